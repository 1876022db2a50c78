"""A rank that dies or stops is named, the others end at once, and a launcher's restart goes on."""

import pickle
import socket
import time

import pytest

from tests.support.faults import Fault
from tests.support.processes import Launch
from tests.support.recovery import last_hash, without_times
from tests.support.training import Bench, Run

pytestmark = pytest.mark.faults

STEP = "llm.trainers.gpt.loop:Trainer.train_step"
SAVE = "llm.checkpoint.save:Saver._write_tensors"
EVALUATION = "llm.parallel.base:AcceleratedStrategy.evaluate"
OPTIONS = {"max_train_steps": 16, "checkpointing_steps": 4, "eval_steps": 6}
HOST = socket.gethostname()


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("lost"))


@pytest.mark.parametrize(
    ("place", "call"),
    [(STEP, 9), (SAVE, 2), (SAVE, 4), (EVALUATION, 3)],
    ids=["step", "save", "last save", "evaluation"],
)
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_rank_is_named_and_the_others_end_in_ten_seconds(bench, victim, place, call):
    name = f"killed-{victim}-{place.rpartition('.')[2]}-{call}"
    fault = Fault(at=place, what="SIGKILL", call=call, rank=victim)
    started = bench.start(name, ranks=3, faults=[fault], **OPTIONS)
    died = started.wait_for_death()
    run = Run(bench.folder / name, started.outcomes(timeout=30))

    assert time.monotonic() - died < 10
    failure = f"rank {victim} on {HOST} has died, about step "
    for rank, outcome in enumerate(run.outcomes):
        if rank == victim:
            assert outcome.error == "ended with code -9"
        else:
            assert outcome.value == 76 or outcome.error == "ended with code 76"
            assert failure in outcome.output
            assert "Traceback" not in outcome.output
    status = run.read_json("status.json")
    assert status["status"] == "failed"
    assert failure in status["reason"]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_is_named_within_its_limit_and_five_seconds(bench, victim, tmp_path):
    stopped = tmp_path / "stopped"
    fault = Fault(at=STEP, what="SIGSTOP", call=6, rank=victim, file=stopped)
    name = f"stopped-{victim}"
    started = bench.start(name, ranks=3, faults=[fault], timeout=4, **OPTIONS)
    started.wait_for_death()
    seconds = time.time() - stopped.stat().st_mtime
    others = [process for rank, process in enumerate(started.processes) if rank != victim]
    for process in others:
        process.join(timeout=10)
    started.kill()
    run = Run(bench.folder / name, started.outcomes())

    assert 2 < seconds < 4 + 5
    assert [process.exitcode for process in others] in ([76, 76], [0, 0])
    status = run.read_json("status.json")
    assert status["status"] == "failed"
    assert f"rank {victim} on {HOST} hangs" in status["reason"]
    assert "limit 4 s" in status["reason"]


def test_the_stacks_show_the_hanging_rank_if_all_are_at_one_step(bench):
    hang = Fault(at=STEP, what="wait", amount=120, call=6, rank=1)
    started = bench.start("hung", ranks=2, faults=[hang], timeout=4, **OPTIONS)
    run = Run(bench.folder / "hung", started.outcomes(timeout=60))

    assert "every rank hangs: no progress for" in run.read_json("status.json")["reason"]
    stacks = [(run.folder / "stacks" / f"rank_0000{r}.txt").read_text() for r in range(2)]
    assert ["_happen" in text for text in stacks] == [False, True]
    assert ["in train_step" in text for text in stacks] == [True, False]  # which is not begun
    recorded = [pickle.loads((run.folder / f"stacks/gloo_rank_{r}").read_bytes()) for r in range(2)]
    assert all(trace["entries"][-1]["profiling_name"].startswith("gloo:") for trace in recorded)


def test_a_restart_by_torchrun_ends_with_the_same_bits(bench):
    # Each save is done before the next step, so that it is known where the run goes on.
    options = {**OPTIONS, "resume_from_checkpoint": True, "async_checkpoint": False}
    straight = bench.train_well("straight", ranks=2, **options)
    kills = [
        Fault(at=STEP, what="SIGKILL", call=7, rank=1),
        Fault(at=STEP, what="SIGKILL", call=7, rank=0, restart=1),
    ]
    command = bench.command("restarted", **options)

    launch = Launch(command, faults=kills, launcher=["--max_restarts", "2"])
    output = launch.end()

    assert launch.process.returncode == 0, output
    assert [output.count(f"at step {step}.") for step in (4, 8)] == [1, 1]
    assert launch.left == []
    run = Run(bench.folder / "restarted", [])
    assert last_hash(run) == last_hash(straight)
    assert without_times(run) == without_times(straight)
    assert run.read_json("status.json")["status"] == "finished"


def test_torchrun_ends_soon_after_a_killed_rank_that_the_status_names(bench):
    kill = Fault(at=STEP, what="SIGKILL", call=7, rank=1, file=bench.folder / "killed")

    launch = Launch(bench.command("launched", **OPTIONS), ranks=3, faults=[kill])
    output = launch.end()

    assert time.time() - (bench.folder / "killed").stat().st_mtime < 10
    assert launch.process.returncode != 0
    assert launch.left == []
    assert launch.port_is_free()
    status = Run(bench.folder / "launched", []).read_json("status.json")
    assert status["status"] == "failed", output
    assert f"rank 1 on {HOST} has died" in status["reason"]


def test_no_stopped_process_is_left_behind_by_torchrun(bench):
    stop = Fault(at=STEP, what="SIGSTOP", call=6, rank=1)

    launch = Launch(bench.command("held", timeout=3, **OPTIONS), faults=[stop])
    launch.end()

    assert launch.process.returncode != 0
    assert launch.left == []
    status = Run(bench.folder / "held", []).read_json("status.json")
    assert f"rank 1 on {HOST} hangs" in status["reason"]
