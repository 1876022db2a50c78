"""An auxiliary loss of the model's last hidden states, for extensions."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from llm.errors import ConfigError
from llm.runtime.float32 import sums_dtype
from llm.runtime.labels import IGNORED

if TYPE_CHECKING:
    from llm.trainers.gpt.seams import LoopContext


class AuxiliaryLoss:
    """Adds a loss of the last hidden states to the objective of each training step.

    Like the loss of the tokens, it is summed over the tokens of a step on all ranks and divided
    once by their number, so the number of ranks and micro-batches does not change it. The logged
    `loss` and all evaluations are without it.

    Args:
        context: The run with its prepared model.
        loss: Takes the last hidden states, [sequences, tokens, width], and returns the loss of each
            sequence, summed over its tokens, [sequences].

    Raises:
        ConfigError: The layout has not been tried: it has other ranks than replicas and shards.
    """

    def __init__(self, context: "LoopContext", loss: Callable[[Tensor], Tensor]) -> None:
        dims, config = context.run.dims, context.run.config
        if dims.data_ranks != dims.world_size or dims.expert > 1 or config.replica_option:
            raise ConfigError(
                "An auxiliary loss of an extension has been tried on replicas and shards of one "
                "model only; leave out the other kinds of parallelism, or the extension."
            )
        self._strategy, self._loss = context.strategy, loss
        self._is_real_sample = torch.ones(0, dtype=torch.bool)
        # The loss, and the number of tokens.
        device = context.strategy.device
        self._sums = torch.zeros(2, dtype=sums_dtype(device), device=device)
        context.strategy.loss.register_forward_pre_hook(self._find_real_samples, with_kwargs=True)
        context.strategy.model.base_model.register_forward_hook(
            torch.compiler.disable(self._add_losses)
        )

    def mean(self) -> float:
        """Return the mean per token since the last call; all ranks call it.

        The host waits for the device. Skipped steps count too.
        """
        loss, num_tokens = self._strategy.reduce_sum(self._sums).tolist()
        self._sums = torch.zeros_like(self._sums)
        return float(loss / num_tokens) if num_tokens else 0.0

    def state_dict(self) -> dict[str, float]:
        """Return the sums since the last call of `mean`; all ranks call it.

        The extension saves them in its part of checkpoints. From then on rank 0 has the sums of all
        ranks, so that a run that continues and a resumed run add the same numbers.
        """
        sums = self._strategy.reduce_sum(self._sums)
        self._sums = sums.clone() if self._strategy.rank == 0 else torch.zeros_like(sums)
        loss, num_tokens = sums.tolist()
        return {"loss": loss, "num_tokens": num_tokens}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Load the sums; rank 0 has them, so that the next sum over ranks counts them once."""
        self._sums.zero_()
        if self._strategy.rank == 0:
            sums = [state["loss"], state["num_tokens"]]
            self._sums.copy_(torch.tensor(sums, dtype=self._sums.dtype))

    def _find_real_samples(
        self, module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]
    ) -> None:
        """Note which samples of a micro-batch have labels; copies in a short last step do not."""
        labels = kwargs["labels"] if "labels" in kwargs else args[1]
        self._is_real_sample = (labels != IGNORED).any(1)

    def _add_losses(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Pass the last hidden states through `AttachLosses`, in training.

        Raises:
            ConfigError: The loss is not a tensor with a number for each sequence.
        """
        hidden = output.last_hidden_state
        if torch.is_grad_enabled() and hidden.requires_grad:
            losses = self._loss(hidden)
            shape = list(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            if shape != [len(hidden)]:
                raise ConfigError(
                    f"An extension's auxiliary loss of hidden states {list(hidden.shape)} is "
                    f"{shape}; let it return the loss of each sequence, summed over its tokens: a "
                    f"tensor of the shape [{len(hidden)}]."
                )
            count_losses = partial(
                self._count_losses, is_real_sample=self._is_real_sample, num_tokens=hidden.shape[1]
            )
            output.last_hidden_state = AttachLosses.apply(  # type: ignore[no-untyped-call]
                hidden, count_losses, losses
            )
        return output

    def _count_losses(self, losses: Tensor, *, is_real_sample: Tensor, num_tokens: int) -> Tensor:
        """Count the losses of a micro-batch; return the gradient of the rank's objective by them.

        Args:
            losses: The loss of each sequence, [sequences].
            is_real_sample: Which sequences count, bool [sequences].
            num_tokens: Tokens of a sequence.
        """
        sample_mask = is_real_sample.to(losses.dtype)
        self._sums += torch.stack([(sample_mask * losses).sum(), num_tokens * sample_mask.sum()])
        token_weight = self._strategy.token_weight * self._strategy.loss_scale()
        return token_weight.to(losses.dtype) * sample_mask


class AttachLosses(torch.autograd.Function):
    """The identity on a tensor of a layer, through which losses of the layer get their gradient.

    So a loss of any layer needs neither the model's outputs nor the stage with the last layer.
    """

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        count_losses: Callable[..., Tensor | None],
        *counted: Tensor | None,
    ) -> Tensor:
        """Return the tensor; the other arguments are for the backward pass.

        There `count_losses` takes the `counted` tensors, which are recomputed under checkpointing.
        It returns the gradient of the objective by the last of them, the losses.
        """
        ctx.count_losses = count_losses
        ctx.save_for_backward(*counted)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Count the losses, and return the gradients of the tensor and of the losses."""
        counted = ctx.saved_tensors
        return gradients[0], None, *[None] * (len(counted) - 1), ctx.count_losses(*counted)
