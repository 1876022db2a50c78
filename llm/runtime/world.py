"""Which of the processes of a job this one is, and its device."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llm.runtime.launcher import ranks_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class World:
    """Where this process stands among all processes of the job."""

    rank: int
    local_rank: int
    world_size: int

    @property
    def is_main(self) -> bool:
        """Whether this process speaks and writes for all."""
        return self.rank == 0


def world_from_environment() -> World:
    """Read rank and world size as torchrun, `accelerate launch`, srun and mpiexec set them."""
    told = {**ranks_of(os.environ), **os.environ}
    return World(
        rank=int(told.get("RANK", "0")),
        local_rank=int(told.get("LOCAL_RANK", "0")),
        world_size=int(told.get("WORLD_SIZE", "1")),
    )


def launch_id() -> str | None:
    """A name that all processes of one launch share; a later launch may have it again.

    None when the process was started alone.
    """
    if world_from_environment().world_size == 1:
        return None
    names = (
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT",
        "SLURM_JOB_ID",
        "PBS_JOBID",
    )
    return ":".join(os.environ.get(name, "") for name in names)


def is_launched() -> bool:
    """Whether torchrun, `accelerate launch`, srun or mpiexec started this process as a rank."""
    return "TORCHELASTIC_RUN_ID" in os.environ or bool(ranks_of(os.environ))


def device_of(world: World) -> "torch.device":
    """The device that this process trains on."""
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda", world.local_rank % torch.cuda.device_count())
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        return torch.device("xpu", world.local_rank % torch.xpu.device_count())
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")
