"""Compare the data path with Megatron-LM, nanoGPT and run_clm.

python -m benchmarks.data --help; benchmarks/README.md explains how to install the peers.
"""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks import batches, preparation
from benchmarks.corpus import cut, make_corpus
from benchmarks.measure import say
from benchmarks.report import ReportOptions, Section, machine, render, run_benchmark
from llm.config.options import option
from llm.errors import ConfigError

_PACKAGES = ("torch", "numpy", "tokenizers", "transformers", "datasets", "gigatoken", "tiktoken")
Part = Literal["prepare", "start", "assembly", "far", "waiting"]


@dataclass(frozen=True, kw_only=True)
class DataBenchmarkOptions(ReportOptions):
    """Options of the benchmark."""

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
        ("prepare", "start", "assembly", "far", "waiting"),
        "Parts to measure: prepare (text to tokens), start (one line), assembly (batches), far (a "
        "sample of 10^12 tokens), waiting (a training loop).",
        group="Run",
    )
    repeats: int = option(5, "Runs of each program, interleaved.", group="Run", at_least=1)
    batches: int = option(
        2000, "Batches of 32 x 1024 tokens that a run reads.", group="Run", at_least=4
    )


def check(options: DataBenchmarkOptions) -> None:
    """Refuse options that cannot work.

    Raises:
        ConfigError: An option is missing, or a path does not exist.
    """
    if "prepare" in options.only or "start" in options.only:
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
            raise ConfigError(
                f"--megatron {options.megatron} is not a checkout: {tool} is missing."
            )
    if shutil.which(options.peer_python) is None:
        raise ConfigError(f"--peer_python {options.peer_python} cannot be run.")


def measure(options: DataBenchmarkOptions, work_dir: Path) -> list[Section]:
    """Measure all chosen parts.

    Args:
        options: The options.
        work_dir: An existing folder.
    """
    peers = preparation.Peers(
        # Absolute, since cases run in other folders; resolving would leave a virtual environment.
        python=str(Path(shutil.which(options.peer_python) or "").absolute()),
        megatron=None if options.megatron is None else Path(options.megatron).resolve(),
        nanogpt=options.nanogpt,
        run_clm=options.run_clm,
    )
    sections: list[Section] = []
    if "prepare" in options.only or "start" in options.only:
        sections += _measure_preparation(options, peers, work_dir)
    repeats, tokens = options.repeats, work_dir / "tokens"
    if "assembly" in options.only or "waiting" in options.only:
        batches.write_tokens(tokens, options.tokens, work_dir)
    if "assembly" in options.only:
        sections.append(
            batches.measure_assembly(
                tokens,
                num_batches=options.batches,
                peers=peers,
                work_dir=work_dir,
                repeats=repeats,
            )
        )
    if "far" in options.only:
        sections.append(batches.measure_far(work_dir, repeats=repeats))
    if "waiting" in options.only:
        steps = max(4, options.batches // 10)
        sections.append(
            batches.measure_waiting(tokens, num_steps=steps, work_dir=work_dir, repeats=repeats)
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
    # This is also the warm-up: byte code is compiled and libraries are read from the disk.
    line = cut(corpus, work_dir / "line.jsonl", 1e-6)
    sections = []
    repeats = options.repeats if "start" in options.only else 1
    start = preparation.measure_start(programs, line, repeats=repeats)
    if "start" in options.only:
        sections.append(start)
    if "prepare" in options.only:
        for size in options.sizes:
            section = preparation.measure_size(
                programs,
                cut(corpus, work_dir / "input.jsonl", size),
                size,
                with_slow=size <= options.slow_peers_up_to,
                repeats=options.repeats,
            )
            sections.append(section)
    return sections


def report(options: DataBenchmarkOptions, folder: Path) -> str:
    """Measure all chosen parts and return the report."""
    check(options)
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
    return render("Data benchmark", lines, measure(options, folder))


if __name__ == "__main__":
    sys.exit(
        run_benchmark(
            "data", "Compares the data path with other programs.", DataBenchmarkOptions, report
        )
    )
