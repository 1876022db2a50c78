"""Whole runs whose model is divided over ranks: the losses of one, checkpoints of any layout."""

import math

import pytest
from safetensors.torch import load_file

from tests.support.recovery import check_resume
from tests.support.training import NO_DROPOUT, Bench, Run

SHARDED = {"data_parallel_shard_size": 2}


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("plain"), **NO_DROPOUT)


@pytest.fixture(scope="module")
def alone(plain) -> Run:
    return plain.train_well("alone", per_device_train_batch_size=8, eval_metrics="accuracy")


FOUR = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}  # its list of layers cannot grow
FAMILIES = {"gpt2": {"n_layer": 4, "n_head": 4, **NO_DROPOUT}, "llama": FOUR, "qwen3": HEADS}


@pytest.fixture(
    scope="module",
    params=[
        "gpt2",
        pytest.param("llama", marks=pytest.mark.layouts),
        pytest.param("qwen3", marks=pytest.mark.layouts),
    ],
)
def family(request, tmp_path_factory) -> tuple[Bench, Run]:
    """A model of four layers and heads, and its training on one rank."""
    bench = Bench(
        tmp_path_factory.mktemp(request.param), family=request.param, **FAMILIES[request.param]
    )
    options = {"per_device_train_batch_size": 8, "eval_metrics": "accuracy"}
    return bench, bench.train_well("alone", **options)


FSDP4 = {"data_parallel_shard_size": 4}
TENSOR = {"tensor_parallel_size": 2}
SEQUENCE = {**TENSOR, "sequence_parallel": True}
CONTEXT = {"context_parallel_size": 2}
PIPELINE = {"pipeline_parallel_size": 2}
LAYOUTS = {
    "FSDP2": (2, SHARDED),
    "HSDP2x2": (4, SHARDED),
    "FSDP4": (4, FSDP4),
    "TP2": (2, TENSOR),
    "TP4": (4, {"tensor_parallel_size": 4}),
    "TP2xFSDP2": (4, TENSOR | SHARDED),
    "TP2xDP2": (4, TENSOR),
    "SP2": (2, SEQUENCE),
    "SP2xFSDP2": (4, SEQUENCE | SHARDED),
    "CP2": (2, CONTEXT),
    "CP2xDP2": (4, CONTEXT),
    "CP2xFSDP2": (4, CONTEXT | SHARDED),
    "TP2xCP2": (4, TENSOR | CONTEXT),
    "PP2": (2, PIPELINE),
    "PP4": (4, {"pipeline_parallel_size": 4, "gradient_accumulation_steps": 4}),
    "PP2xDP2": (4, PIPELINE),
    "PP2xFSDP2": (4, PIPELINE | SHARDED),
    "PP2xTP2": (4, PIPELINE | TENSOR),
}
IN_CI = ("PP2",)
"""That of `make test-extended`; `make test-layouts` runs the others."""


def data_ranks(ranks: int, sizes: dict[str, int]) -> int:
    """How many shares a global batch has."""
    others = ("tensor_parallel_size", "context_parallel_size", "pipeline_parallel_size")
    return ranks // math.prod(sizes.get(name, 1) for name in others)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=pytest.mark.extended if name in IN_CI else pytest.mark.layouts)
        for name in LAYOUTS
    ],
)
def test_a_sharded_model_trains_evaluates_and_exports_as_on_one_rank(family, layout):
    bench, alone = family
    ranks, sizes = LAYOUTS[layout]
    config = alone.read_json("config.json")
    if layout == "PP4" and config.get("num_hidden_layers", 4) < 4:
        pytest.skip(f"{config['model_type']} has two layers here")
    micro_batches = sizes.get("gradient_accumulation_steps", 2)
    run = bench.train_well(
        layout,
        ranks=ranks,
        per_device_train_batch_size=8 // micro_batches // data_ranks(ranks, sizes),
        eval_metrics="accuracy",
        checkpointing_steps=10,
        **{"gradient_accumulation_steps": 2, **sizes},
    )
    assert run.losses == pytest.approx(alone.losses, rel=1e-5)
    assert "eval_accuracy" in alone.metrics[-1]
    for ours, theirs in zip(run.metrics, alone.metrics, strict=True):
        for key in ("grad_norm", "eval_loss", "eval_accuracy"):
            if key in theirs:
                assert ours[key] == pytest.approx(theirs[key], rel=1e-4)
    ours, theirs = (load_file(r.folder / "model.safetensors") for r in (run, alone))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].shape == tensor.shape
        assert (ours[name] - tensor).abs().max() < 1e-3


