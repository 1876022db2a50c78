"""Runs whose ranks divide the experts of a mixture: the losses of one rank, checkpoints of any."""

import pytest
from safetensors.torch import load_file
from transformers import DbrxConfig, JetMoeConfig

from llm.errors import ConfigError
from llm.trainers.gpt.config import check_config
from llm.trainers.gpt.extensions import GPTConfig
from tests.support.models import tiny_config
from tests.support.recovery import check_resume
from tests.support.training import Bench, Run

EXPERTS = {"data_parallel_shard_size": 2, "expert_parallel_size": 2}
FOUR = {"data_parallel_shard_size": 4, "expert_parallel_size": 4}
ALONE = {"expert_parallel_size": 2}
LAYOUTS = {
    "EP2": (2, EXPERTS),
    "EP2 recomputed": (2, EXPERTS | {"activation_checkpointing": "full"}),
    "EP2 recomputed in part": (2, EXPERTS | {"activation_checkpointing": "selective"}),
    "EP4": (4, FOUR),
    "EP2xDP2": (4, EXPERTS),
    "PP2xEP2": (4, EXPERTS | {"pipeline_parallel_size": 2}),
    "EP2 of FSDP4": (4, {"data_parallel_shard_size": 4, "expert_parallel_size": 2}),
    "EP2 of DDP2": (2, ALONE),
    "EP2 of DDP4": (4, ALONE),
    "EP4 of DDP4": (4, {"expert_parallel_size": 4}),
    "EP2 of PP2xDP2": (4, ALONE | {"pipeline_parallel_size": 2}),
}
SAMPLES = 8


def size_of(ranks, sizes):
    """Return the samples of a micro-batch, two of which make a rank's part of a step."""
    return SAMPLES // 2 // (ranks // sizes.get("pipeline_parallel_size", 1))


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("mixture"), family="qwen3_moe", num_experts=8)


@pytest.fixture(scope="module")
def alone(bench) -> Run:
    return bench.train_well("alone", per_device_train_batch_size=SAMPLES, max_train_steps=8)


@pytest.mark.parametrize(
    "layout",
    [name if name == "EP2" else pytest.param(name, marks=pytest.mark.layouts) for name in LAYOUTS],
)
def test_a_run_with_divided_experts_is_that_of_one_rank(bench, alone, layout):
    ranks, sizes = LAYOUTS[layout]
    run = bench.train_well(
        layout,
        ranks=ranks,
        per_device_train_batch_size=size_of(ranks, sizes),
        gradient_accumulation_steps=2,
        max_train_steps=8,
        **sizes,
    )
    assert run.losses == pytest.approx(alone.losses, rel=1e-5)
    for ours, theirs in zip(run.metrics, alone.metrics, strict=True):
        for key in ("grad_norm", "eval_loss"):
            if key in theirs:
                assert ours[key] == pytest.approx(theirs[key], rel=1e-4)
    ours, theirs = (load_file(r.folder / "model.safetensors") for r in (run, alone))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name] - tensor).abs().max() < 1e-3


@pytest.mark.layouts
@pytest.mark.parametrize(
    "layouts",
    [
        ("EP2", "EP4", None),
        ("EP2xDP2", None, "PP2xEP2"),
        ("EP2 of FSDP4", "EP2 of DDP2", "EP4"),
        ("EP2 of DDP4", "EP2 of PP2xDP2", None),
    ],
    ids=str,
)
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "soap"])
def test_a_run_resumes_with_experts_divided_in_other_ways(bench, layouts, optimizer):
    options = {"optimizer": optimizer, "max_train_steps": 8}
    name = f"{optimizer} {layouts[0]}"
    alone = bench.train_well(f"{name} alone", per_device_train_batch_size=SAMPLES, **options)
    for end, layout in zip((3, 6, 8), layouts, strict=True):
        ranks, sizes = LAYOUTS[layout] if layout else (1, {})
        bench.train_well(
            name,
            ranks=ranks,
            per_device_train_batch_size=size_of(ranks, sizes),
            gradient_accumulation_steps=2,
            change_on_resume="max_train_steps",
            checkpointing_steps=3,
            resume_from_checkpoint=True,
            **{**options, "max_train_steps": end},
            **sizes,
        )
    run = Run(bench.folder / name, [])
    assert run.losses == pytest.approx(alone.losses, rel=1e-3 if optimizer == "soap" else 1e-5)


