"""Which rank a process is when srun or mpiexec started it, one for each device.

torchrun tells its processes in RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, which is
what torch and Accelerate read. Other launchers say the same in their own words; this translates.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from llm.errors import ParallelError

# Rank, number of ranks, rank on this host, as the kinds of mpiexec name them.
_MPI = (
    ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID"),  # HPE Cray PALS: Polaris, Aurora
    ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK"),  # other launchers of HPE Cray
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),  # Hydra: MPICH, Intel MPI
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),  # Open MPI
)
_MPI_LOCAL_SIZE = ("PMI_LOCAL_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")

# Below the ports from which systems pick those of outgoing connections.
_FIRST_PORT, _NUM_PORTS = 20000, 10000
_DEFAULT_PORT = 29500


def adopt_launcher() -> None:
    """Set what torch and Accelerate read from what srun or mpiexec has set; once, before both.

    Nothing changes under torchrun, nor in a process that was started alone.

    Raises:
        ParallelError: It is not known where rank 0 is.
    """
    found = ranks_of(os.environ)
    if not found:
        return
    address = os.environ.get("MASTER_ADDR") or _address_of_rank_0(os.environ)
    if address is None:
        raise ParallelError(
            f"mpiexec started {found['WORLD_SIZE']} processes, and none knows the host of rank 0: "
            'export MASTER_ADDR="$(head -n 1 "$PBS_NODEFILE")", or the name of the first host, '
            "before mpiexec."
        )
    found["MASTER_ADDR"] = address
    found["MASTER_PORT"] = str(_port(os.environ))
    for name, value in found.items():
        os.environ.setdefault(name, value)


def ranks_of(environ: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE and LOCAL_RANK of one of several processes of srun or mpiexec.

    Args:
        environ: Its environment.

    Returns:
        Empty for a process that was started alone, by torchrun, or by `accelerate launch`.
    """
    found = _ranks_of_mpi(environ) or _ranks_of_slurm(environ)
    # Within a task of srun or mpiexec, torchrun counts its own ranks. Who exports
    # RANK=$SLURM_PROCID by hand means the task.
    if any(
        environ.get(name, found.get(name)) != found.get(name) for name in ("RANK", "WORLD_SIZE")
    ):
        return {}
    return found


def task_launcher(environ: Mapping[str, str]) -> str | None:
    """The program that started this process as one of several tasks: "srun", "mpiexec" or None."""
    found = ranks_of(environ)
    if not found:
        return None
    # Cray's PMI sets the names of its mpiexec beside those of srun.
    return "srun" if _ranks_of_slurm(environ) == found else "mpiexec"


def hosts_of(environ: Mapping[str, str]) -> list[str]:
    """The hosts on which a scheduler runs this job's processes; empty without a scheduler."""
    nodes = environ.get("SLURM_STEP_NODELIST") if _ranks_of_slurm(environ) else None
    nodes = nodes or environ.get("SLURM_JOB_NODELIST")
    if nodes:
        return expand(nodes)
    try:
        lines = Path(environ["PBS_NODEFILE"]).read_text(encoding="utf-8").split()
    except (KeyError, OSError):  # PBS writes it on the first host only
        return []
    return list(dict.fromkeys(lines))


def ranks_per_node(environ: Mapping[str, str], world_size: int) -> int:
    """How many ranks share the host of this one; all of them where nobody says.

    Args:
        environ: Its environment.
        world_size: Number of ranks.
    """
    for name in ("LOCAL_WORLD_SIZE", *_MPI_LOCAL_SIZE):
        if name in environ:
            return int(environ[name])
    hosts = hosts_of(environ) if ranks_of(environ) else []
    return max(1, world_size // max(1, len(hosts)))


def expand(nodes: str) -> list[str]:
    """The names in Slurm's short form: `nid[08-10],login1` is nid08, nid09, nid10, login1."""
    names = []
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        open_names = [""]
        for plain, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", item):
            ends = [plain] if plain else _numbers(ranges)
            open_names = [start + end for start in open_names for end in ends]
        names += open_names
    return names


def _numbers(ranges: str) -> list[str]:
    numbers = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        span = range(int(first), int(last or first) + 1)
        numbers += [str(number).zfill(len(first)) for number in span]
    return numbers


def _ranks_of_mpi(environ: Mapping[str, str]) -> dict[str, str]:
    for rank, size, local_rank in _MPI:
        if {rank, size, local_rank} <= environ.keys() and int(environ[size]) > 1:
            return {
                "RANK": environ[rank],
                "WORLD_SIZE": environ[size],
                "LOCAL_RANK": environ[local_rank],
            }
    return {}


def _ranks_of_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """For a task of a step. A batch script has a SLURM_PROCID too, and is alone."""
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if int(tasks) == 1 or not {"SLURM_PROCID", "SLURM_LOCALID"} <= environ.keys():
        return {}
    # A batch script inherits the variables of the step in which sbatch was called.
    same_step = environ.get("SLURM_NTASKS", tasks) == tasks
    here = environ.get("SLURMD_NODENAME")
    if not same_step or (here and here not in expand(environ.get("SLURM_STEP_NODELIST", here))):
        return {}
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": environ["SLURM_LOCALID"],
    }


def _address_of_rank_0(environ: Mapping[str, str]) -> str | None:
    hosts = hosts_of(environ)
    if hosts:
        return hosts[0]
    size = ranks_of(environ)["WORLD_SIZE"]
    alone = any(environ.get(name) == size for name in _MPI_LOCAL_SIZE)
    return "127.0.0.1" if alone else None


def _port(environ: Mapping[str, str]) -> int:
    """A port that the processes of one step agree on, and jobs on the same host hardly share."""
    job = environ.get("SLURM_JOB_ID") or environ.get("PBS_JOBID", "").partition(".")[0]
    digits = re.sub(r"\D", "", job)
    if not digits:
        return _DEFAULT_PORT
    step = environ.get("SLURM_STEP_ID", "0") if _ranks_of_slurm(environ) else "0"
    return _FIRST_PORT + (int(digits) + 1009 * (int(step) + 1)) % _NUM_PORTS
