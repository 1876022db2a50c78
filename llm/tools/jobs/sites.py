"""Sites and their queues, read from `sites.toml` or from a file of yours."""

import dataclasses
import functools
import math
import tomllib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from llm.errors import ConfigError
from llm.tools.plan.options import PlanOptions

_DEVICES = typing.get_args(typing.get_type_hints(PlanOptions)["device"])
NOBODY = "nobody yet"
"""The value of `ran` for a site where nobody has run llm-trainers."""


@dataclass(frozen=True, kw_only=True)
class Queue:
    """A queue, and the size and duration of its jobs.

    Attributes:
        name: Name of the queue, the partition or the QOS.
        min_nodes: Nodes of its smallest job.
        max_nodes: Nodes of its largest job; by default unknown, so any number is accepted.
        hours: Its time limit; by default unknown, so any time is accepted.
        max_jobs: Jobs of a user that may be queued or running; by default unknown, so any number is
            accepted.
        preemptable: Whether a job can be ended at any time.
        device: Device of its nodes, if it differs from the site's.
        gpus_per_node: Devices of its nodes, if their number differs from the site's.
        cpus_per_gpu: Cores for each device, if their number differs from the site's.
    """

    name: str
    min_nodes: int = 1
    max_nodes: float = math.inf
    hours: float = math.inf
    max_jobs: float = math.inf
    preemptable: bool = False
    device: str | None = None
    gpus_per_node: int | None = None
    cpus_per_gpu: int | None = None

    def accepts(self, *, nodes: int, minutes: int, jobs: int = 1) -> bool:
        """Return whether this number of jobs with this size and duration may be in the queue."""
        return (
            self.min_nodes <= nodes <= self.max_nodes
            and minutes <= 60 * self.hours
            and jobs <= self.max_jobs
        )

    @property
    def limits(self) -> str:
        """The limits in words, such as `1-2 nodes, 0.5 h`."""
        nodes, hours = f"{self.min_nodes} or more", "any time"
        if self.max_nodes < math.inf:
            nodes = f"{self.min_nodes}-{self.max_nodes:g}"
        if self.hours < math.inf:
            hours = f"{self.hours:g} h"
        jobs = ""
        if self.max_jobs < math.inf:
            jobs = f", {self.max_jobs:g} job{'s' if self.max_jobs > 1 else ''} per user"
        return f"{nodes} nodes, {hours}{jobs}"


