"""From a step of a run to its text, by `llm-trainers inspect RUN --step N`."""

import ctypes
import json
import mmap
import re
import shutil
import sys

import numpy as np
import pytest

from llm.config.duration import Duration
from llm.config.toml import to_toml
from llm.data.formats.megatron import TokenFile, write_index
from llm.errors import CheckpointError, DataError
from llm.tools.inspect import main
from llm.trainers.gpt.extensions import GPTConfig
from llm.trainers.gpt.step_samples import find_step_samples, split_into_passages
from tests.support.loaded_samples import tokens_of, train_and_note
from tests.support.ranks import run_ranks, values
from tests.support.token_files import random_documents, write_flat, write_pair
from tests.support.training import Bench, write_model_folder


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    bench = Bench(tmp_path_factory.mktemp("bench"), lines=2)
    write_pair(bench.folder / "wiki", random_documents(60, seed=1))
    write_pair(bench.folder / "code", random_documents(40, seed=2, first_id=150))
    return bench


def blend(bench: Bench) -> dict[str, object]:
    words = ["0.7", bench.folder / "wiki", "0.3", bench.folder / "code"]
    return {"train_file": None, "data_path": words, "split": "90,10,0"}


LAYOUTS = {
    "two ranks, two micro-batches, a short last step": (
        2,
        2,
        {"gradient_accumulation_steps": 2, "max_train_samples": 50, "max_train_steps": None},
    ),
    "two ranks of one sample each": (2, 1, {"tensor_parallel_size": 2, "max_train_steps": 3}),
}


@pytest.mark.parametrize(
    "name",
    [
        "two ranks, two micro-batches, a short last step",
        pytest.param("two ranks of one sample each", marks=pytest.mark.extended),
    ],
)
def test_the_tokens_of_every_step_and_rank_are_found(bench, name):
    ranks, data_ranks, options = LAYOUTS[name]
    options = {**options, "skip_samples": "3:6,20:21"}
    argv = bench.command(f"layout-{ranks}-{data_ranks}", **blend(bench), **options)
    outcomes = values(run_ranks(train_and_note, ranks, argv))

    run = bench.folder / f"layout-{ranks}-{data_ranks}"
    assert [code for code, _ in outcomes] == [0] * ranks
    for rank, (_, steps) in enumerate(outcomes):
        for step, windows in steps.items():
            found = find_step_samples(run, step, rank=rank % data_ranks, data_ranks=None)
            assert (found.total_steps, found.data_ranks) == (len(steps), data_ranks)
            assert tokens_of(found) == windows
    whole = find_step_samples(run, 1, rank=None, data_ranks=None)
    assert whole.samples.tolist()[:4] == [0, 1, 2, 6]


def test_a_step_is_shown_with_its_documents_as_text(bench, capsys):
    bench.train_well("shown", **blend(bench), max_train_steps=4)
    run = bench.folder / "shown"

    assert main([str(run), "--step", "3", "--tokens", "5"]) == 0

    lines = capsys.readouterr().out.splitlines()
    found = find_step_samples(run, 3, rank=None, data_ranks=None)
    assert lines[1] == "step              3 of 4"
    assert lines[2:4] == ["samples           4", "data ranks        1"]
    assert [line for line in lines if line.startswith("sample ")] == [
        f"sample {number}, source {('wiki', 'code')[source]}"
        for number, source in zip([8, 9, 10, 11], found.sources.tolist(), strict=True)
    ]
    source = found.corpus[found.sources[0]].stream
    first = next(split_into_passages(source, int(found.starts[0]), 33))
    stop = first.offset + first.tokens.size - 1
    at = lines.index("sample 8, source wiki" if found.sources[0] == 0 else "sample 8, source code")
    assert lines[at + 1] == (
        f"document {first.document}, tokens {first.offset} to {stop} of {first.length}"
    )
    text = found.tokenizer.decode(first.tokens[:5].tolist(), clean_up_tokenization_spaces=False)
    assert lines[at + 2].startswith(repr(text))


