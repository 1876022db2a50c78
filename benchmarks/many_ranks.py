"""Count files, messages and seconds of a start, a save and a resume on many ranks of one machine.

python -m benchmarks.many_ranks [--ranks 1 4 16] [--layout replicated] [--before FILE.json]

Each rank is a process that trains a tiny GPT-2 over gloo under `strace`, which sees each system
call with a path, of Python, C++ and Rust. Messages are counted where Python calls
torch.distributed or the launcher's store. What C++ sends to form process groups or to average
gradients is not seen. Look at the growth with the number of ranks: the seconds of processes that
share a few cores say little.
"""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.measure import CaseFailed, say
from benchmarks.report import (
    ReportOptions,
    Section,
    machine,
    render,
    run_benchmark,
    table,
)
from benchmarks.shapes import SHAPES, make_inputs
from benchmarks.training import ROOT
from llm.config.options import option
from llm.errors import ConfigError

Figures = Mapping[str, float]
"""The figures of a rank in a phase, by name."""

_PHASES = ("start", "save", "resume")
_STEPS = 4
_MARKS = "/many_ranks/"
_CALL = re.compile(r"(\d+) +[\d.]+ (\w+)\((.*)")
_RESUMED = re.compile(r"(\d+) +[\d.]+ <\.\.\. \w+ resumed>(.*)")
_PATH = re.compile(r'"((?:[^"\\]|\\.)*)"')
_TIMEOUT_SECONDS = 900.0


@dataclass(frozen=True, kw_only=True)
class ManyRanksOptions(ReportOptions):
    """Options of the benchmark."""

    ranks: tuple[int, ...] = option(
        (1, 4, 16), "Numbers of processes; each takes about 0.3 GB of memory.", group="Run"
    )
    layout: Literal["sharded", "replicated"] = option(
        "sharded", "Whether ranks hold shards of the model, or the whole model.", group="Run"
    )
    before: str | None = option(
        None, "Figures of an earlier version, for the same tables.", group="Run"
    )


def report(options: ManyRanksOptions, folder: Path) -> str:
    """Train with each number of ranks, write the figures as JSON, and return the report.

    Raises:
        ConfigError: `strace` is missing, or the file of `--before` cannot be read.
        CaseFailed: A rank ended with an error.
    """
    if shutil.which("strace") is None:
        raise ConfigError("The program strace is missing; install it.")
    earlier = _read_figures(options.before) if options.before else {}
    inputs = _Inputs(folder / "inputs")
    figures = {}
    for num_ranks in options.ranks:
        figures[str(num_ranks)] = _measure(num_ranks, options.layout, inputs, folder)
        say(f"{num_ranks} ranks: done")
        if options.output is not None:
            path = Path(options.output).with_suffix(".json")
            path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    sections = [_section(phase, figures, earlier) for phase in _PHASES]
    facts = [*machine(["torch", "transformers", "safetensors"]), f"layout: {options.layout}"]
    return render("Many ranks", facts, sections)


def _read_figures(path: str) -> dict[str, dict[str, list[Figures]]]:
    try:
        figures: dict[str, dict[str, list[Figures]]] = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--before {path} cannot be read: {error}.") from error
    return figures


class _Inputs:
    """A model's folder with a tokenizer, and token files with a sidecar.

    Args:
        folder: Where to write them.
    """

    def __init__(self, folder: Path) -> None:
        shape = dataclasses.replace(SHAPES["toy"], steps=500)
        text_files = make_inputs(shape, folder)
        self.model, self.data = text_files.model, folder / "data"
        self.data.mkdir()
        self.tokens = self.data / "tokens_text_document"
        command = [
            *(sys.executable, "-m", "llm", "prepare", "--input", str(text_files.text)),
            *("--tokenizer_name", str(self.model), "--text_unit", "line"),
            *("--output_prefix", str(self.data / "tokens")),
        ]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)


def _measure(
    num_ranks: int, layout: str, inputs: _Inputs, folder: Path
) -> dict[str, list[Figures]]:
    """Start, save twice, and resume before the second save; return each rank's figures by phase."""
    run = folder / f"run-{num_ranks}"
    flags = [
        *("--config_name", str(inputs.model), "--tokenizer_name", str(inputs.model)),
        *("--data_path", str(inputs.tokens), "--split", "90,10", "--block_size", "16"),
        *("--per_device_train_batch_size", "1", "--seed", "1", "--logging_steps", "1"),
        *("--max_train_steps", str(_STEPS), "--save_interval", f"{_STEPS // 2}steps"),
        *("--no_async_checkpoint", "--report_to", "none", "--output_dir", str(run)),
    ]
    if layout == "sharded" and num_ranks > 1:
        flags += ["--data_parallel_shard_size", str(num_ranks)]
    started = _train(num_ranks, flags, inputs, run, folder / f"start-{num_ranks}")
    num_files = len([path for path in _checkpoint(run).rglob("*") if path.is_file()])
    shutil.rmtree(_checkpoint(run))  # as if the run had been killed before it
    resumed = _train(
        num_ranks, [*flags, "--resume_from_checkpoint"], inputs, run, folder / f"resume-{num_ranks}"
    )
    shutil.rmtree(run)
    return {
        "start": [phases["start"] for phases in started],
        # The first save of a start also checks that every tensor has a writer.
        "save": [{**phases["save 2"], "checkpoint_files": num_files} for phases in started],
        "resume": [phases["start"] for phases in resumed],
    }


