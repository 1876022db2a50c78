"""Training runs with --z_loss."""

import pytest

from llm.errors import ConfigError
from llm.trainers.gpt.main import parse_args
from tests.support.recovery import check_resume
from tests.support.training import NO_DROPOUT, Bench

OPTIONS = {"max_train_steps": 4, "z_loss": 0.05, "gradient_accumulation_steps": 2}


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench(tmp_path_factory.mktemp("z-loss"), **NO_DROPOUT)


@pytest.fixture(scope="module")
def alone(bench):
    return bench.train_well("alone", **OPTIONS, per_device_train_batch_size=4)


def test_the_z_loss_is_logged_apart_and_pulls_the_logits_down(bench, alone):
    plain = bench.train_well("plain", **{**OPTIONS, "z_loss": 0})
    first, *_, last = [record for record in alone.metrics if "loss" in record]
    assert first["loss"] == plain.losses[0]  # the same weights: the loss is without it
    assert 0.05 * 5.0**2 < first["z_loss"] < 0.05 * 6.5**2  # of 320 tokens, ln 320 = 5.8
    assert last["z_loss"] < first["z_loss"]
    assert f"z loss: {last['z_loss']:.6E} |" in alone.output
    assert not any("z_loss" in record for record in plain.metrics)
    assert "z loss" not in plain.output


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, {"per_device_train_batch_size": 2}),
        pytest.param(2, {"pipeline_parallel_size": 2}, marks=pytest.mark.extended),
    ],
)
def test_every_layout_has_the_z_loss_of_one_rank(bench, alone, ranks, layout):
    run = bench.train_well("-".join(layout), ranks=ranks, **OPTIONS, **layout)
    for ours, theirs in zip(run.metrics, alone.metrics, strict=True):
        for key in {"loss", "z_loss", "eval_loss"} & theirs.keys():
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5), key


def test_a_resumed_run_has_the_z_loss_of_an_interval_that_was_open(bench):
    options = {**OPTIONS, "logging_steps": 4, "checkpointing_steps": 2}
    resumed = check_resume(bench, "open", **options)
    assert resumed.metrics[-1]["z_loss"] > 0


def test_a_negative_coefficient_is_refused(bench):
    with pytest.raises(ConfigError, match="--z_loss must be at least 0, not -1"):
        parse_args(bench.command("refused", z_loss=-1))
