"""What one rank cannot compute, no rank takes part in."""

import hashlib
from collections.abc import Sequence

import pytest

from tests.support.faults import Fault, install
from tests.support.ranks import run_ranks, values
from tests.support.training import Bench, Run

pytestmark = pytest.mark.faults

LOSS = "llm.models.loss:LanguageModelLoss.forward"


def train_and_hash(argv: list[str], faults: Sequence[Fault]) -> tuple[int, str]:
    """The exit code, and a hash of this rank's own weights and moments at the end."""
    from llm.parallel.base import AcceleratedStrategy
    from llm.trainers.gpt import main

    digest = hashlib.sha256()
    close = AcceleratedStrategy.close

    def hashing(self) -> None:
        state = self.state_dict()
        for tensor in state["model"].values():
            digest.update(tensor.numpy().tobytes())
        for moments in state["optimizer"].values():
            for tensor in moments.values():
                digest.update(tensor.numpy().tobytes())
        close(self)

    AcceleratedStrategy.close = hashing
    install(faults)
    return main.main(argv), digest.hexdigest()


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_a_non_finite_step_is_skipped_on_all_ranks_and_training_continues(tmp_path, precision):
    bench = Bench(tmp_path)
    argv = bench.command("nan", max_train_steps=12, eval_steps=100, mixed_precision=precision)
    # One forward that orders the buckets, and one a step: the fifth step's, on the second rank.
    fault = Fault(at=LOSS, what="nan", call=6, rank=1)

    outcomes = run_ranks(train_and_hash, 3, argv, [fault])

    codes, hashes = zip(*values(outcomes), strict=True)
    assert codes == (0, 0, 0)
    assert len(set(hashes)) == 1
    run = Run(bench.folder / "nan", outcomes)
    assert "step 5 was skipped: its gradient is not finite (samples 48 to 59)" in run.output
    event = '"event": "skip", "step": 5, "first_sample": 48, "last_sample": 59, "inspect": "'
    assert event in (run.folder / "events.jsonl").read_text()
    skipped = [record["skipped_steps"] for record in run.metrics]
    before = skipped[3]  # a loss scale may have been too high at first
    assert skipped[4:6] == [before + 1, before + 1]
    assert run.metrics[4]["loss"] is None
    assert all(record["loss"] > 0 for record in run.metrics if record["step"] != 5)
    assert run.losses[-1] < run.losses[0]


def test_a_skipped_step_is_reported_even_if_the_run_is_killed_after_it(tmp_path):
    bench = Bench(tmp_path)
    options = {"max_train_steps": 8, "logging_steps": 8, "checkpointing_steps": 4}
    options["async_checkpoint"] = False
    undefined = Fault(at=LOSS, what="nan", call=3)
    kill = Fault(at="llm.trainers.gpt.loop:Trainer.train_step", what="SIGKILL", call=7)
    bench.train("cut", faults=[undefined, kill], resume_from_checkpoint=True, **options)

    bench.train_well("cut", resume_from_checkpoint=True, **options)

    log = (bench.folder / "cut" / "log.txt").read_text()
    assert log.count("step 3 was skipped") == 1
    assert Run(bench.folder / "cut", []).metrics[-1]["skipped_steps"] == 1
