"""One rank of a training under `strace`, for `benchmarks.many_ranks`.

python -m benchmarks.many_ranks_rank COUNTS.json OPTIONS...

It calls `access` on a path below `MARKS` where a phase begins, which shows up among the system
calls, and counts what this rank sends and receives in Python.
"""

import collections
import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARKS = "/many_ranks"
"""Folder of the paths that mark phases; it does not exist."""

_COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter_tensor",
    "scatter",
)
_STORE_CALLS = ("add", "check", "get", "multi_get", "set", "wait")


class _Counter:
    """Counts messages and seconds by phase."""

    def __init__(self) -> None:
        self.phases: dict[str, dict[str, float]] = {}
        self.begin("start")

    def begin(self, phase: str) -> None:
        """Begin a phase, and mark it among the system calls."""
        os.access(f"{MARKS}/{phase}", os.F_OK)
        self._now = self.phases.setdefault(phase, collections.defaultdict(float))
        self._began = time.perf_counter()

    def end(self) -> None:
        """End the phase; what follows belongs to the training."""
        self._now["seconds"] += time.perf_counter() - self._began
        self.begin("training")

    def add(self, **counts: int) -> None:
        """Add to the counts of the phase."""
        for name, count in counts.items():
            self._now[name] += count


def _tensor_bytes(value: Any) -> int:
    """Return the bytes of a tensor, or of a list of tensors."""
    if isinstance(value, list | tuple):
        return sum(_tensor_bytes(entry) for entry in value)
    return int(getattr(value, "nbytes", 0))


def _count_collectives(counter: _Counter) -> None:
    """Count calls of torch.distributed on tensors, and the bytes of their first argument."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            values = args[:1] or [*kwargs.values()][:1]
            counter.add(collectives=1, collective_bytes=_tensor_bytes([*values]))
            return function(*args, **kwargs)

        return call

    for name in _COLLECTIVES:
        function = counted(getattr(distributed_c10d, name))
        setattr(distributed_c10d, name, function)
        setattr(dist, name, function)


def _count_store_calls(counter: _Counter) -> None:
    """Count calls of stores from Python, and the bytes of their values."""
    from torch.distributed.distributed_c10d import Store

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            sent = len(args[2]) if name == "set" else 0
            values = result if name == "multi_get" else [result] if name == "get" else []
            counter.add(store_calls=1, store_bytes=sent + sum(map(len, values)))
            return result

        return call

    for name in _STORE_CALLS:
        setattr(Store, name, counted(name, getattr(Store, name)))


def _mark_phases(counter: _Counter) -> None:
    """End the start with the first step, and mark each save."""
    from llm.checkpoint.save import Saver
    from llm.trainers.gpt.loop import Trainer

    train_step, save = Trainer.train_step, Saver.save

    def first_step(trainer: Trainer, batch: Any) -> None:
        counter.end()
        setattr(Trainer, "train_step", train_step)  # noqa: B010
        train_step(trainer, batch)

    def marked_save(saver: Saver, **arguments: Any) -> None:
        saves = sum(phase.startswith("save") for phase in counter.phases)
        counter.begin(f"save {saves + 1}")
        save(saver, **arguments)
        counter.end()

    setattr(Trainer, "train_step", first_step)  # noqa: B010
    setattr(Saver, "save", marked_save)  # noqa: B010


def main() -> int:
    """Train, and write the counts."""
    from llm.trainers.gpt.main import main as train

    counter = _Counter()
    _count_collectives(counter)
    _count_store_calls(counter)
    _mark_phases(counter)
    code = train(sys.argv[2:])
    Path(sys.argv[1]).write_text(json.dumps(counter.phases), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
