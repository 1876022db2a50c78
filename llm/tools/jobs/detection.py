"""Drafts the file of a site that is not listed: `llm-trainers jobs --detect --output mine.toml`.

It asks the clients of Slurm or PBS and the programs of this node, each with a timeout. The top of
the draft names the missing values.
"""

import dataclasses
import json
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime

from llm.errors import ConfigError
from llm.tools.jobs.sites import NOBODY
from llm.tools.plan.card_names import device_of_card
from llm.tools.sweep.slots import has_pals

_TIMEOUT_SECONDS = 20
_SINFO_FIELDS = "%R|%l|%s|%D|%c|%G|%M"
_ALWAYS_UNKNOWN = (
    "the module or container with PyTorch (set_up)",
    "NCCL's, RCCL's or oneCCL's variables for the network (set_up)",
    "directives that every job needs",
    "the cores that are nearest to each device",
    "the folder for runs and data",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DetectedNode:
    """Devices and cores of a kind of node; None stands for an unknown value.

    Attributes:
        device: The device by its name in `llm-trainers plan`.
        card: Its name as a program shows it.
        gpus: Number of devices.
        cpus: Number of cores, as the scheduler counts them.
    """

    device: str | None = None
    card: str | None = None
    gpus: int | None = None
    cpus: int | None = None

    @property
    def cpus_per_gpu(self) -> int | None:
        """Cores for each device."""
        return self.cpus // self.gpus if self.cpus and self.gpus else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DetectedQueue:
    """A queue and its limits; None stands for an unknown limit or for none."""

    name: str
    min_nodes: int = 1
    max_nodes: int | None = None
    hours: float | None = None
    preemptable: bool = False
    node: DetectedNode = DetectedNode()


class Draft:
    """The answers of the programs of a machine about its site.

    Attributes:
        programs: Programs that answered.
        unknown: Missing values, in words.
        values: Values of the site by key.
        name: Name of the site.
        queues: Its queues.
        node: The usual kind of node.
    """

    def __init__(self) -> None:
        self.programs: list[str] = []
        self.unknown: list[str] = []
        self.values: dict[str, object] = {}
        self.name = "mysite"
        self.queues: list[DetectedQueue] = []
        self.node = DetectedNode()

    def ask(self, *command: str) -> str | None:
        """Run a program; return what it prints, or None without it or without an answer."""
        program = shutil.which(command[0])
        if program is None:
            return None
        try:
            completed = subprocess.run(
                [program, *command[1:]],
                capture_output=True,
                stdin=subprocess.DEVNULL,
                text=True,
                errors="replace",
                timeout=_TIMEOUT_SECONDS,
            )
        except (OSError, subprocess.TimeoutExpired):
            self.unknown.append(
                f"what {' '.join(command)} tells: it does not answer in {_TIMEOUT_SECONDS} s"
            )
            return None
        if completed.returncode != 0:
            text = (completed.stderr or completed.stdout).strip().partition("\n")[0]
            # A comment in TOML has no control characters, such as those of colors.
            reason = "".join(letter for letter in text if letter.isprintable())
            self.unknown.append(f"what {' '.join(command)} tells: {reason or 'it fails'}")
            return None
        self.programs.append(command[0])
        return completed.stdout


def detect_site() -> tuple[str, list[str]]:
    """Ask the programs of this machine about its site.

    Returns:
        A TOML file of one site, and its missing values, in words.

    Raises:
        ConfigError: The clients of Slurm and PBS are missing.
    """
    draft = Draft()
    if shutil.which("sinfo") is not None:
        _ask_slurm(draft)
    elif shutil.which("qstat") is not None:
        _ask_pbs(draft)
    else:
        raise ConfigError(
            "--detect finds neither sinfo nor qstat here: call it on a login node of the cluster."
        )
    _ask_node(draft)
    if draft.node.gpus is None:
        draft.unknown.append("the number of devices of a node (gpus_per_node)")
    if draft.node.device is None:
        card = "" if draft.node.card is None else f": the scheduler says {draft.node.card}"
        draft.unknown.append(f"the device{card}")
    if not draft.queues:
        draft.unknown.append("the queues")
    draft.unknown += _ALWAYS_UNKNOWN
    return _format_draft(draft), draft.unknown


def _ask_slurm(draft: Draft) -> None:
    """Read partitions and nodes from Slurm's clients."""
    draft.values["schedulers"] = ["slurm"]
    config = _read_pairs(draft.ask("scontrol", "show", "config") or "", r"^(\w+)\s*=\s*(.*)$")
    if config.get("ClusterName", "(null)") != "(null)":
        draft.name = config["ClusterName"]
    preempts_by = config.get("PreemptType", "").rpartition("/")[2]
    if preempts_by == "qos":
        draft.unknown.append("the QOS where a job can be ended at any time: it depends on the QOS")
    # Otherwise 1024 nodes are 1K.
    sinfo = draft.ask("sinfo", "--noheader", "--noconvert", "--format", _SINFO_FIELDS) or ""
    draft.queues = read_sinfo(sinfo, has_preemption=preempts_by == "partition_prio")
    partitions = draft.ask("scontrol", "show", "partition", "--oneliner") or ""
    limiting_qos = set(re.findall(r"\bQoS=(\S+)", partitions)) - {"N/A"}
    if limiting_qos:
        draft.unknown.append(
            f"limits of the QOS {', '.join(sorted(limiting_qos))}: see sacctmgr show qos"
        )


def read_sinfo(text: str, *, has_preemption: bool) -> list[DetectedQueue]:
    """Return the partitions with devices, or all if none has devices.

    Args:
        text: Output of `sinfo --noheader --noconvert --format "%R|%l|%s|%D|%c|%G|%M"`, with a line
            for each partition and kind of node.
        has_preemption: Whether the preemption mode of a partition counts.
    """
    rows = [line.strip().split("|") for line in text.splitlines()]
    rows = [row for row in rows if len(row) == len(_SINFO_FIELDS.split("|")) and row[3].isdigit()]
    gpu_rows = [row for row in rows if _read_gres(row[5]).gpus]
    rows_by_name: dict[str, list[list[str]]] = {}
    for row in gpu_rows or rows:
        rows_by_name.setdefault(row[0], []).append(row)
    queues = []
    for name, partition_rows in rows_by_name.items():
        largest_row = max(partition_rows, key=lambda row: int(row[3]))
        _, limit, job_size, _, cpus, gres, mode = largest_row
        num_nodes = sum(int(row[3]) for row in partition_rows)
        smallest_job, _, largest_job = job_size.partition("-")
        max_nodes = int(largest_job) if largest_job.isdigit() else num_nodes
        node = dataclasses.replace(_read_gres(gres), cpus=_read_count(cpus.rstrip("+")))
        queues.append(
            DetectedQueue(
                name=name,
                min_nodes=max(1, int(smallest_job)) if smallest_job.isdigit() else 1,
                max_nodes=min(max_nodes, num_nodes),
                hours=_read_hours(limit),
                preemptable=has_preemption and mode.upper() not in ("OFF", "N/A", ""),
                node=node,
            )
        )
    return queues


def _read_gres(gres: str) -> DetectedNode:
    """Return the devices of Slurm's generic resources, such as `gpu:a100:4(S:0-1),nvme:1`."""
    counts: Counter[str] = Counter()
    for item in re.sub(r"\([^)]*\)", "", gres).split(","):
        fields = item.split(":")
        if fields[0] == "gpu" and fields[-1].isdigit():
            counts[":".join(fields[1:-1])] += int(fields[-1])
    if not counts:
        return DetectedNode()
    card = counts.most_common(1)[0][0]
    device = device_of_card(card.replace("_", " "))
    return DetectedNode(card=card or None, device=device, gpus=counts.total())


def _read_hours(limit: str) -> float | None:
    """Return the hours of a time limit such as 2-00:00:00, 36:00:00 or 30:00; None for none."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", limit.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (int(digits or 0) for digits in match.groups())
    return round(24 * days + hours + minutes / 60 + seconds / 3600, 2)


def _read_pairs(text: str, pattern: str) -> dict[str, str]:
    """Return the pairs that a pattern with two groups finds, one on a line."""
    return dict(re.findall(pattern, text, re.MULTILINE))


def _ask_pbs(draft: Draft) -> None:
    """Read queues and nodes from the clients of PBS."""
    draft.values["schedulers"] = ["pbs"]
    server = draft.ask("qstat", "-Bf") or ""
    server_name = re.search(r"^Server: ([\w-]+)", server, re.MULTILINE)
    if server_name is not None:
        draft.name = re.sub(r"-?pbs.*", "", server_name[1]) or server_name[1]
    filesystems = re.search(r"valid_filesystems = (\S+)", server)
    if filesystems is not None:
        draft.unknown.append(f"filesystems, which a job must name: some of {filesystems[1]}")
    draft.queues = read_qstat(draft.ask("qstat", "-Qf") or "")
    draft.node, system = read_pbsnodes(draft.ask("pbsnodes", "-a") or "")
    if system is not None:
        draft.values["system"] = system
    if has_pals(os.environ):
        draft.values["pals"] = True


def read_qstat(text: str) -> list[DetectedQueue]:
    """Return the queues that accept jobs; a routing queue has the limits of its destinations.

    Args:
        text: Output of `qstat -Qf`.
    """
    attributes_by_name = {
        section.partition("\n")[0].strip(): _read_pairs(section, r"^\s+([\w.]+) = (.*)$")
        for section in re.split(r"^Queue: ", text, flags=re.MULTILINE)[1:]
    }
    queues = []
    for name, attributes in attributes_by_name.items():
        accepts_jobs = attributes.get("enabled") == "True" and attributes.get("started") == "True"
        is_reservation = re.fullmatch(r"[RMS]\d+", name) is not None
        if not accepts_jobs or is_reservation or attributes.get("from_route_only") == "True":
            continue
        destinations = [name]
        if attributes.get("queue_type") == "Route":
            names = attributes.get("route_destinations", "").split(",")
            destinations = [destination.partition("@")[0].strip() for destination in names]
        for destination in destinations:
            limits = {**attributes_by_name.get(destination, {})}
            queues.append(
                DetectedQueue(
                    name=name,
                    min_nodes=_read_count(limits.get("resources_min.nodect")) or 1,
                    max_nodes=_read_count(limits.get("resources_max.nodect")),
                    hours=_read_hours(limits.get("resources_max.walltime", "")),
                    preemptable="preempt" in name,
                )
            )
    return queues


def _read_count(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def read_pbsnodes(text: str) -> tuple[DetectedNode, str | None]:
    """Return the most frequent kind of node with devices, and its `system`.

    Args:
        text: Output of `pbsnodes -a`.
    """
    kinds: Counter[tuple[str | None, str | None, str | None]] = Counter()
    for section in re.split(r"\n\s*\n", text):
        values = _read_pairs(section, r"^\s+resources_available\.(\w+) = (.*)$")
        if values:
            kinds[values.get("ngpus"), values.get("ncpus"), values.get("system")] += 1
    with_gpus = {kind: count for kind, count in kinds.items() if _read_count(kind[0])}
    if not kinds:
        return DetectedNode(), None
    gpus, cpus, system = max(with_gpus or kinds, key=lambda kind: kinds[kind])
    return DetectedNode(gpus=_read_count(gpus) or None, cpus=_read_count(cpus)), system


def _ask_node(draft: Draft) -> None:
    """Complete the usual node from the queues and from the programs of this node."""
    if draft.queues and draft.node.gpus is None:
        nodes = [queue.node for queue in draft.queues if queue.node.gpus]
        if nodes:
            draft.node = Counter(nodes).most_common(1)[0][0]
    cards = _read_cards(draft)
    if not cards:
        return
    card = Counter(cards).most_common(1)[0][0]
    is_same_kind = draft.node.device in (None, device_of_card(card))
    if draft.node.gpus is None:
        cpus = _read_pairs(draft.ask("lscpu") or "", r"^(CPU\(s\)):\s+(\d+)$").get("CPU(s)")
        draft.node = DetectedNode(gpus=len(cards), cpus=draft.node.cpus or _read_count(cpus))
    elif draft.node.gpus != len(cards):
        return  # a login node with other cards
    if is_same_kind:
        draft.node = dataclasses.replace(draft.node, card=card, device=device_of_card(card))


def _read_cards(draft: Draft) -> list[str]:
    """Return the names of the devices of this node."""
    nvidia = draft.ask("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    if nvidia is not None:
        return [line.strip() for line in nvidia.splitlines() if line.strip()]
    amd = draft.ask("rocm-smi", "--showproductname")
    return re.findall(r"Card [Ss]eries:\s*(.+?)\s*$", amd or "", re.MULTILINE)


def _format_draft(draft: Draft) -> str:
    """Return the draft as a TOML file."""
    name = re.sub(r"[^\w-]", "-", draft.name, flags=re.ASCII).lower()
    programs = ", ".join(dict.fromkeys(draft.programs))
    source = f" from {programs}" if programs else ", without an answer of a scheduler"
    today = datetime.now().astimezone().date().isoformat()
    node = draft.node
    values = {
        "date": today,
        "ran": NOBODY,
        **draft.values,
        "device": node.device,
        "gpus_per_node": node.gpus,
        "cpus_per_gpu": node.cpus_per_gpu,
    }
    lines = [
        f"# A draft that llm-trainers jobs --detect wrote on {today}{source}.",
        "# Compare it with your site's pages. It lacks:",
        *(f"# - {item}" for item in draft.unknown),
        "",
        f"[{name}]",
        *(f"{key} = {_format_value(value)}" for key, value in values.items() if value is not None),
    ]
    if draft.queues:
        rows = [f"    {_format_queue(queue, node)}," for queue in draft.queues]
        lines += ["# A job takes the first queue that accepts its size.", "queues = [", *rows, "]"]
    lines += ['set_up = """', "# module load ...", '"""']
    return "\n".join(lines) + "\n"


def _format_queue(queue: DetectedQueue, node: DetectedNode) -> str:
    """Return the row of a queue, with its nodes if they differ from the usual ones."""
    values: dict[str, object] = {
        "name": queue.name,
        "min_nodes": queue.min_nodes if queue.min_nodes > 1 else None,
        "max_nodes": queue.max_nodes,
        "hours": queue.hours,
        "preemptable": queue.preemptable or None,
    }
    if queue.node.gpus is not None and queue.node.gpus != node.gpus:
        values["gpus_per_node"] = queue.node.gpus
    if queue.node.device is not None and queue.node.device != node.device:
        values["device"] = queue.node.device
    if queue.node.cpus_per_gpu is not None and queue.node.cpus_per_gpu != node.cpus_per_gpu:
        values["cpus_per_gpu"] = queue.node.cpus_per_gpu
    items = [
        f"{key} = {_format_value(value)}" for key, value in values.items() if value is not None
    ]
    return f"{{ {', '.join(items)} }}"


def _format_value(value: object) -> str:
    """Return a value as TOML, which writes strings and lists as JSON does."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str | bool | Sequence | Mapping):
        return json.dumps(value)
    return str(value)
