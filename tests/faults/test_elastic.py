"""One run on 1, 2, 4 and 2 ranks in turn is the run of one rank."""

from collections.abc import Sequence

import pytest

from tests.support.faults import Fault, install
from tests.support.ranks import run_ranks, values
from tests.support.training import Bench, Run

pytestmark = pytest.mark.faults

NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
OPTIONS = {
    "per_device_train_batch_size": 2,
    "global_batch_size": 8,
    "max_train_steps": 24,
    "resume_from_checkpoint": True,
}


def train_and_tell(argv: list[str], faults: Sequence[Fault]) -> tuple[int, dict]:
    """The exit code; and by step, each sample of this rank with its tokens."""
    from llm.trainers.gpt import loop, main

    seen: dict[int, list] = {}
    train_step = loop.Trainer.train_step

    def telling(self, batch) -> None:
        rows = [row.tobytes() for micro in batch.micro_batches for row in micro.input_ids.numpy()]
        seen[self.state.step] = list(zip(batch.samples.tolist(), rows, strict=True))
        train_step(self, batch)

    loop.Trainer.train_step = telling
    install(faults)
    return main.main(argv), seen


def samples_by_step(bench: Bench, name: str, ranks: int, code: int, steps: int | None) -> dict:
    """Run until the end, or until so many steps when the first rank is asked to stop."""
    faults = []
    if steps is not None:
        at = "llm.trainers.gpt.loop:Trainer.train_step"
        faults = [Fault(at=at, what="SIGTERM", call=steps, rank=0)]
    argv = bench.command(name, **OPTIONS)
    found = values(run_ranks(train_and_tell, ranks, argv, faults))
    assert [value[0] for value in found] == [code] * ranks
    together: dict[int, list] = {}
    for _, seen in found:
        for step, samples in seen.items():
            together.setdefault(step, []).extend(samples)
    return {step: sorted(samples) for step, samples in together.items()}


def test_the_same_samples_in_the_same_order_and_the_same_losses(tmp_path):
    bench = Bench(tmp_path, **NO_DROPOUT)
    alone = samples_by_step(bench, "alone", 1, 0, None)

    elastic: dict[int, list] = {}
    for ranks, steps in ((1, 5), (2, 6), (4, 4), (2, None)):
        part = samples_by_step(bench, "elastic", ranks, 0 if steps is None else 75, steps)
        assert not part.keys() & elastic.keys()  # no step is done twice
        elastic |= part

    assert [s for step in range(24) for s, _ in alone[step]] == list(range(8 * 24))
    assert elastic == alone
    run, straight = Run(bench.folder / "elastic", []), Run(bench.folder / "alone", [])
    assert len(run.losses) == 24
    assert run.losses == pytest.approx(straight.losses, rel=1e-5)
