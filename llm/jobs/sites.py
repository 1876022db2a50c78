"""What sites ask of a job, as `sites.toml` says."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llm.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Queue:
    """A queue, and the largest and longest job that it takes."""

    name: str
    min_nodes: int
    max_nodes: int
    hours: int


@dataclass(frozen=True, kw_only=True)
class Site:
    """A cluster.

    Attributes:
        schedulers: What it runs, the usual one first.
        gpus_per_node: What torch counts as devices of a node.
        cpus_per_gpu: Cores for each of them.
        launcher: How the site's own pages start ranks.
        directives: Further directives that every job needs.
        task_directives: How sbatch gives each task its GPU, where --gpus-per-node does not.
        system: What PBS calls the machine when it selects nodes.
        filesystems: The file systems that a job has to name.
        pals: Whether mpiexec is HPE's PALS, which would otherwise bind ranks to single cores.
        queues: The queues in the order of preference; a job takes the first that fits its size.
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
    queues: Sequence[Queue] = ()
    queue_option: str = "partition"
    set_up: str = ""
    master_addr: str = "${HOSTS[0]}"


def _read() -> dict[str, Site]:
    text = Path(__file__).with_name("sites.toml").read_text(encoding="utf-8")
    return {
        name: Site(**{**facts, "queues": [Queue(**row) for row in facts.get("queues", ())]})
        for name, facts in tomllib.loads(text).items()
    }


SITES = _read()


def choose_queue(site: Site, *, asked: str | None, nodes: int, minutes: int) -> str:
    """Return the queue that was asked for, or the site's first that takes a job of this size.

    Raises:
        ConfigError: None does, or the one that was asked for does not.
    """
    rows = [queue for queue in site.queues if asked in (None, queue.name)]
    if not rows:
        return asked or "__QUEUE__"
    for queue in rows:
        if queue.min_nodes <= nodes <= queue.max_nodes and minutes <= 60 * queue.hours:
            return queue.name
    offers = ", ".join(
        f"{queue.name} ({queue.min_nodes}-{queue.max_nodes} nodes, {queue.hours} h)"
        for queue in rows
    )
    verb = "No queue takes" if asked is None else f"--queue {asked} does not take"
    raise ConfigError(
        f"{verb} --nodes {nodes} for {minutes} minutes. There are {offers}; change --nodes, "
        "--time or --queue."
    )
