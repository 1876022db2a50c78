"""Measure what preparation on many nodes costs: the join, each shard, each way to run it.

python -m benchmarks.large_corpus --tokenizer_name FOLDER --megabytes 200
"""

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.corpus import cut, make_corpus
from benchmarks.measure import Case, Usage, interleave, median
from benchmarks.report import (
    ReportOptions,
    Section,
    at_most,
    machine,
    program_table,
    render,
    run_benchmark,
    spread,
    table,
)
from llm.config.options import option

# SHARD_BYTES or 0, workers of Dask or 0, a short text, and the words of `prepare`. Dask's workers
# prepare the short text first: the cluster runs and has the tokenizer when time is taken.
_SCRIPT = """
import json, os, resource, sys, time
import llm.data.workers
from llm.prepare import prepare_files
from llm.prepare.prepare import main
times = {}
workers_seconds = lambda: 0.0
def timed(name):
    inner = getattr(prepare_files, name)
    def call(*how, **options):
        before, cpu_before = time.perf_counter(), sum(os.times()[:4]) + workers_seconds()
        try:
            return inner(*how, **options)
        finally:
            times[name] = time.perf_counter() - before
            times[name + "_cpu"] = sum(os.times()[:4]) + workers_seconds() - cpu_before
    setattr(prepare_files, name, call)
if __name__ == "__main__":
    shard_bytes, workers = map(int, sys.argv[1:3])
    timed("tokenize_shards")
    timed("assemble_output")
    llm.data.workers.num_cores = lambda: 64  # as many processes as asked for
    prepare_files.SHARD_BYTES = shard_bytes or prepare_files.SHARD_BYTES
    prepare_files._MAX_SHARDS = 1 << 20
    warm_up, words = sys.argv[3], sys.argv[4:]
    if workers:
        # Set as in examples/slurm/prepare_dask.sh; Dask reads them when it is imported.
        os.environ["DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED"] = "False"
        os.environ["DASK_DISTRIBUTED__ADMIN__TICK__INTERVAL"] = "1s"
        from distributed import Client, LocalCluster
        cluster = LocalCluster(
            n_workers=workers, threads_per_worker=1, memory_limit=0, dashboard_address=None
        )
        os.environ["DASK_SCHEDULER_ADDRESS"] = cluster.scheduler_address
        at, to = words.index("--input") + 1, words.index("--output_prefix") + 1
        shorter = [*words[:at], warm_up, *words[at + 1 : to], "warm-up", *words[to + 1 :]]
        prepare_files.SHARD_BYTES, kept = 1000, prepare_files.SHARD_BYTES
        assert main(shorter) == 0
        prepare_files.SHARD_BYTES = kept
        client = Client(cluster.scheduler_address, set_as_default=False)
        workers_seconds = lambda: sum(client.run(time.process_time).values())
    code = main(words)
    if workers:
        client.close()
        cluster.close()
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e6
    print(json.dumps({**times, "worker_megabytes": peak}))
    sys.exit(code)
"""


@dataclass(frozen=True, kw_only=True)
class LargeCorpusOptions(ReportOptions):
    """Options of the benchmark."""

    tokenizer_name: str = option("gpt2", "The tokenizer.", group="Input")
    megabytes: float = option(200.0, "MB of JSONL to prepare.", group="Input", above=0)
    shards: int = option(10_000, "Shards of one line each.", group="Input", at_least=10)
    workers: int = option(4, "Processes, and workers of Dask.", group="Run", at_least=1)
    repeats: int = option(3, "Runs of each program, interleaved.", group="Run", at_least=1)


