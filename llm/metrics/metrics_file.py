"""metrics.jsonl: a line of numbers for each report, whole also after a kill and on a full disk."""

import json
import logging
import threading
from collections.abc import Mapping
from pathlib import Path

from llm.errors import one_line
from llm.runtime.files import json_safe, read_json_lines, sync, write_whole

logger = logging.getLogger("llm")


class MetricsFile:
    """The open metrics.jsonl of a run.

    Lines that cannot be written, such as on a full disk, stay in memory until they can.

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
        self._size = path.stat().st_size
        self._unwritten = b""
        self._lock = threading.Lock()  # the thread that saves calls `flush`

    def append(self, record: Mapping[str, float], *, step: int) -> None:
        """Append a line."""
        values = {name: json_safe(value) for name, value in record.items()}
        line = json.dumps({"step": step} | values) + "\n"
        with self._lock:
            is_first_failure = not self._unwritten
            self._unwritten += line.encode()
        try:
            self.flush()
        except OSError as error:
            if is_first_failure:
                logger.warning(
                    f"{self._path} cannot be written ({one_line(error)}). Training continues, and "
                    "its lines are kept in memory until they can be written."
                )

    def flush(self) -> None:
        """Write the lines that are still in memory to the disk.

        Raises:
            OSError: The file cannot be written.
        """
        with self._lock:
            if not self._unwritten:
                return
            try:
                self._file.truncate(self._size)  # a failed attempt may have written a part
                unwritten = memoryview(self._unwritten)
                while unwritten:
                    unwritten = unwritten[self._file.write(unwritten) :]
                sync(self._file)
            except OSError as error:
                error.filename = str(self._path)
                raise
            self._size += len(self._unwritten)
            self._unwritten = b""

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
    lines = [line for line in read_json_lines(path) if line is not None and line["step"] <= step]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    if not path.exists() or path.read_bytes() != text.encode():  # a full disk takes no new file
        write_whole(path, text)
    return {name for line in lines if line["step"] == step for name in line}
