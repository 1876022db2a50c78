"""Checks the ranks and the network of a job before it begins: `srun llm-trainers preflight`.

Start it like the training, with one process per device. Every rank sends its host, device and
versions to rank 0 through a TCP store, so rank 0 can name the ranks that do not answer. Then all
ranks time an all-reduce and a broadcast. A slow link between hosts is a warning.

Exit codes: 0 success, even with a warning; 1 a rank does not answer, fails, or differs from the
others; 2 an option or the environment cannot work.
"""

import json
import math
import os
import platform
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from llm import __version__
from llm.config.command_line import parse_options
from llm.config.options import option, option_group
from llm.config.program import program
from llm.errors import ParallelError
from llm.runtime.logging import counted
from llm.runtime.process_settings import raise_file_limit
from llm.runtime.world import (
    World,
    device_of,
    read_job_hosts,
    set_torchrun_variables,
    world_from_environment,
)
from llm.tools.bad_nodes import add_bad_nodes, find_hosts_without_devices, keep_minority, short_name

if TYPE_CHECKING:
    import torch
    from torch.distributed.distributed_c10d import Store

_BACKENDS = {"cuda": "nccl", "xpu": "xccl"}
_EXTRA_WAIT_SECONDS = 5.0
_POLL_SECONDS = 0.05
_NUM_REPEATS = 3
_MIN_GBIT_PER_SECOND = 1.0  # networks of clusters are a hundred times as fast
STAGES = ("start", "connecting", "all-reduce", "broadcast", "done")
"""Progress of a rank in the collectives, in order."""


@option_group("Pre-flight")
class PreflightOptions:
    """The timeout and the size of the messages."""

    timeout: float = option(
        60.0, "Seconds for all ranks to answer, and again to communicate.", above=0, at_most=86_400
    )
    message_mb: int = option(
        64, "MiB that are reduced and broadcast.", at_least=1, at_most=1_000_000
    )
    bad_nodes: str | None = option(None, "Add hosts that fail to this file.", path=True)


@program
def main(argv: Sequence[str]) -> int:
    """Run the program; return the exit code."""
    options = parse_options(
        PreflightOptions,
        argv,
        prog="llm-trainers preflight",
        description="Check that every rank of a job answers, and time its network.",
    )
    # Otherwise each rank prints C++ stack traces above its sentence if rank 0 cannot be reached.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    set_torchrun_variables()
    raise_file_limit()
    return check_rank(options, world_from_environment())


def check_rank(options: PreflightOptions, world: World) -> int:
    """Run the checks on one rank; rank 0 prints the result. Returns the exit code."""
    try:
        description = describe_rank(world)
    except RuntimeError as error:  # an error of the driver; rank 0 reports this rank as silent
        first_line = str(error).partition("\n")[0]
        host = socket.gethostname()
        _record_bad_nodes(options, [host])
        return _print_error(f"rank {world.rank} on {host} has no working device: {first_line}")
    if world.world_size == 1:
        sys.stdout.write(f"{_format_rank(0, description, None)}\npreflight: one process, alone.\n")
        return 0
    try:
        return _check_ranks(options, world, description)
    except RuntimeError as error:  # an error of the store: rank 0 cannot be reached, or has ended
        address = f"{os.environ.get('MASTER_ADDR')}, port {os.environ.get('MASTER_PORT')}"
        first_line = str(error).partition("\n")[0]
        return _print_error(
            f"rank {world.rank} on {description['host']} does not reach rank 0 at {address}: "
            f"{first_line}"
        )


def describe_rank(world: World) -> dict[str, Any]:
    """Return host, device and versions of this process."""
    import torch

    device = device_of(world)
    kind, device_id = platform.machine(), None
    versions = {"llm": __version__, "python": platform.python_version(), "torch": torch.__version__}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        kind, device_id = properties.name, str(properties.uuid)
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    elif device.type == "xpu":
        kind = torch.xpu.get_device_properties(device).name
    return {
        "host": socket.gethostname(),
        "device": str(device),
        "kind": kind,
        "id": device_id,
        "versions": versions,
    }


