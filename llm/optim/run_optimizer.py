"""The requests of a run to its optimizer, in addition to updates."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer


@dataclass(frozen=True, kw_only=True)
class StateMemory:
    """Bytes that an optimizer takes in addition to its state of each weight.

    Attributes:
        replicated: Permanent memory of a rank that holds the whole model.
        divided: Permanent memory of all ranks together that divide the model.
        recording: Memory of a rank during the forward and backward passes.
        stepping: Memory of a rank during the update.
        divided_stepping: Memory during the update of all ranks together that divide the model,
            instead of `stepping`; 0 if each takes the same.
    """

    replicated: int = 0
    divided: int = 0
    recording: int = 0
    stepping: int = 0
    divided_stepping: int = 0


@dataclass(frozen=True, kw_only=True)
class MatrixTraffic:
    """The messages between ranks that divide the weights if one rank updates each matrix.

    Attributes:
        bytes_per_element: Bytes of the received gradient and the sent update, per element.
        with_ends: Whether embeddings and the output head are such matrices too.
        with_experts: Whether stacks of experts are sent too.
        bucket: Number of elements in a message.
    """

    bytes_per_element: int
    with_ends: bool
    with_experts: bool
    bucket: int


class RunOptimizer:
    """The optimizer of a run; AdamW and SGD need only what is here.

    Attributes:
        optimizer: Updates the weights.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def record_passes(
        self, *, token_weight: float, loss_scale: Callable[[], Tensor]
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context around the passes of a step, in which an optimizer may record them.

        Args:
            token_weight: Factor on the loss of each token in the objective of a rank.
            loss_scale: Returns the factor on the objective before `backward`.
        """
        return contextlib.nullcontext()

    def before_clip(self, *, learning_rate: float) -> None:
        """Change the gradient of a step, which is averaged over ranks and unscaled."""

    def localize(self, local_of: Mapping[Tensor, nn.Parameter]) -> None:
        """Use the local shards that replace the parameters in the optimizer's groups.

        Args:
            local_of: This rank's shards by the parameters of the model.
        """

    def owner_of(self, path: str) -> int | None:
        """Return which of the ranks that divide the weights alone holds a tensor of a checkpoint.

        Args:
            path: Path of the tensor in the checkpoint.

        Returns:
            Index of the rank among them; None if each holds a shard, or all hold the whole tensor.
        """
        return None

    def prepare_load(self, list_saved_tensors: Callable[[], Mapping[str, Tensor]]) -> None:
        """Allocate the state that is read from a checkpoint next, if it does not exist yet.

        Args:
            list_saved_tensors: Returns the checkpoint's tensors by path, on the meta device.
        """

    def parts(self) -> dict[str, Any]:
        """Return further parts of a checkpoint by name; each has a `state_dict`."""
        return {}

    def describe(self) -> str:
        """Return lines for the beginning of the log; empty if there is nothing to say."""
        return ""

    def metrics(self) -> dict[str, Tensor]:
        """Return numbers for the log by name, on the device; all ranks must call it."""
        return {}

    def memory(self) -> dict[str, StateMemory]:
        """Return the memory that it takes in addition to the state of `optimizer`, by kind."""
        return {}

    def traffic(self) -> MatrixTraffic | None:
        """Return what it sends if ranks divide the weights; None if it sends nothing."""
        return None


class OptimizerFactory:
    """Makes the optimizer of a run.

    Args:
        make: Returns the optimizer of a model or of shards of it.
    """

    def __init__(self, make: Callable[[nn.Module], Optimizer]) -> None:
        self._make = make

    def inspect_model(self, model: nn.Module) -> None:
        """Look at the whole model before it is divided; its weights may be dummies."""

    def make(self, model: nn.Module, mesh: DeviceMesh | None) -> RunOptimizer:
        """Return the optimizer of the weights that this rank has.

        Args:
            model: The model, or this rank's stages and shards of it.
            mesh: The ranks that divide it, with the axes pipeline, replicate, shard and tensor;
                None if every rank has the whole model.
        """
        return RunOptimizer(self._make(model))
