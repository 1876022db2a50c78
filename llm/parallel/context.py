"""Every sample's sequence divided over ranks: context parallelism.

A sequence is cut into twice as many chunks as there are ranks. Each rank holds one from the front
and its mirror image from the back, so that all ranks have as many keys to attend to. Everything
but attention is the business of a token alone; for attention the keys and values of all ranks are
gathered, as Llama 3 was trained (Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from llm.data.loader import MicroBatch
from llm.parallel.dims import ParallelDims


class ContextPart:
    """The chunks of each sequence that a rank holds; every rank must make one.

    Args:
        layout: Where the ranks stand.
        rank: Of this process among all.

    Attributes:
        num_chunks: Into how many chunks of one length a sequence is cut.
        chunks: The numbers of the two that this rank holds.
    """

    def __init__(self, layout: ParallelDims, rank: int) -> None:
        at = layout.coordinates(rank)["context"]
        self.num_chunks = 2 * layout.context
        self.chunks = at, self.num_chunks - 1 - at
        self._group, _ = dist.new_subgroups_by_enumeration(layout.groups("context"))

    def of(self, micro_batch: MicroBatch) -> MicroBatch:
        """This rank's part of a micro-batch, with the positions of its tokens in the samples."""
        input_ids, labels, positions, documents = micro_batch
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)
            positions = positions.expand_as(input_ids)
        return MicroBatch(
            self._cut(input_ids),
            self._cut(labels),
            self._cut(positions),
            None if documents is None else self._cut(documents),
        )

    def _cut(self, whole: Tensor) -> Tensor:
        chunks = whole.chunk(self.num_chunks, dim=1)
        return torch.cat([chunks[number] for number in self.chunks], dim=1)

    def gather(self, part: Tensor, dim: int) -> Tensor:
        """The whole sequence out of the parts that the ranks hold; differentiable.

        Args:
            part: Of one shape on all ranks that share a sequence; each of them must call it.
            dim: The dimension of the tokens.

        Returns:
            The same with the tokens of all ranks along `dim`, in the order of the sequence. Its
            gradient is summed over the ranks.
        """
        whole: Tensor = _Gather.apply(part, dim, self._group)  # type: ignore[no-untyped-call]
        return whole


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        ranks = group.size()
        tokens_first = part.movedim(dim, 0).contiguous()
        gathered = tokens_first.new_empty(ranks * len(tokens_first), *tokens_first.shape[1:])
        dist.all_gather_single(gathered, tokens_first, group=group)
        front, back = gathered.unflatten(0, (ranks, 2, -1)).unbind(1)
        return torch.cat([front, back.flip(0)]).flatten(0, 1).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        ranks = ctx.group.size()
        chunks = grad_outputs[0].movedim(ctx.dim, 0).unflatten(0, (2 * ranks, -1))
        by_rank = torch.stack([chunks[:ranks], chunks[ranks:].flip(0)], dim=1).flatten(0, 2)
        part = by_rank.new_empty(len(by_rank) // ranks, *by_rank.shape[1:])
        dist.reduce_scatter_single(part, by_rank, group=ctx.group)
        return part.movedim(0, ctx.dim), None, None
