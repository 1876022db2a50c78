"""A request to stop during a long evaluation ends it, and saves first."""

import json

import pytest

from llm.checkpoint.load import list_checkpoints
from tests.support.faults import Fault
from tests.support.recovery import without_times
from tests.support.training import Bench

EVALUATE = "llm.parallel.base:AcceleratedStrategy.evaluate"
OPTIONS = {
    "max_train_steps": 6,
    "eval_steps": 3,
    "per_device_eval_batch_size": 1,
    "validation_split_percentage": 40,
    "resume_from_checkpoint": True,
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {}),
        pytest.param(1, {"save_top_k": 1, "checkpointing_steps": 3}, marks=pytest.mark.extended),
        pytest.param(2, {}, marks=pytest.mark.extended),
    ],
    ids=["one rank", "save_top_k", "two ranks"],
)
def test_a_signal_in_an_evaluation_saves_at_once(bench: Bench, ranks: int, options: dict) -> None:
    name = f"stopped-{ranks}-{len(options)}"
    asked = Fault(at=EVALUATE, what="SIGTERM", call=3)
    stopped = bench.train(name, ranks=ranks, faults=[asked], **OPTIONS, **options)

    assert stopped.codes == [75] * ranks
    status = json.loads((stopped.folder / "status.json").read_text())
    assert (status["status"], status["step"]) == ("preempted", 3)
    assert (stopped.folder / "checkpoints" / "step_00000003").is_dir()
    assert "validation at step 3" not in stopped.output

    resumed = bench.train_well(name, ranks=ranks, **OPTIONS, **options)
    assert "validation at step 3" in resumed.output


def test_a_checkpoint_of_a_stop_gets_its_score_on_resume(bench: Bench) -> None:
    options = {**OPTIONS, "checkpointing_steps": 2, "keep_checkpoints": 1, "save_top_k": 2}
    straight = bench.train_well("scored", **options)
    asked = Fault(at="llm.trainers.gpt.loop:Trainer.train_step", what="SIGTERM", call=4)
    assert bench.train("unscored", faults=[asked], **options).codes == [75]

    resumed = bench.train_well("unscored", **options)

    assert without_times(resumed) == without_times(straight)
    scores = [
        {
            saved.step: saved.metadata["eval_loss"]
            for saved in list_checkpoints(run.folder / "checkpoints")
        }
        for run in (straight, resumed)
    ]
    assert list(scores[0]) == [4, 6]
    assert scores[0] == scores[1]


def test_a_signal_in_the_last_evaluation_saves_the_last_step(bench: Bench) -> None:
    options = {**OPTIONS, "eval_steps": 6, "checkpointing_steps": 4}
    asked = Fault(at=EVALUATE, what="SIGTERM", call=3)
    stopped = bench.train("last", faults=[asked], **options)

    assert stopped.codes == [75]
    assert (stopped.folder / "checkpoints" / "step_00000006").is_dir()

    resumed = bench.train_well("last", **options)

    assert "validation at step 6" in resumed.output
    saved = list_checkpoints(resumed.folder / "checkpoints")[-1]
    assert saved.metadata["eval_loss"] == resumed.read_json("all_results.json")["eval_loss"]


def test_a_signal_in_a_sample_ends_its_text(bench: Bench) -> None:
    asked = Fault(at="llm.trainers.gpt.text_sample:sample_text", what="SIGTERM", call=1)
    sampling = {"sample_steps": 2, "sample_prompt": "The king"}
    stopped = bench.train("sample", faults=[asked], **OPTIONS, **sampling)

    assert stopped.codes == [75]
    assert (stopped.folder / "checkpoints" / "step_00000003").is_dir()
    sample = stopped.output.split("a sample at step 2:\n\n")[1].split("\n")[0]
    assert len(sample) < 40  # of 120 tokens
