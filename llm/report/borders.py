"""Where a run changes as planned: the stages of its data, the growth of its batch, its cooldown."""

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from llm.config.tokens import Tokens
from llm.data.batch_schedule import parse_batch_schedule

Border = tuple[str, int, str]
"""The kind of an event, the steps done before it, and a few words."""


def find_borders(config: dict[str, Any], start: dict[str, Any]) -> Iterator[Border]:
    """Yield the borders of stages and batches, those after the end of the run included.

    Args:
        config: config.toml.
        start: The last `start` event; earlier versions do not record the batch in it.
    """
    if "block_size" not in start or "global_batch_size" not in start:
        return
    phases = parse_batch_schedule(start["global_batch_size"])

    def steps_to(tokens: int) -> int:
        """Return the step that reaches a token."""
        steps = done = 0
        for (size, _), (_, end) in pairwise([*phases, (0, tokens)]):
            step_tokens = size * start["block_size"]
            of_phase = max(0, math.ceil((min(end, tokens) - done) / step_tokens))
            steps, done = steps + of_phase, done + of_phase * step_tokens
        return steps

    for size, first_token in phases[1:]:
        yield "batch", steps_to(first_token), f"the batch grows to {size:,} samples"
    stages = config.get("data_stage") or []
    for number, (before, stage) in enumerate(pairwise(stages), start=2):
        words = " ".join(Path(str(word)).name for word in stage["data_path"])
        yield "stage", steps_to(Tokens(before["until"])), f"data stage {number}: {words}"
