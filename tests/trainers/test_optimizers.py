"""Whole runs with --optimizer: they resume bit for bit, and ranks, overflows and gossip fit in."""

import pytest

from llm.errors import CheckpointError, ConfigError
from llm.trainers.gpt.main import parse_args
from tests.support.faults import Fault
from tests.support.recovery import check_resume
from tests.support.training import NO_DROPOUT, Bench

LOSS = "llm.models.loss:LanguageModelLoss.forward"
MORE = pytest.mark.layouts
RATES = {"muon": 3e-3, "normuon --hyperball": 0.02, "soap": 3e-3, "sgd": 0.1}


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("plain"), **NO_DROPOUT)


@pytest.fixture(scope="module")
def dropout(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("dropout"))


@pytest.mark.parametrize(
    ("optimizer", "ranks", "precision", "momentum", "shards"),
    [
        pytest.param("muon", 2, "fp16", None, None, marks=MORE),
        pytest.param("muon", 2, "fp16", None, 2, marks=pytest.mark.extended),
        pytest.param("normuon --hyperball", 2, "fp16", None, 2, marks=pytest.mark.extended),
        pytest.param("soap", 1, "no", None, None, marks=MORE),
        pytest.param("soap", 2, "fp16", None, None, marks=MORE),
        pytest.param("soap", 2, "fp16", None, 2, marks=MORE),
        pytest.param("sgd", 2, "fp16", None, None, marks=MORE),
        # No state at all.
        pytest.param("sgd", 1, "no", 0, None, marks=pytest.mark.extended),
    ],
)
def test_a_resumed_run_is_bit_identical(dropout, optimizer, ranks, precision, momentum, shards):
    """Dropout is on, an interval of the log is open at the checkpoint, bases are due after it."""
    options = {
        "optimizer": optimizer.partition(" ")[0],
        "hyperball": "hyperball" in optimizer,
        "ranks": ranks,
        "mixed_precision": precision,
        "learning_rate": RATES[optimizer],
        "momentum": momentum,
        "data_parallel_shard_size": shards,
        "weight_decay": 0.1,
        "lr_scheduler_type": "cosine",
        "soap_update_steps": 4 if optimizer == "soap" else None,
        "max_train_steps": 12,
        "checkpointing_steps": 6,
        "gradient_accumulation_steps": 2,
        "logging_steps": 4,
    }
    name = optimizer.replace(" --", "-")
    check_resume(dropout, f"{name}-{ranks}-{precision}-{shards}", **options)


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param("muon", marks=pytest.mark.extended),
        *(pytest.param(name, marks=MORE) for name in ("soap", "sgd")),
    ],
)
def test_two_ranks_train_as_one_and_a_nan_on_one_skips_the_step_on_both(plain, optimizer):
    options = {"optimizer": optimizer, "learning_rate": RATES[optimizer], "betas": (0.9, 0.95)}
    options |= {"betas": None} if optimizer == "sgd" else {}
    alone = plain.train_well(
        f"alone-{optimizer}",
        per_device_train_batch_size=8,
        faults=[Fault(at=LOSS, what="nan", call=5)],
        **options,
    )
    both = plain.train_well(
        f"both-{optimizer}",
        ranks=2,
        faults=[Fault(at=LOSS, what="nan", call=5, rank=1)],
        **options,
    )
    sound = {record["step"]: record["loss"] for record in alone.metrics if record["step"] != 5}
    assert "step 5 was skipped" in both.output
    assert both.metrics[-1]["skipped_steps"] == 1
    for record in both.metrics:
        if record["step"] != 5:
            # Muon computes in bf16, which magnifies the order of a sum.
            assert record["loss"] == pytest.approx(sound[record["step"]], rel=1e-3)
    assert sound[20] < sound[1] - 0.3


@pytest.mark.parametrize(
    "optimizer", [pytest.param("muon", marks=pytest.mark.extended), pytest.param("sgd", marks=MORE)]
)
def test_gossip_resumes_under_another_world_size(plain, optimizer):
    options = {
        "optimizer": optimizer,
        "learning_rate": RATES[optimizer],
        "data_parallel": "gossip",
        "global_batch_size": 8,
        "checkpointing_steps": 4,
        "resume_from_checkpoint": True,
    }
    name = f"gossip-{optimizer}"
    plain.train_well(name, ranks=2, max_train_steps=4, per_device_train_batch_size=4, **options)
    run = plain.train_well(name, max_train_steps=12, per_device_train_batch_size=8, **options)
    assert "holds 2 replicas of the model and this run has 1" in run.output
    assert len(run.losses) == 12
    assert run.losses[-1] < run.losses[0] - 0.3


def test_no_change_on_resume_makes_one_optimizer_of_another(plain):
    saved = {"max_train_steps": 2, "checkpointing_steps": 2, "kfac": True}
    plain.train_well("of-kfac", **saved)
    again = {**saved, "max_train_steps": 4, "resume_from_checkpoint": True}
    for changed in ({"kfac": False}, {"kfac_max_dim": 16}, {"optimizer": "sgd", "kfac": False}):
        for allowed in ({}, {"change_on_resume": ("max_train_steps", *changed)}):
            said = f"holds another state of the optimizer: {next(iter(changed))} was .* --init_from"
            with pytest.raises(CheckpointError, match=said):
                plain.read("of-kfac", **{**again, **changed, **allowed})
    names = ("max_train_steps", "optimizer")  # that of the default by its name is no other
    plain.train_well("of-kfac", change_on_resume=names, optimizer="adamw", **again)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"momentum": 0.8}, "--momentum needs --optimizer sgd or --optimizer muon"),
        (
            {"momentum": 0.8, "optimizer": "soap"},
            "--momentum needs --optimizer sgd or --optimizer muon",
        ),
        ({"momentum": 1, "optimizer": "sgd"}, "--momentum must be smaller than 1"),
        ({"soap_update_steps": 5}, "--soap_update_steps needs --optimizer soap"),
        ({"optimizer": "sgd", "betas": (0.9, 0.95)}, "--betas is not for --optimizer sgd"),
        ({"optimizer": "sgd", "eps": 1e-6}, "--eps is not for --optimizer sgd"),
        ({"optimizer": "muon", "kfac": True}, "--optimizer muon does not go with --kfac"),
        (
            {"optimizer": "soap", "kfac": True, "kfac_method": "eigen"},
            "--optimizer soap does not go with --kfac by the method eigen; choose ekfac, or leave",
        ),
        (
            {"optimizer": "soap", "kfac": True, "kfac_damping": 0.01, "kfac_kl_clip": 0.1},
            r"the method eigen \(selected by --kfac_damping and --kfac_kl_clip\); choose ekfac",
        ),
        (
            {"optimizer": "muon", "learning_rate": 0, "embedding_learning_rate": 1e-3},
            "--embedding_learning_rate 0.001 follows .* --learning_rate, which must be above 0",
        ),
        ({"optimizer": "sgd", "kfac": True}, "--optimizer sgd does not go with --kfac"),
        ({"optimizer": "lion"}, "adamw, accumadamw, muon, normuon, soap, sgd"),
    ],
)
def test_options_that_do_not_fit_an_optimizer_are_refused(plain, options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        parse_args(plain.command("refused", **options))
