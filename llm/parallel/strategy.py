"""What the loop asks of a parallel layout: one optimizer step's forward and backward.

Data, loss, schedule, checkpoint, evaluation and log do not know which layout runs.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from llm.data.loader import MicroBatch

MakeOptimizer = Callable[[torch.nn.Module], torch.optim.Optimizer]


class SecondOrder(Protocol):
    """What a second-order method such as K-FAC does around a step, besides the optimizer's."""

    def capture_stats(
        self, *, token_weight: float, loss_scale: torch.Tensor
    ) -> contextlib.AbstractContextManager[None]:
        """Surround a step's passes and see what they compute.

        Args:
            token_weight: What each token's loss is multiplied by in the objective of a rank.
            loss_scale: What the objective is multiplied by before `backward`.
        """

    def precondition(self, *, learning_rate: float) -> None:
        """Change the gradient before it is clipped; every rank must call it."""

    def describe(self) -> str:
        """A few lines for the beginning of the log."""

    def metrics(self) -> dict[str, torch.Tensor]:
        """Numbers for the log, on the device."""

    def state_dict(self) -> dict[str, Any]:
        """All that the next steps depend on; every rank must call it."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""


@runtime_checkable
class SpreadOptimizer(Protocol):
    """An optimizer of whose state a rank may have only a part."""

    def gathered_state(self) -> Mapping[torch.Tensor, dict[str, torch.Tensor]]:
        """The state of all parameters, the same on all ranks; every rank must call it."""


class Strategy(Protocol):
    """Spreads a model and its training step over devices.

    Tensors that come back stay on the device, so that nothing in a step waits for it.

    Attributes:
        device: Where this process computes.
        rank: Of this process among all.
        world_size: Number of processes.
        data_rank: Which share of a global batch this process works on.
        data_ranks: Into how many shares a global batch is divided.
        rng_rank: Seed offset for dropout; ranks that process the same tokens share it.
        second_order: K-FAC, if the run has it.
        answer_delay: The most calls of `any_rank` between a flag and its answer.
    """

    device: torch.device
    rank: int
    world_size: int
    data_rank: int
    data_ranks: int
    rng_rank: int
    second_order: SecondOrder | None
    answer_delay: int

    def prepare(self, loss: torch.nn.Module, make_optimizer: MakeOptimizer) -> None:
        """Take over the model (inside its loss) and make its optimizer."""

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the rate of the next `optimizer_step`."""

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], *, num_tokens: int
    ) -> torch.Tensor:
        """Compute the gradient of one step's mean loss, unscaled.

        Args:
            micro_batches: This rank's share of the step.
            num_tokens: Tokens that count over all ranks; the loss is divided by it once.

        Returns:
            The sum of this rank's token losses, a float32 scalar.
        """

    def optimizer_step(self, max_grad_norm: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Clip the gradient (0: no clipping) and update the weights, or skip.

        Returns:
            The gradient's norm before clipping, and 1.0 if it was not finite and the step was
            skipped, else 0.0: equal on all ranks, or of this one if it has weights of its own.
        """

    def averaged(self) -> contextlib.AbstractContextManager[torch.Tensor | None]:
        """Within it, the model is the one that is evaluated; every rank must enter it.

        Where ranks have weights of their own, that is their mean, and it gives how far they are
        from it: the root of the mean squared distance, as a part of the mean's norm. Else None.
        """

    def evaluate(self, micro_batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum of token losses and number of tokens that count, on this rank."""

    def predict(self, micro_batch: MicroBatch) -> torch.Tensor:
        """The likeliest next token at each position, int64 of the inputs' shape."""

    def loss_scale(self) -> torch.Tensor:
        """The factor by which the loss is scaled (1 without fp16)."""

    def reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over all shares of the data; every rank must call it."""

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Concatenate tensors of one shape of all shares of the data along the first dimension."""

    def any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """Which flags any rank has set now or some calls ago; every rank must call it.

        The answer is the same on all ranks, and comes once.
        """

    def barrier(self) -> None:
        """Wait for all ranks."""

    def state_dict(self) -> dict[str, Any]:
        """Model, optimizer and loss scale, by parameter name, as live tensors."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""

    def owner_ranks(self, path: str) -> Sequence[int]:
        """The ranks that hold a tensor of a checkpoint, whose path there begins "strategy/"."""

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The whole model's parameters and persistent buffers on rank 0's host, for export.

        Every rank must call it; the others get an empty dict.
        """
