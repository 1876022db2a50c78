"""The wall time of a run over all of its starts: how much of it trained, and what took the rest.

Rank 0 writes the account to `goodput.json` with every report, so a killed start loses at most the
time since its last report, which then counts as time between two starts.
"""

import contextlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from llm.runtime.files import write_whole

Part = Literal["start", "training", "evaluation", "saving", "output", "queue"]
"""What time is spent on: `output` is the log and the exported model, `queue` the time between two
starts."""

_MIN_SHOWN_SHARE = 0.0005
"""Smaller losses would be shown as 0.0%."""

_FIELDS = ("began", "written", "starts", "device_seconds", "inherited_seconds", "inherited_tokens")
"""Numbers in `goodput.json`, in addition to the seconds of each part and the results."""


class WallTime:
    """Accounts for the wall time of a run; it begins with this process.

    Attributes:
        tokens: Tokens consumed by all ranks, including the tokens of a branch's parent.
        start_joules: Joules that the devices have used in this start; None if unknown.
    """

    def __init__(self) -> None:
        process_age = _process_age()
        self._run_start_time = time.time() - process_age
        self._num_starts = 1
        self._seconds_by_part: dict[Part, float] = dict.fromkeys(get_args(Part), 0.0)
        self._current_part: Part = "start"
        self._part_start_time = time.monotonic() - process_age
        self._start_time = self._part_start_time
        self._path: Path | None = None
        self._num_devices = 1
        self._earlier_device_seconds = 0.0
        # Training seconds and tokens of the parent of a branch; None until training begins.
        self._inherited_usage: tuple[float, int] | None = None
        self._repeated_seconds = 0.0
        self._earlier_joules: float | None = 0.0
        self.start_joules: float | None = None
        self.tokens = 0

    def open(self, path: Path, *, num_devices: int) -> None:
        """Continue the account of earlier starts, and write to its file from now on.

        Args:
            path: Path of `goodput.json`; a missing or damaged file begins a new account.
            num_devices: Devices that this start uses.
        """
        self._path, self._num_devices = path, num_devices
        account = _read_account(path)
        if account is None:
            return
        seconds_between_starts = max(0.0, self._run_start_time - account["written"])
        if not account["is_finished"]:
            self._seconds_by_part["queue"] = seconds_between_starts
        for part, seconds in account["seconds"].items():
            self._seconds_by_part[part] += seconds
        # A finished run that is made longer has not waited for this start.
        self._run_start_time = account["began"] + (
            seconds_between_starts if account["is_finished"] else 0.0
        )
        self._num_starts = account["starts"] + 1
        self._earlier_device_seconds = account["device_seconds"]
        self._inherited_usage = account["inherited_seconds"], account["inherited_tokens"]
        self._earlier_joules = account.get("energy_joules")

    def switch(self, part: Part) -> Part:
        """Count time as spent on a part from now on, and return the part until now."""
        now = time.monotonic()
        self._seconds_by_part[self._current_part] += now - self._part_start_time
        self._part_start_time = now
        previous_part, self._current_part = self._current_part, part
        return previous_part

    @contextlib.contextmanager
    def spent_on(self, part: Part) -> Iterator[None]:
        """Count the time inside the context as spent on a part."""
        previous_part = self.switch(part)
        try:
            yield
        finally:
            self.switch(previous_part)

    def begin_training(self, *, seconds: float, tokens: int) -> None:
        """Begin or continue training at the start or from a checkpoint.

        Args:
            seconds: Seconds of training up to the checkpoint, which count. All training of earlier
                starts beyond it is lost, and is repeated.
            tokens: Tokens up to the checkpoint.
        """
        self.switch("training")
        if self._inherited_usage is None:
            self._inherited_usage = seconds, tokens
        inherited_seconds, _ = self._inherited_usage
        trained_seconds = self._seconds_by_part["training"]
        self._repeated_seconds = max(0.0, trained_seconds - (seconds - inherited_seconds))
        self.tokens = tokens

    def results(self) -> dict[str, float]:
        """Return how the wall time until now was spent, under the names in `all_results.json`."""
        self.switch(self._current_part)
        wall_seconds = time.time() - self._run_start_time
        training_seconds = self._seconds_by_part["training"] - self._repeated_seconds
        lost_seconds = [("repeated", self._repeated_seconds), *self._seconds_by_part.items()]
        device_hours = self._device_seconds() / 3600
        _, inherited_tokens = self._inherited_usage or (0.0, 0)
        num_tokens = self.tokens - inherited_tokens
        joules = self._energy_joules()
        energy_metrics = (
            {"energy_joules": joules, "tokens_per_joule": num_tokens / joules} if joules else {}
        )
        return {
            "goodput": training_seconds / wall_seconds,
            "starts": self._num_starts,
            "wall_seconds": wall_seconds,
            "training_seconds": training_seconds,
            **{
                f"lost_{part}_seconds": seconds
                for part, seconds in lost_seconds
                if part != "training"
            },
            "device_hours": device_hours,
            "tokens_per_device_hour": num_tokens / device_hours,
            **energy_metrics,
        }

    def _device_seconds(self) -> float:
        """Return the seconds of all devices over all starts, without the time between them."""
        start_seconds = time.monotonic() - self._start_time
        return self._earlier_device_seconds + start_seconds * self._num_devices

    def _energy_joules(self) -> float | None:
        """Return the joules of all starts, or None if a start does not know its part."""
        if self._earlier_joules is None or self.start_joules is None:
            return None
        return self._earlier_joules + self.start_joules

    def write(self, *, is_finished: bool = False) -> None:
        """Write the account to its file; on a full disk, the last one stays.

        Args:
            is_finished: Whether the results of the run are written.
        """
        if self._path is None:
            return
        results = self.results()
        inherited_seconds, inherited_tokens = self._inherited_usage or (0.0, 0)
        account = {
            "began": self._run_start_time,
            "written": time.time(),
            "is_finished": is_finished,
            "starts": self._num_starts,
            "device_seconds": self._device_seconds(),
            "inherited_seconds": inherited_seconds,
            "inherited_tokens": inherited_tokens,
            "energy_joules": self._energy_joules(),
            "seconds": self._seconds_by_part,
            "results": results,
        }
        with contextlib.suppress(OSError):  # metrics.jsonl is on the same disk, and warns
            write_whole(self._path, json.dumps(account, indent=1) + "\n", survives_power_cut=False)


