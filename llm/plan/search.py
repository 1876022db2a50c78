"""Layouts of so many ranks, ranked by the tokens a second that they are expected to reach."""

from collections.abc import Iterator

from llm.errors import ConfigError
from llm.parallel.layout import Layout
from llm.plan.estimate import Estimate, estimate
from llm.plan.job import Job, Shares


def layouts(world_size: int, *, gpus_per_node: int, num_layers: int) -> Iterator[Layout]:
    """Layouts worth a look: tensor and context in a node, stages of at least one layer."""
    for tensor in _divisors(gpus_per_node):
        for context in (1, 2, 4, 8):
            for pipeline in _divisors(world_size):
                ranks, rest = divmod(world_size, tensor * context * pipeline)
                if rest or pipeline > num_layers or tensor * context > gpus_per_node:
                    continue
                if pipeline > 1 and context > 1:  # the trainer has no such layout
                    continue
                for shard in _divisors(ranks):
                    yield Layout(
                        pipeline=pipeline,
                        replicate=ranks // shard,
                        shard=shard,
                        context=context,
                        tensor=tensor,
                    )


def search(job: Job, shares: Shares, *, world_size: int) -> list[Estimate]:
    """All layouts that can be, the fastest that fit first, then those that do not, by memory."""
    found = []
    num_layers = len(shares.census(1).blocks) // job.virtual_stages
    refused: set[tuple[int, int]] = set()
    for layout in layouts(world_size, gpus_per_node=job.gpus_per_node, num_layers=num_layers):
        if (layout.tensor, layout.context) in refused:
            continue
        try:
            shares.trace(layout.tensor, layout.context)
        except ConfigError:
            refused.add((layout.tensor, layout.context))
            continue
        try:
            found.append(estimate(job, shares, layout))
        except ConfigError:
            continue
    return sorted(
        found, key=lambda e: (not e.fits, -e.tokens_per_second if e.fits else e.memory.total)
    )


def nearest(found: list[Estimate], layout: Layout) -> Estimate | None:
    """The layout that fits and changes least of another one; of several, the fastest."""
    fitting = [e for e in found if e.fits]
    if not fitting:
        return None
    return min(fitting, key=lambda e: (_distance(e.layout, layout), -e.tokens_per_second))


def _distance(one: Layout, other: Layout) -> int:
    """How many times a size is doubled or halved from one to the other, roughly."""
    pairs = zip(one.sizes, other.sizes, strict=True)
    return sum(abs(a.bit_length() - b.bit_length()) + (a != b) for a, b in pairs)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
