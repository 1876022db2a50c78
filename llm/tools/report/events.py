"""The events of a run: logged events and planned changes."""

import dataclasses
import math
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

from llm.config.duration import Tokens
from llm.data.batch_schedule import count_steps, plan_batch_phases
from llm.errors import ConfigError
from llm.runtime.logging import counted


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """An event of a run, as the page shows it.

    Attributes:
        kind: `start`, `resume`, `branch`, `save`, `skip`, `spike`, `rewind`, `stop`, `finish`,
            `best`, `stage`, `batch`, `cooldown` or `mean`.
        step: Optimizer steps done; None if unknown.
        text: A few words.
        time: Local time; empty if unknown.
        is_current: Whether its steps are still part of the curves: False for an event after the
            checkpoint that a later start resumed from.
    """

    kind: str
    step: int | None
    text: str
    time: str = ""
    is_current: bool = True


def list_logged_events(lines: list[dict[str, Any]], *, saved_steps: set[int]) -> list[Event]:
    """Return the events of events.jsonl, and the checkpoints that it lacks.

    Args:
        lines: The lines of the file, with values of the right types.
        saved_steps: Steps of the existing checkpoints.
    """
    events: list[Event] = []
    for line in lines:
        kind, step = line["event"], line.get("step")
        if kind in ("start", "rewind"):
            events = [_mark_undone_after(event, step or 0) for event in events]
        text = _describe_event(line, is_saved=step in saved_steps)
        if text is not None:
            time = str(line.get("time", ""))[:19].replace("T", " ")
            if line.get("status") == "finished":
                kind = "finish"
            events.append(Event(kind=kind, step=step, text=text, time=time))
    unlogged_steps = saved_steps - {event.step for event in events if event.kind == "save"}
    return events + [Event(kind="save", step=step, text="saved") for step in sorted(unlogged_steps)]


def _mark_undone_after(event: Event, step: int) -> Event:
    """Return an event; it is not current if it comes after the step that a run goes back to."""
    is_current = event.is_current and (event.step or 0) <= step
    return dataclasses.replace(event, is_current=is_current)


def _describe_event(line: dict[str, Any], *, is_saved: bool) -> str | None:
    """Return the text of an event for the page; None for kinds that it does not show."""
    samples = f"samples {line.get('first_sample')} to {line.get('last_sample')}"
    match line["event"]:
        case "start":
            return f"started on {counted(line.get('ranks', 0), 'rank')}"
        case "resume":
            return "resumed"
        case "branch":
            return f"branched from {line.get('checkpoint')}"
        case "save":
            return "saved" if is_saved else "saved; removed since"
        case "skip":
            return f"skipped: its gradient is not finite ({samples})"
        case "spike":
            return f"the loss {line.get('loss') or math.inf:.4g} is a spike ({samples})"
        case "rewind":
            return f"back to this step, without the samples {line.get('skip_samples')}"
        case "stop":
            return f"{line.get('status')}: {line.get('reason') or 'all steps are done'}"
    return None


def list_planned_events(
    config: dict[str, Any],
    start: dict[str, Any],
    *,
    first_step: int,
    last_step: float,
    cooldown_from: int | None,
) -> list[Event]:
    """Return the steps where data stages, larger batches and the cooldown began.

    Args:
        config: config.toml.
        start: The last `start` event; empty if there is none.
        first_step: Steps that a branch inherits from its parent.
        last_step: Steps done.
        cooldown_from: Steps done before the cooldown; None without one.
    """
    try:
        events = [
            event
            for event in _iterate_phase_changes(config, start)
            if (event.step or 0) > first_step
        ]
    except (ConfigError, ArithmeticError, LookupError, TypeError, ValueError):
        events = []  # a person has edited the files, so no run had these options
    if cooldown_from is not None and cooldown_from >= first_step:
        text = f"the cooldown begins, of {config['cooldown_tokens']:,} tokens"
        events.append(Event(kind="cooldown", step=cooldown_from, text=text))
    return [event for event in events if (event.step or 0) <= last_step]


def _iterate_phase_changes(config: dict[str, Any], start: dict[str, Any]) -> Iterator[Event]:
    """Yield each planned change of the batch size and the data stage, including future ones."""
    if "block_size" not in start or "global_batch_size" not in start:
        return
    phases = plan_batch_phases(start["global_batch_size"], block_size=start["block_size"])
    for step, _, size in phases[1:]:
        yield Event(kind="batch", step=step, text=f"the batch grows to {size:,} samples")
    for stage_number, (previous_stage, stage) in enumerate(
        pairwise(config.get("data_stage") or []), start=2
    ):
        num_samples = Fraction(Tokens(previous_stage["until"]), start["block_size"])
        paths = " ".join(Path(str(word)).name for word in stage["data_path"])
        step = math.ceil(count_steps(phases, num_samples))
        yield Event(kind="stage", step=step, text=f"data stage {stage_number}: {paths}")
