"""A run with stages, a budget, a growing batch, skipped samples and an average, and its branch."""

from pathlib import Path

import pytest

from llm.tools.inspect import main as inspect
from llm.trainers.gpt.step_samples import find_step_samples
from tests.support.faults import Fault
from tests.support.loaded_samples import tokens_of, train_and_note
from tests.support.ranks import run_ranks, values
from tests.support.token_files import random_documents, write_pair
from tests.support.training import FROM_PARENT, NO_DROPOUT, Bench, Run

STAGES = """
[[data_stage]]
until = 1_500
data_path = [0.75, "{folder}/web", 0.25, "{folder}/code"]

[[data_stage]]
data_path = [0.2, "{folder}/web", 0.8, "{folder}/code"]
"""
# 5 steps of 4 windows of 32 tokens, 5 of 8, and one of 3 windows.
STABLE = {
    "train_file": None,
    "split": "9,1",
    "max_train_steps": None,
    "max_train_tokens": "2K",
    "global_batch_size": "4@0,8@640",
    "per_device_train_batch_size": 2,
    "skip_samples": "5:9,40:41",
    "ema_decay": 0.9,
    "eval_ema": True,
    "eval_steps": 4,
    "log_source_losses": True,
    "checkpointing_steps": 2,
    "async_checkpoint": False,
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    bench = Bench(tmp_path_factory.mktemp("bench"), lines=2, **NO_DROPOUT)
    write_pair(bench.folder / "web", random_documents(60, seed=1))
    write_pair(bench.folder / "code", random_documents(60, seed=2, first_id=150))
    (bench.folder / "stages.toml").write_text(STAGES.format(folder=bench.folder))
    return bench


def train_noting(bench: Bench, name: str, **options) -> list[dict[int, list[list[int]]]]:
    """Train on two ranks; return the windows that each has read in each step."""
    outcomes = values(run_ranks(train_and_note, 2, bench.command(name, **options)))
    assert [code for code, _ in outcomes] == [0, 0]
    return [noted for _, noted in outcomes]


@pytest.fixture(scope="module")
def stable(bench) -> list[dict[int, list[list[int]]]]:
    return train_noting(bench, "stable", config=bench.folder / "stages.toml", **STABLE)


def of_branch(bench: Bench) -> dict[str, object]:
    """A cooldown of 31 windows after step 8: 3 steps of 8 and one of 7."""
    return FROM_PARENT | {
        "branch_from": bench.folder / "stable" / "8",
        "cooldown_tokens": 992,
        "cooldown_shape": "sqrt",
    }


@pytest.fixture(scope="module")
def cooled(bench, stable) -> list[dict[int, list[list[int]]]]:
    return train_noting(bench, "cooled", **of_branch(bench))


def check_shown(folder: Path, noted: list[dict[int, list[list[int]]]], capsys) -> None:
    """Compare what inspect finds for every step and rank with what the loader has read."""
    for rank, steps in enumerate(noted):
        for step, windows in steps.items():
            found = find_step_samples(folder, step, rank=rank, data_ranks=None)
            assert tokens_of(found) == windows
            assert inspect([str(folder), "--step", str(step), "--rank", str(rank)]) == 0
            shown = capsys.readouterr().out
            for number, source in zip(found.samples, found.sources, strict=True):
                assert f"sample {number}, source {('web', 'code')[source]}" in shown


def test_each_step_is_shown_with_the_samples_that_the_loader_read(bench, stable, cooled, capsys):
    assert [sorted(steps) for steps in stable] == [[*range(1, 12)]] * 2
    assert [sorted(steps) for steps in cooled] == [[*range(9, 13)]] * 2
    check_shown(bench.folder / "stable", stable, capsys)
    check_shown(bench.folder / "cooled", cooled, capsys)

    samples = [
        find_step_samples(
            bench.folder / "stable", step, rank=None, data_ranks=None
        ).samples.tolist()
        for step in range(1, 12)
    ]
    assert [len(step) for step in samples] == [4] * 5 + [8] * 5 + [3]
    assert [n for step in samples for n in step] == [
        n for n in range(68) if n not in (5, 6, 7, 8, 40)
    ]
    assert cooled[0][9] == stable[0][9]


@pytest.mark.faults
def test_a_branch_killed_and_resumed_on_one_rank_has_the_same_losses(bench, cooled):
    straight = Run(bench.folder / "cooled", [])
    kill = Fault(at="llm.trainers.gpt.loop:Trainer.train_step", what="SIGKILL", call=3, rank=0)
    started = bench.start("killed", ranks=2, faults=[kill], **of_branch(bench))
    started.wait_for_death()
    started.kill()
    started.outcomes(timeout=30)

    killed = bench.train_well("killed", resume_from_checkpoint=True, **of_branch(bench))

    assert "Resumed from" in killed.output
    for key in ("loss", "eval_loss", "eval_ema_loss", "loss/web", "loss/code", "learning_rate"):
        curve, whole = (
            {row["step"]: row[key] for row in run.metrics if key in row}
            for run in (killed, straight)
        )
        assert curve.keys() == whole.keys() != set()
        assert curve == pytest.approx(whole, rel=1e-4)
    for step in range(9, 13):
        one, two = (
            find_step_samples(run.folder, step, rank=None, data_ranks=None)
            for run in (killed, straight)
        )
        assert one.samples.tolist() == two.samples.tolist()