def test_a_resume_on_other_ranks_shows_the_steps_of_each_start(bench):
    """The global batch is kept, and each start has the ranks that it had."""
    options = {**blend(bench), "checkpointing_steps": 2, "lr_scheduler_type": "constant"}
    bench.train_well("moved", ranks=2, max_train_steps=2, **options)
    bench.train_well("moved", max_train_steps=4, resume_from_checkpoint=True, **options)

    first = find_step_samples(bench.folder / "moved", 2, rank=1, data_ranks=None)
    second = find_step_samples(bench.folder / "moved", 3, rank=0, data_ranks=None)

    assert (first.data_ranks, first.samples.tolist()) == (2, [12, 13, 14, 15])
    assert (second.data_ranks, second.samples.tolist()) == (1, [*range(16, 24)])
    asked = find_step_samples(bench.folder / "moved", 3, rank=1, data_ranks=2)
    assert asked.samples.tolist() == [20, 21, 22, 23]


def test_the_steps_before_a_branch_have_the_ranks_of_its_parent(bench):
    options = {**blend(bench), "checkpointing_steps": 2, "global_batch_size": 8}
    parent = bench.train_well("parent", ranks=2, max_train_steps=2, **options)
    run = bench.train_well("branch", branch_from=parent.folder, max_train_steps=4, **options)

    def ranks_of(step: int) -> int:
        return find_step_samples(run.folder, step, rank=0, data_ranks=None).data_ranks

    assert [ranks_of(step) for step in (1, 2, 3, 4)] == [2, 2, 1, 1]
    shutil.rmtree(parent.folder)
    assert ranks_of(3) == 1


@pytest.fixture(scope="module")
def short_run(bench):
    bench.train_well("short", **blend(bench), max_train_steps=2)
    return bench.folder / "short"


def test_without_the_events_the_order_of_samples_is_not_known(short_run, tmp_path):
    run = shutil.copytree(short_run, tmp_path / "silent")
    (run / "events.jsonl").unlink()

    with pytest.raises(DataError, match=r"events\.jsonl records no start of the run"):
        find_step_samples(run, 2, rank=None, data_ranks=None)


@pytest.mark.parametrize(
    ("name", "value"),
    [("block_size", -1), ("data_ranks", 0), ("total_samples", 10**400), ("step", None)],
    ids=str,
)
def test_a_start_with_values_that_no_run_records_is_damaged(short_run, tmp_path, name, value):
    run = shutil.copytree(short_run, tmp_path / "odd")
    start, *lines = (run / "events.jsonl").read_text().splitlines()
    odd = json.dumps({**json.loads(start), name: value})
    (run / "events.jsonl").write_text("\n".join([odd, *lines]))

    with pytest.raises(DataError, match=rf"events\.jsonl is damaged: a start has the {name} "):
        find_step_samples(run, 2, rank=None, data_ranks=None)


def test_a_flat_file_is_shown_without_documents(bench, capsys):
    write_flat(bench.folder / "train.bin", [token % 250 + 1 for token in range(2000)])
    bench.train_well(
        "flat", train_file=None, train_data_path=[bench.folder / "train.bin"], max_train_steps=2
    )

    assert main([str(bench.folder / "flat"), "--step", "1"]) == 0

    output = capsys.readouterr().out
    assert re.search(r"^the file, tokens [\d,]+ to [\d,]+ of 2,000$", output, re.MULTILINE)
    assert "Flat token files do not say where documents begin: train.bin." in output


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--step", "3"], "--step 3 is beyond the run, which has 2 steps."),
        (["--step", "0"], "--step must be at least 1, not 0."),
        (["--step", "2", "--rank", "1"], "--rank 1 does not exist: step 2 has 1 data-parallel"),
        (["--step", "2", "--rank", "-1"], "--rank must be at least 0, not -1."),
        (["--rank", "0"], "--rank needs --step"),
        (["--documents", "1"], "short is the folder of a run: name one of its steps by --step."),
        (["--step", "2", "--data_ranks", "2"], "--data_ranks needs --rank"),
        (["--step", "2", "--verify"], "--verify is for token files and --step for a run"),
    ],
)
def test_a_step_or_rank_that_is_none_is_refused(short_run, capsys, words, sentence):
    assert main([str(short_run), *words]) == 2
    assert sentence in capsys.readouterr().err


def test_a_run_that_is_not_there_is_refused(tmp_path, capsys):
    assert main([str(tmp_path / "nowhere"), "--step", "1"]) == 2
    assert "nowhere is not a folder; name the --output_dir of a run." in capsys.readouterr().err


