"""Which rank this process is, under torchrun, srun or mpiexec, and which device it uses.

torch and Accelerate read RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, which torchrun
sets. srun and mpiexec set different variables; `adopt_launcher` translates them.
"""

import itertools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llm.errors import ParallelError
from llm.runtime.srun_shell import in_shell_of_srun

if TYPE_CHECKING:
    import torch

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_SLURM = ("SLURM_PROCID", "SLURM_LOCALID")
_MPI = (  # the same three, as each mpiexec names them
    ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID"),  # HPE Cray PALS: Polaris, Aurora
    ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK"),  # other launchers of HPE Cray
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),  # Hydra: MPICH, Intel MPI
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),  # Open MPI
)
_MPI_LOCAL_SIZE = ("PMI_LOCAL_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")

# Below the ports that systems use for outgoing connections.
_FIRST_PORT, _NUM_PORTS = 20000, 10000
_DEFAULT_PORT = 29500


@dataclass(frozen=True, kw_only=True)
class World:
    """The rank of this process and the number of ranks."""

    rank: int
    local_rank: int
    world_size: int

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which logs and writes the files of the run."""
        return self.rank == 0


def world_from_environment() -> World:
    """Read rank and world size as torchrun, `accelerate launch`, srun and mpiexec set them.

    Raises:
        ParallelError: A variable is missing, is not a number, or does not fit the others.
    """
    environ = {**ranks_of(os.environ), **os.environ}
    rank, world_size = (
        _parse_number(environ, "RANK", "0"),
        _parse_number(environ, "WORLD_SIZE", "1"),
    )
    variables = [name for name in ("RANK", "WORLD_SIZE") if name in environ]
    if len(variables) == 1:
        missing = "RANK" if variables == ["WORLD_SIZE"] else "WORLD_SIZE"
        raise ParallelError(
            f"{variables[0]} is {environ[variables[0]]}, and {missing} is not set: unset "
            f"{variables[0]} to train with one process, or start the processes with torchrun, srun "
            "or mpiexec."
        )
    if world_size == 0:
        raise ParallelError(
            "WORLD_SIZE is 0, and at least one process trains: start the processes with torchrun, "
            "srun or mpiexec, or unset RANK and WORLD_SIZE."
        )
    if rank >= world_size:
        raise ParallelError(
            f"RANK is {rank}, and WORLD_SIZE {world_size} allows ranks up to {world_size - 1}: "
            "start the processes with torchrun, srun or mpiexec, or unset both variables."
        )
    return World(
        rank=rank, local_rank=_parse_number(environ, "LOCAL_RANK", "0"), world_size=world_size
    )


def _parse_number(environ: Mapping[str, str], name: str, default: str) -> int:
    """Return the value of a variable that a launcher sets to a whole number."""
    value = environ.get(name, default)
    if re.fullmatch(r"[0-9]{1,9}", value) is None:
        raise ParallelError(
            f"The environment variable {name} is {value!r}, not a whole number: unset it, or start "
            "the processes with torchrun, srun or mpiexec."
        )
    return int(value)


def ignore_ranks() -> None:
    """Let a program that does not share its work run as a single process under any launcher."""
    for name in (*_TORCHRUN, *itertools.chain(*_MPI), *_MPI_LOCAL_SIZE, *_SLURM):
        os.environ.pop(name, None)


def is_launched() -> bool:
    """Return whether torchrun, `accelerate launch`, srun or mpiexec started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ or bool(ranks_of(os.environ))


def device_of(world: World) -> "torch.device":
    """Return the device that this process trains on."""
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda", world.local_rank % torch.cuda.device_count())
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        return torch.device("xpu", world.local_rank % torch.xpu.device_count())
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


def adopt_launcher() -> None:
    """Set torchrun's variables under srun and mpiexec; call before torch reads them.

    Changes nothing under torchrun or in a single process.

    Raises:
        ParallelError: The host of rank 0 is unknown, or a variable is not a number.
    """
    world = world_from_environment()
    ranks = ranks_of(os.environ)
    if not ranks:
        _check_address(world)
        return
    hosts = hosts_of(os.environ)
    address = os.environ.get("MASTER_ADDR") or (hosts[0] if hosts else None)
    if address is None:
        if all(os.environ.get(name) != ranks["WORLD_SIZE"] for name in _MPI_LOCAL_SIZE):
            raise ParallelError(
                f"mpiexec started {ranks['WORLD_SIZE']} processes, but none knows the host of "
                'rank 0: export MASTER_ADDR="$(head -n 1 "$PBS_NODEFILE")", or the name of the '
                "first host, before mpiexec."
            )
        address = "127.0.0.1"  # all ranks run on this host
    ranks |= {"MASTER_ADDR": address, "MASTER_PORT": str(_choose_port(os.environ))}
    for name, value in ranks.items():
        os.environ.setdefault(name, value)


