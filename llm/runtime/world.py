"""Which rank this process is, under torchrun, srun or mpiexec, and which device it uses.

torch and Accelerate read RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, which torchrun
sets. srun and mpiexec set different variables; `set_torchrun_variables` translates them.
"""

import itertools
import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llm.errors import ParallelError
from llm.runtime.srun_shell import in_shell_of_srun

if TYPE_CHECKING:
    import torch

_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_SLURM_VARIABLES = ("SLURM_PROCID", "SLURM_LOCALID")
_MPI_VARIABLES = (  # the same three, as each mpiexec names them
    ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID"),  # HPE Cray PALS: Polaris, Aurora
    ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK"),  # other launchers of HPE Cray
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),  # Hydra: MPICH, Intel MPI
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),  # Open MPI
)
_LOCAL_SIZE_VARIABLES = ("PMI_LOCAL_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")

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
    environ = {**read_rank_variables(os.environ), **os.environ}
    rank = _read_integer(environ, "RANK", "0")
    world_size = _read_integer(environ, "WORLD_SIZE", "1")
    _check_rank(environ, rank, world_size)
    return World(
        rank=rank, local_rank=_read_integer(environ, "LOCAL_RANK", "0"), world_size=world_size
    )


def _check_rank(environ: Mapping[str, str], rank: int, world_size: int) -> None:
    """Refuse a rank without a world size, a world size without a rank, or a rank beyond the world.

    Raises:
        ParallelError: Names the variables.
    """
    set_variables = [name for name in ("RANK", "WORLD_SIZE") if name in environ]
    if len(set_variables) == 1:
        [set_variable] = set_variables
        missing_variable = "RANK" if set_variable == "WORLD_SIZE" else "WORLD_SIZE"
        raise ParallelError(
            f"{set_variable} is {environ[set_variable]}, and {missing_variable} is not set: unset "
            f"{set_variable} to train with one process, or start the processes with torchrun, srun "
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


def _read_integer(environ: Mapping[str, str], name: str, default: str) -> int:
    """Return the value of an environment variable that a launcher sets to a whole number."""
    value = environ.get(name, default)
    if re.fullmatch(r"[0-9]{1,9}", value) is None:
        raise ParallelError(
            f"The environment variable {name} is {value!r}, not a whole number: unset it, or start "
            "the processes with torchrun, srun or mpiexec."
        )
    return int(value)


def ignore_ranks(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let a program that does not share its work run as a single process under any launcher."""
    for variable in (
        *_TORCHRUN_VARIABLES,
        *itertools.chain(*_MPI_VARIABLES),
        *_LOCAL_SIZE_VARIABLES,
        *_SLURM_VARIABLES,
    ):
        environ.pop(variable, None)


def is_cpu_chosen() -> bool:
    """Return whether the user asks for the CPU, by the variable of `accelerate launch --cpu`."""
    return os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on")


def is_launched() -> bool:
    """Return whether torchrun, `accelerate launch`, srun or mpiexec started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ or bool(read_rank_variables(os.environ))


def device_of(world: World) -> "torch.device":
    """Return the device that this process trains on."""
    import torch

    if is_cpu_chosen():
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", world.local_rank % torch.cuda.device_count())
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        return torch.device("xpu", world.local_rank % torch.xpu.device_count())
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


def set_torchrun_variables() -> None:
    """Set torchrun's variables under srun and mpiexec; call before torch reads them.

    Changes nothing under torchrun or in a single process.

    Raises:
        ParallelError: The host of rank 0 is unknown, or a variable is not a number.
    """
    world = world_from_environment()
    variables = read_rank_variables(os.environ)
    if not variables:
        _check_rank0_address(world)
        return
    hosts = read_job_hosts(os.environ)
    rank0_address = os.environ.get("MASTER_ADDR") or (hosts[0] if hosts else None)
    if rank0_address is None:
        if all(os.environ.get(name) != variables["WORLD_SIZE"] for name in _LOCAL_SIZE_VARIABLES):
            raise ParallelError(
                f"mpiexec started {variables['WORLD_SIZE']} processes, but none knows the host of "
                'rank 0: export MASTER_ADDR="$(head -n 1 "$PBS_NODEFILE")", or the name of the '
                "first host, before mpiexec."
            )
        rank0_address = "127.0.0.1"  # all ranks run on this host
    variables |= {"MASTER_ADDR": rank0_address, "MASTER_PORT": str(_choose_rank0_port(os.environ))}
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def _check_rank0_address(world: World) -> None:
    """Refuse to start if one of several processes does not know where rank 0 listens."""
    if world.world_size == 1:
        return
    unset_variables = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if unset_variables:
        raise ParallelError(
            f"This is one of {world.world_size} processes, and {' and '.join(unset_variables)} do "
            "not say where rank 0 listens: start it by torchrun, srun or mpiexec, or export them."
        )
    port = _read_integer(os.environ, "MASTER_PORT", "")
    if not 1 <= port <= 65535:
        raise ParallelError(
            f"The environment variable MASTER_PORT is {port}, and ports have numbers from 1 to "
            "65535: export the one where rank 0 listens, or start the processes with torchrun, "
            "srun or mpiexec."
        )


def read_rank_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return RANK, WORLD_SIZE and LOCAL_RANK of one of several tasks of srun or mpiexec.

    Empty for a process that was started alone, by torchrun, or by `accelerate launch`.
    """
    variables = _read_mpi_variables(environ) or _read_slurm_variables(environ)
    # If srun or mpiexec started torchrun, torchrun's ranks and world size differ from theirs. If a
    # script exports RANK=$SLURM_PROCID, they are equal.
    for name in ("RANK", "WORLD_SIZE"):
        task_value = variables.get(name)
        if environ.get(name, task_value) != task_value:
            return {}
    return variables


def _read_mpi_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables of one of several tasks of mpiexec; empty for other processes."""
    for mpi_names in _MPI_VARIABLES:
        _, size_name, _ = mpi_names
        if environ.keys() >= set(mpi_names) and _read_integer(environ, size_name, "1") > 1:
            values = [environ[name] for name in mpi_names]
            return dict(zip(_TORCHRUN_VARIABLES, values, strict=True))
    return {}


def _read_slurm_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables of one of several tasks of srun; empty for other processes.

    A batch script runs as a single process, although it has a SLURM_PROCID.
    """
    if not environ.keys() >= set(_SLURM_VARIABLES) or in_shell_of_srun(environ):
        return {}
    num_tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if _read_integer(environ, "SLURM_STEP_NUM_TASKS", "1") == 1:
        return {}
    # If a job step calls sbatch, the batch script inherits the step's variables.
    is_same_step = environ.get("SLURM_NTASKS", num_tasks) == num_tasks
    if not is_same_step or not _is_on_step_node(environ):
        return {}
    values = (environ["SLURM_PROCID"], num_tasks, environ["SLURM_LOCALID"])
    return dict(zip(_TORCHRUN_VARIABLES, values, strict=True))


def _is_on_step_node(environ: Mapping[str, str]) -> bool:
    """Return whether the nodes of the Slurm step include this one, as far as it is known."""
    node_name = environ.get("SLURMD_NODENAME")
    if not node_name:
        return True
    return node_name in expand_nodelist(environ.get("SLURM_STEP_NODELIST", node_name))


def task_launcher(environ: Mapping[str, str]) -> str | None:
    """Return "srun" or "mpiexec" if it started this process as one of several tasks, else None."""
    variables = read_rank_variables(environ)
    if not variables:
        return None
    # Cray's PMI sets the variables of its mpiexec under srun as well.
    return "srun" if _read_slurm_variables(environ) == variables else "mpiexec"


def read_job_hosts(environ: Mapping[str, str]) -> list[str]:
    """Return the hosts that the scheduler gave this job; empty without a scheduler."""
    nodelist = environ.get("SLURM_STEP_NODELIST") if _read_slurm_variables(environ) else None
    nodelist = nodelist or environ.get("SLURM_JOB_NODELIST")
    if nodelist:
        return expand_nodelist(nodelist)
    try:
        hosts = Path(environ["PBS_NODEFILE"]).read_text(encoding="utf-8").split()
    except (KeyError, OSError):  # PBS writes the file on the first host only
        return []
    return list(dict.fromkeys(hosts))


def ranks_per_node(environ: Mapping[str, str], world_size: int) -> int:
    """Return the number of ranks on this host; all ranks if no variable tells the number."""
    for name in ("LOCAL_WORLD_SIZE", *_LOCAL_SIZE_VARIABLES):
        if name in environ:
            return _read_integer(environ, name, "1")
    hosts = read_job_hosts(environ) if read_rank_variables(environ) else []
    return max(1, world_size // max(1, len(hosts)))


def is_on_one_host(environ: Mapping[str, str], world_size: int) -> bool:
    """Return whether all ranks run on this host, as the launcher's variables tell."""
    for name in ("LOCAL_WORLD_SIZE", *_LOCAL_SIZE_VARIABLES):
        if name in environ:
            return _read_integer(environ, name, "1") == world_size
    return bool(read_rank_variables(environ)) and len(read_job_hosts(environ)) == 1


def expand_nodelist(nodelist: str) -> list[str]:
    """Return the hosts of a Slurm node list: `nid[08-09],login1` is nid08, nid09, login1."""
    hosts = []
    # Commas separate the items, except between brackets.
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist):
        item_hosts = [""]
        for literal, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", item):
            suffixes = [literal] if literal else _expand_ranges(ranges)
            item_hosts = [prefix + suffix for prefix in item_hosts for suffix in suffixes]
        hosts += item_hosts
    return hosts


def _expand_ranges(ranges: str) -> list[str]:
    """Return the numbers in Slurm's ranges, with their zeros: `08-10,15` is 08, 09, 10, 15."""
    numbers = []
    for item in ranges.split(","):
        range_start, _, range_end = item.partition("-")
        indices = range(int(range_start), int(range_end or range_start) + 1)
        numbers += [str(index).zfill(len(range_start)) for index in indices]
    return numbers


def _choose_rank0_port(environ: Mapping[str, str]) -> int:
    """Return a port that is equal on all ranks of a job step and rarely used by other jobs."""
    job_id = environ.get("SLURM_JOB_ID") or environ.get("PBS_JOBID", "").partition(".")[0]
    digits = re.sub(r"\D", "", job_id)
    if not digits:
        return _DEFAULT_PORT
    step_id = environ.get("SLURM_STEP_ID", "0") if _read_slurm_variables(environ) else "0"
    return _FIRST_PORT + (int(digits) + 1009 * (int(step_id) + 1)) % _NUM_PORTS