def test_token_files_that_have_gone_or_changed_are_refused(bench, capsys):
    for suffix in ("bin", "idx"):
        shutil.copy(bench.folder / f"wiki.{suffix}", bench.folder / f"passing.{suffix}")
    prefix = bench.folder / "passing"
    bench.train_well("passing-run", train_file=None, train_data_path=[prefix], max_train_steps=2)
    argv = [str(bench.folder / "passing-run"), "--step", "1"]

    write_pair(prefix, random_documents(60, seed=7))
    assert main(argv) == 2
    assert "names are no longer those that step 1 was trained on" in capsys.readouterr().err
    prefix.with_suffix(".bin").unlink()
    assert main(argv) == 2
    assert "passing.bin cannot be read" in capsys.readouterr().err


def pages_in_memory(path) -> int:
    """Pages of a file that the system has read, or that another process has written."""
    libc = ctypes.CDLL(None, use_errno=True)
    data = TokenFile(path.with_suffix("")).tokens
    size = -(-data.nbytes // mmap.PAGESIZE)
    resident = np.zeros(size, np.uint8)
    address = ctypes.c_void_p(data.ctypes.data)
    vector = ctypes.c_void_p(resident.ctypes.data)
    assert libc.mincore(address, ctypes.c_size_t(data.nbytes), vector) == 0
    return int((resident & 1).sum())


@pytest.mark.skipif(sys.platform != "linux", reason="mincore and sparse files of Linux")
def test_of_a_hundred_gigabytes_only_samples_and_a_few_places_are_read(
    tmp_path, capsys, monkeypatch
):
    documents, length = 100_000, 500_000
    (tmp_path / "vast.bin").touch()
    with (tmp_path / "vast.bin").open("r+b") as file:
        file.truncate(2 * documents * length)
    with (tmp_path / "vast.idx").open("wb") as idx:
        write_index(
            idx,
            np.dtype("<u2"),
            num_sequences=documents,
            num_documents=documents,
            lengths=lambda: iter([np.full(documents, length)]),
            documents=[np.arange(documents + 1)],
        )
    run = tmp_path / "run"
    run.mkdir()
    config = GPTConfig(
        model_name_or_path=str(write_model_folder(tmp_path / "model")),
        train_data_path=(str(tmp_path / "vast"),),
        block_size=32,
        max_duration=Duration(f"{10**8} steps"),
        seed=1,
    )
    (run / "config.toml").write_text(to_toml(config))
    start = {"event": "start", "step": 0, "data_ranks": 1, "data": {}, "total_samples": 8 * 10**8}
    start |= {"seed": 1, "block_size": 32, "per_device_train_batch_size": 8}
    start |= {"global_batch_size": 8}
    (run / "events.jsonl").write_text(json.dumps(start) + "\n")
    monkeypatch.setattr(
        "llm.trainers.gpt.step_samples.data_has_changed", lambda recorded, present: False
    )

    assert main([str(run), "--step", "87654321"]) == 0

    output = capsys.readouterr().out
    assert output.count("\nsample ") == 8
    found = re.findall(r"^document ([\d,]+), tokens ([\d,]+) to", output, re.MULTILINE)
    numbers = [(int(a.replace(",", "")), int(b.replace(",", ""))) for a, b in found]
    starts = find_step_samples(run, 87654321, rank=None, data_ranks=None).starts.tolist()
    assert {divmod(start, length) for start in starts} <= set(numbers)
    # 8 samples, both ends and 64 places, around some of which the system may read some megabytes.
    assert pages_in_memory(tmp_path / "vast.bin") < 20_000  # of 24 million


def test_data_in_another_order_between_equal_ends_are_refused(bench, capsys):
    prefix, documents = bench.folder / "ordered", random_documents(10_000, seed=3)
    write_pair(prefix, documents)
    options = {"train_file": None, "train_data_path": [prefix], "max_train_steps": 2}
    run = bench.train_well("ordered-run", checkpointing_steps=1, **options)
    argv = [str(run.folder), "--step", "1"]
    assert main(argv) == 0

    middle = documents[4_000:6_000]
    write_pair(prefix, [*documents[:4_000], *middle[1_000:], *middle[:1_000], *documents[6_000:]])

    assert main(argv) == 2
    assert "names are no longer those that step 1 was trained on" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="The training data have changed since"):
        bench.read("ordered-run", resume_from_checkpoint=True, **options)
