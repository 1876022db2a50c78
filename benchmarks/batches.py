"""Measure the reading of batches: tokens per CPU-second, far samples, waiting for data."""

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure import Case, Usage, interleave, median, run
from benchmarks.preparation import PEERS, Peers
from benchmarks.report import Goal, Section, at_least, at_most, program_table, spread

_ROOT = str(Path(__file__).parent.parent)
_GATHER = "llm, gather only"
_LOADER = "llm, the training loader"
_NANOGPT = "nanoGPT's get_batch"
_FAR = "sample 10^9 of a file of 10^12 tokens"
_MEGATRON = "Megatron-LM GPTDataset + DataLoader"


def _ours(name: str, task: str, prefix: Path, folder: Path, *options: str) -> Case:
    command = [sys.executable, "-m", "benchmarks.our_batches", task, "--prefix", str(prefix)]
    return Case(
        name=name,
        command=[*command, *options],
        folder=folder / task,
        environment={"PYTHONPATH": _ROOT},
    )


def write_tokens(prefix: Path, num_tokens: int, work_dir: Path) -> None:
    """Write a uint16 token file of random ids.

    Raises:
        CaseFailed: The disk is full, for example.
    """
    run(_ours("tokens", "write", prefix, work_dir, "--tokens", str(num_tokens)))


def measure_assembly(
    prefix: Path,
    *,
    num_batches: int,
    peers: Peers,
    work_dir: Path,
    repeats: int,
) -> Section:
    """Measure batches of 32 x 1024 tokens from a token file, without the time of imports.

    Args:
        prefix: The token file.
        num_batches: Batches of each run.
        peers: The other programs.
        work_dir: Folder in which the cases write.
        repeats: Runs of each.
    """
    number = ("--batches", str(num_batches))
    cases = [
        _ours(_GATHER, "gather", prefix, work_dir, *number),
        _ours(_LOADER, "load", prefix, work_dir, *number),
    ]
    given = ["--prefix", str(prefix), *number]
    if peers.nanogpt:
        command = [peers.python, str(PEERS / "nanogpt_batches.py"), *given]
        cases.append(Case(name=_NANOGPT, command=command, folder=work_dir / "nanogpt_batches"))
    for workers in (0, 2) if peers.megatron is not None else ():
        # Every run builds the index again, since the case's folder is emptied before it.
        folder = work_dir / f"megatron_batches_{workers}"
        command = [peers.python, str(PEERS / "megatron_batches.py"), *given]
        command += ["--num_workers", str(workers), "--cache_dir", str(folder / "cache")]
        environment = {"PYTHONPATH": str(peers.megatron)}
        name = f"{_MEGATRON}, {workers} workers"
        cases.append(Case(name=name, command=command, folder=folder, environment=environment))
    results = interleave(cases, repeats)

    def cells(_: str, runs: Sequence[Usage]) -> Sequence[str]:
        setup = "setup_cpu_seconds" in runs[0].reported
        return (
            f"{_speed(runs):.1f}",
            f"{_speed(runs, with_setup=True):.1f}",
            spread(runs, "cpu_seconds"),
            spread(runs, "wall_seconds"),
            spread(runs, "setup_cpu_seconds", 3) if setup else "",
        )

    header = ("Reader", "M tokens per CPU-s", "set-up included", "CPU s", "wall s", "set-up CPU s")
    explained = (
        f"{num_batches:,} batches of 32 x 1024 tokens, uint16 on disk, int64 in the batch. Set-up "
        "is opening the file and, in Megatron-LM, building the index; imports are left out."
    )
    return Section(
        title="Batch assembly",
        lines=[explained, "", *program_table(header, results, cells)],
        goals=_assembly_goals(results),
    )


def _speed(runs: Sequence[Usage], *, with_setup: bool = False) -> float:
    seconds = median(runs, "cpu_seconds")
    if with_setup and "setup_cpu_seconds" in runs[0].reported:
        seconds += median(runs, "setup_cpu_seconds")
    return median(runs, "tokens") / seconds / 1e6


def _assembly_goals(results: dict[str, list[Usage]]) -> list[Goal]:
    goals = []
    for ours in (_GATHER, _LOADER):
        for peer, bound in ((_NANOGPT, 5), (_MEGATRON, 8)):
            # The best of a peer's settings counts.
            theirs = [
                _speed(runs) for name, runs in results.items() if runs and name.startswith(peer)
            ]
            if results[ours] and theirs:
                ratio = _speed(results[ours]) / max(theirs)
                goals.append(at_least(f"tokens per CPU-s, {ours} over {peer}", ratio, bound))
    return goals


def measure_far(work_dir: Path, *, repeats: int) -> Section:
    """Measure opening a sparse file of 10**12 tokens and fetching sample 10**9."""
    case = _ours(_FAR, "far", Path("far"), work_dir)
    results = interleave([case], repeats)
    goals = []
    if runs := results[case.name]:
        milliseconds = median(runs, "open_ms") + median(runs, "fetch_ms")
        goals.append(at_most(f"{_FAR}, opening and fetching", milliseconds, 10, " ms"))
    lines = program_table(
        ("", "opening, ms", "fetching, ms"),
        results,
        lambda _, runs: (spread(runs, "open_ms"), spread(runs, "fetch_ms")),
    )
    return Section(title="Far away", lines=lines, goals=goals)


def measure_waiting(prefix: Path, *, num_steps: int, work_dir: Path, repeats: int) -> Section:
    """Measure how long a loop with steps of 50 ms waits for its batches."""
    cases = []
    for name, flags in (("the step sleeps", ()), ("the step computes", ("--busy",))):
        folder = work_dir / f"wait_{len(flags)}"
        cases.append(_ours(name, "wait", prefix, folder, "--batches", str(num_steps), *flags))
    results = interleave(cases, repeats)
    goals = [
        at_most(f"waiting for data, {name}", 100 * median(runs, "waited_share"), 1, " %")
        for name, runs in results.items()
        if runs
    ]
    lines = program_table(
        (f"{num_steps} steps of 50 ms", "of the time spent waiting"),
        results,
        lambda _, runs: (f"{100 * median(runs, 'waited_share'):.3f} %",),
    )
    return Section(title="Waiting for data", lines=lines, goals=goals)