@dataclass(frozen=True, kw_only=True)
class _Program:
    """Cases of `llm-trainers prepare`."""

    options: LargeCorpusOptions
    folder: Path

    def processes(self, name: str, corpus: Path, *, workers: int, shard_bytes: int = 0) -> Case:
        """Return a case on processes; it reports the times of its phases."""
        arguments = [*self._input_arguments(corpus), "--workers", str(workers)]
        return self._make_case(name, [str(shard_bytes), "0", *arguments])

    def dask(self, name: str, corpus: Path, *, workers: int, shard_bytes: int = 0) -> Case:
        """Return a case on a cluster of this machine, with the same report."""
        arguments = [*self._input_arguments(corpus), "--executor", "dask"]
        return self._make_case(name, [str(shard_bytes), str(workers), *arguments])

    def _input_arguments(self, corpus: Path) -> list[str]:
        tokenizer = self.options.tokenizer_name
        if os.path.exists(tokenizer):  # the cases run in other folders
            tokenizer = os.path.abspath(tokenizer)
        arguments = ["--input", str(corpus), "--tokenizer_name", tokenizer]
        return [*arguments, "--output_prefix", "out"]

    def _make_case(self, name: str, arguments: Sequence[str]) -> Case:
        script = self.folder / "prepare.py"
        script.write_text(_SCRIPT)
        warm_up = self.folder / "warm-up.jsonl"
        warm_up.write_text('{"text": "some words to begin with"}\n' * 400)
        root = str(Path(__file__).parent.parent)
        folder = self.folder / "".join(
            character if character.isalnum() else "_" for character in name
        )
        return Case(
            name=name,
            command=[sys.executable, str(script), *arguments[:2], str(warm_up), *arguments[2:]],
            folder=folder,
            environment={"PYTHONPATH": root},
        )


def _join_section(usage: Usage, folder: Path, megabytes: float) -> Section:
    """Measure the cost of joining the shards, compared with encoding them."""
    prefix = folder / "out_text_document"
    output_megabytes = (
        sum(Path(f"{prefix}.{suffix}").stat().st_size for suffix in ("bin", "idx")) / 1e6
    )
    token_megabytes = Path(f"{prefix}.bin").stat().st_size / 1e6
    encode_seconds, join_seconds = (
        usage.reported[name] for name in ("tokenize_shards", "assemble_output")
    )
    gigabytes = megabytes / 1e3
    share = join_seconds / (join_seconds + encode_seconds)
    rows = [
        (
            "encode on 1 core",
            f"{encode_seconds:.2f}",
            f"{encode_seconds / gigabytes:.1f}",
            f"{megabytes:,.0f}",
            f"{token_megabytes:,.0f}",
        ),
        (
            "join",
            f"{join_seconds:.2f}",
            f"{join_seconds / gigabytes:.2f}",
            f"{token_megabytes + output_megabytes:,.0f}",
            f"{output_megabytes:,.0f}",
        ),
    ]
    header = ("Phase", "s", "s per GB of text", "MB read", "MB written")
    lines = table(header, rows)
    lines += [
        "",
        f"The join takes {share:.1%} of the time with one core. It reads the shards, writes the "
        "result, and reads it for the checksums. Encoding is divided by the number of cores; the "
        "join runs on one core of one node.",
    ]
    return Section(title=f"Join, {megabytes:,.0f} MB of text", lines=lines, goals=[])


def _executors_section(program: _Program, corpus: Path) -> tuple[Section, Usage, Path]:
    """Processes and Dask on the same text."""
    num_workers = program.options.workers
    processes, one_process = f"--workers {num_workers}", "--workers 1"
    dask_name = f"--executor dask, {num_workers} workers"
    cases = [
        program.processes(one_process, corpus, workers=1),
        program.processes(processes, corpus, workers=num_workers),
        program.dask(dask_name, corpus, workers=num_workers),
    ]
    results = interleave(cases, program.options.repeats)

    def cells(name: str, runs: Sequence[Usage]) -> Sequence[str]:
        phases = ("tokenize_shards", "tokenize_shards_cpu", "assemble_output")
        return [spread(runs, phase) for phase in phases]

    lines = program_table(("Way", "encode s", "encode CPU s", "join s"), results, cells)
    lines += ["", "Dask's cluster runs before, and its workers have encoded a short text."]
    has_equal_files = all(
        (cases[0].folder / f"out_text_document.{kind}").read_bytes()
        == (case.folder / f"out_text_document.{kind}").read_bytes()
        for case in cases[1:]
        for kind in ("bin", "idx")
    )
    lines += [
        "",
        f"The files {'are the same byte for byte' if has_equal_files else 'DIFFER'}.",
    ]
    goals = []
    if results[processes] and results[dask_name]:
        for phase, time_name in (("tokenize_shards", "time"), ("tokenize_shards_cpu", "CPU time")):
            ratio = median(results[dask_name], phase) / median(results[processes], phase)
            goals.append(
                at_most(f"{time_name} of Dask over --workers {num_workers}", ratio, 1.05, "x")
            )
    fastest = min(results[one_process], key=lambda usage: usage.reported["tokenize_shards"])
    return Section(title="Processes and Dask", lines=lines, goals=goals), fastest, cases[0].folder


