"""What happened to a run, and what it said of itself, out of its log and its checkpoints.

The log is written for people, so that every sentence looked for here may be missing.
"""

import dataclasses
import re
from pathlib import Path
from typing import Literal

from llm import checkpoint

Kind = Literal["save", "resume", "skip", "stop", "best"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened at one step of a run.

    Attributes:
        kind: What it is.
        step: Optimizer steps that were done.
        text: A few words for people.
        time: When, as the log has it; None if unknown.
    """

    kind: Kind
    step: int
    text: str
    time: str | None = None


@dataclasses.dataclass(kw_only=True)
class LogFacts:
    """What the beginning of a run's log says; None where it does not.

    Attributes:
        architecture: Model type, as Hugging Face has it.
        num_parameters: Parameters of the model.
        total_steps: Steps of the whole run.
        num_ranks: Processes of the last start.
        device: Type of their devices.
        precision: Mixed precision.
    """

    architecture: str | None = None
    num_parameters: int | None = None
    total_steps: int | None = None
    num_ranks: int | None = None
    device: str | None = None
    precision: str | None = None


_TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d")
_MODEL = re.compile(r"\bmodel: (\S+), ([\d,]+) parameters")
_LENGTH = re.compile(r"\blength: ([\d,]+) steps")
_WORLD = re.compile(r"\bworld: (\d+) ranks?, (\w+), mixed precision (\w+)")
_RESUMED = re.compile(r"\bResumed from .* at step (\d+)")
_AFRESH = re.compile(r"\bthe run starts afresh")
_SAVED = re.compile(r"\bSaved \S.*step_(\d+)")
_SKIPPED = re.compile(r"\bstep (\d+) was skipped(: .*)?")
_STOPPED = re.compile(r"\bStopped by (.+?) after step (\d+)")


def read_log(path: Path) -> tuple[list[Event], LogFacts]:
    """The events of a run's log.txt, and what it says of the run; nothing if there is no log.

    What a start did after the step from which a later one went on is left out, as it is in
    metrics.jsonl.
    """
    events: list[Event] = []
    facts = LogFacts()
    if not path.is_file():
        return events, facts
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if "lm loss:" in line:  # nearly all lines, and none of these
                continue
            began_at = _start(line)
            if began_at is not None:
                events = [event for event in events if event.step <= began_at]
            event = _event(line)
            if event is not None:
                events.append(event)
            elif began_at is None:
                _note(line, facts)
    return events, facts


def with_checkpoints(events: list[Event], folder: Path) -> list[Event]:
    """Add the saves that only the checkpoints themselves tell of, and say which ones are left.

    Args:
        events: What the log tells.
        folder: The run's `checkpoints` folder, which need not exist.

    Returns:
        All events, in the order of their steps.
    """
    kept = {found.step: found.saved_at for found in checkpoint.found(folder)}
    told = {event.step for event in events if event.kind == "save"}
    events = [
        dataclasses.replace(event, text="saved; removed since")
        if event.kind == "save" and event.step not in kept
        else event
        for event in events
    ]
    for step, saved_at in kept.items():
        if step not in told:
            time = saved_at[:19].replace("T", " ")
            events.append(Event(kind="save", step=step, text="saved", time=time))
    return sorted(events, key=lambda event: event.step)


def _start(line: str) -> int | None:
    """The step from which a start goes on, if the line tells of one."""
    if _AFRESH.search(line):
        return 0
    match = _RESUMED.search(line)
    return int(match[1]) if match else None


def _event(line: str) -> Event | None:
    stamp = _TIME.match(line)
    time = stamp[0] if stamp else None
    if match := _SAVED.search(line):
        return Event(kind="save", step=int(match[1]), text="saved", time=time)
    if match := _RESUMED.search(line):
        return Event(kind="resume", step=int(match[1]), text="resumed", time=time)
    if match := _SKIPPED.search(line):
        text = f"skipped{match[2] or ''}"
        return Event(kind="skip", step=int(match[1]), text=text, time=time)
    if match := _STOPPED.search(line):
        return Event(kind="stop", step=int(match[2]), text=f"stopped by {match[1]}", time=time)
    return None


def _note(line: str, facts: LogFacts) -> None:
    """Take over what a line says of the run; a later start's word counts."""
    if match := _MODEL.search(line):
        facts.architecture, facts.num_parameters = match[1], _integer(match[2])
    elif match := _LENGTH.search(line):
        facts.total_steps = _integer(match[1])
    elif match := _WORLD.search(line):
        facts.num_ranks, facts.device, facts.precision = int(match[1]), match[2], match[3]


def _integer(text: str) -> int:
    return int(text.replace(",", ""))
