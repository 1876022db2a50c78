"""DiLoCo: replicas train alone for many steps, then take one common step by their mean change.

Douillard et al. 2023, arXiv:2311.08105: every H inner steps, an outer SGD with Nesterov momentum
takes the difference between the common starting weights and the mean of the replicas as its
gradient, and all replicas continue from its result. The moments of the inner optimizer are not
averaged.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from llm.extensions.decentralized.modes import DiLoCo
from llm.parallel.flat_buffers import FlatBuffer, group_for_flat_buffers


class OuterOptimizer:
    """Counts inner steps and takes the outer ones; every rank calls it at the same steps.

    Args:
        diloco: The inner steps, and the learning rate and momentum of the outer step.
        tensors: The weights by name, equal on all ranks.
        world_size: Number of ranks.
    """

    def __init__(self, diloco: DiLoCo, tensors: Mapping[str, Tensor], *, world_size: int) -> None:
        self._diloco = diloco
        self._tensors = dict(tensors)
        self._world_size = world_size
        # Inner steps since the last outer step; a tensor, because checkpoints average and save
        # tensors.
        self._num_inner_steps = torch.zeros((), dtype=torch.int64)
        self._start_weights = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self._velocity = {name: torch.zeros_like(t) for name, t in self._start_weights.items()}
        self._buffers = [
            FlatBuffer(group) for group in group_for_flat_buffers(list(tensors.values()))
        ]

    def before_step(self) -> None:
        """Before the first inner step, store the weights that all replicas start from."""
        if self._num_inner_steps == 0:
            with torch.no_grad():
                torch._foreach_copy_(
                    list(self._start_weights.values()), list(self._tensors.values())
                )

    @torch.no_grad()
    def after_step(self) -> None:
        """Count an inner step, and take the outer one if it is due."""
        self._num_inner_steps += 1
        if self._num_inner_steps < self._diloco.inner_steps:
            return
        self._num_inner_steps.zero_()
        self._average_replicas()
        self._take_outer_step()

    def _average_replicas(self) -> None:
        """Overwrite the weights with their mean over all replicas."""
        for buffer in self._buffers:
            buffer.pack()
            if self._world_size > 1:
                dist.all_reduce(buffer.flat)
                buffer.flat.div_(self._world_size)
            buffer.unpack()

    def _take_outer_step(self) -> None:
        """Update the starting weights by SGD with Nesterov momentum; the weights become equal.

        The gradient is the difference between the starting weights and the mean weights.
        """
        weights = list(self._tensors.values())
        start_weights = list(self._start_weights.values())
        velocity = list(self._velocity.values())
        momentum = self._diloco.outer_momentum
        outer_gradient = torch._foreach_sub(start_weights, weights)
        torch._foreach_mul_(velocity, momentum)
        torch._foreach_add_(velocity, outer_gradient)
        torch._foreach_add_(outer_gradient, velocity, alpha=momentum)
        torch._foreach_add_(start_weights, outer_gradient, alpha=-self._diloco.outer_learning_rate)
        torch._foreach_copy_(weights, start_weights)

    def wait_for_messages(self) -> None:
        """Do nothing: no message is in flight between two steps."""

    def state_dict(self) -> dict[str, Any]:
        """Return starting weights, velocity and inner steps since; equal on all ranks."""
        return {
            "start": self._start_weights,
            "velocity": self._velocity,
            "inner_steps": self._num_inner_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        with torch.no_grad():
            for name in self._tensors:
                self._start_weights[name].copy_(state["start"][name])
                self._velocity[name].copy_(state["velocity"][name])
            self._num_inner_steps.copy_(state["inner_steps"])
        if self._num_inner_steps >= self._diloco.inner_steps:
            # One replica took them, without outer steps: the next ones start from its weights.
            self._num_inner_steps.zero_()
