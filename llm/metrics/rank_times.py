"""Times that differ between ranks, and the ranks that keep the others waiting.

Ranks wait for each other in every collective, so a step takes equally long on all of them. What
tells a slow rank is the time that it spends alone: waiting for data, computing before the first
collective of a step, and writing its part of a checkpoint.
"""

import logging
import time
from collections.abc import Iterable, Sequence
from statistics import median_low
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from llm.runtime.logging import counted, event

_SLOW_RATIO = 1.2
"""A rank is slow from this multiple of the median on."""

_MIN_SHARE_OF_STEP = 0.05
"""Share of a step below which a rank's excess over the median is not worth a line."""

_INTERVALS_TO_NAME = 3
"""A rank is named after this many slow logging intervals, or saves, in a row."""

_MAX_NAMED_RANKS = 4
"""Maximum ranks that one line names; it counts the others."""

logger = logging.getLogger("llm")


class Activity(NamedTuple):
    """Something that every rank does alone.

    Attributes:
        name: Prefix of its names in `metrics.jsonl`.
        description: Beginning of the sentence that names a slow rank.
        unit: Unit of work that its seconds belong to.
        interval: Name of the intervals in which ranks are compared.
        min_excess: Seconds above the median below which no rank is slow: other programs delay some
            rank by a few milliseconds in every step, and a disk delays some save by a second.
    """

    name: str
    description: str
    unit: str
    interval: str
    min_excess: float


DATA = Activity("data", "Waiting for data", "step", "logging interval", 0.01)
COMPUTE = Activity(
    "compute", "Computing before the first collective", "step", "logging interval", 0.01
)
SAVE = Activity("save", "Writing a part of a checkpoint", "save", "save", 1.0)


