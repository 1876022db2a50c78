"""A request to stop during a long evaluation ends it, and saves first."""

import json

import pytest

from tests.support.faults import Fault
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


def test_a_signal_in_the_last_evaluation_saves_the_last_step(bench: Bench) -> None:
    options = {**OPTIONS, "eval_steps": 6, "checkpointing_steps": 4}
    asked = Fault(at=EVALUATE, what="SIGTERM", call=3)
    stopped = bench.train("last", faults=[asked], **options)

    assert stopped.codes == [75]
    assert (stopped.folder / "checkpoints" / "step_00000006").is_dir()
    assert "validation at step 6" in bench.train_well("last", **options).output


def test_a_signal_in_a_sample_ends_its_text(bench: Bench) -> None:
    asked = Fault(at="llm.trainers.gpt.text_sample:sample_text", what="SIGTERM", call=1)
    sampling = {"sample_steps": 2, "sample_prompt": "The king"}
    stopped = bench.train("sample", faults=[asked], **OPTIONS, **sampling)

    assert stopped.codes == [75]
    assert (stopped.folder / "checkpoints" / "step_00000003").is_dir()
    sample = stopped.output.split("a sample at step 2:\n\n")[1].split("\n")[0]
    assert len(sample) < 40  # of 120 tokens
