"""Several ranks at one output, which share nothing but its folder."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llm.errors import ConfigError, DataError
from llm.prepare import prepare_files, shares
from llm.prepare.output_files import Output
from llm.prepare.prepare import main
from llm.prepare.shards import require_reference
from llm.prepare.shares import Share, acquire_join, find_share
from llm.prepare.verification import find_token_file_faults
from llm.runtime.claims import Claim
from tests.support.processes import wait_until
from tests.support.texts import (
    THREE,
    FailingSource,
    ListSource,
    ReadSource,
    content,
    expected_pair,
    json_lines,
    names,
    pair,
    prepare,
    prepare_all,
    write,
)

FORK = multiprocessing.get_context("fork")
TEXTS = [f"document {number}: " + "the dog sleeps, " * (number % 9) for number in range(44)]
GOOD = ["--input", "a.jsonl", "--tokenizer_name", "tokenizer", "--output_prefix", "out"]

pytestmark = pytest.mark.usefixtures("fresh_reads")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    """The tests themselves may run in a job."""
    for name in [
        name for name in os.environ if name.startswith(("SLURM_", "PMI_", "PALS_", "PBS_"))
    ]:
        monkeypatch.delenv(name)


def sources(count=5):
    return [ReadSource([f"text {number}", "b"], name=f"{number}") for number in range(count)]


def prepare_rank(prefix, rank, world_size, texts=None, **options):
    prepare(prefix, texts or sources(), share=Share(rank=rank, world_size=world_size), **options)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_any_number_of_ranks_makes_the_same_files(tmp_path, world_size, workers):
    prepare(tmp_path / "expected" / "wiki", sources())
    ReadSource.reads.clear()

    for rank in reversed(range(world_size)):
        assert not (tmp_path / "made" / "wiki.bin").exists()
        prepare_rank(tmp_path / "made" / "wiki", rank, world_size, workers=workers)

    assert content(tmp_path / "made") == content(tmp_path / "expected")
    if workers == 1:  # otherwise other processes read
        assert sorted(ReadSource.reads) == ["0", "1", "2", "3", "4"]


def test_small_outputs_have_different_ranks(tmp_path):
    share = Share(rank=1, world_size=3)

    assert list(share.shard_indices(7)) == [1, 4]
    assert [list(share.shard_indices(1, num_preceding=first)) for first in range(4)] == [
        [],
        [0],
        [],
        [],
    ]


def test_each_rank_begins_with_another_output(tmp_path):
    def begun(rank):
        ReadSource.reads.clear()
        jobs = [
            ([ReadSource([name], name=name)] * 3, Output(prefix=tmp_path / name)) for name in "abc"
        ]
        prepare_all(jobs, share=Share(rank=rank, world_size=3))
        return ReadSource.reads

    assert [list(begun(rank)) for rank in range(3)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
    ]
    assert names(tmp_path) == sorted(
        f"{a}.{kind}" for a in "abc" for kind in ("bin", "idx", "json")
    )


def test_a_rank_whose_peers_were_never_started_says_so(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", "llm.data")
    monkeypatch.setattr(shares, "_NOTICE_SECONDS", 0.1)
    monkeypatch.setattr(shares, "_ABSENT_SECONDS", 0.8)
    share = Share(rank=0, world_size=4, is_launched=True)
    sentence = "rank 1, 2, 3 {} start. If no other process was started, .* --rank 0 --world_size 1"

    with pytest.raises(DataError, match=sentence.format("did not")):
        prepare(tmp_path / "wiki", sources(), share=share)

    assert re.search("rank 0 of 4 waits for " + sentence.format("to"), caplog.text)


def test_a_rank_does_not_wait_for_peers_at_work_on_another_output(tmp_path, monkeypatch):
    monkeypatch.setattr(shares, "_ABSENT_SECONDS", 0.1)
    share = Share(rank=0, world_size=2, is_launched=True)
    jobs = [([ReadSource([name], name=name)] * 3, Output(prefix=tmp_path / name)) for name in "ab"]
    prepare_all(jobs[1:], share=Share(rank=1, world_size=2))

    prepare_all(jobs, share=share)

    assert names(tmp_path) == ["a.parts", "a.parts.lock", "b.bin", "b.idx", "b.json"]


def test_ranks_that_finish_together_join_the_shards_once(tmp_path):
    def work(rank, barrier):
        barrier.wait()
        prepare_rank(tmp_path / "wiki", rank, 4)

    barrier = FORK.Barrier(4)
    processes = [FORK.Process(target=work, args=(rank, barrier)) for rank in range(4)]
    joins = tmp_path / "joins"
    assemble = prepare_files.assemble_output

    def counted_assemble(*how, **options):
        with joins.open("a") as file:
            file.write("x")
        assemble(*how, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_files, "assemble_output", counted_assemble)
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)

    assert [process.exitcode for process in processes] == [0] * 4
    assert joins.read_text() == "x"
    joins.unlink()
    assert names(tmp_path) == THREE
    assert find_token_file_faults(tmp_path / "wiki") == []


def test_of_many_ranks_that_claim_the_join_at_once_one_has_it(tmp_path):
    (tmp_path / "plan.json").touch()
    barrier, won = FORK.Barrier(8), FORK.Value("i", 0)

    def work():
        claim = Claim(tmp_path, "join")
        newest, looks = claim._newest_generation, iter([barrier.wait])

        def look_together():
            """All have seen that nobody joins, before the first one claims it."""
            number = newest()
            next(looks, lambda: None)()
            return number

        claim._newest_generation = look_together
        if acquire_join(claim, tmp_path):
            with won:
                won.value += 1
            time.sleep(0.5)
            (tmp_path / "plan.json").unlink()

    processes = [FORK.Process(target=work) for _ in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)

    assert won.value == 1


def test_a_rank_whose_work_is_joined_or_done_does_nothing_again(tmp_path, caplog):
    prepare_rank(tmp_path / "wiki", 0, 2)
    prepare_rank(tmp_path / "wiki", 0, 2)
    assert ReadSource.reads == ["0", "2", "4"]

    prepare_rank(tmp_path / "wiki", 1, 2)
    prepare_rank(tmp_path / "wiki", 0, 2)

    assert ReadSource.reads == ["0", "2", "4", "1", "3"]
    assert caplog.messages.count(f"wrote {tmp_path}/wiki.bin") == 1
    assert f"{tmp_path}/wiki.bin already exists, made with the same options" in caplog.messages


def test_another_number_of_ranks_or_one_process_finishes_the_work(tmp_path):
    prepare(tmp_path / "expected" / "wiki", sources())
    for name, again in (("ranks", range(2)), ("alone", None)):
        ReadSource.reads.clear()
        prefix = tmp_path / name / "wiki"
        prepare_rank(prefix, 1, 3)
        for rank in again or ():
            prepare_rank(prefix, rank, 2)
        if again is None:
            prepare(prefix, sources())

        assert content(tmp_path / name) == content(tmp_path / "expected")
        assert sorted(ReadSource.reads) == ["0", "1", "2", "3", "4"]


def test_a_rank_that_has_failed_can_finish_later(tmp_path):
    broken = [ReadSource(["a"], name="a"), FailingSource(["b"], name="b")]
    prepare_rank(tmp_path / "wiki", 0, 2, broken)
    with pytest.raises(DataError, match="line 9"):
        prepare_rank(tmp_path / "wiki", 1, 2, broken)

    prepare_rank(tmp_path / "wiki", 1, 2, [broken[0], ReadSource(["b"], name="b")])

    assert names(tmp_path) == THREE


def test_wrong_ids_found_by_one_rank_are_made_again_at_the_join(tmp_path, monkeypatch):
    """The encoder of bytes is the reference; here its shards pass for those of the fast one."""
    prepare(tmp_path / "expected" / "wiki", sources())
    with monkeypatch.context() as patch:
        patch.setattr("llm.prepare.shards.ReferenceEncoder", ())
        prepare_rank(tmp_path / "made" / "wiki", 0, 2)
    require_reference(tmp_path / "made" / "wiki.parts")
    ReadSource.reads.clear()

    prepare_rank(tmp_path / "made" / "wiki", 1, 2)

    assert sorted(ReadSource.reads) == ["0", "1", "2", "3", "4"]
    assert content(tmp_path / "made") == content(tmp_path / "expected")


def test_a_shard_damaged_after_its_rank_has_finished_is_written_again(tmp_path):
    prepare(tmp_path / "expected" / "wiki", sources())
    prepare_rank(tmp_path / "made" / "wiki", 0, 2)
    (tmp_path / "made" / "wiki.parts" / "000002.bin").write_bytes(b"??")

    prepare_rank(tmp_path / "made" / "wiki", 1, 2)

    assert content(tmp_path / "made") == content(tmp_path / "expected")


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"encoding": {"end_token": None}}, "was begun with another --append_eos; give all ranks"),
        ({"shuffle_seed": 3}, "was begun with another --shuffle or --seed; give all ranks the"),
        ({"texts": [ListSource(["a"])]}, "was begun with another input; give all ranks the same"),
    ],
    ids=["options", "shuffle", "input"],
)
def test_a_rank_with_another_command_or_input_is_refused(tmp_path, change, fault):
    prepare_rank(tmp_path / "wiki", 0, 2)

    with pytest.raises(DataError, match=rf"wiki\.parts {fault}"):
        prepare_rank(tmp_path / "wiki", 1, 2, **change)

    prepare_rank(tmp_path / "wiki", 1, 2)
    assert names(tmp_path) == THREE


def test_shards_of_another_version_are_refused(tmp_path):
    prepare_rank(tmp_path / "wiki", 0, 2)
    plan = tmp_path / "wiki.parts" / "plan.json"
    plan.write_text(plan.read_text().replace('"format": 1', '"format": 0'))

    with pytest.raises(DataError, match="holds shards of another version of this program; finish"):
        prepare_rank(tmp_path / "wiki", 1, 2)


def test_a_rank_refuses_an_output_of_another_text_and_unknown_files(tmp_path):
    prepare(tmp_path / "wiki", [ListSource(["a"])])
    with pytest.raises(DataError, match="exists already; choose another --output_prefix"):
        prepare_rank(tmp_path / "wiki", 0, 2)

    (tmp_path / "web.parts").mkdir()
    (tmp_path / "web.parts" / "thesis.txt").write_text("precious")
    with pytest.raises(DataError, match=r"thesis\.txt is in a folder for unfinished work but does"):
        prepare_rank(tmp_path / "web", 0, 2)


def test_ranks_and_one_process_do_not_work_at_once(tmp_path):
    output = Output(prefix=tmp_path / "wiki")
    with (
        prepare_files._lock_output(output, is_shared=True),
        pytest.raises(DataError, match="Another program is writing to"),
    ):
        prepare(tmp_path / "wiki", sources())

    with (
        prepare_files._lock_output(output),
        pytest.raises(DataError, match="Another program is writing"),
    ):
        prepare_rank(tmp_path / "wiki", 0, 2)


SLURM = {"SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "4"}
ARRAY = dict(
    zip(
        [f"SLURM_ARRAY_TASK_{name}" for name in ("ID", "COUNT", "MIN", "MAX", "STEP")],
        ["5", "4", "1", "7", "2"],
        strict=True,
    )
)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, Share()),
        (SLURM, Share(rank=2, world_size=4)),
        (ARRAY, Share(rank=2, world_size=4)),
    ],
    ids=["alone", "srun", "array"],
)
def test_the_rank_comes_from_the_launcher(monkeypatch, variables, expected):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert find_share(None, None, os.environ) == expected
    assert find_share(0, 9, os.environ) == Share(rank=0, world_size=9)


def test_the_rank_of_a_pbs_array_is_its_index():
    assert find_share(None, 4, {"PBS_ARRAY_INDEX": "3"}) == Share(rank=3, world_size=4)
    assert find_share(0, 1, {"PBS_ARRAY_INDEX": "3"}) == Share()


@pytest.mark.parametrize(
    ("given", "variables", "fault"),
    [
        ((4, 4), {}, "--rank 4 does not exist with --world_size 4; ranks count from 0 to 3."),
        (
            (None, None),
            {**ARRAY, "SLURM_ARRAY_TASK_MAX": "8"},
            "The job array has 4 tasks with numbers from 1 to 8, which do not tell the rank",
        ),
        (
            (None, None),
            {**ARRAY, **SLURM},
            "This is rank 2 of 4 in task 2 of 4 of a job array; start one process for each task",
        ),
        (
            (None, None),
            {"PBS_ARRAY_INDEX": "3"},
            "This is task 3 of a PBS job array, and PBS does not tell how many there are; give the",
        ),
        (
            (None, 4),
            {"PBS_ARRAY_INDEX": "4"},
            "PBS_ARRAY_INDEX is 4, and --world_size 4 has ranks from 0 to 3; submit -J 0-3, or",
        ),
        ((None, 4), {}, "--world_size needs --rank outside of a PBS job array; give both."),
    ],
    ids=["rank", "array", "both", "pbs", "pbs index", "size"],
)
def test_a_rank_that_does_not_exist_is_refused(monkeypatch, given, variables, fault):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(ConfigError, match=fault):
        find_share(*given, os.environ)


# Each shard takes some time, and a rank that joins says so and waits.
SLOW = """
import os, sys, time
from pathlib import Path
from llm.prepare import prepare_files, shares, tokenize_shards
from llm.prepare.prepare import main
from llm.runtime import claims
prepare_files.SHARD_BYTES = 200
claims.HEARTBEAT_SECONDS, claims.HEARTBEAT_TIMEOUT_SECONDS = 0.1, 2.0
shares._POLL_SECONDS = 0.05
write_shard = tokenize_shards.write_shard
def slow(source, stem, *how, **options):
    with open("begun", "a") as file:
        print(os.getpid(), stem.name, file=file)
    time.sleep(0.02)
    write_shard(source, stem, *how, **options)