def _shards_section(program: _Program, folder: Path) -> Section:
    """What a shard costs, by ten thousand shards of a line and by one shard of all lines."""
    num_shards = program.options.shards
    line = '{"text": "a short line"}\n'
    corpus = folder / "lines.jsonl"
    corpus.write_text(line * num_shards)
    cases = [
        program.processes("one shard", corpus, workers=1),
        program.processes(f"{num_shards:,} shards", corpus, workers=1, shard_bytes=len(line)),
        program.dask("Dask, one shard", corpus, workers=1),
        program.dask(f"Dask, {num_shards:,} shards", corpus, workers=1, shard_bytes=len(line)),
    ]
    results = interleave(cases, 1)
    lines = program_table(
        ("Case", "encode s", "encode CPU s", "join s", "join CPU s"),
        results,
        lambda _, runs: [
            spread(runs, f"{phase}{suffix}")
            for phase in ("tokenize_shards", "assemble_output")
            for suffix in ("", "_cpu")
        ],
    )
    goals = []
    for one_shard, many_shards, executor in (
        (cases[0], cases[1], "a process"),
        (cases[2], cases[3], "Dask"),
    ):
        if results[one_shard.name] and results[many_shards.name]:
            phases = ("tokenize_shards", "assemble_output")
            seconds = sum(median(results[many_shards.name], phase) for phase in phases)
            seconds -= sum(median(results[one_shard.name], phase) for phase in phases)
            goals.append(
                at_most(
                    f"a shard's overhead with {executor}", 1e3 * seconds / num_shards, 10, " ms"
                )
            )
    return Section(title=f"Overhead of {num_shards:,} shards", lines=lines, goals=goals)


def _memory_section(program: _Program, corpus: Path, folder: Path) -> Section:
    """The peak memory of a worker for a text, and for four times as much."""
    large_corpus = folder / "large.jsonl"
    with open(large_corpus, "wb") as file:
        for _ in range(4):
            with open(corpus, "rb") as text:
                shutil.copyfileobj(text, file)
    cases = [
        program.processes("the text", corpus, workers=2, shard_bytes=1 << 23),
        program.processes("four times the text", large_corpus, workers=2, shard_bytes=1 << 23),
    ]
    results = interleave(cases, 1)
    lines = program_table(
        ("Case", "peak MB of a worker"),
        results,
        lambda _, runs: (spread(runs, "worker_megabytes", 0),),
    )
    goals = []
    if all(results.values()):
        small_peak, large_peak = (median(results[case.name], "worker_megabytes") for case in cases)
        goals.append(
            at_most("memory of a worker for four times the text", large_peak / small_peak, 1.1, "x")
        )
    return Section(title="Memory of a worker, shards of 8 MiB", lines=lines, goals=goals)


def measure(options: LargeCorpusOptions, folder: Path) -> str:
    """Measure everything; return the report."""
    full_corpus, corpus = folder / "whole.jsonl", folder / "corpus.jsonl"
    make_corpus(full_corpus, int(options.megabytes))
    cut_corpus = cut(full_corpus, corpus, options.megabytes)
    full_corpus.unlink()
    program = _Program(options=options, folder=folder)
    executors_section, fastest_usage, output_folder = _executors_section(program, corpus)
    sections = [
        executors_section,
        _join_section(fastest_usage, output_folder, cut_corpus.megabytes),
        _shards_section(program, folder),
        _memory_section(program, corpus, folder),
    ]
    facts = [f"Input: {cut_corpus}", *machine(["numpy", "gigatoken", "tokenizers", "distributed"])]
    return render("Preparation of a large corpus", facts, sections)


if __name__ == "__main__":
    sys.exit(run_benchmark("large_corpus", __doc__ or "", LargeCorpusOptions, measure))
