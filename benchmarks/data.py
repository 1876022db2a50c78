"""Measures the data path beside Megatron-LM, nanoGPT and run_clm.

python -m benchmarks.data --help; benchmarks/README.md says how to get the peers.
"""

import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks import batches, preparation
from benchmarks.corpus import cut, make_corpus
from benchmarks.measure import CaseFailed
from benchmarks.report import Goal, Section, machine, render
from llm.config.command_line import parse
from llm.config.options import option
from llm.errors import ConfigError, LLMError

_PACKAGES = ("torch", "numpy", "tokenizers", "transformers", "datasets", "gigatoken", "tiktoken")
Part = Literal["prepare", "start", "assembly", "far", "waiting"]


@dataclass(frozen=True, kw_only=True)
class DataBenchmarkOptions:
    """What to measure."""

    corpus: str | None = option(
        None, "JSONL file with the key text, to cut the inputs from.", group="Input"
    )
    make_corpus: int | None = option(
        None,
        "Instead of --corpus: MB of source code to gather below the folders of this Python and "
        "/usr/include.",
        group="Input",
        at_least=1,
    )
    sizes: tuple[float, ...] = option(
        (16.0, 300.0),
        "MB of JSONL to prepare; a corpus that is too short is repeated.",
        group="Input",
        above=0,
    )
    vocab_file: str | None = option(None, "GPT-2's vocab.json.", group="Input")
    merges_file: str | None = option(None, "GPT-2's merges.txt.", group="Input")
    tokens: int = option(
        120_000_000,
        "Tokens in the file from which batches are read.",
        group="Input",
        at_least=10_000,
    )
    peer_python: str = option(
        sys.executable, "The Python that runs the other programs.", group="Peers"
    )
    megatron: str | None = option(
        None, "A checkout of Megatron-LM; without it, it is left out.", group="Peers"
    )
    nanogpt: bool = option(
        False, "Also measure nanoGPT's way, with tiktoken and datasets.", group="Peers"
    )
    run_clm: bool = option(
        False, "Also measure run_clm's way, with transformers and datasets.", group="Peers"
    )
    slow_peers_up_to: float = option(
        64.0,
        "MB beyond which preprocess_data, nanoGPT and run_clm are left out; they take minutes "
        "at 300.",
        group="Peers",
        at_least=0,
    )
    only: tuple[Part, ...] = option(
        (),
        "Parts to measure; none means all: prepare (text to tokens), start (one line), assembly "
        "(batches), far (a sample of 10^12 tokens), waiting (a training loop).",
        group="Run",
    )
    repeats: int = option(5, "Runs of each program, interleaved.", group="Run", at_least=1)
    batches: int = option(
        2000, "Batches of 32 x 1024 tokens that a run reads.", group="Run", at_least=4
    )
    work_dir: str | None = option(
        None,
        "Folder for inputs and outputs, some 15 times the largest size; a temporary one if unset.",
        group="Run",
    )
    output: str | None = option(
        None, "File to write the report to, besides printing it.", group="Run"
    )


def check(options: DataBenchmarkOptions) -> None:
    """Refuses what cannot be measured.

    Raises:
        ConfigError: An option is missing, or a path is not there.
    """
    if wanted(options, "prepare") or wanted(options, "start"):
        if (options.corpus is None) == (options.make_corpus is None):
            raise ConfigError("Give one of --corpus FILE and --make_corpus MB.")
        for name in ("vocab_file", "merges_file"):
            path = getattr(options, name)
            if path is None:
                raise ConfigError(f"--{name} is missing: preparation is measured with GPT-2's.")
            if not Path(path).is_file():
                raise ConfigError(f"--{name} {path} does not exist.")
    if options.corpus is not None and not Path(options.corpus).is_file():
        raise ConfigError(f"--corpus {options.corpus} does not exist.")
    if options.megatron is not None:
        tool = Path(options.megatron, "tools", "preprocess_data.py")
        if not tool.is_file():
            raise ConfigError(f"--megatron {options.megatron} is no checkout: {tool} is missing.")
    if shutil.which(options.peer_python) is None:
        raise ConfigError(f"--peer_python {options.peer_python} cannot be run.")
    for name in ("output", "work_dir"):
        path = getattr(options, name)
        folder = None if path is None else Path(path).parent if name == "output" else Path(path)
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--{name} {path} cannot be made: {error.strerror}.") from error


def wanted(options: DataBenchmarkOptions, part: Part) -> bool:
    """Whether a part is to be measured."""
    return not options.only or part in options.only


