"""The parameters of a model by where they stand: before, in and after its blocks."""

import dataclasses
import itertools
import math
from collections.abc import Iterable

from torch import nn
from transformers import PreTrainedModel

from llm.models.sizes import find_blocks

FP32 = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParamCounts:
    """A model's parameters.

    Attributes:
        blocks: Those of each block.
        others: Those outside of blocks; a tied one once.
        head: Those of the output head, in `others` too.
        is_tied: Whether the output head has none but the embedding's.
        buffers: Bytes of buffers.
    """

    blocks: list[list[nn.Parameter]]
    others: list[nn.Parameter]
    head: set[nn.Parameter]
    is_tied: bool
    buffers: int

    @property
    def parameters(self) -> int:
        """Elements of all of them."""
        return num_elements(itertools.chain(self.others, *self.blocks))


def count_parameters(model: PreTrainedModel) -> ParamCounts:
    """List the parameters of a model, which may be on the meta device."""
    blocks = [list(block.parameters()) for block in find_blocks(model)]
    inside = set(itertools.chain(*blocks))
    output = model.get_output_embeddings()
    head = set() if output is None else set(output.parameters())
    return ParamCounts(
        blocks=blocks,
        others=[p for p in model.parameters() if p not in inside],
        head=head,
        is_tied=head.issubset(model.get_input_embeddings().parameters()),
        buffers=sum(b.nbytes for b in model.buffers()),
    )


def num_elements(parameters: Iterable[nn.Parameter]) -> int:
    """Elements of some parameters."""
    return sum(p.numel() for p in parameters)


def shard_sizes(parameters: Iterable[nn.Parameter], ranks: int) -> tuple[int, int]:
    """Elements on the first of so many ranks, which divide rows as `fully_shard` does.

    Returns:
        Of all parameters, and of those that are trained.
    """
    own = trained = 0
    for parameter in parameters:
        rows, *columns = parameter.shape or (1,)
        size = math.ceil(rows / ranks) * math.prod(columns)
        own += size
        trained += size * parameter.requires_grad
    return own, trained