@pytest.mark.layouts
@pytest.mark.parametrize("layout", ["FSDP2", "PP2xFSDP2", "CP2"])
def test_half_precision_is_that_of_one_rank(plain, layout):
    """What autocast leaves in float32, such as the gains of norms, no layout makes smaller."""
    options = {"mixed_precision": "bf16", "gradient_accumulation_steps": 2, "max_train_steps": 5}
    whole = plain.train_well(f"bf16-{layout}-alone", per_device_train_batch_size=4, **options)
    ranks, sizes = LAYOUTS[layout]
    run = plain.train_well(
        f"bf16-{layout}",
        ranks=ranks,
        per_device_train_batch_size=4 // data_ranks(ranks, sizes),
        **options,
        **sizes,
    )
    assert run.losses == pytest.approx(whole.losses, rel=1e-4)


@pytest.mark.parametrize(
    "layouts",
    [
        ("FSDP2", "PP2"),
        pytest.param(("FSDP4", "PP2xTP2"), marks=pytest.mark.layouts),
        pytest.param(("CP2xFSDP2", "TP2xCP2"), marks=pytest.mark.layouts),
        pytest.param(("SP2xFSDP2", "CP2"), marks=pytest.mark.layouts),
    ],
    ids=" then ".join,
)
def test_a_run_resumes_under_other_layouts(plain, alone, layouts):
    """The same samples, the same losses; a stage's rank reads what another's has written."""
    for end, layout in zip((5, 11, 20), (*layouts, None), strict=True):
        ranks, sizes = LAYOUTS[layout] if layout else (1, {})
        plain.train_well(
            f"moving-{layouts[0]}",
            ranks=ranks,
            per_device_train_batch_size=4 // data_ranks(ranks, sizes),
            gradient_accumulation_steps=2,
            max_train_steps=end,
            change_on_resume="max_train_steps",
            checkpointing_steps=3,
            resume_from_checkpoint=True,
            eval_metrics="accuracy",
            **sizes,
        )
    run = Run(plain.folder / f"moving-{layouts[0]}", [])
    assert run.losses == pytest.approx(alone.losses, rel=1e-5)
    assert run.metrics[-1]["samples"] == 160


@pytest.mark.parametrize(
    ("sizes", "precision"),
    [
        pytest.param(SHARDED, "fp16", id="FSDP2", marks=pytest.mark.layouts),
        pytest.param(PIPELINE, "fp16", id="PP2", marks=pytest.mark.extended),
        pytest.param(TENSOR, "no", id="TP2", marks=pytest.mark.layouts),
        pytest.param(SEQUENCE, "no", id="SP2", marks=pytest.mark.layouts),
        pytest.param(CONTEXT, "no", id="CP2", marks=pytest.mark.layouts),
    ],
)
def test_a_sharded_run_resumes_bit_for_bit(tmp_path_factory, sizes, precision):
    """Dropout is on, and a logging interval (3 steps) is open at the checkpoint."""
    bench = Bench(tmp_path_factory.mktemp("dropout"))
    options = {
        "ranks": 2,
        "checkpointing_steps": 10,
        "gradient_accumulation_steps": 2,
        "logging_steps": 3,
        "eval_steps": 7,
        "mixed_precision": precision,
        **sizes,
    }
    check_resume(bench, "shards", **options)


def test_sizes_that_do_not_divide_the_ranks_are_refused_on_all_of_them(plain):
    """What else is refused stands in tests/trainers/test_rules.py."""
    run = plain.train("refused", ranks=2, data_parallel_shard_size=3)
    assert run.codes == [2, 2]
    assert "3 ranks, which do not divide the 2 that there are" in run.output
