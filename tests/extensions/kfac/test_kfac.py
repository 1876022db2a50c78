"""Whole runs with --kfac: what they reach, what they say, and that they resume bit for bit."""

from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from llm.errors import ConfigError
from llm.extensions.kfac.make_kfac import choose_max_block_width, find_model_coverage, make_kfac
from llm.trainers.gpt.extensions import GPTConfig
from tests.support.faults import Fault
from tests.support.models import tiny_config, tiny_model
from tests.support.recovery import check_resume
from tests.support.training import NO_DROPOUT, Bench, Run

LOSS = "llm.models.loss:LanguageModelLoss.forward"
# A and G of four layers in two blocks, where queries, keys and values have a G each; wider than two
# models are both factors of the MLP's inner side.
BLOCKS = "MiB of factors and bases on this rank, 4 of 20 factors in diagonal blocks."
MORE = pytest.mark.layouts
DAMPED = {"kfac_damping": 0.01, "kfac_factor_update_steps": 1}


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("plain"), **NO_DROPOUT)


@pytest.fixture(scope="module")
def dropout(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("dropout"))


@pytest.fixture(scope="module")
def alone(plain) -> Run:
    return plain.train_well("alone", kfac=True, per_device_train_batch_size=8)


def test_kfac_reaches_a_lower_loss_than_adamw_in_the_same_steps(plain):
    options = {"max_train_steps": 60, "learning_rate": 3e-3}
    adamw = plain.train_well("adamw", **options)
    kfac = plain.train_well("kfac", kfac=True, **options)
    assert kfac.losses[0] == adamw.losses[0]
    ours, theirs = (run.read_json("all_results.json")["eval_loss"] for run in (kfac, adamw))
    assert ours < theirs - 0.05


def test_covered_layers_are_logged_once_and_each_report_has_kfac_metrics(alone):
    log = (alone.folder / "log.txt").read_text()
    # Two blocks with four Conv1D each, one of them three matrices; the rest is AdamW's.
    assert log.count("K-FAC covers 12 layers with 25,152 of") == 1
    assert "Not covered, since it is a LayerNorm: transformer.h.0.ln_1" in log
    assert BLOCKS in log
    assert "method is ekfac; factor_update_steps=50" in log
    assert all(record["kfac_condition"] >= 1 for record in alone.metrics if "loss" in record)
    assert all(record["kfac_fallbacks"] == 0 for record in alone.metrics if "loss" in record)
    # Without an update there is no time of one.
    timed = [record for record in alone.metrics if "kfac_inv_update_ms" in record]
    assert 0 < len(timed) < len(alone.metrics)
    assert all(0 < record["kfac_inv_update_ms"] < record["ms_per_step"] for record in timed)
    assert all(0 < record["kfac_factor_update_ms"] < record["ms_per_step"] for record in timed)


@pytest.mark.parametrize(
    ("options", "width", "widest"),
    [
        ({}, 32, 64),
        ({}, 5000, 8192),
        ({"kfac_max_dim": 10}, 32, 10),
        ({"kfac_method": "eigen"}, 32, 8192),
    ],
)
def test_only_ekfac_has_blocks_of_two_widths_unless_they_are_asked_for(options, width, widest):
    model = SimpleNamespace(config=tiny_config("gpt2", n_embd=width))
    assert choose_max_block_width(GPTConfig(kfac=True, **options), model) == widest


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(
            1,
            {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
            marks=pytest.mark.extended,
        ),
        pytest.param(2, {"per_device_train_batch_size": 4}, marks=MORE),
        (2, {"per_device_train_batch_size": 4, "data_parallel_shard_size": 2}),
        pytest.param(
            2,
            {"gradient_accumulation_steps": 2, "pipeline_parallel_size": 2},
            marks=pytest.mark.extended,
        ),
    ],
)
def test_ranks_accumulation_and_layout_do_not_change_the_losses(plain, alone, ranks, options):
    name = f"ranks{ranks}-" + "-".join(map(str, options.values()))
    run = plain.train_well(name, ranks=ranks, kfac=True, **options)
    assert run.losses == pytest.approx(alone.losses, rel=1e-4)


# Dropout is on, an interval of the log is open at the checkpoint, and bases are due after.
OPEN = {
    "kfac": True,
    "kfac_factor_update_steps": 2,
    "kfac_inv_update_steps": 4,
    "max_train_steps": 12,
    "checkpointing_steps": 6,
    "gradient_accumulation_steps": 2,
    "logging_steps": 4,
}


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {}),
        pytest.param(1, {"mixed_precision": "fp16"}, marks=MORE),
        pytest.param(2, {}, marks=MORE),
        pytest.param(2, {"mixed_precision": "fp16"}, marks=MORE),
        pytest.param(2, {"kfac_method": "eigen"}, marks=pytest.mark.extended),
        pytest.param(
            1,
            {"optimizer": "soap", "soap_update_steps": 4, "nesterov": True},
            marks=pytest.mark.extended,
        ),
        pytest.param(2, {"data_parallel_shard_size": 2, "mixed_precision": "fp16"}, marks=MORE),
    ],
)
def test_a_resumed_run_is_bit_identical(dropout, ranks, options):
    name = f"{ranks}-" + "-".join(map(str, options.values()))
    check_resume(dropout, name, ranks=ranks, **{**OPEN, **options})


