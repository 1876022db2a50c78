"""Layouts of so many ranks, ranked by the tokens a second that they are expected to reach."""

import contextlib
import itertools
from collections.abc import Iterator

from llm.errors import ConfigError
from llm.parallel.dims import ParallelDims
from llm.plan.estimate import Estimate, estimate
from llm.plan.job import Job


def search(job: Job) -> list[Estimate]:
    """All layouts that can be, the fastest that fit first, then those that do not, by memory."""
    found = []
    for tensor, context in itertools.product(_divisors(job.options.gpus_per_node), (1, 2, 4, 8)):
        if tensor * context > job.options.gpus_per_node:
            continue
        with contextlib.suppress(ConfigError):
            job.trace(tensor, context)  # which refuses all of them at once
            for layout in _layouts(job.layout.world_size, tensor, context):
                with contextlib.suppress(ConfigError):
                    found.append(estimate(job, layout))
    return sorted(
        found, key=lambda e: (not e.fits, -e.tokens_per_second if e.fits else e.memory.total)
    )


def _layouts(world_size: int, tensor: int, context: int) -> Iterator[ParallelDims]:
    for pipeline in _divisors(world_size):
        ranks, rest = divmod(world_size, tensor * context * pipeline)
        if rest or (pipeline > 1 and context > 1):  # the trainer has no such layout
            continue
        for shard in _divisors(ranks):
            yield ParallelDims(
                pipeline=pipeline,
                replicate=ranks // shard,
                shard=shard,
                context=context,
                tensor=tensor,
            )


def nearest(found: list[Estimate], layout: ParallelDims) -> ParallelDims | None:
    """The layout that fits and changes least of another one; of several, the fastest."""

    def distance(plan: Estimate) -> tuple[int, float]:
        """How many times a size is doubled or halved, roughly."""
        pairs = zip(plan.layout.sizes, layout.sizes, strict=True)
        steps = sum(abs(a.bit_length() - b.bit_length()) + (a != b) for a, b in pairs)
        return steps, -plan.tokens_per_second

    best = min((plan for plan in found if plan.fits), key=distance, default=None)
    return None if best is None else best.layout


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