@pytest.mark.layouts
def test_a_run_with_divided_experts_resumes_bit_for_bit(bench):
    check_resume(
        bench, "resumed", ranks=2, checkpointing_steps=10, per_device_train_batch_size=4, **EXPERTS
    )


@pytest.mark.layouts
def test_half_precision_is_that_of_one_rank(bench):
    options = {"mixed_precision": "bf16", "max_train_steps": 5}
    alone = bench.train_well("bf16 alone", per_device_train_batch_size=4, **options)
    run = bench.train_well("bf16", ranks=2, per_device_train_batch_size=2, **options, **EXPERTS)
    assert run.losses == pytest.approx(alone.losses, rel=1e-4)


@pytest.mark.parametrize(
    ("family", "sizes", "words"),
    [
        ("gpt2", EXPERTS, "--expert_parallel_size 2 divides experts, and gpt2 has none"),
        ("qwen3_moe", FOUR, "does not divide the 6 experts of a layer .* choose one of 2, 3, 6"),
        (
            "qwen3_moe",
            EXPERTS | {"data_parallel_shard_size": 4},
            "--data_parallel_shard_size 4 does not divide the 6 experts .* choose one of 2, 3, 6",
        ),
        ("dbrx", EXPERTS, "cannot divide the experts of dbrx, which lack transformers' common"),
        ("jetmoe", EXPERTS, "cannot divide the experts of jetmoe, which lack transformers' common"),
    ],
)
def test_a_model_whose_experts_cannot_be_divided_is_refused(family, sizes, words, tmp_path):
    bench = Bench(tmp_path)
    if family == "qwen3_moe":
        tiny_config(family, num_experts=6).save_pretrained(bench.model)
    elif family == "jetmoe":
        sizes_of_model = {"num_hidden_layers": 1, "hidden_size": 32, "num_local_experts": 4}
        JetMoeConfig(vocab_size=320, **sizes_of_model).save_pretrained(bench.model)
    elif family == "dbrx":
        attention = {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}
        sizes_of_model = {"n_layers": 1, "d_model": 32, "n_heads": 4, "attn_config": attention}
        DbrxConfig(vocab_size=320, **sizes_of_model).save_pretrained(bench.model)
    with pytest.raises(ConfigError, match=words):
        bench.read(ranks=sizes["data_parallel_shard_size"], per_device_train_batch_size=1, **sizes)


def test_a_number_of_ranks_that_cannot_divide_experts_is_refused(bench):
    with pytest.raises(ConfigError, match=r"2 has to divide the number of ranks .* which is 3"):
        bench.read(ranks=3, per_device_train_batch_size=1, **ALONE)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"data_parallel_shard_size": 3}, "2 has to divide --data_parallel_shard_size 3"),
        ({"expert_parallel_size": 4}, "4 has to divide --data_parallel_shard_size 2"),
        ({"unsharded_gradients": True}, "--unsharded_gradients does not go with --expert_par"),
        ({"mixed_precision": "fp8"}, "--mixed_precision fp8 .* --expert_parallel_size"),
        (
            {"mixed_precision": "fp8", "fp8_all_gather": True},
            "--fp8_all_gather .* does not go with --expert_parallel_size",
        ),
        ({"kfac": True}, "--kfac needs .*, which --expert_parallel_size divides"),
        ({"data_parallel": "gossip"}, "--expert_parallel_size divides one model over ranks"),
        ({"tensor_parallel_size": 2}, "--tensor_parallel_size does not go with --expert_par"),
        ({"context_parallel_size": 2}, "--context_parallel_size does not go with --expert_par"),
    ],
)
def test_options_that_exclude_divided_experts_are_refused_by_name(options, words):
    base = {"model_name_or_path": "qwen3_moe", "train_file": "a.txt"}
    with pytest.raises(ConfigError, match=words):
        check_config(GPTConfig(**{**base, **EXPERTS, **options}))