def _checkpoint(run: Path) -> Path:
    """Return the last checkpoint of a run."""
    return run / "checkpoints" / f"step_{_STEPS:08d}"


def _train(
    num_ranks: int, flags: Sequence[str], inputs: _Inputs, run: Path, folder: Path
) -> list[dict[str, Figures]]:
    """Train once; return the figures of each rank by phase.

    Raises:
        CaseFailed: A rank ended with an error.
    """
    folder.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(num_ranks):
        environment = {
            **os.environ,
            **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)},
            **{"LOCAL_WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1"},
            **{"MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"},
        }
        command = [
            *("strace", "-f", "--seccomp-bpf", "-qq", "-ttt", "-s", "400", "-e", "trace=%file"),
            *("-o", str(folder / f"calls-{rank}.txt"), sys.executable, "-m"),
            *("benchmarks.many_ranks_rank", str(folder / f"counts-{rank}.json"), *flags),
        ]
        with (folder / f"log-{rank}.txt").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # strace and the rank
                )
            )
    try:
        codes = [process.wait(_TIMEOUT_SECONDS) for process in processes]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if any(codes):
        rank = next(rank for rank, code in enumerate(codes) if code)
        text = (folder / f"log-{rank}.txt").read_text(errors="replace")
        raise CaseFailed(f"rank {rank} of {num_ranks}: exit code {codes[rank]}: ...{text[-600:]}")
    watched = (str(run), str(inputs.data), str(inputs.model))
    ranks: list[dict[str, Figures]] = []
    for rank in range(num_ranks):
        phases = count_calls(folder / f"calls-{rank}.txt", watched)
        counts = json.loads((folder / f"counts-{rank}.json").read_text())
        ranks.append({phase: {**phases[phase], **counts[phase]} for phase in counts})
    shutil.rmtree(folder)
    return ranks


def count_calls(path: Path, watched: Sequence[str]) -> dict[str, Counter[str]]:
    """Count the system calls of a rank by phase.

    Args:
        path: The output of `strace`.
        watched: The folders of the run, the data and the model.

    Returns:
        By phase: `opened` files and folders below these folders, `written` files of these, other
        `lookups` there (by name alone, or of files that do not exist), and files opened elsewhere:
        `imports` of Python and its libraries, and `others`.
    """
    phases: dict[str, Counter[str]] = {}
    counts: Counter[str] = Counter()
    for call, arguments in _read_calls(path):
        match = _PATH.search(arguments)
        name = match[1] if match else ""
        if name.startswith(_MARKS):
            counts = phases.setdefault(name.removeprefix(_MARKS), Counter())
            continue
        is_opened = call in ("open", "openat", "creat") and not re.search(r"= -1 E\w+", arguments)
        if any(name == folder or name.startswith(f"{folder}/") for folder in watched):
            counts["opened" if is_opened else "lookups"] += 1
            counts["written"] += is_opened and re.search(r"O_WRONLY|O_RDWR", arguments) is not None
        elif is_opened:
            is_system = name.startswith(("/proc", "/sys", "/dev", "/etc"))
            counts["others" if is_system else "imports"] += 1
    # What comes before the first mark are the imports of the program.
    return phases


def _read_calls(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the rest of each system call; a call that was interrupted is joined."""
    unfinished: dict[str, tuple[str, str]] = {}
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if match := _CALL.match(line):
                process, call, rest = match.groups()
                if rest.endswith("<unfinished ...>"):
                    unfinished[process] = call, rest
                else:
                    yield call, rest
            elif (match := _RESUMED.match(line)) and match[1] in unfinished:
                call, rest = unfinished.pop(match[1])
                yield call, rest + match[2]


_COLUMNS = {
    "opened": "files opened",
    "lookups": "other lookups",
    "collectives": "collectives",
    "collective_bytes": "their bytes",
    "store_calls": "store calls",
    "store_bytes": "their bytes",
    "seconds": "seconds",
}


def _section(
    phase: str,
    figures: Mapping[str, Mapping[str, Sequence[Figures]]],
    earlier: Mapping[str, Mapping[str, Sequence[Figures]]],
) -> Section:
    """Return the table of a phase: the median rank, and what all ranks open together."""
    total = "checkpoint_files" if phase == "save" else "imports"
    rows = []
    for ranks in figures:
        for label, version in ((f"{ranks}, before", earlier), (ranks, figures)):
            if ranks not in version:
                continue
            entries = version[ranks][phase]
            medians = [
                f"{statistics.median(entry.get(name, 0) for entry in entries):,.0f}"
                if name != "seconds"
                else f"{statistics.median(entry[name] for entry in entries):.2f}"
                for name in _COLUMNS
            ]
            opened = sum(entry.get("opened", 0) for entry in entries)
            rows.append([label, f"{opened:,}", *medians, f"{entries[-1].get(total, 0):,}"])
    last = "files of the checkpoint" if phase == "save" else "files of Python"
    header = ["ranks", "files opened by all", *_COLUMNS.values(), last]
    return Section(title=f"Each {phase}, median rank", lines=table(header, rows))


if __name__ == "__main__":
    sys.exit(
        run_benchmark(
            "many_ranks",
            "Counts files and messages of a start, a save and a resume on many ranks.",
            ManyRanksOptions,
            report,
        )
    )
