"""metrics.jsonl: a line of numbers for each report, whole also after a kill and on a full disk.

Lines are on the disk when `flush` returns, as before each checkpoint. A line alone is not waited
for: a GPU would idle meanwhile, because the host has just read the loss.
"""

import json
import logging
import threading
from collections.abc import Mapping
from pathlib import Path

from llm.errors import one_line
from llm.runtime.files import json_safe, read_json_lines, sync, write_whole
from llm.runtime.logging import counted

logger = logging.getLogger("llm")


class MetricsFile:
    """The open metrics.jsonl of a run.

    Lines stay in memory until they are on the disk, so those that cannot be written, such as on a
    full disk, are written later.

    Args:
        path: The file; it need not exist.
        step: The step that training starts from. Lines of later steps are removed.

    Attributes:
        names_at_start: The names of the values that the file already has for this step.
    """

    def __init__(self, path: Path, *, step: int) -> None:
        self.names_at_start = truncate_metrics(path, step=step)
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._size = path.stat().st_size  # on the disk
        self._unsynced = b""  # the lines after it
        self._num_written = 0  # bytes of them in the file
        self._has_failed = False
        self._lock = threading.Lock()  # the thread that saves calls `flush`

    def append(self, record: Mapping[str, float], *, step: int) -> None:
        """Append values as a line; keep it in memory while the file cannot be written."""
        values = {name: json_safe(value) for name, value in record.items()}
        line = json.dumps({"step": step} | values) + "\n"
        with self._lock:
            self._unsynced += line.encode()
            try:
                self._write()
                self._has_failed = False
            except OSError as error:
                if not self._has_failed:
                    logger.warning(
                        f"{self._path} cannot be written ({one_line(error)}). Training continues, "
                        "and its lines are kept in memory until they can be written."
                    )
                self._has_failed = True

    def flush(self) -> None:
        """Write all lines to the disk, and wait for it.

        Raises:
            OSError: The file cannot be written.
        """
        with self._lock:
            if not self._unsynced:
                return
            try:
                self._write()
                sync(self._file)
            except OSError as error:
                self._num_written = 0  # the system may have dropped them: all are written again
                error.filename = str(self._path)
                raise
            self._size += len(self._unsynced)
            self._unsynced, self._num_written, self._has_failed = b"", 0, False

    def _write(self) -> None:
        """Write the lines that are not in the file, without waiting for the disk."""
        self._file.truncate(self._size + self._num_written)  # an attempt may have written a part
        unwritten = memoryview(self._unsynced)[self._num_written :]
        while unwritten:
            unwritten = unwritten[self._file.write(unwritten) :]
        self._num_written = len(self._unsynced)

    def close(self) -> None:
        """Write what is still in memory, and close the file."""
        try:
            with self._file:
                self.flush()
        except OSError as error:
            logger.warning(f"Lines are missing in {self._path} ({one_line(error)}).")


def truncate_metrics(path: Path, *, step: int) -> set[str]:
    """Remove lines of later steps from metrics.jsonl, and an incomplete line that a kill left.

    Args:
        path: The file; it need not exist.
        step: The step that training resumes from.

    Returns:
        The names of the values that the file already has for this step.
    """
    all_lines = read_json_lines(path)
    readable_lines = [
        line for line in all_lines if line is not None and isinstance(line.get("step"), int)
    ]
    is_cut_short = bool(all_lines) and all_lines[-1] is None
    num_damaged = len(all_lines) - len(readable_lines) - is_cut_short
    if num_damaged:
        logger.warning(f"{path}: {counted(num_damaged, 'line')} could not be read and are removed")
    lines = [line for line in readable_lines if line["step"] <= step]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    if not path.exists() or path.read_bytes() != text.encode():  # a full disk takes no new file
        write_whole(path, text)
    return {name for line in lines if line["step"] == step for name in line}
