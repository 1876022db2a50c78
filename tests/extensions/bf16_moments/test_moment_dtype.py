"""Training runs with --moment_dtype bf16."""

import pytest

from llm.errors import ConfigError
from llm.trainers.gpt.main import parse_args
from tests.support.recovery import check_resume
from tests.support.training import NO_DROPOUT, Bench

OPTIONS = {"moment_dtype": "bf16", "lr_scheduler_type": "cosine", "max_train_steps": 12}


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench(tmp_path_factory.mktemp("moments"), **NO_DROPOUT)


@pytest.mark.parametrize(
    "sharded",
    [
        pytest.param(False, marks=pytest.mark.layouts),
        pytest.param(True, marks=pytest.mark.extended),
    ],
)
def test_a_resumed_run_rounds_its_moments_to_the_same_bits(bench, sharded):
    options = {**OPTIONS, "ranks": 2, "checkpointing_steps": 6, "logging_steps": 4}
    if sharded:
        options["data_parallel_shard_size"] = 2
    check_resume(bench, str(sharded), **options)


def test_the_losses_stay_near_those_of_float32_moments(bench):
    half = bench.train_well("half", **OPTIONS)
    whole = bench.train_well("whole", **{**OPTIONS, "moment_dtype": "fp32"})
    assert whole.losses[-1] < whole.losses[0] - 0.3
    assert half.losses == pytest.approx(whole.losses, abs=0.01)
    assert half.losses != whole.losses


@pytest.mark.parametrize(
    ("options", "other"),
    [
        ({"optimizer": "muon"}, "--optimizer muon"),
        ({"optimizer": "soap"}, "--optimizer soap"),
        ({"optimizer": "sgd"}, "--optimizer sgd"),
        ({"optimizer": "accumadamw"}, "--optimizer accumadamw"),
        ({"kfac": True}, "--kfac"),
        ({"data_parallel": "gossip"}, "--data_parallel gossip"),
    ],
)
def test_what_has_no_moments_in_bf16_is_refused_by_name(bench, options, other):
    with pytest.raises(ConfigError, match=f"--moment_dtype bf16 is for AdamW .*, not for {other}"):
        parse_args(bench.command("refused", moment_dtype="bf16", **options))
