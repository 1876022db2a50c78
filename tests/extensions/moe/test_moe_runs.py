"""Runs of a mixture of experts: the same losses and loads on every layout, exact resumes."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from tests.extensions.moe.toy import glm4_moe
from tests.support.recovery import last_counts, last_hash, without_times
from tests.support.training import Bench, Run

OPTIONS = {
    "max_train_steps": None,
    "max_duration": "28samples",  # 4 steps of 8, the last one padded
    "router_balancing": "loss",
    "router_aux_loss_coef": 0.1,
    "router_z_loss": 1e-3,
}
LAYOUTS = {
    "recomputed": (
        1,
        {
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 4,
            "activation_checkpointing": "full",
        },
    ),
    "DDP2": (2, {"per_device_train_batch_size": 4}),
    "FSDP2": (
        2,
        {
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "data_parallel_shard_size": 2,
        },
    ),
    "PP2": (
        2,
        {
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "pipeline_parallel_size": 2,
            "activation_checkpointing": "full",
        },
    ),
    "EP2": (
        2,
        {
            "per_device_train_batch_size": 4,
            "data_parallel_shard_size": 2,
            "expert_parallel_size": 2,
        },
    ),
    "EP2 of DDP2": (2, {"per_device_train_batch_size": 4, "expert_parallel_size": 2}),
    "EP2 of FSDP4": (
        4,
        {
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 2,
            "data_parallel_shard_size": 4,
            "expert_parallel_size": 2,
        },
    ),
    "EP2 of PP2xDP2": (
        4,
        {
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "pipeline_parallel_size": 2,
            "expert_parallel_size": 2,
        },
    ),
    "CP2": (2, {"per_device_train_batch_size": 8, "context_parallel_size": 2}),
}
IN_SHORT = ("recomputed", "FSDP2")


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("mixtral"), family="mixtral")


@pytest.fixture(scope="module")
def alone(mixtral) -> Run:
    return mixtral.train_well("alone", per_device_train_batch_size=8, **OPTIONS)


@pytest.mark.parametrize(
    "layout",
    [
        name if name in IN_SHORT else pytest.param(name, marks=pytest.mark.layouts)
        for name in LAYOUTS
    ],
)
def test_losses_and_loads_are_those_of_one_rank(mixtral, alone, layout):
    ranks, sizes = LAYOUTS[layout]
    run = mixtral.train_well(layout, ranks=ranks, **OPTIONS, **sizes)
    assert run.losses == pytest.approx(alone.losses, rel=1e-6)
    names = {"moe_max_load", "moe_mean_max_load", "moe_idle_experts", "moe_aux_loss", "moe_z_loss"}
    for ours, theirs in zip(run.metrics, alone.metrics, strict=True):
        assert {name for name in ours if name.startswith("moe_")} == names
        for name in names:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5)


def test_the_card_says_how_large_the_mixture_is_and_how_it_was_balanced(alone):
    lines = (alone.folder / "events.jsonl").read_text().splitlines()
    [start] = [event for event in map(json.loads, lines) if event["event"] == "start"]
    assert start["experts"] == "2 layers of 4, 2 per token"
    # of 2 layers, two of the 4 experts, with three matrices of 32 x 64 each
    assert start["parameters"] - start["active_parameters"] == 2 * 2 * 3 * 32 * 64
    card = (alone.folder / "README.md").read_text()
    assert f"| active parameters | {start['active_parameters']:,} |" in card
    assert "| experts | 2 layers of 4, 2 per token |" in card
    assert "| balancing of experts | balanced by an auxiliary loss of 0.1 over each global" in card
    load = f"{alone.metrics[-1]['moe_max_load']:.2f}x the mean of its layer, in the last step"
    assert f"| largest load of an expert | {load} |" in card


@pytest.fixture(scope="module")
def biased(tmp_path_factory) -> Bench:
    """A model with a bias in its routers."""
    bench = Bench(tmp_path_factory.mktemp("biased"), family="mixtral")
    glm4_moe().save_pretrained(bench.model)
    return bench


def test_a_run_resumes_bit_for_bit_with_bias_and_loss(biased):
    options = {
        "router_balancing": "both",
        "logging_steps": 2,
        "expert_load_steps": 4,
        "checkpointing_steps": 3,
    }
    whole = biased.train_well("whole", max_train_steps=6, **options)
    shutil.copytree(whole.folder, biased.folder / "again")
    shutil.rmtree(biased.folder / "again" / "checkpoints" / "step_00000006")
    again = biased.train_well("again", max_train_steps=6, resume_from_checkpoint=True, **options)

    assert last_hash(again) == last_hash(whole)
    assert last_counts(again) == last_counts(whole)
    assert without_times(again) == without_times(whole)
    weights = load_file(whole.folder / "model.safetensors")
    biases = [tensor for name, tensor in weights.items() if name.endswith("correction_bias")]
    assert [bool(bias.any()) for bias in biases] == [True, True]
    refused = biased.train("again", max_train_steps=7, resume_from_checkpoint=True)
    assert "router_balancing was 'both' and is 'auto'" in refused.output
    assert refused.codes == [2]


def test_biases_are_the_same_on_shards(biased):
    runs = [
        biased.train_well("alone", max_train_steps=3),
        biased.train_well(
            "shards",
            ranks=2,
            max_train_steps=3,
            per_device_train_batch_size=2,
            data_parallel_shard_size=2,
        ),
    ]
    weights = [load_file(run.folder / "model.safetensors") for run in runs]
    biases = [name for name in weights[0] if name.endswith("correction_bias")]
    assert len(biases) == 2
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in biases)


@pytest.mark.extended
def test_an_average_of_the_weights_has_the_last_bias(biased):
    options = {"router_balancing": "bias", "max_train_steps": 3, "learning_rate": 1e-2}
    average = biased.train_well("average", ema_decay=0.5, export_ema=True, **options)
    live = biased.train_well("live", **options)
    assert average.losses == live.losses
    exported, last = (load_file(run.folder / "model.safetensors") for run in (average, live))
    averaged_names = [name for name in last if not torch.equal(exported[name], last[name])]
    biases = [name for name in last if name.endswith("correction_bias")]
    assert len(biases) == 2
    assert all(last[name].any() for name in biases)
    assert averaged_names == [name for name in last if name not in biases]


@pytest.mark.extended
def test_a_bias_that_is_a_parameter_is_the_same_on_shards_in_bf16(tmp_path):
    """ERNIE's bias is a parameter, of which shards hold parts; bf16 rounds none of it."""
    bench = Bench(tmp_path, family="ernie4_5_moe")
    options = {"max_train_steps": 4, "router_balancing": "bias", "mixed_precision": "bf16"}
    runs = [
        bench.train_well("alone", **options),
        bench.train_well(
            "shards",
            ranks=2,
            per_device_train_batch_size=2,
            data_parallel_shard_size=2,
            **options,
        ),
    ]
    weights = [load_file(run.folder / "model.safetensors") for run in runs]
    biases = [name for name in weights[0] if name.endswith("correction_bias")]
    assert len(biases) == 2
    assert [weights[0][name].dtype for name in biases] == [torch.float32] * 2
    assert all(weights[0][name].any() for name in biases)
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in biases)


def test_random_weights_are_balanced_and_pretrained_ones_are_not(mixtral, alone):
    run = mixtral.train_well("random", max_train_steps=1)
    assert "; balanced by an auxiliary loss of 0.01 over each global batch" in run.output
    run = mixtral.train_well("pretrained", model_name_or_path=alone.folder, max_train_steps=1)
    assert "; not balanced because the weights are pretrained" in run.output