@dataclass(frozen=True, kw_only=True)
class Site:
    """A cluster.

    The attributes from `title` to `notes` are facts for readers. If one is None, the sources do not
    tell it.

    Attributes:
        schedulers: Its schedulers, the usual one first.
        device: Device of its nodes by its name in `llm-trainers plan`; None for any.
        gpus_per_node: Devices of a node, as torch counts them.
        cpus_per_gpu: Cores for each device.
        launcher: Launcher that the site's own pages recommend.
        has_torchrun: Whether torchrun works with the site's settings.
        directives: Further directives that every job needs.
        task_directives: Directives that make sbatch give each task its GPU, if `gpu_directive` does
            not.
        gpu_directive: Directive of sbatch for the devices of a node; empty if it takes none.
        whole_node_directives: Directives of sbatch for a job that uses its nodes alone.
        system: Name of the machine when PBS selects nodes.
        filesystems: File systems that a job must request.
        pals: Whether mpiexec is HPE's PALS, which by default binds ranks to single cores.
        first_cores: The first core of each socket that a job can use, if a node has several; an
            equal number of the node's devices belongs to each.
        numa: Whether GPUs of a node belong to different NUMA nodes; torchrun then binds the ranks
            to them.
        task_cpu_bind: Value of srun's `--cpu-bind` for a task on each device of a whole node.
        queues: Queues in the order of preference; a job takes the first that accepts its size.
        queue_option: Slurm's option that names the queue.
        set_up: Shell lines that make Python and the network usable.
        master_addr: Shell text for the address of rank 0.
        title: Its full name.
        source: Addresses of the pages with these facts.
        date: Date of the newest page, or the month when undated pages were read.
        ran: Who ran what there, and when.
        gpu: The device in words.
        account: Form of the value of `--account`.
        module: Module or container with PyTorch.
        pytorch: Its version of PyTorch.
        driver: Version of the devices' driver.
        collectives: Library that sends messages between devices, and its version.
        cpu_binding: How processes belong to cores.
        scratch: Folder for runs and data.
        notes: Advice for the first job.
    """

    schedulers: Sequence[Literal["slurm", "pbs"]]
    device: str | None = None
    gpus_per_node: int = 4
    cpus_per_gpu: int = 8
    launcher: Literal["torchrun", "task_per_gpu"] = "torchrun"
    has_torchrun: bool = True
    directives: Sequence[str] = ()
    task_directives: Sequence[str] = ()
    gpu_directive: str = "--gpus-per-node={gpus}"
    whole_node_directives: Sequence[str] = ("--exclusive", "--mem=0")
    system: str | None = None
    filesystems: str | None = None
    pals: bool = False
    first_cores: Sequence[int] = ()
    numa: bool = False
    task_cpu_bind: str | None = None
    queues: Sequence[Queue] = ()
    queue_option: Literal["partition", "qos"] = "partition"
    set_up: str = ""
    master_addr: str = "${HOSTS[0]}"
    title: str | None = None
    source: Sequence[str] = ()
    date: str | None = None
    ran: str = NOBODY
    gpu: str | None = None
    account: str | None = None
    module: str | None = None
    pytorch: str | None = None
    driver: str | None = None
    collectives: str | None = None
    cpu_binding: str | None = None
    scratch: str | None = None
    notes: Sequence[str] = ()

    @property
    def unknown_facts(self) -> list[str]:
        """Names of the facts that the sources do not tell."""
        return [name for name in FACTS if getattr(self, name) is None]

    @property
    def has_modules(self) -> bool:
        """Whether `set_up` calls `module`, which only login shells are sure to have."""
        return any(line.split()[:1] == ["module"] for line in self.set_up.splitlines())

    def is_preemptable(self, queue_name: str) -> bool:
        """Return whether a job in this queue can be ended at any time."""
        return any(queue.preemptable for queue in self.queues if queue.name == queue_name)

    def for_queue(self, queue_name: str) -> "Site":
        """Return the site with the nodes of a queue."""
        names = ("device", "gpus_per_node", "cpus_per_gpu")
        for queue in self.queues:
            if queue.name == queue_name:
                values = {name: getattr(queue, name) for name in names}
                return dataclasses.replace(
                    self, **{name: value for name, value in values.items() if value is not None}
                )
        return self

    def bind_ranks(self, *, ranks: int, cores: int) -> str:
        """Return the argument of PALS's `--cpu-bind` for a node's ranks with `cores` cores each.

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


FACTS = ("account", "module", "pytorch", "driver", "collectives", "cpu_binding", "scratch")
"""Facts of a site for readers, in the order of tables."""


def read_sites(path: Path) -> dict[str, Site]:
    """Read the sites of a TOML file, one in each table.

    Raises:
        ConfigError: The file cannot be read, or a table is not a site.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--site {path} cannot be read: {error}.") from error
    return {name: _make_site(f"{path}: [{name}]", table) for name, table in tables.items()}


def _make_site(place: str, table: Any) -> Site:
    """Return the site of a table."""
    values = _checked_values(Site, place, table)
    rows = table.get("queues", ())
    queues = [
        Queue(**_checked_values(Queue, f"{place} queues[{index}]", row))
        for index, row in enumerate(rows)
    ]
    site = Site(**{**values, "queues": queues})
    if not site.schedulers:
        raise ConfigError(f"{place} schedulers is empty; name slurm or pbs.")
    try:
        site.gpu_directive.format(gpus=site.gpus_per_node)
    except (LookupError, ValueError, AttributeError):
        raise ConfigError(
            f"{place} gpu_directive = {site.gpu_directive!r} has braces around other text than "
            "gpus; write {gpus} where the number of devices is."
        ) from None
    if site.first_cores and site.gpus_per_node % len(site.first_cores):
        raise ConfigError(
            f"{place} first_cores names {len(site.first_cores)} sockets, which do not divide the "
            f"{site.gpus_per_node} devices of gpus_per_node."
        )
    return site


