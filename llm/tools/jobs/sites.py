"""Sites and their queues, read from `sites.toml`."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llm.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Queue:
    """A queue, and the size and duration of its jobs."""

    name: str
    min_nodes: int
    max_nodes: int
    hours: int


@dataclass(frozen=True, kw_only=True)
class Site:
    """A cluster.

    Attributes:
        schedulers: Its schedulers, the usual one first.
        gpus_per_node: Devices of a node, as torch counts them.
        cpus_per_gpu: Cores for each device.
        launcher: Launcher that the site's own pages recommend.
        directives: Further directives that every job needs.
        task_directives: Directives that make sbatch give each task its GPU, if --gpus-per-node does
            not.
        system: Name of the machine when PBS selects nodes.
        filesystems: File systems that a job must request.
        pals: Whether mpiexec is HPE's PALS, which by default binds ranks to single cores.
        first_cores: The first core of each socket that a job can use, if a node has several; an
            equal number of the node's devices belongs to each.
        numa: Whether GPUs of a node belong to different NUMA nodes; torchrun then binds the ranks
            to them.
        queues: Queues in the order of preference; a job takes the first that accepts its size.
        queue_option: Slurm's option that names the queue.
        set_up: Shell lines that make Python and the network usable.
        master_addr: Shell text for the address of rank 0.
    """

    schedulers: Sequence[Literal["slurm", "pbs"]]
    gpus_per_node: int = 4
    cpus_per_gpu: int = 8
    launcher: Literal["torchrun", "task_per_gpu"] = "torchrun"
    directives: Sequence[str] = ()
    task_directives: Sequence[str] = ()
    system: str | None = None
    filesystems: str | None = None
    pals: bool = False
    first_cores: Sequence[int] = ()
    numa: bool = False
    queues: Sequence[Queue] = ()
    queue_option: str = "partition"
    set_up: str = ""
    master_addr: str = "${HOSTS[0]}"

    def bind_ranks(self, *, ranks: int, cores: int) -> str:
        """Return the argument of PALS's `--cpu-bind` for a rank on each device of a node.

        Args:
            ranks: Number of ranks on the node.
            cores: Number of cores for each of them.

        Raises:
            ConfigError: A socket has fewer cores.
        """
        if not self.first_cores:
            return f"depth --depth {cores}"
        if cores > self.cpus_per_gpu:
            raise ConfigError(
                f"--cpus_per_gpu {cores} is more than the {self.cpus_per_gpu} cores that this site "
                "has for each device; choose a smaller number."
            )
        ranks_per_socket = self.gpus_per_node // len(self.first_cores)
        first_cores = [
            socket_core + rank * cores
            for socket_core in self.first_cores
            for rank in range(ranks_per_socket)
        ]
        return "list:" + ":".join(f"{core}-{core + cores - 1}" for core in first_cores[:ranks])


def _read_sites() -> dict[str, Site]:
    text = Path(__file__).with_name("sites.toml").read_text(encoding="utf-8")
    return {
        name: Site(**{**site, "queues": [Queue(**row) for row in site.get("queues", ())]})
        for name, site in tomllib.loads(text).items()
    }


SITES = _read_sites()


def choose_queue(site: Site, *, queue_name: str | None, nodes: int, minutes: int) -> str:
    """Return the queue that you name, or the site's first one that accepts a job of this size.

    Raises:
        ConfigError: No queue, or not the named one, accepts the job.
    """
    queues = [queue for queue in site.queues if queue_name in (None, queue.name)]
    if not queues:
        return queue_name or "__QUEUE__"
    for queue in queues:
        if queue.min_nodes <= nodes <= queue.max_nodes and minutes <= 60 * queue.hours:
            return queue.name
    offers = ", ".join(
        f"{queue.name} ({queue.min_nodes}-{queue.max_nodes} nodes, {queue.hours} h)"
        for queue in queues
    )
    verb = "No queue takes" if queue_name is None else f"--queue {queue_name} does not take"
    raise ConfigError(
        f"{verb} --nodes {nodes} for {minutes} minutes. There are {offers}; change --nodes, "
        "--time or --queue."
    )
