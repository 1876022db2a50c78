"""The parameters of a model by where they stand: before, in and after its blocks."""

import dataclasses
import itertools
import math
from collections.abc import Iterable

from transformers import PreTrainedModel

from llm.models.blocks import find_blocks

FP32 = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter as one tensor-parallel rank holds it."""

    name: str
    shape: tuple[int, ...]
    trained: bool

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def shard(self, ranks: int) -> int:
        """Elements on the first of so many ranks: rows divided up, as `fully_shard` does."""
        if not self.shape:
            return 1
        rows = math.ceil(self.shape[0] / ranks)
        return rows * math.prod(self.shape[1:])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Census:
    """A model's parameters.

    Attributes:
        blocks: Those of each block.
        others: Those outside of blocks; a tied one once.
        head: Names of those of the output head, in `others`.
        untied_head: Of these, those that are not the embedding's.
        buffers: Bytes of buffers.
    """

    blocks: tuple[tuple[Parameter, ...], ...]
    others: tuple[Parameter, ...]
    head: frozenset[str]
    untied_head: frozenset[str]
    buffers: int

    @property
    def parameters(self) -> int:
        """Elements of all of them."""
        everything = itertools.chain(self.others, *self.blocks)
        return sum(parameter.numel for parameter in everything)


def shard_sizes(parameters: Iterable[Parameter], ranks: int) -> tuple[int, int]:
    """Elements on the first of so many ranks: of all parameters, and of those that are trained."""
    own = trained = 0
    for parameter in parameters:
        size = parameter.shard(ranks)
        own += size
        trained += size * parameter.trained
    return own, trained


def take_census(model: PreTrainedModel) -> Census:
    """List the parameters of a model, which may be on the meta device."""
    blocks = find_blocks(model)
    in_blocks = set(blocks.parameters())
    head = model.get_output_embeddings()
    head_parameters = set() if head is None else set(head.parameters())
    embedding = set(model.get_input_embeddings().parameters())
    others = [(n, p) for n, p in model.named_parameters() if p not in in_blocks]
    return Census(
        blocks=tuple(
            tuple(
                Parameter(name=n, shape=tuple(p.shape), trained=p.requires_grad)
                for n, p in block.named_parameters()
            )
            for block in blocks
        ),
        others=tuple(
            Parameter(name=n, shape=tuple(p.shape), trained=p.requires_grad) for n, p in others
        ),
        head=frozenset(n for n, p in others if p in head_parameters),
        untied_head=frozenset(n for n, p in others if p in head_parameters and p not in embedding),
        buffers=sum(b.numel() * b.element_size() for b in model.buffers()),
    )
