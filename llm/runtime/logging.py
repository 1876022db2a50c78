"""The log of a run: on the console, in log.txt, and its events in events.jsonl.

events.jsonl records the events of all starts of a run, one JSON object per line.
"""

import errno
import json
import logging
import logging.handlers
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from llm.config.terminal import discard_output, escape_controls
from llm.errors import one_line
from llm.runtime.files import end_last_line, json_safe

Kind = Literal[
    "start",
    "resume",
    "branch",
    "save",
    "evaluation",
    "experts",
    "task",
    "skip",
    "slow",
    "spike",
    "rewind",
    "stop",
]


SAME_ON_ALL_RANKS = {"same_on_all_ranks": True}
"""Mark of a warning that all ranks log, so that rank 0 alone shows it:
`logger.warning(line, extra=SAME_ON_ALL_RANKS)`."""


class _Formatter(logging.Formatter):
    """Escapes control characters, which a text of the model or a path may contain."""

    def format(self, record: logging.LogRecord) -> str:
        return escape_controls(super().format(record))


class _ConsoleHandler(logging.Handler):
    """Writes log lines to standard output without breaking a progress bar.

    A terminal gets the short form of a line that has one.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line; if the terminal or the reader of a pipe has gone, write no more."""
        # A process that has not imported tqdm shows no bar, so it can skip the import.
        tqdm = sys.modules.get("tqdm")
        write = print if tqdm is None else tqdm.tqdm.write
        try:
            short_line = getattr(record, "short", None) if sys.stdout.isatty() else None
            write(self.format(record) if short_line is None else short_line, file=sys.stdout)
            sys.stdout.flush()
        except Exception as error:  # training and log.txt continue
            if isinstance(error, OSError) and error.errno in (errno.EPIPE, errno.EIO):
                discard_output()


def set_up_logging(*, rank: int, level_of_other_ranks: int = logging.WARNING) -> None:
    """Send the package's log to the console: everything from rank 0, warnings from all ranks.

    The other ranks do not show what is marked as `SAME_ON_ALL_RANKS`.

    Lines are kept in memory too, until `log_to_file` knows the folder of the run.

    Args:
        rank: Rank of this process.
        level_of_other_ranks: The lowest level that the ranks other than 0 log.
    """
    logging.raiseExceptions = False  # a full disk must not cause tracebacks from the log
    threading.excepthook = _log_thread_error
    logger = logging.getLogger("llm")
    console_handler = _ConsoleHandler()
    prefix = "" if rank == 0 else f"[rank {rank}] "
    console_handler.setFormatter(_Formatter(prefix + "%(message)s"))
    console_handler.setLevel(logging.INFO if rank == 0 else level_of_other_ranks)
    if rank != 0:
        console_handler.addFilter(lambda record: not hasattr(record, "same_on_all_ranks"))
    memory_handler = logging.handlers.MemoryHandler(10_000, flushLevel=logging.CRITICAL + 1)
    logger.handlers = [console_handler, memory_handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


def _log_thread_error(hook_args: threading.ExceptHookArgs) -> None:
    """Log the error that ends a thread, with its traceback unless it is an OSError."""
    logging.getLogger("llm").warning(
        f"A background thread failed ({hook_args.exc_type.__name__}: {hook_args.exc_value}).",
        exc_info=None if isinstance(hook_args.exc_value, OSError) else hook_args.exc_value,
    )


def log_to_file(path: Path) -> None:
    """Send the package's log to a file too, including the lines from before this call."""
    end_last_line(path)
    file_handler = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    file_handler.setFormatter(_Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    logger = logging.getLogger("llm")
    for handler in list(logger.handlers):
        if isinstance(handler, logging.handlers.MemoryHandler):
            handler.setTarget(file_handler)
            handler.close()
            logger.removeHandler(handler)
    logger.addHandler(file_handler)


def quiet_libraries() -> None:
    """Keep the hints of libraries out of the run's log; call before torch is imported."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # Otherwise torch prints C++ stack traces when a rank dies and its TCPStore disappears.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging as transformers_logging

    hub_logging.set_verbosity_error()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def event(kind: Kind, *, step: int, **values: object) -> dict[str, Any]:
    """Make a log line an event as well: `logger.info("Saved", extra=event("save", step=5))`.

    Args:
        kind: Kind of event.
        step: Optimizer steps done.
        values: Further JSON values.
    """
    return {"event": {"kind": kind, "step": step, **values}}


def short_form(text: str) -> dict[str, str]:
    """Give a line a short form for terminals: `logger.info(line, extra=short_form("step 5/9"))`."""
    return {"short": text}


def append_event(path: Path, kind: Kind, *, step: int | None, **values: object) -> None:
    """Append an event to events.jsonl.

    Args:
        path: The file.
        kind: Kind of event.
        step: Optimizer steps done; None if unknown.
        values: Further values; infinite numbers and NaN become null.

    Raises:
        OSError: The file cannot be written.
    """
    record: dict[str, object] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "event": kind,
        "step": step,
    }
    record |= {name: json_safe(value) for name, value in values.items()}
    end_last_line(path)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


class EventHandler(logging.Handler):
    """Appends log lines marked by `event` to events.jsonl."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        """Append the event of a line, if it has one; no error stops the training."""
        values = getattr(record, "event", None)
        if values is not None:
            try:
                append_event(self._path, **values)
            except Exception as error:
                logging.getLogger("llm").warning(
                    f"An event cannot be written to {self._path} ({one_line(error)})."
                )


def counted(number: int, noun: str) -> str:
    """Return a number and its noun, in the plural unless it is 1: "1 rank", "2,000 steps"."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def list_first(names: Sequence[str], max_names: int) -> str:
    """Return the first names as a list in a sentence, and the number of the others."""
    name_list = ", ".join(names[:max_names])
    num_omitted = len(names) - max_names
    return f"{name_list} and {num_omitted:,} more" if num_omitted > 0 else name_list
