"""Gossip between nodes each of which holds one replica, divided over its ranks.

Inside a node weights, gradients and optimizer state are divided as `llm.parallel.fsdp` does it.
Each rank averages its part with the ranks of other nodes that hold the same part, so that weights
are never whole on their way.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor, Replicate

from llm.parallel.fsdp import ShardedStrategy, local_tensor
from llm.parallel.gossip.decentralized import DecentralizedStrategy
from llm.parallel.strategy import MakeOptimizer


class ShardedReplicas(DecentralizedStrategy, ShardedStrategy):
    """Every node trains a replica of its own, of which each of its ranks holds a part.

    The arguments are those of both strategies; `ranks_per_replica` is the layout's `shard`.
    """

    def prepare(self, loss: nn.Module, make_optimizer: MakeOptimizer) -> None:
        """Divide the model (inside its loss) and make the optimizer of this rank's parts."""
        self._whole_mesh = self.mesh["replicate", "shard"]
        if self.scaler is not None:
            # A loss scale is a replica's own.
            group = self.mesh.get_group("shard")
            self.scaler = ShardedGradScaler(self.device.type, process_group=group)
        super().prepare(loss, make_optimizer)

    @property
    def _dividing_mesh(self) -> DeviceMesh:
        return self.mesh["shard"]  # what is averaged over replicas is weights, not gradients

    def _make_equal(self) -> None:
        """Replicas are equal: each rank has drawn or read its parts by their names alone."""

    def _wrap(self, loss: nn.Module) -> nn.Module:
        return ShardedStrategy._wrap(self, loss)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[Tensor | None]:
        """The model has the mean of all replicas' weights meanwhile; see `Strategy`."""
        self._reshard()
        try:
            with super().averaged() as distance:
                yield distance
        finally:
            self._reshard()

    def _common_state(self) -> dict[str, Any]:
        """As parts that each replica holds alike, so that one of them is written."""
        state = super()._common_state()
        model = {name: self._of_all(tensor) for name, tensor in state["model"].items()}
        return {**state, "model": model}

    def _mean(self) -> dict[str, Tensor]:
        means = super()._mean()
        live: dict[str, Any] = dict(self.model.named_parameters())
        return {
            name: self._of_all(
                DTensor.from_local(
                    mean,
                    live[name].device_mesh,
                    live[name].placements,
                    run_check=False,
                    shape=live[name].shape,
                    stride=live[name].stride(),
                )
            )
            for name, mean in means.items()
        }

    def _of_all(self, tensor: Tensor) -> Tensor:
        """A divided tensor as one that the other replicas hold too; the same memory."""
        if not isinstance(tensor, DTensor):
            return tensor
        return DTensor.from_local(
            local_tensor(tensor),
            self._whole_mesh,
            (Replicate(), *tensor.placements),
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )

    def _copy(self, target: Tensor, source: Tensor) -> None:
        local_tensor(target).copy_(local_tensor(source))

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The mean model's parameters and buffers on rank 0's host; every rank must call it."""
        with self.averaged():
            return ShardedStrategy.full_state_dict(self)
