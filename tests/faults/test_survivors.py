"""Ranks of gossip and DiLoCo that lose others and go on, in processes of their own."""

import pytest

from llm.checkpoint import newest_valid
from tests.support.faults import Fault
from tests.support.launch import Launch, start_tasks
from tests.support.training import Bench, Run

pytestmark = pytest.mark.faults

STEP = "llm.trainers.gpt.loop:Trainer.train_step"
EVALUATION = "llm.parallel.accelerated:AcceleratedStrategy.evaluate"
RING = {"data_parallel": "gossip"}
OPTIONS = {
    "on_peer_loss": "continue",
    "per_device_train_batch_size": 2,
    "max_train_steps": 14,
    "checkpointing_steps": 7,
    "eval_steps": 5,
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("survivors"))


def outcome(bench: Bench, name: str, faults: list[Fault], *, ranks: int = 4, **options):
    """The run, and by rank the exit code and what was printed."""
    argv = bench.command(name, **{**OPTIONS, **options})
    tasks = start_tasks(argv, ranks=ranks, faults=faults)
    try:
        printed = [task.communicate(timeout=240)[0] for task in tasks]
    finally:
        for task in tasks:
            task.kill()
    return Run(bench.folder / name, []), [task.returncode for task in tasks], printed


def check_whole(run: Run, *, replicas: int, losses: int = 1) -> None:
    """No step was done twice, all samples were consumed, and the run ended well."""
    logged = [record for record in run.metrics if "loss" in record]
    steps = [record["step"] for record in logged]
    assert steps == sorted(set(steps))
    # What the ranks had of a step that was cut short is not told.
    assert len(steps) >= 14 - losses
    assert logged[-1]["samples"] == 14 * 8
    assert run.losses[-1] < run.losses[0] - 0.3
    assert run.read_json("status.json")["status"] == "finished"
    newest = newest_valid(run.folder / "checkpoints")
    assert newest is not None
    assert (newest.step, newest.facts["replicas"]) == (14, replicas)


@pytest.mark.parametrize(
    ("victim", "place", "call", "options"),
    [
        (3, STEP, 10, {**RING, "topology": "exp"}),
        (0, STEP, 10, RING),
        (1, STEP, 10, {**RING, "gossip_order": "blocking"}),
        (3, EVALUATION, 4, RING),
        (2, STEP, 10, {"data_parallel": "diloco", "sync_every": 3}),
    ],
    ids=["exp", "rank 0", "blocking", "evaluation", "diloco"],
)
def test_three_of_four_ranks_go_on_to_the_end(bench, victim, place, call, options):
    kill = Fault(at=place, what="SIGKILL", call=call, rank=victim)
    name = f"{victim}-{options['data_parallel']}-{call}-{len(options)}"

    run, codes, printed = outcome(bench, name, [kill], **options)

    expected = [0] * 4
    expected[victim] = -9
    assert codes == expected, "\n".join(printed)
    assert "they go on without 1 that is lost." in "".join(printed)
    assert not any("Traceback" in text for text in printed)
    check_whole(run, replicas=3)


def test_ranks_are_lost_until_one_is_left(bench):
    # Counted anew in each start: rank 3 of four falls, then rank 2 of three, and rank 1 of two.
    kills = [Fault(at=STEP, what="SIGKILL", call=4, rank=rank) for rank in (1, 2, 3)]
    kills[0] = Fault(at=STEP, what="SIGKILL", call=4, rank=3)
    kills[1] = Fault(at=EVALUATION, what="SIGKILL", call=2, rank=2)
    kills[2] = Fault(at=STEP, what="SIGKILL", call=9, rank=1)

    run, codes, printed = outcome(bench, "falling", kills, **RING)

    assert codes == [0, -9, -9, -9], "\n".join(printed)
    check_whole(run, replicas=1, losses=3)


def test_a_rank_that_hangs_is_left_behind_and_ends_when_it_wakes_up(bench):
    stop = Fault(at=STEP, what="SIGSTOP", call=10, rank=2, file=bench.folder / "stopped")
    argv = bench.command("hung", **{**OPTIONS, **RING, "step_timeout": 5})
    tasks = start_tasks(argv, ranks=4, faults=[stop])
    try:
        others = [task.communicate(timeout=240)[0] for i, task in enumerate(tasks) if i != 2]
        assert [tasks[rank].returncode for rank in (0, 1, 3)] == [0, 0, 0], "\n".join(others)
        tasks[2].send_signal(18)  # SIGCONT
        late = tasks[2].communicate(timeout=60)[0]
    finally:
        for task in tasks:
            task.kill()

    assert tasks[2].returncode == 76, late
    assert "others have gone on already" in late
    check_whole(Run(bench.folder / "hung", []), replicas=3)


def test_torchrun_ends_the_others_and_starts_all_again_from_what_they_saved(bench):
    kill = Fault(at=STEP, what="SIGKILL", call=10, rank=1)
    options = {**OPTIONS, **RING, "checkpointing_steps": 50, "resume_from_checkpoint": True}

    launch = Launch(
        bench.command("torchrun", **options),
        ranks=4,
        faults=[kill],
        launcher=["--max_restarts", "1"],
    )
    output = launch.end(timeout=240)

    assert launch.process.returncode == 0, output
    assert launch.left == []
    assert "The checkpoint holds 3 replicas of the model and this run has 4" in output
    assert "at step 9." in output or "at step 10." in output
    assert Run(bench.folder / "torchrun", []).read_json("status.json")["status"] == "finished"
