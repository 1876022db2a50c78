"""The residual stream of tensor-parallel layers: whole on every rank, or sharded by sequence.

Layers read the residual stream and add to it. If every rank holds all of it, all ranks compute the
same norms and dropouts, and keep the same activations. With sequence parallelism each rank holds
some tokens of each sample: an all-gather precedes each layer, and a reduce-scatter replaces the
all-reduce after it. Both send the bytes of one all-reduce. See Korthikanti et al. 2022,
arXiv:2205.05198, section 4.2.
"""

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

_SHARDED_TOKENS = Shard(1)
"""Hidden states are [batch, tokens, width]."""


class ResidualStream:
    """The hidden states between layers, and how a rank's part of a layer reads and changes them.

    Args:
        mesh: The ranks that compute each layer together, one axis.
        sharded: Whether each rank holds only some tokens between the layers; also an attribute.
    """

    def __init__(self, mesh: DeviceMesh, *, sharded: bool) -> None:
        self._mesh = mesh
        self.sharded = sharded

    def shard(self, hidden: Tensor) -> Tensor:
        """Return this rank's tokens; the gradient is gathered.

        Args:
            hidden: [batch, tokens, width], equal on all ranks.
        """
        if hidden.shape[1] % self._mesh.size():
            raise ValueError(
                f"{self._mesh.size()} ranks cannot share {hidden.shape[1]} tokens equally."
            )
        replicated = DTensor.from_local(hidden, self._mesh, [Replicate()], run_check=False)
        shard: Tensor = replicated.redistribute(placements=[_SHARDED_TOKENS]).to_local()
        return shard

    def gather(self, shard: Tensor, *, for_layer: bool) -> Tensor:
        """Return all tokens, [batch, tokens, width].

        Args:
            shard: This rank's tokens.
            for_layer: Whether each rank computes a part of the layer that reads them. The gradients
                of the parts are reduce-scattered; otherwise they are equal on all ranks.
        """
        if for_layer and torch.is_autocast_enabled(shard.device.type):
            # The layer's products would cast all tokens; this sends half the bytes.
            shard = shard.to(torch.get_autocast_dtype(shard.device.type))
        shards = DTensor.from_local(shard, self._mesh, [_SHARDED_TOKENS], run_check=False)
        replicated = shards.redistribute(placements=[Replicate()])
        gathered: Tensor = replicated.to_local(
            grad_placements=[Partial() if for_layer else Replicate()]
        )
        return gathered

    def read(self, inputs: Tensor) -> Tensor:
        """Return the input of this rank's part of a layer, complete in its gradient.

        Args:
            inputs: [..., width], all tokens.
        """
        return inputs if self.sharded else self.copy(inputs)

    def copy(self, tensor: Tensor) -> Tensor:
        """Return the same tensor; its gradient is all-reduced."""
        replicated = DTensor.from_local(tensor, self._mesh, [Replicate()], run_check=False)
        copied: Tensor = replicated.to_local(grad_placements=[Partial()])
        return copied

    def reduce(self, partial_product: Tensor, bias: Tensor | None) -> Tensor:
        """Return the sum over ranks, plus the bias, in the layout of the residual stream.

        Args:
            partial_product: This rank's term of the sum, for all tokens.
            bias: Added once and not by each rank; equal on all ranks.
        """
        terms = DTensor.from_local(partial_product, self._mesh, [Partial()], run_check=False)
        placement = _SHARDED_TOKENS if self.sharded else Replicate()
        product: Tensor = terms.redistribute(placements=[placement]).to_local()
        return product if bias is None else product + bias
