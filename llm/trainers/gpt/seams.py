"""What an extension can add to the trainer: options with rules, inputs, a part in the loop.

An extension is a folder of `llm/extensions/` with an `options.py`, which declares a subclass of
[Extension][llm.trainers.gpt.seams.Extension]; `llm/trainers/gpt/extensions.py` lists it. The core
calls extensions in the order of that list.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from llm.trainers.gpt.config import CoreConfig

if TYPE_CHECKING:  # options are read and checked before torch is imported
    from torch import nn
    from torch.optim import Optimizer
    from transformers import PreTrainedConfig, PreTrainedModel

    from llm.checkpoint.format import Checkpoint
    from llm.data.loader import StepBatch, TrainLoader
    from llm.models.transforms import Transform
    from llm.parallel.base import AcceleratedStrategy
    from llm.trainers.gpt.run_setup import RunSetup


@dataclass(frozen=True)
class Inputs:
    """What has been read of a run before its data, and before process groups form.

    Attributes:
        start: The checkpoint that the run resumes, branches from, or evaluates.
        init_from: The checkpoint whose weights the run starts from.
        model_config: The model's configuration.
        weights_from: The Hub name or folder whose pretrained weights the run starts from.
    """

    start: "Checkpoint | None"
    init_from: "Checkpoint | None"
    model_config: "PreTrainedConfig"
    weights_from: str | None


@dataclass(frozen=True)
class Running:
    """A prepared run or evaluation.

    Attributes:
        setup: What has been read of it.
        strategy: The model and its optimizer, on any layout.
        model: The model as the log describes it.
        keep_alive: Call it at least once every `timeout` seconds in what takes long.
    """

    setup: "RunSetup"
    strategy: "AcceleratedStrategy"
    model: "PreTrainedModel"
    keep_alive: Callable[[], None]


@dataclass(frozen=True)
class Exported:
    """What is exported in place of the last weights.

    Attributes:
        prefix: Prefix of its evaluation results, such as `ema_`.
        words: What it is, for the log.
        card: What the model card says of the weights.
    """

    prefix: str
    words: str
    card: str


class LoopExtension:
    """Takes part in training or in an evaluation; every rank calls every method.

    Attributes:
        part: Its name in checkpoints; None if it keeps no state.
        words: What its state is, for the log.
        exported: What `exporting` puts into the model; None if that changes nothing.
    """

    part: ClassVar[str | None] = None
    words: ClassVar[str] = ""
    exported: Exported | None = None

    def before_step(self, step: int) -> None:
        """Act before a training step.

        Args:
            step: Steps done.
        """

    def after_update(self, batch: "StepBatch") -> None:
        """Act after each optimizer step, without reading from the device."""

    def after_step(self, step: int) -> None:
        """Act after a training step, before anything is logged; its time counts as training.

        Args:
            step: Steps done.
        """

    def after_steps(
        self, steps: "Sequence[tuple[int, bool, float]]", loader: "TrainLoader"
    ) -> None:
        """Look at steps whose losses have been read from the device, with those of other ranks.

        Args:
            steps: For each step its number, whether it was skipped, and its mean loss.
            loader: What the steps were trained on.

        Raises:
            DivergedError: Training must not go on.
            RestartError: Training must go back to a checkpoint.
        """

    def between_steps(self) -> None:
        """Act between two steps, in time that does not count as training."""

    def close(self) -> None:
        """Act after the last step of this start."""

    def evaluated(
        self, evaluate: Callable[[], dict[str, float]], *, last: bool
    ) -> dict[str, float]:
        """Return further results of an evaluation.

        Args:
            evaluate: Evaluates the model as it is.
            last: Whether this is the evaluation at the end of training.
        """
        return {}

    def exporting(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model has the weights to export."""
        return contextlib.nullcontext()

    def begin(self) -> None:
        """Begin afresh where a checkpoint does not have the part."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: plain values, and tensors by the names of the model's parameters."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state; live tensors have been read into already."""


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Extension(CoreConfig):
    """The options of an extension, and what it does with them; it imports its code where used."""

    @property
    def listed(self) -> "Sequence[type[Extension]]":
        """The extensions in `extensions.py`, in their order."""
        return ()

    def problems(self) -> list[str]:
        """Return a sentence for each combination of its options, or with the core's, that fails."""
        return []

    def needs_validation(self) -> list[str]:
        """Return its options that ask for evaluations, as far as they are given."""
        return []

    def read(self, inputs: Inputs) -> None:
        """Check what has been read.

        Raises:
            LLMError: In one sentence, what is wrong with it.
        """

    def transform(self, model_config: "PreTrainedConfig") -> "Transform | None":
        """Return what it changes in the model from outside; None without such a change."""
        return None

    def make_optimizer(self, model: "nn.Module", *, seed: int) -> "Optimizer | None":
        """Return the optimizer of a model; None if the core makes it.

        Args:
            model: The model, or this rank's shards of it.
            seed: The run's seed.
        """
        return None

    def in_loop(self, running: Running) -> LoopExtension | None:
        """Return its part in training or evaluation; None if the options do not ask for it."""
        return None

    def bytes_per_parameter(self) -> float:
        """Return the device memory that it takes for each trained parameter."""
        return 0.0


def extensions_of(config: CoreConfig) -> Iterator[tuple[type[Extension], Extension]]:
    """Yield each listed extension, and the options to call its methods with."""
    if isinstance(config, Extension):
        for extension in config.listed:
            yield extension, config


def loop_extensions(config: CoreConfig, running: Running) -> list[LoopExtension]:
    """Return the parts of all extensions in training or in an evaluation."""
    parts = (extension.in_loop(options, running) for extension, options in extensions_of(config))
    return [part for part in parts if part is not None]


def transforms_of(config: CoreConfig, model_config: "PreTrainedConfig") -> "list[Transform]":
    """Return what all extensions change in a model."""
    found = (each.transform(options, model_config) for each, options in extensions_of(config))
    return [transform for transform in found if transform is not None]


def optimizer_of(config: CoreConfig, model: "nn.Module", *, seed: int) -> "Optimizer | None":
    """Return the optimizer that an extension makes; None if the core makes it."""
    made = (
        each.make_optimizer(options, model, seed=seed) for each, options in extensions_of(config)
    )
    return next((optimizer for optimizer in made if optimizer is not None), None)