def describe_goodput(results: Mapping[str, float]) -> str:
    """Return goodput and losses as a text: "91.0% of 3.1 h (start 6.2%, saving 2.8%)".

    Args:
        results: The result of `WallTime.results`.
    """
    wall_seconds = results["wall_seconds"]
    shares = {
        name.removeprefix("lost_").removesuffix("_seconds"): value / wall_seconds
        for name, value in results.items()
        if name.startswith("lost_")
    }
    loss_texts = [
        f"{part} {share:.1%}"
        for part, share in sorted(shares.items(), key=lambda entry: -entry[1])
        if share >= _MIN_SHOWN_SHARE
    ]
    hours = f"{wall_seconds / 3600:.3g} h" if wall_seconds >= 3600 else f"{wall_seconds:.3g} s"
    return f"{results['goodput']:.1%} of {hours} ({', '.join(loss_texts)})"


def goodput_rows(results: Mapping[str, float]) -> dict[str, object]:
    """Return the rows about wall time and energy in the table of the model card."""
    return {
        "goodput": describe_goodput(results),
        "device hours": results["device_hours"],
        "tokens per device hour": results["tokens_per_device_hour"],
        **{
            name.replace("_", " "): results[name]
            for name in ("energy_joules", "tokens_per_joule")
            if name in results
        },
    }


def _read_account(path: Path) -> dict[str, Any] | None:
    """Return the account that an earlier start has written; None without a valid one."""
    try:
        account = json.loads(path.read_text(encoding="utf-8"))
        numbers = [*(account[name] for name in _FIELDS), *account["seconds"].values()]
        numbers.append(account.get("energy_joules") or 0.0)
        has_known_parts = account["seconds"].keys() <= {*get_args(Part)}
        has_finite_numbers = all(math.isfinite(number) for number in numbers)
        is_valid = (
            has_known_parts and isinstance(account["is_finished"], bool) and has_finite_numbers
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return account if is_valid else None


def _process_age() -> float:
    """Return the seconds since this process began, with Python's imports; 0 if unknown."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        ticks_after_boot = int(fields[19])
        seconds_after_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
        return max(0.0, seconds_after_boot - ticks_after_boot / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):  # not on Linux
        return 0.0
