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

import llm
from llm.errors import ConfigError, one_line, os_error_remedy
from llm.runtime.files import write_whole
from llm.runtime.logging import counted
from llm.tools.evidence.code_version import find_commit, hash_sources

FORMAT = 1
Result = Literal["passed", "failed", "not run"]

_PERSONAL_VARIABLES = (
    *("USER", "LOGNAME", "HOSTNAME", "MASTER_ADDR", "SLURM_JOB_ACCOUNT", "SLURM_JOB_USER"),
    *("SLURMD_NODENAME", "SLURM_SUBMIT_HOST", "PBS_ACCOUNT", "PBS_O_LOGNAME", "PBS_O_HOST"),
)
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY", re.IGNORECASE)
_MIN_SECRET_LENGTH = 8
_ADDRESS = re.compile(
    r"\b\d{1,3}(?:\.\d{1,3}){3}\b"  # IPv4
    r"|\b[0-9a-fA-F]{1,4}(?:::?[0-9a-fA-F]{1,4}){3,7}\b"  # IPv6
    r"|\b[0-9a-fA-F]{4}(?::[0-9a-fA-F]{1,4})?::[0-9a-fA-F]{1,4}\b"  # short, such as fe80::1
)
_PATH = re.compile(r"(?<![\w.])~?(?:/[\w.+@%-]+)+/?")
_MODULE_SUFFIXES = (".py", ".so")


class EvidenceFile:
    """A JSON file that is written after each check, so that a kill loses only the last one.

    Args:
        path: The file, which must not exist.
        options: The choices of the user, by name.
        site: Name of the cluster, or None.

    Attributes:
        personal_words: Names of users and hosts, and secrets, which `add` removes from figures.

    Raises:
        ConfigError: It exists, or cannot be written.
    """

    def __init__(self, path: Path, *, options: Mapping[str, Any], site: str | None) -> None:
        self.personal_words: Sequence[str] = ()
        self._path = path
        package = Path(llm.__file__).parent
        self._content: dict[str, Any] = {
            "format": FORMAT,
            "program": f"llm-trainers {llm.__version__}",
            "commit": find_commit(package),
            "sources_sha256": hash_sources(package),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "options": dict(options),
            "finished": False,
            "summary": [],
            "site": site,
            "machine": {},
            "parts": {},
        }
        try:
            path.open("x").close()
        except FileExistsError as error:
            raise ConfigError(_describe_existing(path)) from error
        except OSError as error:
            raise ConfigError(f"--output {path} cannot be written: {one_line(error)}.") from error
        try:
            self._write()
        except OSError as error:
            path.unlink()
            raise ConfigError(
                f"--output {path} cannot be written: {one_line(error)}; {os_error_remedy(error)}."
            ) from error

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
        code = self._content["commit"] or f"sources {self._content['sources_sha256'][:12]}"
        lines = [f"{self._content['program']} ({code}), {self._content['date']}"]
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


def work_folder(path: Path) -> Path:
    """Return the folder of the trainings of a run that writes this file."""
    return Path(f"{path}.work")


def _describe_existing(path: Path) -> str:
    """Return why a path that exists cannot be the file, and what to do."""
    if path.is_dir():
        return f"--output {path} is a folder; name a file in it."
    if work_folder(path).exists():
        return (
            f"--output {path} and {work_folder(path)} exist: another run writes them, or was "
            "killed. Name another file, or remove both if no run writes them."
        )
    return (
        f"--output {path} exists, and evidence never replaces a file; name another one, or remove "
        "it."
    )


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


def secret_words() -> list[str]:
    """Return the values of this process's environment variables for tokens and passwords.

    Do not send them to other ranks.
    """
    return [
        value
        for name, value in os.environ.items()
        if _SECRET_NAME.search(name) and len(value) >= _MIN_SECRET_LENGTH
    ]


def remove_personal_data(text: str, words: Iterable[str]) -> str:
    """Return a program's output without personal data.

    Names become `<name>`, network addresses `<address>`, and absolute paths `<path>`, with the name
    of a Python file or library.

    Args:
        text: The output.
        words: Names of users and hosts, and secrets.
    """
    text = _PATH.sub(_shorten_path, text)
    text = _ADDRESS.sub("<address>", text)
    for word in sorted({word for word in words if len(word) > 1}, key=len, reverse=True):
        # `nid1-hsn0` is another name of nid1, and `alice_runs` has the name of a user.
        pattern = rf"(?<![a-zA-Z0-9]){re.escape(word)}(?![a-zA-Z0-9])"
        text = re.sub(pattern, "<name>", text, flags=re.IGNORECASE)
    return text


def _shorten_path(match: re.Match[str]) -> str:
    """Return what replaces an absolute path: a file of Python or a library keeps its name."""
    name = match[0].rpartition("/")[2]
    return f"<path>/{name}" if name.endswith(_MODULE_SUFFIXES) else "<path>"