def _check_address(world: World) -> None:
    """Refuse to start if one of several processes does not know where rank 0 listens."""
    if world.world_size == 1:
        return
    unknown = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if unknown:
        raise ParallelError(
            f"This is one of {world.world_size} processes, and {' and '.join(unknown)} do not say "
            "where rank 0 listens: start it by torchrun, srun or mpiexec, or export them."
        )
    _parse_number(os.environ, "MASTER_PORT", "")


def ranks_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Return RANK, WORLD_SIZE and LOCAL_RANK of one of several tasks of srun or mpiexec.

    Empty for a process that was started alone, by torchrun, or by `accelerate launch`.
    """
    ranks = _ranks_of_mpi(environ) or _ranks_of_slurm(environ)
    # If srun or mpiexec started torchrun, torchrun's ranks and world size differ from theirs. If a
    # script exports RANK=$SLURM_PROCID, they are equal.
    if any(environ.get(name, ranks.get(name)) != ranks.get(name) for name in _TORCHRUN[:2]):
        return {}
    return ranks


def _ranks_of_mpi(environ: Mapping[str, str]) -> dict[str, str]:
    for names in _MPI:
        if environ.keys() >= set(names) and _parse_number(environ, names[1], "1") > 1:
            return {
                variable: environ[name] for variable, name in zip(_TORCHRUN, names, strict=True)
            }
    return {}


def _ranks_of_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the ranks of a task in a job step; a batch script runs alone, with a SLURM_PROCID."""
    if not environ.keys() >= set(_SLURM) or in_shell_of_srun(environ):
        return {}
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if _parse_number(environ, "SLURM_STEP_NUM_TASKS", "1") == 1:
        return {}
    # If a job step calls sbatch, the batch script inherits the step's variables.
    same_step = environ.get("SLURM_NTASKS", tasks) == tasks
    node_name = environ.get("SLURMD_NODENAME")
    if not same_step or (
        node_name and node_name not in expand(environ.get("SLURM_STEP_NODELIST", node_name))
    ):
        return {}
    values = (environ["SLURM_PROCID"], tasks, environ["SLURM_LOCALID"])
    return dict(zip(_TORCHRUN, values, strict=True))


def task_launcher(environ: Mapping[str, str]) -> str | None:
    """Return "srun" or "mpiexec" if it started this process as one of several tasks, else None."""
    ranks = ranks_of(environ)
    if not ranks:
        return None
    # Cray's PMI sets the variables of its mpiexec under srun as well.
    return "srun" if _ranks_of_slurm(environ) == ranks else "mpiexec"


def hosts_of(environ: Mapping[str, str]) -> list[str]:
    """Return the hosts that the scheduler gave this job; empty without a scheduler."""
    nodes = environ.get("SLURM_STEP_NODELIST") if _ranks_of_slurm(environ) else None
    nodes = nodes or environ.get("SLURM_JOB_NODELIST")
    if nodes:
        return expand(nodes)
    try:
        lines = Path(environ["PBS_NODEFILE"]).read_text(encoding="utf-8").split()
    except (KeyError, OSError):  # PBS writes the file on the first host only
        return []
    return list(dict.fromkeys(lines))


def ranks_per_node(environ: Mapping[str, str], world_size: int) -> int:
    """Return the number of ranks on this host, or all ranks if no variable tells."""
    for name in ("LOCAL_WORLD_SIZE", *_MPI_LOCAL_SIZE):
        if name in environ:
            return _parse_number(environ, name, "1")
    hosts = hosts_of(environ) if ranks_of(environ) else []
    return max(1, world_size // max(1, len(hosts)))


def is_on_one_host(environ: Mapping[str, str], world_size: int) -> bool:
    """Return whether all ranks run on this host, as the launcher's variables tell."""
    for name in ("LOCAL_WORLD_SIZE", *_MPI_LOCAL_SIZE):
        if name in environ:
            return _parse_number(environ, name, "1") == world_size
    return bool(ranks_of(environ)) and len(hosts_of(environ)) == 1


def expand(nodes: str) -> list[str]:
    """Return the host names in Slurm's short form: `nid[08-09],login1` is nid08, nid09, login1."""
    hosts = []
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        prefixes = [""]
        for plain, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", item):
            ends = [plain] if plain else _expand_ranges(ranges)
            prefixes = [prefix + end for prefix in prefixes for end in ends]
        hosts += prefixes
    return hosts


def _expand_ranges(ranges: str) -> list[str]:
    numbers = []
    for item in ranges.split(","):
        first, _, stop = item.partition("-")
        span = range(int(first), int(stop or first) + 1)
        numbers += [str(number).zfill(len(first)) for number in span]
    return numbers


def _choose_port(environ: Mapping[str, str]) -> int:
    """Return a port that is equal on all ranks of a job step and rarely used by other jobs."""
    job = environ.get("SLURM_JOB_ID") or environ.get("PBS_JOBID", "").partition(".")[0]
    digits = re.sub(r"\D", "", job)
    if not digits:
        return _DEFAULT_PORT
    step = environ.get("SLURM_STEP_ID", "0") if _ranks_of_slurm(environ) else "0"
    return _FIRST_PORT + (int(digits) + 1009 * (int(step) + 1)) % _NUM_PORTS