class Board:
    """Values that each rank publishes in a store, readable by every rank."""

    def __init__(self, store: "Store", *, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._ranks = range(world_size)

    def set(self, name: str, value: Any) -> None:
        """Publish a value of this rank."""
        self._store.set(f"{name}/{self._rank}", json.dumps(value))

    def get_all(self, name: str) -> dict[int, Any]:
        """Return the values that ranks have published, by rank."""
        keys = [f"{name}/{rank}" for rank in self._ranks]
        if self._store.check(keys):
            return dict(enumerate(map(json.loads, self._store.multi_get(keys))))
        # Reading a missing key blocks.
        return {
            rank: json.loads(self._store.get(key))
            for rank, key in enumerate(keys)
            if self._store.check([key])
        }

    def wait(self, name: str, deadline: float, *, unless: str | None = None) -> bool:
        """Wait for all ranks' values; False after the deadline, or once `unless` is posted."""
        keys = [f"{name}/{rank}" for rank in self._ranks]
        while time.monotonic() < deadline:
            if self._store.check(keys):
                return True
            if unless is not None and self.get_global(unless) is not None:
                return False
            time.sleep(_POLL_SECONDS)
        return False

    def set_global(self, key: str, text: str) -> None:
        """Write a text for all ranks, unless one has been written already."""
        self._store.compare_set(key, "", text or "-")

    def get_global(self, key: str, deadline: float = -math.inf) -> str | None:
        """Return the posted text; None if there is none before the deadline."""
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                return None
            time.sleep(_POLL_SECONDS)
        text = self._store.get(key).decode()
        return "" if text == "-" else text


def _check_ranks(options: PreflightOptions, world: World, description: dict[str, Any]) -> int:
    """Run the checks of several ranks through a store; return the exit code of this rank."""
    board = open_board(world, timeout=options.timeout)
    main_host = os.environ["MASTER_ADDR"]
    board.set("description", description)
    fault = _compare_ranks(options, world, board)
    if fault == "":
        fault = _test_communication(options, world, board)
    if fault is None:
        return _print_error(f"rank 0 at {main_host} does not answer rank {world.rank}")
    if world.is_main:
        _print_ranks(board)
        exit_code = _print_error(fault) if fault else _print_success(options, board, world)
        # A launcher kills all ranks once one ends with an error, so the others wait until rank 0
        # has printed. Rank 0 ends last because it serves the store.
        board.set_global("printed", "")
        board.set("finished", True)
        board.wait("finished", time.monotonic() + _EXTRA_WAIT_SECONDS)
        return exit_code
    board.get_global("printed", time.monotonic() + _EXTRA_WAIT_SECONDS)
    board.set("finished", True)
    return 1 if fault else 0


def _compare_ranks(options: PreflightOptions, world: World, board: Board) -> str | None:
    """Compare the descriptions of the ranks on rank 0; return its verdict.

    Returns:
        A description of the fault; empty if all ranks answer and agree, None if rank 0 does not
        answer.
    """
    deadline = time.monotonic() + options.timeout
    if world.is_main:
        board.wait("description", deadline)
        descriptions = board.get_all("description")  # late answers count too
        hosts = [entry["host"] for entry in descriptions.values()]
        if len(descriptions) == world.world_size:
            fault = describe_differences(descriptions)
            _record_bad_nodes(
                options, keep_minority(find_hosts_without_devices(descriptions), hosts)
            )
        else:
            fault = describe_missing(descriptions, world, options.timeout)
            bad_hosts = find_silent_hosts(descriptions, world)
            _record_bad_nodes(options, keep_minority(bad_hosts, read_job_hosts(os.environ)))
        board.set_global("verdict/description", fault)
    return board.get_global("verdict/description", deadline + _EXTRA_WAIT_SECONDS)


def open_board(world: World, *, timeout: float, program_name: str = "preflight") -> Board:
    """Return the board of all ranks; rank 0 serves its store.

    Args:
        world: Rank and world size of this process.
        timeout: Seconds that a connection may take.
        program_name: Prefix of the keys.

    Raises:
        RuntimeError: Rank 0 cannot be reached.
    """
    # torchrun serves a store already.
    is_server = world.is_main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = _connect_store(timeout, is_server=is_server, program_name=program_name)
    return Board(store, rank=world.rank, world_size=world.world_size)


def _connect_store(
    timeout: float, *, is_server: bool = False, program_name: str = "preflight"
) -> "Store":
    """Connect to rank 0's store."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=is_server,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefixed_store: Store = PrefixStore(f"{program_name}/{attempt}", store)
    return prefixed_store


def _test_communication(options: PreflightOptions, world: World, board: Board) -> str | None:
    """Time the collectives; return rank 0's verdict, even if they hang.

    Returns:
        A description of the fault; empty without one, None if rank 0 does not answer.
    """
    deadline = time.monotonic() + options.timeout
    # A thread that hangs in a library cannot be stopped; a daemon ends with the process.
    threading.Thread(target=_report_collectives, args=(options, world, board), daemon=True).start()
    if world.is_main:
        fault = ""
        if not board.wait("done", deadline, unless="failure"):
            host_by_rank = {
                rank: entry["host"] for rank, entry in board.get_all("description").items()
            }
            bad_hosts = [host_by_rank[rank] for rank in find_faulty_ranks(board)]
            _record_bad_nodes(options, keep_minority(bad_hosts, host_by_rank.values()))
            fault = describe_hang(board, options.timeout)
        board.set_global("verdict/communication", fault)
    return board.get_global("verdict/communication", deadline + _EXTRA_WAIT_SECONDS)


def _report_collectives(options: PreflightOptions, world: World, board: Board) -> None:
    """Time the collectives, and post the times or the error of this rank on the board."""
    try:
        board.set("times", time_collectives(options, world, board))
        board.set("stage", "done")
        board.set("done", True)
    except Exception as error:  # rank 0 reports any error of a library
        first_line = str(error).strip().partition("\n")[0]
        board.set("failed", f"{type(error).__name__}: {first_line}")
        board.set_global("failure", "")


def time_collectives(options: PreflightOptions, world: World, board: Board) -> dict[str, float]:
    """All-reduce and broadcast a tensor; return the seconds of each on this rank.

    Raises:
        ParallelError: The sum is wrong.
    """
    import torch
    import torch.distributed as dist

    device = device_of(world)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    board.set("stage", "connecting")
    dist.init_process_group(
        _BACKENDS.get(device.type, "gloo"),
        store=_connect_store(options.timeout),  # the first connection blocks in `board.wait`
        rank=world.rank,
        world_size=world.world_size,
        timeout=timedelta(seconds=2 * options.timeout),
    )
    tensor = torch.full((options.message_mb * 2**18,), world.rank + 1.0, device=device)
    dist.all_reduce(tensor[:1].clone())  # the first collective opens the connections
    board.set("stage", "all-reduce")
    dist.all_reduce(tensor)
    expected = world.world_size * (world.world_size + 1) / 2
    if tensor.min().item() != expected or tensor.max().item() != expected:
        raise ParallelError(f"an all-reduce gives {tensor.max().item()} instead of {expected}")
    reduce_seconds = _time_action(lambda: dist.all_reduce(tensor), device)
    board.set("stage", "broadcast")
    broadcast_seconds = _time_action(lambda: dist.broadcast(tensor, src=0), device)
    dist.destroy_process_group()
    return {"all-reduce": reduce_seconds, "broadcast": broadcast_seconds}


def _time_action(action: Callable[[], object], device: "torch.device") -> float:
    """Return the mean seconds of an action on a device, after one run to warm up."""
    from llm.metrics.hardware import synchronize_device

    action()
    synchronize_device(device)
    start_time = time.perf_counter()
    for _ in range(_NUM_REPEATS):
        action()
    synchronize_device(device)
    return (time.perf_counter() - start_time) / _NUM_REPEATS


def describe_missing(descriptions: dict[int, Any], world: World, timeout: float) -> str:
    """Describe the ranks that have not answered, and the hosts where they should run."""
    missing_ranks = [rank for rank in range(world.world_size) if rank not in descriptions]
    sentence = (
        f"{len(missing_ranks)} of {world.world_size} ranks have not answered within {timeout:g} s: "
        f"{', '.join(map(str, missing_ranks))}."
    )
    hosts = find_silent_hosts(descriptions, world)
    if not hosts:
        answering_hosts = dict.fromkeys(short_name(item["host"]) for item in descriptions.values())
        return f"{sentence} Answers came from {', '.join(answering_hosts)} only."
    return (
        f"{sentence} These hosts do not answer: {', '.join(hosts)}. Check whether Python "
        f"starts there, or leave them out (Slurm: --exclude={','.join(hosts)})."
    )


def find_silent_hosts(descriptions: dict[int, Any], world: World) -> list[str]:
    """Return the hosts of the job with a rank that has not answered; empty if none are known."""
    num_answers_by_host = Counter(
        short_name(description["host"]) for description in descriptions.values()
    )
    hosts = read_job_hosts(os.environ)
    ranks_per_host = world.world_size / max(1, len(hosts))
    return [host for host in hosts if num_answers_by_host[short_name(host)] < ranks_per_host]


def describe_differences(descriptions: dict[int, Any]) -> str:
    """Describe how the versions and devices of ranks differ; empty if they agree."""
    versions_by_rank = {rank: entry["versions"] for rank, entry in descriptions.items()}
    packages = sorted({name for versions in versions_by_rank.values() for name in versions})
    problems = []
    for name in packages:
        version_by_rank = {rank: versions.get(name) for rank, versions in versions_by_rank.items()}
        problems.append(_describe_difference(name, version_by_rank))
    kind_by_rank = {rank: entry["device"].partition(":")[0] for rank, entry in descriptions.items()}
    problems.append(_describe_difference("the kind of device", kind_by_rank))
    problems += _describe_shared_devices(descriptions)
    return " ".join(filter(None, problems))


def _describe_shared_devices(descriptions: dict[int, Any]) -> list[str]:
    """Return a sentence about each device that several ranks use."""
    ranks_by_device: dict[str, list[int]] = {}
    for rank, description in descriptions.items():
        if description["id"] is not None:
            ranks_by_device.setdefault(description["id"], []).append(rank)
    return [
        f"Ranks {' and '.join(map(str, ranks))} share one device of "
        f"{descriptions[ranks[0]]['host']}."
        for ranks in ranks_by_device.values()
        if len(ranks) > 1
    ]


def _describe_difference(name: str, value_by_rank: dict[int, Any]) -> str:
    """Describe how a value differs between ranks; empty if all have the same."""
    if len(set(value_by_rank.values())) == 1:
        return ""
    ranks_by_value: dict[Any, list[str]] = {}
    for rank, value in value_by_rank.items():
        ranks_by_value.setdefault(value, []).append(str(rank))
    groups = [f"{value} on rank {', '.join(ranks)}" for value, ranks in ranks_by_value.items()]
    return f"The ranks differ in {name}: {'; '.join(groups)}."


def describe_hang(board: Board, timeout: float) -> str:
    """Describe the ranks that failed in the collectives, or keep the others waiting."""
    name_by_rank = {
        rank: f"rank {rank} on {description['host']}"
        for rank, description in board.get_all("description").items()
    }
    errors = board.get_all("failed")
    if errors:
        failures = [f"{name_by_rank[rank]} fails: {error}" for rank, error in errors.items()]
        return "; ".join(failures) + "."
    first_stage = min(_read_stages(board).values(), key=STAGES.index)
    slow_ranks = [name_by_rank[rank] for rank in find_faulty_ranks(board)]
    time_limit = f"within {timeout:g} s"
    if len(slow_ranks) < len(name_by_rank):
        return (
            f"{', '.join(slow_ranks)} did not get beyond {first_stage} {time_limit}; the "
            "others did."
        )
    return (
        f"All ranks have answered, and none got beyond {first_stage} {time_limit}: they "
        "reach rank 0 but not each other. Set NCCL_DEBUG=INFO to see the network interface in use, "
        "and NCCL_SOCKET_IFNAME (GLOO_SOCKET_IFNAME without GPUs) to choose another."
    )


def find_faulty_ranks(board: Board) -> list[int]:
    """Return the ranks that failed in the collectives, or got least far in them."""
    failed_ranks = board.get_all("failed")
    if failed_ranks:
        return [*failed_ranks]
    stage_by_rank = _read_stages(board)
    first_stage = min(stage_by_rank.values(), key=STAGES.index)
    return [rank for rank, stage in stage_by_rank.items() if stage == first_stage]


def _read_stages(board: Board) -> dict[int, str]:
    return dict.fromkeys(board.get_all("description"), STAGES[0]) | board.get_all("stage")


def _record_bad_nodes(options: PreflightOptions, hosts: Iterable[str]) -> None:
    """Add hosts to the file of bad nodes, if there is one, and say so."""
    if options.bad_nodes is None:
        return
    try:
        new_hosts = add_bad_nodes(options.bad_nodes, hosts)
    except OSError as error:
        sys.stderr.write(
            f"preflight: --bad_nodes {options.bad_nodes} cannot be written: {error.strerror}.\n"
        )
        return
    if new_hosts:
        sys.stderr.write(f"preflight: added to {options.bad_nodes}: {', '.join(new_hosts)}.\n")


def _format_rank(rank: int, description: dict[str, Any], times: dict[str, float] | None) -> str:
    columns = [
        f"rank {rank} on {description['host']}: {description['device']} ({description['kind']})"
    ]
    columns += [f"{name} {version}" for name, version in description["versions"].items()]
    columns += [f"{name} {1000 * seconds:.2f} ms" for name, seconds in (times or {}).items()]
    return ", ".join(columns)


def _print_ranks(board: Board) -> None:
    """Print a line for each rank that has answered."""
    times = board.get_all("times")
    for rank, description in board.get_all("description").items():
        sys.stdout.write(_format_rank(rank, description, times.get(rank)) + "\n")


def _print_success(options: PreflightOptions, board: Board, world: World) -> int:
    """Print the verdict and the longest times, and perhaps a warning; return the exit code."""
    hosts = {description["host"] for description in board.get_all("description").values()}
    times_of_ranks = board.get_all("times").values()
    max_seconds = {
        name: max(times[name] for times in times_of_ranks) for name in ("all-reduce", "broadcast")
    }
    durations = ", ".join(
        f"{name} {1000 * seconds:.2f} ms" for name, seconds in max_seconds.items()
    )
    sys.stdout.write(
        f"preflight: OK: {counted(world.world_size, 'rank')} on {', '.join(sorted(hosts))}; "
        f"{options.message_mb} MiB: {durations}.\n"
    )
    if len(hosts) > 1:
        warning = describe_slow_link(options.message_mb, max_seconds["broadcast"])
        if warning:
            sys.stdout.flush()
            sys.stderr.write(f"preflight: warning: {warning}\n")
    return 0


def describe_slow_link(message_mb: int, seconds: float) -> str:
    """Describe a link between hosts that is too slow for most training; empty if it is not.

    Args:
        message_mb: Size of a message in MiB.
        seconds: Time to send it to all hosts.
    """
    gbit_per_second = message_mb * 2**23 / 1e9 / seconds
    if gbit_per_second >= _MIN_GBIT_PER_SECOND:
        return ""
    return (
        f"The link between the hosts is slow: {message_mb} MiB take {seconds:.2g} s, which is "
        f"{gbit_per_second:.2g} Gbit/s. Choose a faster interface by NCCL_SOCKET_IFNAME "
        "(GLOO_SOCKET_IFNAME without GPUs), or train with --data_parallel diloco."
    )


def _print_error(sentence: str) -> int:
    sys.stdout.flush()
    sys.stderr.write(f"preflight: {sentence}\n")
    return 1


def run() -> NoReturn:
    """Run the program and end the process, even if a thread hangs in a collective."""
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
