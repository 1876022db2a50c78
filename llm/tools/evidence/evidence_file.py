"""The file of the evidence: written after each check, without names of users, hosts and paths."""

import contextlib
import getpass
import json
import os
import re
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from llm import __version__
from llm.errors import ConfigError, one_line
from llm.runtime.files import write_whole
from llm.runtime.logging import counted

FORMAT = 1
Result = Literal["passed", "failed", "not run"]

_PERSONAL_VARIABLES = (
    *("USER", "LOGNAME", "HOSTNAME", "MASTER_ADDR", "SLURM_JOB_ACCOUNT", "SLURM_JOB_USER"),
    *("SLURMD_NODENAME", "PBS_ACCOUNT", "PBS_O_LOGNAME", "PBS_O_HOST"),
)
_ADDRESS = re.compile(
    r"\b\d{1,3}(?:\.\d{1,3}){3}\b"  # IPv4
    r"|\b[0-9a-fA-F]{1,4}(?:::?[0-9a-fA-F]{1,4}){3,7}\b"  # IPv6
)
_PATH = re.compile(r"(?<![\w.])~?(?:/[\w.+@%-]+)+/?")
_MODULE_SUFFIXES = (".py", ".so")


class EvidenceFile:
    """A JSON file that is written after each check, so that a kill loses only the last one.

    Args:
        path: The file, which must not exist.
        site: Name of the cluster, or None.

    Attributes:
        personal_words: Names of users and hosts, which `add` removes from figures.

    Raises:
        ConfigError: It exists, or cannot be written.
    """

    def __init__(self, path: Path, *, site: str | None) -> None:
        self.personal_words: Sequence[str] = ()
        self._path = path
        self._content: dict[str, Any] = {
            "format": FORMAT,
            "program": f"llm-trainers {__version__}",
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "finished": False,
            "summary": [],
            "site": site,
            "machine": {},
            "parts": {},
        }
        try:
            path.open("x").close()
        except FileExistsError as error:
            raise ConfigError(
                f"--output {path} exists, and evidence never replaces a file; name another one, or "
                "remove it if no other run is writing it."
            ) from error
        except OSError as error:
            raise ConfigError(f"--output {path} cannot be written: {one_line(error)}.") from error
        self._write()

    def set_machine(self, job: Mapping[str, Any]) -> None:
        """Record the machine."""
        self._content["machine"] = dict(job)
        self._write()

    def add(self, part: str, check: str, result: Result, *, seconds: float, **figures: Any) -> None:
        """Record a check.

        Args:
            part: Name of its part.
            check: Its name.
            result: Whether it passed, failed, or did not run.
            seconds: How long it took.
            figures: Its figures, and why it failed as `reason`.
        """
        for name, value in figures.items():
            if isinstance(value, str):
                figures[name] = remove_personal_data(value, self.personal_words)
        record = {"check": check, "result": result, "seconds": round(seconds, 1), **figures}
        self._content["parts"].setdefault(part, []).append(record)
        self._write()

    def finish(self) -> bool:
        """Record the end; return whether every check has passed."""
        self._content["finished"] = True
        self._write()
        results = self._count_results()
        return results["passed"] > 0 and not results["failed"] and not results["not run"]

    def summary(self) -> list[str]:
        """Return the content as lines for a person."""
        machine = self._content["machine"]
        lines = [f"{self._content['program']}, {self._content['date']}"]
        if machine:
            lines.append(
                f"{counted(machine['ranks'], 'rank')} on {counted(machine['nodes'], 'node')}: "
                f"{machine['card']} ({machine['device']})"
            )
        for part, records in self._content["parts"].items():
            lines += [f"{part}: {_describe_record(record)}" for record in records]
        results = ", ".join(f"{count} {result}" for result, count in self._count_results().items())
        return [*lines, f"{results}."]

    def _count_results(self) -> dict[str, int]:
        """Return the number of checks by result."""
        counts = {"passed": 0, "failed": 0, "not run": 0}
        for records in self._content["parts"].values():
            for record in records:
                counts[record["result"]] += 1
        return counts

    def _write(self) -> None:
        self._content["summary"] = self.summary()
        write_whole(self._path, json.dumps(self._content, indent=1) + "\n")


def _describe_record(record: Mapping[str, Any]) -> str:
    """Return a check as one line."""
    figures = []
    if "loss_difference" in record:
        figures.append(f"losses differ by {record['loss_difference']:.1e}")
    if "weight_difference" in record:
        figures.append(f"weights by {record['weight_difference']:.1e}")
    if "all_reduce_ms" in record:
        size = record["message_mib"]
        figures.append(f"all-reduce of {size} MiB in {record['all_reduce_ms']:.2f} ms")
    if "tokens_per_second" in record:
        figures.append(f"{record['tokens_per_second']:,.0f} tokens/s")
    if "tokens_per_second_of_plan" in record:
        figures.append(f"{record['tokens_per_second_of_plan']:.2f} of the plan")
    if "memory_of_plan" in record:
        figures.append(f"memory {record['memory_of_plan']:.2f} of the plan")
    if "reason" in record:
        first_line, *output = record["reason"].splitlines()
        figures.append(first_line)
        figures += output[-1:]
    details = f" ({'; '.join(figures)})" if figures else ""
    return f"{record['check']} {record['result']}{details}"


def personal_words() -> list[str]:
    """Return the names of this process's user and host, which must not be in the file."""
    words = [socket.gethostname(), socket.gethostname().partition(".")[0]]
    words += [os.environ[name] for name in _PERSONAL_VARIABLES if os.environ.get(name)]
    with contextlib.suppress(KeyError, OSError):  # the user has no name
        words.append(getpass.getuser())
    return words


def remove_personal_data(text: str, words: Iterable[str]) -> str:
    """Return a program's output without personal data.

    Names become `<name>`, network addresses `<address>`, and absolute paths `<path>`, with the name
    of a Python file or library.

    Args:
        text: The output.
        words: Names of users and hosts.
    """
    text = _PATH.sub(_shorten_path, text)
    text = _ADDRESS.sub("<address>", text)
    for word in sorted({word for word in words if len(word) > 1}, key=len, reverse=True):
        text = re.sub(rf"(?<![\w-]){re.escape(word)}(?![\w-])", "<name>", text)
    return text


def _shorten_path(match: re.Match[str]) -> str:
    """Return what replaces an absolute path: a file of Python or a library keeps its name."""
    name = match[0].rpartition("/")[2]
    return f"<path>/{name}" if name.endswith(_MODULE_SUFFIXES) else "<path>"