def measure(options: DataBenchmarkOptions, work_dir: Path) -> list[Section]:
    """All parts that are wanted, one after the other.

    Args:
        options: What to measure.
        work_dir: An existing folder.
    """
    peers = preparation.Peers(
        # Absolute, for other working folders; resolving would lead out of a virtual environment.
        python=str(Path(shutil.which(options.peer_python) or "").absolute()),
        megatron=None if options.megatron is None else Path(options.megatron).resolve(),
        nanogpt=options.nanogpt,
        run_clm=options.run_clm,
    )
    sections: list[Section] = []
    if wanted(options, "prepare") or wanted(options, "start"):
        sections += _measure_preparation(options, peers, work_dir)
    repeats, tokens = options.repeats, work_dir / "tokens"
    if wanted(options, "assembly") or wanted(options, "waiting"):
        batches.write_tokens(tokens, options.tokens, work_dir)
    if wanted(options, "assembly"):
        sections.append(
            batches.measure_assembly(
                tokens,
                num_batches=options.batches,
                peers=peers,
                work_dir=work_dir,
                repeats=repeats,
                say=say,
            )
        )
    if wanted(options, "far"):
        sections.append(batches.measure_far(work_dir, repeats=repeats, say=say))
    if wanted(options, "waiting"):
        steps = max(4, options.batches // 10)
        sections.append(
            batches.measure_waiting(
                tokens, num_steps=steps, work_dir=work_dir, repeats=repeats, say=say
            )
        )
    return sections


def _measure_preparation(
    options: DataBenchmarkOptions, peers: preparation.Peers, work_dir: Path
) -> list[Section]:
    corpus = Path(options.corpus or work_dir / "corpus.jsonl")
    if options.make_corpus is not None:
        say(f"{make_corpus(corpus, options.make_corpus):,} files of source code")
    programs = preparation.Preparation(
        vocab_file=Path(options.vocab_file or "").resolve(),
        merges_file=Path(options.merges_file or "").resolve(),
        tokenizer=work_dir / "gpt2",
        work_dir=work_dir,
        peers=peers,
    )
    programs.make_tokenizer()
    # Also the warm-up: byte code is compiled and libraries are read from the disk.
    line = cut(corpus, work_dir / "line.jsonl", 1e-6)
    sections = []
    repeats = options.repeats if wanted(options, "start") else 1
    start = preparation.measure_start(programs, line, repeats=repeats, say=say)
    if wanted(options, "start"):
        sections.append(start)
    if not wanted(options, "prepare"):
        return sections
    for size in options.sizes:
        piece = cut(corpus, work_dir / "input.jsonl", size)
        section, results = preparation.measure_size(
            programs,
            piece,
            with_slow=size <= options.slow_peers_up_to,
            repeats=options.repeats,
            say=say,
        )
        goals: Sequence[Goal] = preparation.goals_of_size(size, results)
        sections.append(Section(title=section.title, lines=section.lines, goals=goals))
    return sections


def say(message: str) -> None:
    """Tells what has been done, beside the report."""
    print(message, file=sys.stderr, flush=True)


def facts(options: DataBenchmarkOptions) -> list[str]:
    """What was measured, on what, and who was left out."""
    absent = [
        name
        for name, given in (
            ("Megatron-LM (--megatron)", options.megatron),
            ("nanoGPT (--nanogpt)", options.nanogpt),
            ("run_clm (--run_clm)", options.run_clm),
        )
        if not given
    ]
    lines = machine(_PACKAGES)
    lines.append(
        f"Medians of {options.repeats} interleaved runs, smallest and largest in brackets; CPU is "
        "user and system time of all processes, start-up included unless said otherwise"
    )
    if absent:
        lines.append("Left out, as not asked for: " + ", ".join(absent))
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the report as Markdown, and returns 0, or 2 when that is not possible."""
    # So that a run that is cut short ends the program it measures, and removes its files.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        options = parse(
            DataBenchmarkOptions,
            sys.argv[1:] if argv is None else argv,
            prog="python -m benchmarks.data",
            description="Measures the data path beside other programs.",
        )
        check(options)
        described = facts(options)
        folder = None if options.work_dir is None else str(Path(options.work_dir).resolve())
        with tempfile.TemporaryDirectory(prefix="benchmark-", dir=folder) as work_dir:
            report = render("Data benchmark", described, measure(options, Path(work_dir)))
    except (LLMError, CaseFailed) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    print(report)
    if options.output is not None:
        Path(options.output).write_text(report, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
