"""A request to stop in any phase of a run, to its ranks or to the launcher."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from torch.distributed.launcher.api import LaunchConfig

from tests.support.faults import Fault
from tests.support.processes import Launch, wait_until_there
from tests.support.recovery import check_same, without_times
from tests.support.training import Bench, Run

pytestmark = pytest.mark.faults

OPTIONS = {
    "report_to": "tensorboard",
    "max_train_steps": 12,
    "checkpointing_steps": 4,
    "eval_steps": 3,
    "resume_from_checkpoint": True,
}
BEFORE_TRAINING = {
    "start-up": ("llm.trainers.gpt.train:make_strategy", 1),
    "tokenising": ("llm.data.text_to_tokens:_log_lines", 1),
}
IN_TRAINING = {
    "step": ("llm.parallel.base:AcceleratedStrategy.forward_backward", 6),
    "evaluation": ("llm.parallel.base:AcceleratedStrategy.evaluate", 4),
    "save": ("llm.checkpoint.save:Saver._write_tensors", 1),
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("signals"))


@pytest.fixture(scope="module")
def straight(bench) -> Run:
    return bench.train_well("straight", ranks=2, **OPTIONS)


def waiting(place: tuple[str, int], file: Path, seconds: float) -> Fault:
    """Lets a rank linger in a phase, and says that it is there."""
    at, call = place
    return Fault(at=at, what="wait", call=call, amount=seconds, file=file)


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step_*"))


def check_nothing_is_lost(folder: Path, reason: str) -> int:
    """The last step done is saved, and said; returns it."""
    status = json.loads((folder / "status.json").read_text())
    assert (status["status"], status["reason"]) == ("preempted", reason)
    done = Run(folder, []).metrics[-1]["step"]
    assert status["step"] == done
    assert saved_steps(folder)[-1] == done
    assert not list((folder / "checkpoints").glob(".*"))
    return done


def check_goes_on(bench: Bench, straight: Run, name: str) -> None:
    resumed = bench.train_well(name, ranks=2, **OPTIONS)
    check_same(resumed, straight)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
@pytest.mark.parametrize("phase", BEFORE_TRAINING)
def test_a_signal_before_training_ends_the_process_without_a_checkpoint(
    bench, straight, tmp_path, phase, number
):
    name = f"{phase}-{number}"
    options = {**OPTIONS, "data_cache_dir": tmp_path / "cache"}
    there = tmp_path / "there"
    started = bench.start(
        name, ranks=2, faults=[waiting(BEFORE_TRAINING[phase], there, 20)], **options
    )
    # One rank makes the token files; in Python's own start-up a signal may be lost.
    wait_until_there(there, ranks=1 if phase == "tokenising" else 2)
    began = time.monotonic()
    for process in started.processes:
        os.kill(process.pid, number)
    outcomes = started.outcomes(timeout=10)

    assert time.monotonic() - began < 5
    for outcome in outcomes:
        if number == signal.SIGINT:
            assert outcome.value == 130
        else:
            assert outcome.error == f"ended with code {-number}"
        assert "Traceback" not in outcome.output
    run = bench.train_well(name, ranks=2, **options)
    assert without_times(run) == without_times(straight)


@pytest.mark.parametrize("ranks_told", [[0, 1], [1]], ids=["all ranks", "one rank"])
@pytest.mark.parametrize("phase", IN_TRAINING)
def test_a_signal_during_training_saves_and_ends_with_code_75(
    bench, straight, tmp_path, phase, ranks_told
):
    name = f"{phase}-{len(ranks_told)}"
    there = tmp_path / "there"
    fault = waiting(IN_TRAINING[phase], there, 0.5)
    started = bench.start(name, ranks=2, faults=[fault], **OPTIONS)
    wait_until_there(there)
    for rank in ranks_told:
        os.kill(started.processes[rank].pid, signal.SIGTERM)
    outcomes = started.outcomes(timeout=30)

    assert [outcome.value for outcome in outcomes] == [75, 75]
    reason = "SIGTERM" if 0 in ranks_told else "a request to another rank"
    done = check_nothing_is_lost(bench.folder / name, reason)
    # The sixth step; the ranks agree during the next, or after an evaluation the one after that.
    # Beside a save that lingers in the background, training goes on.
    assert done in {"step": [6, 7], "evaluation": [6, 7, 8], "save": range(4, 12)}[phase]
    check_goes_on(bench, straight, name)


def test_a_second_signal_ends_at_once_and_keeps_valid_checkpoints(bench, straight, tmp_path):
    there = tmp_path / "there"
    fault = waiting(IN_TRAINING["step"], there, 60)
    started = bench.start("twice", faults=[fault], **OPTIONS)
    wait_until_there(there)
    process = started.processes[0]
    os.kill(process.pid, signal.SIGTERM)
    os.kill(process.pid, signal.SIGTERM)  # the same request, by way of a launcher
    time.sleep(3.5)
    assert process.is_alive()
    began = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    (outcome,) = started.outcomes(timeout=10)

    assert time.monotonic() - began < 2
    assert outcome.error == f"ended with code {128 + signal.SIGTERM}"
    assert saved_steps(bench.folder / "twice") == [4]
    bench.train_well("twice", **OPTIONS)


HEARD = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


def hear_user_signal() -> dict:
    """How torchrun is told not to die of SIGUSR1; newer versions overwrite the variable."""
    launcher = ["--signals_to_handle", HEARD] if hasattr(LaunchConfig, "signals_to_handle") else []
    return {"launcher": launcher, "environment": {"TORCHELASTIC_SIGNALS_TO_HANDLE": HEARD}}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_torchrun_forwards_a_signal_and_leaves_no_process_behind(bench, straight, tmp_path, number):
    name = f"torchrun-{number}"
    there = tmp_path / "there"
    launch = Launch(
        bench.command(name, **OPTIONS),
        faults=[waiting(IN_TRAINING["step"], there, 3)],
        **hear_user_signal(),
    )
    wait_until_there(there)
    launch.send(number)
    output = launch.end()

    assert launch.process.returncode != 0
    assert launch.left == [], output
    assert launch.port_is_free()
    check_nothing_is_lost(bench.folder / name, number.name)
    check_goes_on(bench, straight, name)


def test_torchrun_stopped_during_its_start_leaves_no_process_behind(bench, tmp_path):
    there = tmp_path / "there"
    launch = Launch(
        bench.command("torchrun-start", **OPTIONS),
        faults=[waiting(BEFORE_TRAINING["start-up"], there, 60)],
    )
    wait_until_there(there)
    launch.send(signal.SIGTERM)
    began = time.monotonic()
    output = launch.end()

    assert time.monotonic() - began < 10
    assert launch.process.returncode != 0
    assert launch.left == [], output
    assert launch.port_is_free()
    assert not (bench.folder / "torchrun-start" / "status.json").exists()


@pytest.mark.parametrize(
    "shares_store", [True, False], ids=["store of torchrun", "store of rank 0"]
)
def test_ranks_whose_torchrun_is_killed_save_and_end(bench, straight, tmp_path, shares_store):
    name = f"orphans-{shares_store}"
    there = tmp_path / "there"
    launch = Launch(
        bench.command(name, **OPTIONS),
        faults=[waiting(IN_TRAINING["step"], there, 3)],
        environment={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": str(int(not shares_store))},
    )
    wait_until_there(there)
    launch.send(signal.SIGKILL)
    output = launch.end(timeout=15)  # until the last rank has ended

    assert launch.left == [], output
    check_nothing_is_lost(bench.folder / name, "the death of its launcher")
    check_goes_on(bench, straight, name)


def test_ranks_whose_torchrun_is_killed_before_training_end(bench, tmp_path):
    at, call = BEFORE_TRAINING["start-up"]
    there = [tmp_path / "0", tmp_path / "1"]
    launch = Launch(
        bench.command("orphans-start", **OPTIONS),
        faults=[
            Fault(at=at, what="wait", call=call, amount=60, file=file, rank=rank)
            for rank, file in enumerate(there)
        ],
    )
    for file in there:
        wait_until_there(file)
    launch.send(signal.SIGKILL)
    output = launch.end(timeout=15)

    assert launch.left == [], output
    assert not (bench.folder / "orphans-start" / "status.json").exists()


def test_an_evaluation_due_at_the_step_of_a_stop_runs_after_the_resume(bench):
    step = "llm.trainers.gpt.loop:Trainer.train_step"
    options = {**OPTIONS, "checkpointing_steps": 6}
    uninterrupted = bench.train_well("not-due", **options)
    asked = Fault(at=step, what="SIGTERM", call=3)
    assert bench.train("due", faults=[asked], **options).codes == [75]
    assert [record["step"] for record in Run(bench.folder / "due", []).metrics] == [1, 2, 3]
    # Once more from the same checkpoint: the evaluation is done again, and stands there once.
    bench.train("due", faults=[Fault(at=step, what="SIGKILL", call=2)], **options)

    check_same(bench.train_well("due", **options), uninterrupted)
