"""events.jsonl: what happened to a run over all of its starts, one JSON object a line."""

import json
import logging
import math
import time
from pathlib import Path
from typing import Any, Literal

Kind = Literal["start", "resume", "save", "evaluation", "skip", "stop"]


def event(kind: Kind, *, step: int, **values: object) -> dict[str, Any]:
    """Make a line of the log an event too: `logger.info("Saved", extra=event("save", step=5))`.

    Args:
        kind: What happened.
        step: Optimizer steps done.
        values: What else there is to say, as JSON has it.
    """
    return {"event": {"kind": kind, "step": step, **values}}


def append_event(path: Path, kind: Kind, *, step: int | None, **values: object) -> None:
    """Append an event to events.jsonl.

    Args:
        path: The file.
        kind: What happened.
        step: Optimizer steps done; None if unknown.
        values: What else there is to say; a number that is not finite becomes null.

    Raises:
        OSError: The file system refuses it.
    """
    record: dict[str, object] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "event": kind,
        "step": step,
    }
    for name, value in values.items():
        record[name] = None if isinstance(value, float) and not math.isfinite(value) else value
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


class EventHandler(logging.Handler):
    """Writes those lines of the log that are marked by `event` to events.jsonl.

    Args:
        path: The file; appended to.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        """Write the event of a line, if it has one; a full disk does not stop the training."""
        values = getattr(record, "event", None)
        if values is not None:
            try:
                append_event(self._path, **values)
            except OSError:
                self.handleError(record)
