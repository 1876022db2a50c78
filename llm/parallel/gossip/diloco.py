"""DiLoCo: ranks train alone for many steps, then step together along the mean of their ways.

Douillard et al. 2023, arXiv:2311.08105: every H inner steps, the difference between where all
began and the mean of where they are is the gradient of an outer SGD with Nesterov momentum, from
whose result all go on. The inner optimizer's moments stay with their rank.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from llm.parallel.gossip.buckets import BUCKET_BYTES, make_buckets


class OuterOptimizer:
    """Counts inner steps and takes the outer ones; every rank calls it at the same steps.

    Args:
        tensors: The weights by name, equal on all ranks.
        world_size: Number of ranks.
        sync_every: H, the inner steps of an outer one.
        learning_rate: That of the outer step; 1 without momentum is a plain mean.
        momentum: Nesterov momentum of the outer step.
        bucket_bytes: About how much a message holds.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        world_size: int,
        sync_every: int,
        learning_rate: float = 0.7,
        momentum: float = 0.9,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._tensors = dict(tensors)
        self._world_size = world_size
        self._sync_every = sync_every
        self._learning_rate = learning_rate
        self._momentum = momentum
        # Since the last outer one; a tensor, to be saved and read as the others are.
        self._inner_steps = torch.zeros((), dtype=torch.int64)
        self._start = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self._velocity = {name: torch.zeros_like(t) for name, t in self._start.items()}
        self._buckets = make_buckets(list(tensors.values()), bucket_bytes=bucket_bytes)
        self._group = dist.new_group() if world_size > 1 else None

    def before_step(self) -> None:
        """Note where all ranks begin, if they begin together now."""
        if self._inner_steps == 0:
            with torch.no_grad():
                torch._foreach_copy_(list(self._start.values()), list(self._tensors.values()))

    def after_step(self) -> None:
        """Count an inner step, and take the outer one if it is due."""
        self._inner_steps += 1
        if self._inner_steps >= self._sync_every:
            self._outer_step()
            self._inner_steps.zero_()

    @torch.no_grad()
    def _outer_step(self) -> None:
        for bucket in self._buckets:
            bucket.fill()
            if self._world_size > 1:
                dist.all_reduce(bucket.flat, group=self._group)
                bucket.flat.div_(self._world_size)
            bucket.empty()
        weights = list(self._tensors.values())
        start = list(self._start.values())
        velocity = list(self._velocity.values())
        difference = torch._foreach_sub(start, weights)
        torch._foreach_mul_(velocity, self._momentum)
        torch._foreach_add_(velocity, difference)
        torch._foreach_add_(difference, velocity, alpha=self._momentum)
        torch._foreach_add_(start, difference, alpha=-self._learning_rate)
        torch._foreach_copy_(weights, start)

    def settle(self) -> None:
        """Nothing is ever under way."""

    def state_dict(self) -> dict[str, Any]:
        """Where all began, the velocity, and inner steps since; the same on all ranks."""
        return {
            "start": self._start,
            "velocity": self._velocity,
            "inner_steps": self._inner_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        with torch.no_grad():
            for name in self._tensors:
                self._start[name].copy_(state["start"][name])
                self._velocity[name].copy_(state["velocity"][name])
            self._inner_steps.copy_(state["inner_steps"])