def _checked_values(cls: type, place: str, table: Any) -> dict[str, Any]:
    """Return the values of a table that has the keys and the types of a dataclass."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{place} is not a table of a site; write its keys below [NAME].")
    types = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        is_required = field.default is dataclasses.MISSING
        if is_required and field.name not in table:
            raise ConfigError(f"{place} has no key {field.name}.")
    for key, value in table.items():
        if key not in types:
            raise ConfigError(f"{place} has a key {key}, which is none of {', '.join(types)}.")
        if not _has_type(value, types[key]):
            raise ConfigError(
                f"{place} {key} = {value!r} has the wrong type, or is not one of the choices."
            )
        if type(value) in (int, float) and not value > 0:
            raise ConfigError(f"{place} {key} = {value!r} must be greater than 0.")
        texts = value if isinstance(value, list) else [value]
        is_printable = all(text.isprintable() for text in texts if isinstance(text, str))
        if key != "set_up" and not is_printable:
            raise ConfigError(
                f"{place} {key} = {value!r} has a line break, which ends a directive."
            )
    if table.get("device") not in (None, *_DEVICES):
        raise ConfigError(
            f"{place} device = {table['device']!r} is not a device of llm-trainers plan; choose "
            f"from {', '.join(_DEVICES)}, or leave it out."
        )
    return dict(table)


def _has_type(value: Any, expected: Any) -> bool:
    """Return whether a value of TOML fits a type of a site's attribute."""
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if origin is Literal:
        return value in arguments
    if origin is Sequence:
        if arguments == (Queue,):
            return isinstance(value, list)  # each queue is checked by itself
        return isinstance(value, list) and all(_has_type(item, arguments[0]) for item in value)
    if arguments:  # such as str | None
        return any(_has_type(value, argument) for argument in arguments)
    if expected is float:
        return type(value) in (int, float)
    return type(value) is expected


SITES_FILE = Path(__file__).with_name("sites.toml")


@functools.cache
def known_sites() -> dict[str, Site]:
    """Return the sites of `sites.toml` by name."""
    return read_sites(SITES_FILE)


def find_site(name: str) -> Site:
    """Return the site of this name, or the site of a TOML file.

    Raises:
        ConfigError: There is none, or the file has none or several.
    """
    if not name.endswith(".toml"):
        if name not in known_sites():
            raise ConfigError(
                f"--site {name} is not known. There are {', '.join(known_sites())}; for another "
                "one, name a TOML file, such as llm-trainers jobs --detect writes."
            )
        return known_sites()[name]
    sites = read_sites(Path(name))
    if len(sites) != 1:
        raise ConfigError(f"--site {name} has {len(sites)} tables; keep the one of your site.")
    [site] = sites.values()
    return site


def choose_queue(
    site: Site,
    *,
    queue_name: str | None,
    nodes: int,
    minutes: int,
    jobs: int = 1,
    continue_flag: Literal["--chain", "--requeue"] | None = None,
) -> str:
    """Return the queue that you name, or the site's first one that accepts jobs of this size.

    Args:
        site: The site.
        queue_name: The queue that you name, if any.
        nodes: Nodes of each job.
        minutes: Time limit of each job.
        jobs: Number of jobs that are queued at once: members of an array, or 2 for a chain.
        continue_flag: The option that continues a job in a later one, if there is one.

    Raises:
        ConfigError: No queue, or not the named one, accepts the job.
    """
    queues = [queue for queue in site.queues if queue_name in (None, queue.name)]
    if not queues:
        return queue_name or "__QUEUE__"
    for queue in queues:
        if queue.accepts(nodes=nodes, minutes=minutes, jobs=jobs):
            return queue.name
    flag = queue_flag(site)
    offers = ", ".join(f"{queue.name} ({queue.limits})" for queue in queues)
    verb = "No queue takes" if queue_name is None else f"{flag} {queue_name} does not take"
    subject = f"{jobs} jobs at once with " if jobs > 1 else ""
    num_jobs = 2 if continue_flag == "--chain" else jobs
    hours = [
        queue.hours for queue in queues if queue.accepts(nodes=nodes, minutes=0, jobs=num_jobs)
    ]
    remedy = f"change --nodes, --time or {flag}"
    if hours:
        longest = int(60 * max(hours))
        with_flag = f" with {continue_flag}" if continue_flag else ""
        remedy = (
            f"give --time {longest // 60}:{longest % 60:02}:00{with_flag}, or change --nodes or "
            f"{flag}"
        )
    raise ConfigError(
        f"{verb} {subject}--nodes {nodes} for {minutes} minutes. There are {offers}; {remedy}."
    )


def queue_flag(site: Site, scheduler: str | None = None) -> str:
    """Return the option that names the queue, as the site's users call it."""
    return "--queue" if (scheduler or site.schedulers[0]) == "pbs" else f"--{site.queue_option}"
