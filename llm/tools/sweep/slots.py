"""Where members run: on this machine, or side by side on the nodes of a Slurm or PBS job."""

import dataclasses
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from llm.errors import ConfigError
from llm.runtime.files import write_whole
from llm.runtime.logging import counted
from llm.runtime.world import read_job_hosts, read_rank_variables

_SAVE_SECONDS = 270
"""Time that torchrun leaves its ranks to save, after a signal; by default 30 seconds."""
_FIRST_PORT, _NUM_PORTS = 20000, 10000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slot:
    """Nodes that run one member at a time.

    Attributes:
        hosts: The nodes of a job; empty for this machine.
        launcher: The words that start a process on each of these nodes.
        port: Port on the first node where the nodes of a member meet.
    """

    hosts: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()
    port: int = _FIRST_PORT

    def command(self, arguments: Sequence[str], *, nproc_per_node: int | str) -> list[str]:
        """Return the command that starts a member here.

        Args:
            arguments: Arguments of the trainer.
            nproc_per_node: Processes on each node, or `auto` for one on each GPU.
        """
        num_nodes = max(1, len(self.hosts))
        if num_nodes == 1 and nproc_per_node == 1:
            command = [sys.executable, "-m", "llm", "train", *arguments]
        else:
            command = [sys.executable, "-m", "torch.distributed.run"]
            if num_nodes == 1:
                command.append("--standalone")
            else:
                command += [f"--nnodes={num_nodes}", "--rdzv_backend=c10d"]
                command += [f"--rdzv_endpoint={self.hosts[0]}:{self.port}", "--rdzv_id=sweep"]
            command += [f"--nproc_per_node={nproc_per_node}", "--max_restarts=0"]
            command += [f"--shutdown_timeout={_SAVE_SECONDS}", "-m", "llm.trainers.gpt"]
            command += arguments
        return [*self.launcher, *command]


def find_slots(
    environ: Mapping[str, str], *, nodes: int, nproc_per_node: int | str, folder: Path
) -> list[Slot]:
    """Return the slots of this machine or job: disjoint nodes, `nodes` for each.

    Nodes that remain are named on stderr.

    Args:
        environ: The environment variables.
        nodes: Nodes of a member.
        nproc_per_node: Processes of a member on each node, or `auto`.
        folder: Folder of the sweep, for the host files of mpiexec.

    Raises:
        ConfigError: There are fewer nodes, several processes run this program, or the job's
            variables do not allow torchrun.
    """
    if read_rank_variables(environ):
        raise ConfigError(
            "llm-trainers sweep starts the ranks of its members itself; start it once, without "
            "srun, mpiexec or torchrun."
        )
    hosts = read_job_hosts(environ)
    is_on_host = "SLURM_JOB_ID" not in environ or "SLURMD_NODENAME" in environ
    if nodes > max(1, len(hosts)):
        place = f"this job has {len(hosts)}" if hosts else "this is a single machine without a job"
        raise ConfigError(f"--nodes {nodes} is the number of nodes of a member, and {place}.")
    is_single_process = nodes == 1 and nproc_per_node == 1
    if hosts and environ.get("CCL_PROCESS_LAUNCHER") == "pmix" and not is_single_process:
        raise ConfigError(
            "CCL_PROCESS_LAUNCHER is pmix, as on Aurora, so oneCCL needs ranks that mpiexec "
            "starts, and a sweep within a job starts them by torchrun: use llm-trainers jobs "
            "sweep pbs --site aurora, which writes an array with a job for each member."
        )
    if len(hosts) <= 1 and is_on_host:
        return [Slot()]
    job_digits = re.sub(r"\D", "", environ.get("SLURM_JOB_ID") or environ.get("PBS_JOBID", ""))
    slots = []
    for start in range(0, len(hosts) - nodes + 1, nodes):
        slot_hosts = tuple(hosts[start : start + nodes])
        launcher = tuple(_launcher_words(environ, slot_hosts, folder))
        port = _FIRST_PORT + (int(job_digits or 0) + start) % _NUM_PORTS
        slots.append(Slot(hosts=slot_hosts, launcher=launcher, port=port))
    if idle_hosts := hosts[len(slots) * nodes :]:
        sys.stderr.write(
            f"A member takes {nodes} nodes, so this job has {counted(len(idle_hosts), 'node')} "
            f"without work: {', '.join(idle_hosts)}.\n"
        )
    return slots


def _launcher_words(environ: Mapping[str, str], hosts: Sequence[str], folder: Path) -> list[str]:
    """Return the words that start a process with all cores of the job on each of some nodes."""
    num_nodes = len(hosts)
    if "SLURM_JOB_ID" in environ:
        launcher = ["srun", "--overlap", f"--nodes={num_nodes}", f"--ntasks={num_nodes}"]
        launcher += ["--ntasks-per-node=1", f"--nodelist={','.join(hosts)}"]
        launcher += ["--kill-on-bad-exit=1", "--cpu-bind=none"]
        return [*launcher, *_slurm_core_options(environ)]
    folder.mkdir(parents=True, exist_ok=True)
    job = environ.get("PBS_JOBID", "").partition(".")[0]
    host_file = folder / f".hosts-{job}-{hosts[0]}"  # jobs may share the folder and the host
    write_whole(host_file, "".join(f"{host}\n" for host in hosts))
    launcher = ["mpiexec", "--hostfile", str(host_file), "-n", str(num_nodes), "--ppn", "1"]
    # By default, PALS binds a process to a single core. Other launchers do not know the option.
    return [*launcher, *(["--cpu-bind", "none"] if has_pals(environ) else [])]


def _slurm_core_options(environ: Mapping[str, str]) -> list[str]:
    """Return srun's option for the cores of all the job's tasks on a node.

    Without it, the step has all cores. srun does not inherit the number from sbatch in all
    versions.
    """
    if "SLURM_CPUS_PER_TASK" not in environ:
        return []
    counts = environ.get("SLURM_TASKS_PER_NODE", "1").split(",")  # such as 4(x2),3
    num_tasks = min(int(count.partition("(")[0]) for count in counts)
    return [f"--cpus-per-task={num_tasks * int(environ['SLURM_CPUS_PER_TASK'])}"]


def has_pals(environ: Mapping[str, str]) -> bool:
    """Return whether mpiexec is the launcher of HPE's PALS, which has its own options."""
    mpiexec = shutil.which("mpiexec", path=environ.get("PATH"))
    return mpiexec is not None and "/pals/" in os.path.realpath(mpiexec)
