"""An exponential moving average of the weights, on every layout."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from llm.data.loader import StepBatch
from llm.parallel.base import AcceleratedStrategy
from llm.parallel.fsdp import reshard, wrap_as_dtensor
from llm.trainers.gpt.seams import ExtraWeights, LoopExtension


class WeightAverage(LoopExtension):
    """The average of a strategy's weights after each step, in float32, sharded like the weights.

    The influence of a step's weights decays by `decay` with each later step, or by half every
    `half_life` tokens. As in Adam's moments (Kingma & Ba 2015, section 3), the average is divided
    by the sum of all factors, so initial weights have no part in it, even in a short run.

    Args:
        strategy: A prepared strategy; its ranks train one model.
        decay: Decay per step; None with a half-life.
        half_life: Tokens until the influence of weights has halved.
        is_evaluated: Whether each evaluation also evaluates the average.
        is_exported: Whether the average is exported instead of the weights.
    """

    part = "ema"
    description = "moving average of the weights"

    def __init__(
        self,
        strategy: AcceleratedStrategy,
        *,
        decay: float | None,
        half_life: int | None = None,
        is_evaluated: bool = False,
        is_exported: bool = False,
    ) -> None:
        self._strategy, self._decay, self._half_life = strategy, decay, half_life
        if is_evaluated or is_exported:
            self.weights = ExtraWeights(
                prefix="ema_",
                is_evaluated=is_evaluated,
                is_exported=is_exported,
                description="the average",
                card="their exponential moving average",
                swap_in=self.swap_in,
            )
        self._live_weights = [parameter.detach() for parameter in strategy.local_parameters]
        self._averages = [weight.clone() for weight in self._live_weights]
        self._factor_sum = 0.0  # the sum of all factors, times 1 - decay

    def begin(self) -> None:
        """Begin with the present weights if a checkpoint has no average."""
        torch._foreach_copy_(self._averages, self._live_weights)
        self._factor_sum = 0.0

    def after_step(self, step: int, batch: StepBatch) -> None:
        """Update the average with the weights after a step; reads nothing from the device."""
        decay = self._decay
        if self._half_life is not None:
            decay = 0.5 ** (batch.num_tokens / self._half_life)
        assert decay is not None  # one of the two is given
        self._factor_sum = 1 - decay * (1 - self._factor_sum)
        torch._foreach_lerp_(self._averages, self._live_weights, (1 - decay) / self._factor_sum)

    @contextlib.contextmanager
    def swap_in(self) -> Iterator[None]:
        """Replace the model's weights by the average inside the context."""
        self._swap_weights()
        try:
            yield
        finally:
            self._swap_weights()

    def _swap_weights(self) -> None:
        reshard(self._strategy.wrapped)  # weights that are still gathered would not change
        for weight, average in zip(self._live_weights, self._averages, strict=True):
            previous_weight = weight.clone()
            weight.copy_(average)
            average.copy_(previous_weight)

    def state_dict(self) -> dict[str, Any]:
        """Return the average by parameter name, as live shards, and the sum of factors."""
        reshard(self._strategy.wrapped)  # the model has other parameters while they are gathered
        names = {p: name for name, p in self._strategy.model.named_parameters()}
        pairs = zip(self._strategy.parameters, self._averages, strict=True)
        tensors = {names[p]: wrap_as_dtensor(average, like=p) for p, average in pairs}
        return {**tensors, "mass": self._factor_sum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the sum of factors; the live tensors have been read into."""
        self._factor_sum = state["mass"]
