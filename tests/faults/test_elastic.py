"""Runs whose number of ranks changes: by hand, and by torchrun when a node is lost."""

import os
import signal
from collections.abc import Sequence

import pytest

from llm.checkpoint.load import find_newest_checkpoint
from tests.support.faults import Fault, install
from tests.support.processes import Launch, wait_until_there
from tests.support.ranks import free_port, run_ranks, values
from tests.support.training import NO_DROPOUT, Bench, Run

pytestmark = pytest.mark.faults

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


def test_an_elastic_restart_keeps_the_sample_order_and_the_losses(tmp_path):
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


def lose_a_node(bench: Bench, name: str, **options) -> tuple[Run, str]:
    """Three torchruns of one rank each, of which the last is killed in step 8; 2 to 3 may go on."""
    command = bench.command(name, max_train_steps=12, checkpointing_steps=3, **options)
    launcher = ["--nnodes", "2:3", "--max_restarts", "3"]
    settings = "last_call_timeout=5,keep_alive_interval=1"  # 30 s and 5 s unless given
    stopped, port = bench.folder / f"{name}-stopped", free_port()
    stop = Fault(
        at="llm.trainers.gpt.loop:Trainer.train_step", what="SIGSTOP", call=8, file=stopped
    )
    nodes = [
        Launch(
            command,
            ranks=1,
            faults=[stop] if node == 2 else [],
            launcher=[*launcher, "--rdzv_conf", f"is_host={int(node == 0)},{settings}"],
            port=port,
        )
        for node in range(3)
    ]
    try:
        wait_until_there(stopped)
        for pid in nodes[2].alive():
            os.kill(pid, signal.SIGKILL)
    finally:
        outputs = [node.end(timeout=180) for node in nodes]
    output = "\n".join(outputs)
    assert [node.process.returncode for node in nodes] == [0, 0, -9], output
    assert [node.left for node in nodes] == [[], [], []]
    return Run(bench.folder / name, []), output


def test_torchrun_continues_after_a_lost_node_with_the_same_losses(tmp_path):
    bench = Bench(tmp_path, **NO_DROPOUT)
    # Three ranks accumulate over 2 micro-batches, two over 3.
    options = {
        "per_device_train_batch_size": 2,
        "global_batch_size": 12,
        "resume_from_checkpoint": True,
        "async_checkpoint": False,
    }
    straight = bench.train_well("straight", ranks=3, max_train_steps=12, **options)

    run, output = lose_a_node(bench, "lost", **options)

    assert "at step 6." in output
    assert "number of ranks was 3 and is 2" in output
    assert [record["step"] for record in run.metrics if "loss" in record] == [*range(1, 13)]
    assert run.losses == pytest.approx(straight.losses, rel=1e-5)
    assert run.read_json("status.json")["status"] == "finished"


@pytest.mark.parametrize(
    "mode",
    [{"data_parallel": "gossip"}, {"data_parallel": "diloco", "inner_steps": 3}],
    ids=["gossip", "diloco"],
)
def test_gossip_replicas_resume_from_their_mean_after_an_elastic_restart(tmp_path, mode):
    bench = Bench(tmp_path)
    options = {"per_device_train_batch_size": 2, "global_batch_size": 12, **mode}

    run, output = lose_a_node(
        bench, "lost", resume_from_checkpoint=True, async_checkpoint=False, **options
    )

    assert "The checkpoint holds 3 replicas of the model and this run has 2" in output
    assert [record["step"] for record in run.metrics if "loss" in record] == [*range(1, 13)]
    assert run.losses[-1] < run.losses[0] - 0.3
    newest = find_newest_checkpoint(run.folder / "checkpoints")
    assert newest is not None
    assert (newest.step, newest.metadata["replicas"]) == (12, 2)
