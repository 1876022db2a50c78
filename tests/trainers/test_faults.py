"""A sample of what `tests/faults` does to training runs: kills, lost ranks, undefined numbers."""

import pytest

from tests.support.faults import Fault
from tests.support.recovery import check_same, kill_and_go_on, last_hash
from tests.support.training import Bench, Run

OPTIONS = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_train_steps": 12,
    "checkpointing_steps": 4,
    "eval_steps": 5,
    "report_to": "tensorboard",
}
STEP = "llm.trainers.gpt.loop:Trainer.train_step"
KILLS = {
    "between two steps": Fault(at=STEP, what="SIGKILL", call=8, rank=1),
    "in a save": Fault(at="llm.checkpoint.save:commit_checkpoint", what="SIGKILL", call=2, rank=0),
    "in an evaluation": Fault(
        at="llm.parallel.base:AcceleratedStrategy.evaluate", what="SIGKILL", call=4, rank=1
    ),
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def straight(bench) -> Run:
    return bench.train_well("straight", ranks=2, **OPTIONS)


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("between two steps", marks=pytest.mark.extended),
        "in a save",
        pytest.param("in an evaluation", marks=pytest.mark.faults),
    ],
)
def test_a_killed_run_resumes_to_the_same_bits(bench, straight, moment):
    run = kill_and_go_on(bench, moment, [KILLS[moment]], together=True, **OPTIONS)

    check_same(run, straight)


def test_asynchronous_saving_writes_the_same_bits(bench, straight):
    run = bench.train_well("waiting", ranks=2, async_checkpoint=False, **OPTIONS)

    check_same(run, straight)


def test_a_nan_gradient_on_one_rank_skips_the_step_on_all(bench):
    fault = Fault(at="llm.models.loss:LanguageModelLoss.forward", what="nan", call=5, rank=1)
    run = bench.train_well("nan", ranks=2, faults=[fault], **OPTIONS)

    # Two micro-batches a step: the fifth forward is the third step's.
    assert "step 3 was skipped: its gradient is not finite (samples 16 to 23)" in run.output
    assert [record["skipped_steps"] for record in run.metrics] == [0, 0] + [1] * 10
    assert run.losses[-1] < run.losses[0] - 0.1


def test_weights_that_are_not_finite_end_the_run_before_the_next_save(bench):
    faults = [
        Fault(at="llm.checkpoint.save:is_finite", what="value", call=0, rank=0, amount=0.0),
        Fault(at=STEP, what="wait", call=6, amount=1),  # the save of step 4 is checked meanwhile
    ]

    run = bench.train("refused", ranks=2, faults=faults, **OPTIONS)

    assert run.codes == [2, 2]
    assert "error: The state of step 4 is not saved because" in run.output
    assert run.metrics[-1]["step"] < 8


def test_repeated_nan_gradients_stop_the_run_and_keep_the_last_checkpoint(bench):
    options = {**OPTIONS, "ranks": 2, "max_skipped_steps": 3}
    good = bench.train_well("good", **{**options, "max_train_steps": 4})
    fault = Fault(at="llm.models.loss:LanguageModelLoss.forward", what="nan", call=0, rank=1)

    run = bench.train(
        "good", faults=[fault], resume_from_checkpoint=True, **options,
    )  # fmt: skip

    assert run.codes == [2, 2]
    assert run.outcomes[0].output.count("error: The last 3 steps were skipped") == 1
    assert "Traceback" not in run.output
    assert run.read_json("status.json")["status"] == "failed"
    assert last_hash(run) == last_hash(good)
    assert last_hash(run).startswith("step 4:")


def test_a_run_that_stopped_on_nan_gradients_fails_again_when_restarted(bench):
    options = {**OPTIONS, "checkpointing_steps": 2, "logging_steps": 1}
    undefined = [Fault(at="llm.models.loss:LanguageModelLoss.forward", what="nan", call=0)]

    run = bench.train("creeping", faults=undefined, max_skipped_steps=3, **options)
    assert run.codes == [2]
    assert last_hash(run).startswith("step 2:")
    options["resume_from_checkpoint"] = True
    again = bench.train("creeping", faults=undefined, max_skipped_steps=3, **options)
    assert again.codes == [2]
    assert "error: The last 3 steps were skipped" in again.output
    assert "step 4 was skipped" not in again.output
    assert last_hash(again).startswith("step 2:")

    fewer = bench.train("creeping", max_skipped_steps=2, **options)
    assert fewer.codes == [2]
    assert "error: The last 2 steps were skipped" in fewer.output
    assert [record["step"] for record in fewer.metrics] == [1, 2]

    more = bench.train_well("creeping", max_skipped_steps=4, **options)
    assert more.metrics[-1]["skipped_steps"] == 2


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.faults)])
def test_a_failing_disk_ends_a_run_with_one_sentence(bench, ranks):
    last = ranks - 1
    fault = Fault(at="llm.data.corpus:Samples.read", what="disk error", call=9, rank=last)

    run = bench.train(f"unread-{ranks}", ranks=ranks, faults=[fault], **OPTIONS)

    assert run.codes[last] == 2, run.output
    assert "Traceback" not in run.output
    assert run.outcomes[last].output.count("error: A call of the system in ") == 1
    assert "Input/output error; the disk, or the server of the file system," in run.output
    assert run.read_json("status.json")["status"] == "failed"


def test_a_run_whose_last_event_has_no_room_is_finished(bench):
    full = Fault(at="llm.checkpoint.run_folder:append_event", what="disk error")

    run = bench.train_well("no-room", faults=[full], **OPTIONS | {"max_train_steps": 4})

    assert "The end of the run has no event: " in run.output
    assert run.read_json("status.json")["status"] == "finished"
