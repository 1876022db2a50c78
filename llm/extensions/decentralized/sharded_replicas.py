"""Gossip between nodes; each holds one replica, sharded over its ranks.

Inside a node weights, gradients and optimizer state are sharded by `llm.parallel.fsdp`. Each rank
averages its shard with the ranks of other nodes that hold the same shard: no weights are gathered
to be sent.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from accelerate import Accelerator
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel

from llm.extensions.decentralized.decentralized import DecentralizedStrategy
from llm.extensions.decentralized.modes import Gossip
from llm.parallel.dims import ParallelDims
from llm.parallel.fsdp import ShardedStrategy, local_tensor, reshard, wrap_as_dtensor
from llm.parallel.options import ParallelOptions


class ShardedReplicas(DecentralizedStrategy, ShardedStrategy):
    """Every node trains one replica; each of its ranks holds a shard.

    Args:
        gossip: Which replicas average, and when.
        options: As for `ShardedStrategy`.
        accelerator: The processes, devices and precision.
        dims: `shard` is the number of ranks of a node, `replicate` the number of nodes.
        init_weights: As for `ShardedStrategy`.
    """

    _is_sharded = True

    def __init__(
        self,
        gossip: Gossip,
        options: ParallelOptions,
        accelerator: Accelerator,
        dims: ParallelDims,
        *,
        init_weights: Callable[[PreTrainedModel], None] | None = None,
    ) -> None:
        ShardedStrategy.__init__(self, options, accelerator, dims, init_weights=init_weights)
        self._init_replicas(gossip, dims.shard)
        self._replica_and_shard_mesh = self.mesh["replicate", "shard"]
        if self.scaler is not None:
            # Each replica has its own loss scale.
            group = self.mesh.get_group("shard")
            self.scaler = ShardedGradScaler(self.device.type, process_group=group)

    @property
    def _gradient_mesh(self) -> DeviceMesh:
        return self.mesh["shard"]  # gradients stay inside a replica

    @contextlib.contextmanager
    def averaged(self) -> Iterator[Tensor | None]:
        """Give the model the mean of all replicas' weights inside the context."""
        # Weights that are still gathered would not see their shards change, at either end.
        reshard(self.wrapped)
        try:
            with super().averaged() as distance:
                yield distance
        finally:
            reshard(self.wrapped)

    def _common_state(self) -> dict[str, Any]:
        state = super()._common_state()
        model = {name: self._replicate_shard(tensor) for name, tensor in state["model"].items()}
        return {**state, "model": model}

    def _mean_weights(self) -> dict[str, Tensor]:
        live: dict[str, Tensor] = dict(self.model.named_parameters())
        return {
            name: self._replicate_shard(wrap_as_dtensor(mean, like=live[name]))
            for name, mean in super()._mean_weights().items()
        }

    def _replicate_shard(self, tensor: Tensor) -> Tensor:
        """Return a shard as one that all replicas hold, so that one rank of them writes it."""
        if not isinstance(tensor, DTensor):
            return tensor
        return DTensor.from_local(
            local_tensor(tensor),
            self._replica_and_shard_mesh,
            (Replicate(), *tensor.placements),
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )

    def _copy_tensor(self, target: Tensor, source: Tensor) -> None:
        local_tensor(target).copy_(local_tensor(source))