tokenize_shards.write_shard = slow
assemble = prepare_files.assemble_output
def slow_assemble(*how, **options):
    with open("joining", "a") as file:
        print(os.getpid(), file=file)
    while Path("hold").exists():
        time.sleep(0.05)
    assemble(*how, **options)
prepare_files.assemble_output = slow_assemble
sys.exit(main(sys.argv[1:]))
"""


def start(rank, world_size, workers=1):
    words = [*GOOD, "--rank", rank, "--world_size", world_size, "--workers", workers]
    return subprocess.Popen(
        [sys.executable, "-c", SLOW, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(*processes):
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    return outputs


def shards_done():
    return {path.stem for path in Path("out_text_document.parts").glob("[0-9]*.json")}


@pytest.mark.usefixtures("at_home")
def test_a_killed_rank_starts_again_and_repeats_only_what_is_missing(tmp_path):
    write(tmp_path / "a.jsonl", json_lines(TEXTS))
    process = start(1, 2, workers=2)
    wait_until(lambda: len(shards_done()) >= 3)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    finish(start(0, 2))  # which does not join what is incomplete
    done = shards_done()
    Path("begun").unlink()

    (output,) = finish(start(1, 2))

    assert done.isdisjoint(line.split()[1] for line in Path("begun").read_text().splitlines())
    assert "[rank 1] rank 1 of 2 joins the shards" in output
    assert pair("out_text_document") == expected_pair(tmp_path / "e", TEXTS)
    assert not Path("out_text_document.parts").exists()


@pytest.mark.usefixtures("at_home")
def test_a_rank_killed_while_it_joins_is_replaced_by_the_same_command(tmp_path):
    write(tmp_path / "a.jsonl", json_lines(TEXTS))
    Path("hold").touch()
    finish(start(0, 2))
    process = start(1, 2)
    wait_until(Path("joining").exists)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    Path("hold").unlink()

    outputs = finish(start(0, 2), start(1, 2))

    assert sum("joins the shards\n" in output for output in outputs) == 1, outputs
    assert len(Path("joining").read_text().split()) == 2
    assert pair("out_text_document") == expected_pair(tmp_path / "e", TEXTS)
    assert not Path("out_text_document.parts").exists()


@pytest.mark.usefixtures("at_home")
@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["--rank", "1"], "--rank needs --world_size; give that too, or leave it out."),
        (["--rank", "0", "--world_size", "2", "--overwrite"], "--overwrite goes with one process"),
    ],
)
def test_options_of_ranks_that_cannot_work_are_one_sentence(tmp_path, capsys, options, fault):
    write(tmp_path / "a.jsonl", json_lines(TEXTS))

    assert main([*GOOD, *options]) == 2

    (line,) = capsys.readouterr().err.splitlines()
    assert fault in line
