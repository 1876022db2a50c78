"""Small training states, and checkpoints of them and of strategies."""

import errno
import itertools
import os
import signal
import stat
import sys
from collections.abc import Container
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from llm.checkpoint import save as saving
from llm.checkpoint.format import Checkpoint, checkpoint_name
from llm.checkpoint.load import find_newest_checkpoint, list_checkpoints, load_state
from llm.checkpoint.options import CheckpointOptions
from llm.checkpoint.save import Saver
from llm.parallel.base import AcceleratedStrategy

WRITES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink"}


class Part:
    """A part of a training state that is what it was given."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def filled(fill: float) -> Part:
    """A state with tensors, nested values and numbers that all depend on one number."""
    moments = {"exp_avg": torch.full((2,), fill), "lr": 0.1 * fill}
    return Part(
        {
            "weight": torch.full((3, 2), fill),
            "optimizer": {"layer.weight": moments},
            "step": int(fill),
            "best": None,
        }
    )


def is_filled(part: Part, fill: float) -> bool:
    """Whether a state is `filled(fill)` in every bit."""
    moments = part.state["optimizer"]["layer.weight"]
    return (
        torch.equal(part.state["weight"], torch.full((3, 2), fill))
        and torch.equal(moments["exp_avg"], torch.full((2,), fill))
        and moments["lr"] == 0.1 * fill
        and part.state["step"] == int(fill)
        and part.state["best"] is None
    )


def saver_of(
    folder: Path,
    part: Part,
    *,
    metadata: Any = None,
    copies: dict[str, bytes] | None = None,
    copied_first: Container[str] = (),
    **options: Any,
) -> Saver:
    """A saver on one rank that writes before it returns, unless asked otherwise."""
    given = CheckpointOptions(**{"async_checkpoint": False, **options})
    return Saver(
        given,
        folder,
        parts={"part": part},
        metadata=metadata or {},
        rank=0,
        world_size=1,
        extra_files=copies,
        blocking_paths=copied_first,
    )


def save(
    folder: Path,
    step: int,
    *,
    fill: float | None = None,
    eval_loss: float | None = None,
    **metadata: Any,
) -> Path:
    """Save a filled state (with the step, if with nothing else), and name its folder."""
    part = filled(step if fill is None else fill)
    saver_of(folder, part, metadata=metadata).save(step=step, eval_loss=eval_loss)
    return folder / checkpoint_name(step)


def load(found: Checkpoint | None) -> Part:
    """The state that a checkpoint holds."""
    assert found is not None
    part = filled(-1)
    load_state(found, {"part": part})
    return part


def steps(folder: Path) -> list[int]:
    """The steps of the whole checkpoints."""
    return [found.step for found in list_checkpoints(folder)]


def parts_of(strategy: AcceleratedStrategy) -> dict[str, Any]:
    return {"strategy": strategy, **strategy.run_optimizer.parts()}


def save_strategy(strategy: AcceleratedStrategy, folder: Any, step: int) -> None:
    saver = Saver(
        CheckpointOptions(),
        folder,
        parts=parts_of(strategy),
        metadata={},
        rank=strategy.rank,
        world_size=strategy.world_size,
        owner_ranks=strategy.owner_ranks,
    )
    saver.save(step=step, eval_loss=None)
    saver.finish(is_final=True)


def load_strategy(strategy: AcceleratedStrategy, folder: Any) -> None:
    checkpoint = find_newest_checkpoint(folder)
    assert isinstance(checkpoint, Checkpoint)
    load_state(checkpoint, parts_of(strategy))


def join() -> tuple[int, int]:
    """Join a gloo group in which saves retry at once; returns rank and world size."""
    dist.init_process_group("gloo")
    saving._RETRY_DELAYS = (0.0, 0.0)
    return dist.get_rank(), dist.get_world_size()


class FailsAt:
    """The disk is full when some files are synced, counted from 0."""

    def __init__(self, *calls: int) -> None:
        self.calls = set(calls)
        self.count = itertools.count()

    def __call__(self, descriptor: int) -> None:
        if stat.S_ISREG(os.fstat(descriptor).st_mode) and next(self.count) in self.calls:
            raise OSError(errno.ENOSPC, "No space left on device")


def die_at(moment: int) -> None:
    """Kills this process just before its `moment`-th change to a file system, from 0.

    Before a file is synced, half of it is lost, as in a power cut.
    """
    count = itertools.count()
    fsync = os.fsync

    def changes(event: str, args: tuple[object, ...]) -> None:
        opens = event == "open" and isinstance(args[2], int) and args[2] & os.O_CREAT
        if (event in WRITES or opens) and next(count) == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def sync(descriptor: int) -> None:
        if next(count) == moment:
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode):
                os.truncate(f"/proc/self/fd/{descriptor}", status.st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(descriptor)

    os.fsync = sync
    sys.addaudithook(changes)