@pytest.mark.parametrize(
    "method",
    [pytest.param("ekfac", marks=pytest.mark.extended), pytest.param("eigen", marks=MORE)],
)
def test_a_nan_on_one_rank_of_shards_skips_the_step_on_all(plain, method):
    run = plain.train_well(
        f"nan-shards-{method}",
        ranks=2,
        kfac=True,
        kfac_method=method,
        kfac_factor_update_steps=1,
        kfac_inv_update_steps=1,
        data_parallel_shard_size=2,
        max_train_steps=12,
        faults=[Fault(at=LOSS, what="nan", call=5, rank=1)],
    )
    assert "step 5 was skipped" in run.output
    assert all(record["loss"] > 0 for record in run.metrics if record["step"] != 5)
    assert run.losses[-1] < run.losses[0]


@pytest.mark.extended
def test_the_decay_of_ekfac_per_step_does_not_depend_on_the_interval(plain):
    options = {"kfac": True, "kfac_factor_update_steps": 2, "kfac_inv_update_steps": 4}
    losses = [
        plain.train_well(
            f"decay-{decay}", max_train_steps=12, kfac_factor_decay=decay, **options
        ).losses
        for decay in (None, 0.9801, 0.5)
    ]
    assert losses[0] == losses[1] != losses[2]


def test_damping_selects_a_preconditioner_that_trains_and_reports_it(plain):
    run = plain.train_well("damped", kfac=True, **DAMPED)
    assert "method is eigen because of --kfac_damping" in run.output
    assert run.losses[-1] < run.losses[0] - 0.2
    assert run.metrics[0]["kfac_damping"] == pytest.approx(0.01)
    assert 0 <= run.metrics[-1]["kfac_clipped"] <= 1


def test_a_step_that_overflows_is_skipped_and_training_continues(plain):
    """Every step is recorded and decomposed, so that the overflow meets all of it."""
    fault = Fault(at=LOSS, what="nan", call=5)
    run = plain.train_well(
        "nan",
        kfac=True,
        kfac_factor_update_steps=1,
        kfac_inv_update_steps=1,
        mixed_precision="fp16",
        max_train_steps=12,
        faults=[fault],
    )
    assert "step 5 was skipped" in run.output
    assert all(record["loss"] > 0 for record in run.metrics if record["step"] != 5)
    assert run.losses[-1] < run.losses[0]


@pytest.mark.parametrize(
    "family",
    [
        *(pytest.param(name, marks=MORE) for name in ("gpt_neo", "opt", "llama")),
        pytest.param("mixtral", marks=pytest.mark.extended),
    ],
)
def test_other_families_train_with_kfac(family, tmp_path):
    bench = Bench(tmp_path, family=family)
    run = bench.train_well(kfac=True, max_train_steps=4, mixed_precision="bf16")
    assert run.losses[-1] < run.losses[0]
    assert "K-FAC covers" in run.output


@pytest.mark.skipif(find_spec("kfac") is None, reason="kfac-pytorch is not installed")
def test_a_run_with_the_kfac_pytorch_library_resumes_bit_for_bit(dropout):
    check_resume(dropout, "library", **{**OPEN, "kfac_library": "kfac-pytorch"})


@pytest.mark.skipif(find_spec("kfac") is not None, reason="kfac-pytorch is installed")
def test_a_missing_kfac_library_is_named(plain):
    run = plain.train("missing", kfac=True, kfac_library="kfac-pytorch")
    assert run.codes == [2]
    assert "pip install git+https://github.com/gpauloski/kfac-pytorch" in run.output


@pytest.mark.extended
@pytest.mark.parametrize("which", ["full", "selective"])
def test_activation_recomputation_does_not_change_kfac(plain, alone, which):
    options = {"per_device_train_batch_size": 8, "activation_checkpointing": which}
    run = plain.train_well(which, kfac=True, **options)
    assert run.losses == pytest.approx(alone.losses, rel=1e-5)


@pytest.mark.extended
def test_selective_recomputation_keeps_no_product_of_kfac(tmp_path):
    llama = Bench(tmp_path, family="llama")  # its layers, too, are products without a bias
    options = {"kfac": True, "kfac_factor_update_steps": 2, "max_train_steps": 4}
    none, selective = (
        llama.train_well(which, activation_checkpointing=which, **options)
        for which in ("none", "selective")
    )
    assert selective.losses == pytest.approx(none.losses, rel=1e-5)


def test_a_run_with_kfac_is_evaluated_and_started_from_without_it(plain):
    run = plain.train_well("saved", kfac=True, max_train_steps=2, checkpointing_steps=2)
    loss = run.read_json("all_results.json")["eval_loss"]
    plain.train_well("saved", eval_only=True, resume_from_checkpoint=True)
    assert run.read_json("eval_results.json")["loss"] == pytest.approx(loss, rel=1e-6)
    plain.train_well("from", init_from=run.folder, max_train_steps=1)


def test_a_pipeline_stage_without_a_layer_for_kfac_is_refused():
    options = GPTConfig(kfac=True, kfac_skip_layers=[r"h\.0\."])
    model = tiny_model(tiny_config("gpt2"))
    coverage = find_model_coverage(options, model)
    model.transformer.h = model.transformer.h[:1]
    with pytest.raises(ConfigError, match="A pipeline stage has no layer for K-FAC: leave out"):
        make_kfac(options, model, coverage=coverage)
