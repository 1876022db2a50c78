"""Measure preparation: from a JSONL corpus to a file of GPT-2 tokens, by several programs."""

import filecmp
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.corpus import Slice
from benchmarks.measure import Case, CaseFailed, Usage, figures, interleave, median, run
from benchmarks.report import Goal, Section, at_least, at_most, program_table, spread

PEERS = Path(__file__).parent / "peers"

OURS = "llm, 1 worker"
OURS_TWO = "llm, 2 workers"
RAW = "gigatoken alone, texts in memory"
FAST = "Megatron-LM preprocess_data_fast"
MEGATRON = "Megatron-LM preprocess_data"
NANOGPT = "nanoGPT's way (tiktoken)"
RUN_CLM = "run_clm's way"

_PREFIX = "out_text_document"  # of the token files, as Megatron-LM names them


@dataclass(frozen=True, kw_only=True)
class Peers:
    """The other programs.

    Attributes:
        python: The Python that runs them.
        megatron: A checkout of Megatron-LM; None leaves it out.
        nanogpt: Whether to run nanoGPT's way.
        run_clm: Whether to run run_clm's way.
    """

    python: str
    megatron: Path | None
    nanogpt: bool
    run_clm: bool


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """The cases of one run of the benchmark.

    Attributes:
        vocab_file: GPT-2's vocab.json.
        merges_file: GPT-2's merges.txt.
        tokenizer: The folder of the same tokenizer in Hugging Face's format.
        work_dir: The folder in which each case has a folder of its own.
        peers: The other programs.
    """

    vocab_file: Path
    merges_file: Path
    tokenizer: Path
    work_dir: Path
    peers: Peers

    def make_tokenizer(self) -> None:
        """Write the tokenizer's folder.

        Raises:
            CaseFailed: The two files are not GPT-2's.
        """
        arguments = ("--vocab_file", str(self.vocab_file), "--merges_file", str(self.merges_file))
        script = str(PEERS / "make_tokenizer.py")
        out = ("--output_dir", str(self.tokenizer))
        run(self._case("tokenizer", [sys.executable, script, *arguments, *out]))

    def ours(self, corpus: Path, workers: int) -> Case:
        """Return the case of our own program."""
        command = prepare_command(corpus, workers, self.vocab_file, self.merges_file)
        return self._case(OURS if workers == 1 else OURS_TWO, command)

    def raw(self, corpus: Path) -> Case:
        """Return the case of the encoder alone."""
        command = [sys.executable, str(PEERS / "raw_encoder.py"), "--input", str(corpus)]
        return self._case(RAW, [*command, "--tokenizer", str(self.tokenizer)])

    def megatron(self, corpus: Path) -> list[Case]:
        """Return the cases of Megatron-LM's tools, the older one with one and with two workers."""
        if self.peers.megatron is None:
            return []
        shared = ["--input", str(corpus), "--output-prefix", "out", "--append-eod"]
        shared += ["--tokenizer-type", "HuggingFaceTokenizer"]
        shared += ["--tokenizer-model", str(self.tokenizer)]
        tools = self.peers.megatron / "tools"
        environment = {"PYTHONPATH": str(self.peers.megatron), "HF_HUB_OFFLINE": "1"}
        fast = [self.peers.python, str(tools / "preprocess_data_fast.py"), *shared]
        cases = [self._case(FAST, [*fast, "--use-gigatoken"], environment)]
        for workers in (1, 2):
            command = [self.peers.python, str(tools / "preprocess_data.py"), *shared]
            name = f"{MEGATRON}, {workers} worker{'s' if workers > 1 else ''}"
            cases.append(self._case(name, [*command, "--workers", str(workers)], environment))
        return cases

    def others(self, corpus: Path) -> list[Case]:
        """Return nanoGPT's case and those of run_clm, with its default and with one worker."""
        cases = []
        given = ["--input", str(corpus)]
        if self.peers.nanogpt:
            script = str(PEERS / "nanogpt_prepare.py")
            command = [self.peers.python, script, *given, "--vocab_file", str(self.vocab_file)]
            cases.append(self._case(NANOGPT, command))
        if self.peers.run_clm:
            script = str(PEERS / "run_clm_prepare.py")
            command = [self.peers.python, script, *given, "--tokenizer", str(self.tokenizer)]
            cases.append(self._case(f"{RUN_CLM}, no worker given", command))
            one = [*command, "--preprocessing_num_workers", "1"]
            cases.append(self._case(f"{RUN_CLM}, 1 worker", one))
        return cases

    def _case(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> Case:
        folder = self.work_dir / "".join(c if c.isalnum() else "_" for c in name)
        # A cache outside of the case's folder would turn the next run into a look-up.
        caches = {"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
        return Case(
            name=name, command=command, folder=folder, environment={**caches, **(environment or {})}
        )


def prepare_command(corpus: Path, workers: int, vocab_file: Path, merges_file: Path) -> list[str]:
    """Return the command of `llm-trainers prepare` with GPT-2's tokenizer; it writes `out`."""
    command = [sys.executable, "-m", "llm", "prepare", "--input", str(corpus)]
    command += ["--json_key", "text", "--append_eod", "--workers", str(workers)]
    command += ["--vocab_file", str(vocab_file), "--merges_file", str(merges_file)]
    return [*command, "--output_prefix", "out"]


def measure_size(
    preparation: Preparation, corpus: Slice, size: float, *, with_slow: bool, repeats: int
) -> Section:
    """Prepare one corpus with every program, and compare their outputs.

    Args:
        preparation: The cases.
        corpus: The input.
        size: Its size in MB, as it was asked for.
        with_slow: Whether to run programs that need minutes for 300 MB.
        repeats: Runs of each.
    """
    megatron = preparation.megatron(corpus.path)
    slow = [*megatron[1:], *preparation.others(corpus.path)]
    cases = [
        preparation.ours(corpus.path, 1),
        preparation.ours(corpus.path, 2),
        preparation.raw(corpus.path),
        *megatron[:1],
        *(slow if with_slow else []),
    ]
    results = interleave(cases, repeats)
    ours = median(results[OURS], "cpu_seconds") if results[OURS] else float("nan")

    def cells(name: str, runs: Sequence[Usage]) -> Sequence[str]:
        return (
            spread(runs, "cpu_seconds"),
            spread(runs, "wall_seconds"),
            "" if name == RAW else spread(runs, "peak_megabytes", 0),
            f"{median(runs, 'cpu_seconds') / ours:.2f}",
        )

    header = ("Program", "CPU s", "wall s", "peak MB", "CPU, ours = 1")
    lines = [f"Input: {corpus}.", "", *program_table(header, results, cells)]
    if results[RAW]:
        parsing = spread(results[RAW], "parse_cpu_seconds")
        lines += ["", f"Reading the file and parsing its JSON with orjson alone: {parsing} CPU s."]
    if not with_slow and slow:
        lines += ["", "Left out at this size: " + ", ".join(case.name for case in slow) + "."]
    if results[OURS]:
        lines += ["", *_comparisons({c.name: c.folder for c in cases if results[c.name]})]
    return Section(
        title=f"Preparation, {corpus.megabytes:.3g} MB",
        lines=lines,
        goals=goals_of_size(size, results),
    )


def _comparisons(folders: dict[str, Path]) -> list[str]:
    """Return a sentence for each program whose output can be compared with ours."""
    ours = folders[OURS] / _PREFIX
    lines = []
    for name, folder in folders.items():
        if name.startswith((FAST, MEGATRON, OURS_TWO)):
            same = all(
                filecmp.cmp(f"{ours}{suffix}", folder / f"{_PREFIX}{suffix}", shallow=False)
                for suffix in (".bin", ".idx")
            )
            verdict = "are byte for byte ours" if same else "DIFFER from ours"
            lines.append(f"- {name}: `.bin` and `.idx` {verdict}.")
        if name == NANOGPT:
            lines.append(f"- {name}: {_same_documents(Path(f'{ours}.bin'), folder)}.")
    return lines


def _same_documents(ours: Path, folder: Path) -> str:
    command = [sys.executable, "-m", "benchmarks.our_batches", "same", "--prefix", str(ours)]
    command += ["--theirs", str(folder / "train.bin"), str(folder / "val.bin")]
    environment = {"PYTHONPATH": str(Path(__file__).parent.parent)}
    case = Case(name="comparison", command=command, folder=folder / "log", environment=environment)
    try:
        found = run(case).reported
    except CaseFailed as error:
        return f"could not be compared with ours: {error}"
    return f"{found['documents']:,} documents, " + (
        "the same as ours" if found["same"] else "which DIFFER from ours"
    )


def goals_of_size(megabytes: float, results: dict[str, list[Usage]]) -> list[Goal]:
    """Return the goals at 16 MB, where start-up counts, and from 300 MB on, where it does not."""
    if not results[OURS]:
        return []
    ours = median(results[OURS], "cpu_seconds")
    at = f"at {megabytes:.3g} MB"
    goals = []
    small, large = 10 <= megabytes <= 100, megabytes >= 250
    for name, bound in ((MEGATRON, 20), (NANOGPT, 8), (RUN_CLM, 20), (FAST, 2)):
        # The fastest of a program's runs with different workers counts; `FAST` has another name.
        theirs = [
            median(runs, "cpu_seconds")
            for case, runs in results.items()
            if runs and (case == name or case.startswith(f"{name}, "))
        ]
        if theirs and (large if name == FAST else small):
            goals.append(at_least(f"CPU of {name} over ours, {at}", min(theirs) / ours, bound))
    if large and results[RAW]:
        raw = median(results[RAW], "cpu_seconds")
        goals.append(at_most(f"our CPU over that of {RAW}, {at}", ours / raw, 1.3, "x"))
    if large and results[OURS_TWO]:
        speed_up = median(results[OURS], "wall_seconds") / median(results[OURS_TWO], "wall_seconds")
        goals.append(at_least(f"wall clock of one worker over two, {at}", speed_up, 1.6))
    goals.append(
        at_most(f"our peak memory, {at}", max(figures(results[OURS], "peak_megabytes")), 400, " MB")
    )
    return goals


def measure_start(preparation: Preparation, one_line: Slice, *, repeats: int) -> Section:
    """Measure the programs on an input of one short line."""
    cases = [preparation.ours(one_line.path, 1), *preparation.megatron(one_line.path)[:2]]
    results = interleave(cases, repeats)
    goals = []
    if results[OURS]:
        cpu = median(results[OURS], "cpu_seconds")
        goals.append(at_most("our CPU for one line", cpu, 0.7, " s"))
    lines = program_table(
        ("Program", "CPU s", "wall s"),
        results,
        lambda _, runs: (spread(runs, "cpu_seconds"), spread(runs, "wall_seconds")),
    )
    return Section(title="Start-up: an input of one line", lines=lines, goals=goals)