class ComputeClock:
    """Measures the part of each step before its first collective, without waiting for the device.

    Args:
        device: Device of this process. On a CPU the host's time counts, elsewhere the device's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device_module = None if device.type == "cpu" else torch.get_device_module(device)
        self._start: Any = None
        self._seconds: list[float] = []
        self._event_pairs: list[tuple[Any, Any]] = []

    def start(self) -> None:
        """Start with a step."""
        self._start = self._read()

    def stop(self) -> None:
        """Stop before the first collective of the step."""
        end = self._read()
        if self._device_module is None:
            self._seconds.append(end - self._start)
        else:
            self._event_pairs.append((self._start, end))

    def _read(self) -> Any:
        """Return the host's time, or an event that records the device's time."""
        if self._device_module is None:
            return time.perf_counter()
        event = self._device_module.Event(enable_timing=True)
        event.record()
        return event

    def pop_seconds(self) -> list[float]:
        """Return the seconds of each step since the last call, which the device has completed."""
        device_seconds = [start.elapsed_time(end) / 1000 for start, end in self._event_pairs]
        seconds = self._seconds + device_seconds
        self._seconds, self._event_pairs = [], []
        return seconds


class SlowRanks:
    """Counts for how long each rank has been slow in an activity.

    Args:
        activity: The activity.
        world_size: Number of ranks.
    """

    def __init__(self, activity: Activity, world_size: int) -> None:
        self._activity = activity
        self._streaks = [0] * world_size

    def count_interval(
        self, seconds_by_rank: Sequence[float], *, min_excess: float = 0.0
    ) -> list[int]:
        """Count a logging interval, or a save, and return the ranks that have just become slow.

        Args:
            seconds_by_rank: Time of the activity on each rank.
            min_excess: Least seconds above the median of a slow rank in this interval; the
                activity has another minimum.

        Returns:
            The ranks to name now, the slowest first.
        """
        median_seconds = median_low(seconds_by_rank)
        slow_threshold = max(
            _SLOW_RATIO * median_seconds,
            median_seconds + self._activity.min_excess,
            median_seconds + min_excess,
        )
        self._streaks = [
            streak + 1 if seconds >= slow_threshold else 0
            for streak, seconds in zip(self._streaks, seconds_by_rank, strict=True)
        ]
        new_slow_ranks = [
            rank for rank, streak in enumerate(self._streaks) if streak == _INTERVALS_TO_NAME
        ]
        return sorted(new_slow_ranks, key=lambda rank: -seconds_by_rank[rank])


class RankTimes:
    """Compares the times of all ranks and names slow ranks in the log; every rank has one.

    Args:
        rank: Rank of this process; rank 0 reports.
        hosts: Host name of each rank.
        compute_clock: The clock of this rank; None on all ranks if the layout communicates from
            the beginning of a step on.
    """

    def __init__(
        self, *, rank: int, hosts: Sequence[str], compute_clock: ComputeClock | None
    ) -> None:
        self._rank, self._hosts, self._compute_clock = rank, hosts, compute_clock
        self._data_waits: list[float] = []
        self._slow_ranks = {
            activity: SlowRanks(activity, len(hosts)) for activity in (DATA, COMPUTE, SAVE)
        }

    def add_data_wait(self, seconds: float) -> None:
        """Add the time that this rank waited for the batch of a step."""
        self._data_waits.append(seconds)

    def compare_interval(self, *, seconds_per_step: float, step: int) -> dict[str, float]:
        """Gather the times of a logging interval on the host, and name slow ranks.

        Every rank calls it, after it has waited for the device. Of the steps of an interval, each
        rank sends the fastest to compute, because other programs may delay single steps, and the
        median to wait for data, because after a pause some batches are always read ahead.

        Args:
            seconds_per_step: Mean time of a step.
            step: Steps done.

        Returns:
            On rank 0 the numbers for `metrics.jsonl`.
        """
        clock = self._compute_clock
        compute_times = [] if clock is None else clock.pop_seconds()
        local_times = torch.tensor(
            [median_low(self._data_waits), min(compute_times, default=0.0)], dtype=torch.float64
        )
        self._data_waits = []
        times_by_rank = [torch.empty_like(local_times) for _ in self._hosts]
        # By gloo, between two steps: the ranks have just waited for each other on the device.
        dist.all_gather(times_by_rank, local_times)
        if self._rank != 0:
            return {}
        data_waits_by_rank, compute_times_by_rank = torch.stack(times_by_rank, dim=1).tolist()
        min_excess = _MIN_SHARE_OF_STEP * seconds_per_step
        metrics = self._compare_ranks(DATA, data_waits_by_rank, step=step, min_excess=min_excess)
        if clock is not None:
            metrics |= self._compare_ranks(
                COMPUTE, compute_times_by_rank, step=step, min_excess=min_excess
            )
        return metrics

    def compare_saves(
        self, write_times: Iterable[Sequence[float]], *, step: int
    ) -> dict[str, float]:
        """Log the ranks that are slow in several saves.

        Args:
            write_times: For each save the seconds that each rank has written; a rank with 0, which
                writes nothing, counts as the median of the others.
            step: Steps done.

        Returns:
            On rank 0 the numbers of the last save for `metrics.jsonl`.
        """
        metrics: dict[str, float] = {}
        if self._rank != 0:
            return metrics
        for seconds_by_rank in write_times:
            median = median_low([seconds for seconds in seconds_by_rank if seconds] or [0.0])
            metrics = self._compare_ranks(
                SAVE, [seconds or median for seconds in seconds_by_rank], step=step
            )
        return metrics

    def _compare_ranks(
        self,
        activity: Activity,
        seconds_by_rank: Sequence[float],
        *,
        step: int,
        min_excess: float = 0.0,
    ) -> dict[str, float]:
        """Warn of ranks that have become slow; return their times for `metrics.jsonl`."""
        median = median_low(seconds_by_rank)
        new_slow_ranks = self._slow_ranks[activity].count_interval(
            seconds_by_rank, min_excess=min_excess
        )
        if new_slow_ranks:
            self._warn_of_slow_ranks(activity, new_slow_ranks, seconds_by_rank, step=step)
        slowest_rank = max(range(len(seconds_by_rank)), key=lambda rank: seconds_by_rank[rank])
        return {
            f"{activity.name}_ms_median": 1000 * median,
            f"{activity.name}_ms_slowest": 1000 * seconds_by_rank[slowest_rank],
            f"{activity.name}_slowest_rank": slowest_rank,
        }

    def _warn_of_slow_ranks(
        self,
        activity: Activity,
        slow_ranks: Sequence[int],
        seconds_by_rank: Sequence[float],
        *,
        step: int,
    ) -> None:
        """Log which ranks are slow, and by how much."""
        rank_names = [f"rank {rank} on {self._hosts[rank]}" for rank in slow_ranks]
        times = [_format_time(seconds_by_rank[rank], activity.unit) for rank in slow_ranks]
        names_with_times = [
            f"{name} ({time})" for name, time in zip(rank_names, times, strict=True)
        ]
        rank_list = ", ".join(names_with_times[:_MAX_NAMED_RANKS])
        num_unnamed = len(slow_ranks) - _MAX_NAMED_RANKS
        if num_unnamed > 0:
            rank_list += f" and {counted(num_unnamed, 'other rank')}"
        median_time = _format_time(median_low(seconds_by_rank), activity.unit)
        logger.warning(
            f"{activity.description} takes longer on {rank_list} than on the median rank "
            f"({median_time}), in {_INTERVALS_TO_NAME} {activity.interval}s in a row.",
            extra=event("slow", step=step, activity=activity.name, ranks=rank_names),
        )


def _format_time(seconds: float, unit: str) -> str:
    """Return a duration such as "84 ms per step"."""
    return f"{seconds:.1f} s per {unit}" if seconds >= 10 else f"{1000 * seconds:.0f} ms per {unit}"
