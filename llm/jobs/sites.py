"""What sites ask of a job, each fact with the date of the page that says so."""

from dataclasses import dataclass
from typing import Literal

from llm.errors import ConfigError

Scheduler = Literal["slurm", "pbs"]
Launcher = Literal["torchrun", "task_per_gpu"]


@dataclass(frozen=True, kw_only=True)
class Queue:
    """A queue, and the jobs that it takes."""

    name: str
    min_nodes: int
    max_nodes: int
    hours: int

    def takes(self, nodes: int, minutes: int) -> bool:
        """Whether a job of so many nodes and minutes may wait in it."""
        return self.min_nodes <= nodes <= self.max_nodes and minutes <= 60 * self.hours


@dataclass(frozen=True, kw_only=True)
class Site:
    """A cluster.

    Attributes:
        schedulers: What it runs, the usual one first.
        gpus_per_node: What torch counts as devices of a node.
        cpus_per_gpu: Cores for each of them.
        launcher: How its own pages start ranks.
        directives: What a job has to say besides the usual.
        task_directives: How sbatch gives each task its GPU, where it is not by --gpus-per-node.
        system: What PBS calls it in a selection of nodes.
        queues: Where a job may wait; one of them is chosen by its size.
        queue_option: Slurm's option that names the queue.
        set_up: Shell lines that make Python and the network usable.
        master_addr: Shell text for the address of rank 0, where the first host's name will not do.
        spread: What mpiexec is told about cores, for one process a node and for one a device, of
            `{cpus}` cores each.
    """

    schedulers: tuple[Scheduler, ...]
    gpus_per_node: int = 4
    cpus_per_gpu: int = 8
    launcher: Launcher = "torchrun"
    directives: tuple[str, ...] = ()
    task_directives: tuple[str, ...] = ()
    system: str | None = None
    queues: tuple[Queue, ...] = ()
    queue_option: str = "partition"
    set_up: str = ""
    master_addr: str | None = None
    spread: tuple[str, str] = ("", "")


_ALCF_PROXY = """\
export http_proxy=http://proxy.alcf.anl.gov:3128
export https_proxy=http://proxy.alcf.anl.gov:3128"""

SITES = {
    "generic": Site(schedulers=("slurm", "pbs")),
    # ALCF's pages, 2026-08-19. They start one rank for each GPU; one torchrun for each node works
    # as well. The paths of sockets must be short: TMPDIR.
    "polaris": Site(
        schedulers=("pbs",),
        system="polaris",
        directives=("-l place=scatter", "-l filesystems=home:eagle", "-k doe", "-j oe"),
        queues=(
            Queue(name="debug", min_nodes=1, max_nodes=2, hours=1),
            Queue(name="debug-scaling", min_nodes=1, max_nodes=10, hours=1),
            # prod hands jobs on by their size.
            Queue(name="prod", min_nodes=10, max_nodes=24, hours=3),
            Queue(name="prod", min_nodes=25, max_nodes=99, hours=6),
            Queue(name="prod", min_nodes=100, max_nodes=496, hours=24),
            Queue(name="preemptable", min_nodes=1, max_nodes=10, hours=72),
            Queue(name="capacity", min_nodes=1, max_nodes=4, hours=168),
        ),
        set_up=f"""\
module use /soft/modulefiles
module load conda
conda activate base
{_ALCF_PROXY}
export TMPDIR=/tmp  # the paths of sockets must be short
# ALCF's settings for more bandwidth between nodes; its page (2025-01) warns that jobs may hang:
# export NCCL_NET="AWS Libfabric" NCCL_NET_GDR_LEVEL=PHB NCCL_CROSS_NIC=1 NCCL_COLLNET_ENABLE=1""",
        spread=("--cpu-bind none", "--cpu-bind depth --depth {cpus}"),
    ),
    # ALCF's pages, 2026. Each of the 6 GPUs of a node counts as 2 tiles.
    "aurora": Site(
        schedulers=("pbs",),
        system="aurora",
        gpus_per_node=12,
        launcher="task_per_gpu",
        directives=("-l place=scatter", "-l filesystems=home:flare", "-k doe", "-j oe"),
        set_up=f"""\
module load frameworks
{_ALCF_PROXY}
export TMPDIR=/tmp  # the paths of sockets must be short""",
        master_addr="$(hostname).hsn.cm.aurora.alcf.anl.gov",
        spread=("--cpu-bind none", "--cpu-bind depth --depth {cpus}"),
    ),
    # OLCF's page, 2026-07-22, advises against torchrun. Each of the 4 GPUs counts as 2 devices.
    "frontier": Site(
        schedulers=("slurm",),
        gpus_per_node=8,
        cpus_per_gpu=7,
        launcher="task_per_gpu",
        directives=("--network=disable_rdzv_get",),
        task_directives=("--gpus-per-task=1", "--gpu-bind=closest"),
        queues=(
            Queue(name="batch", min_nodes=1, max_nodes=91, hours=2),
            Queue(name="batch", min_nodes=92, max_nodes=183, hours=6),
            Queue(name="batch", min_nodes=184, max_nodes=9472, hours=12),
            Queue(name="extended", min_nodes=1, max_nodes=64, hours=24),
        ),
        set_up="""\
module load rocm rccl-net-plugin
export NCCL_SOCKET_IFNAME=hsn0""",
    ),
    # NERSC's pages, undated, seen in 2026-08.
    "perlmutter": Site(
        schedulers=("slurm",),
        cpus_per_gpu=32,
        directives=("--constraint=gpu",),
        queues=(Queue(name="regular", min_nodes=1, max_nodes=1792, hours=48),),
        queue_option="qos",
    ),
}


def choose_queue(site: Site, *, asked: str | None, nodes: int, minutes: int) -> str:
    """The queue that was asked for, or the site's first that takes a job of this size.

    Raises:
        ConfigError: None does, or the one that was asked for does not.
    """
    rows = [queue for queue in site.queues if asked in (None, queue.name)]
    if not rows:
        return asked or "__QUEUE__"
    fitting = [queue.name for queue in rows if queue.takes(nodes, minutes)]
    if fitting:
        return fitting[0]
    offers = ", ".join(
        f"{queue.name} ({queue.min_nodes}-{queue.max_nodes} nodes, {queue.hours} h)"
        for queue in rows
    )
    verb = "No queue takes" if asked is None else f"--queue {asked} does not take"
    raise ConfigError(
        f"{verb} --nodes {nodes} for {minutes} minutes. There are {offers}; change --nodes, "
        "--time or --queue."
    )
