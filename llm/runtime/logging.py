"""The run's log, on the console and in a file."""

import logging
import logging.handlers
import os
import sys
from pathlib import Path


class _ConsoleHandler(logging.Handler):
    """Writes log lines to standard output without tearing a progress bar apart."""

    def emit(self, record: logging.LogRecord) -> None:
        # Who has not imported it shows no bar, and need not wait for the import.
        bars = sys.modules.get("tqdm")
        write = print if bars is None else bars.tqdm.write
        write(self.format(record), file=sys.stdout)
        sys.stdout.flush()


def set_up_logging(*, rank: int) -> None:
    """Send the package's log to the console: everything from rank 0, warnings from all.

    Lines are kept in memory too, until `log_to_file` knows where the run's folder is.
    """
    logging.raiseExceptions = False  # a log file on a full disk is no reason for tracebacks
    logger = logging.getLogger("llm")
    console = _ConsoleHandler()
    prefix = "" if rank == 0 else f"[rank {rank}] "
    console.setFormatter(logging.Formatter(prefix + "%(message)s"))
    console.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    waiting = logging.handlers.MemoryHandler(10_000, flushLevel=logging.CRITICAL + 1)
    logger.handlers = [console, waiting]
    logger.setLevel(logging.INFO)
    logger.propagate = False


def log_to_file(path: Path) -> None:
    """Send the package's log, from its first line on, to a file as well."""
    file = logging.FileHandler(path, encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    logger = logging.getLogger("llm")
    for handler in list(logger.handlers):
        if isinstance(handler, logging.handlers.MemoryHandler):
            handler.setTarget(file)
            handler.close()
            logger.removeHandler(handler)
    logger.addHandler(file)


def quiet_libraries() -> None:
    """Keep the libraries' hints out of the run's log; call before importing torch."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # Otherwise torch prints C++ stack traces when the store of a dead rank has gone.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging as transformers_logging

    hub_logging.set_verbosity_error()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
