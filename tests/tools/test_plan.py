import gc
import json
import re
import time
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from transformers import GPT2LMHeadModel, GPT2Model, MambaConfig, MambaForCausalLM

from llm.config.duration import Duration
from llm.errors import ConfigError
from llm.models.loss import LanguageModelLoss
from llm.models.sizes import find_blocks
from llm.parallel.dims import ParallelDims
from llm.parallel.pipeline.split import find_pipeline_modules
from llm.parallel.pipeline.stage import cut_model
from llm.tools.plan import trace as plan_trace
from llm.tools.plan.batch_size import fit_batch_size
from llm.tools.plan.estimate import Estimate, checkpoint_bytes, estimate, list_transfers, search
from llm.tools.plan.job import DEVICES, Job
from llm.tools.plan.memory import StagePlan, count_in_flight
from llm.tools.plan.options import PlanOptions, check, find_float8_problems
from llm.tools.plan.plan import main
from llm.tools.plan.rank_model import (
    count_parameters,
    fake_ranks,
    num_elements,
    shard_sizes,
    split_model,
)
from llm.tools.plan.remedy import find_remedy
from llm.tools.plan.trace import MemoryMeter
from tests.support.token_files import write_pair

SMALL = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "block_size": 64,
    "per_device_train_batch_size": 2,
    "device": "cpu",
    "config_overrides": "vocab_size=512",
}


def job_of(**options: Any) -> Job:
    return Job(PlanOptions(**{**SMALL, **options}))


def plan_of(**options: Any) -> Estimate:
    job = job_of(**options)
    return estimate(job, job.dims)


# Layers and width of table 1 of Narayanan et al. 2021, and the batch that it was trained with.
PAPER = {
    "1.7B": (24, 2304, 512),
    "310.1B": (96, 16384, 2160),
}


@pytest.mark.parametrize("size", ["1.7B", pytest.param("310.1B", marks=pytest.mark.slow)])
def test_operations_of_a_step_are_those_of_the_papers_formula(size):
    layers, h, batch = PAPER[size]
    plan = plan_of(
        model_size=size,
        num_layers=None,
        hidden_size=None,
        num_attention_heads=None,
        config_overrides=None,
        device="h100-80gb",
        block_size=2048,
        per_device_train_batch_size=1,
        global_batch_size=batch,
        activation_checkpointing="full",
        mixed_precision="bf16",
        gpus_per_node=8,
        tensor_parallel_size=8,
    )
    formula = 96 * batch * 2048 * layers * h**2 * (1 + 2048 / (6 * h) + 51200 / (16 * layers * h))
    assert plan.flops_per_step == pytest.approx(formula, rel=0.01)


def test_a_moving_average_takes_four_bytes_for_each_trained_weight():
    plain, averaged = job_of(), job_of(ema_tokens=1_000_000)
    assert averaged.optimizer.per_element == plain.optimizer.per_element + 4
    assert checkpoint_bytes(averaged) - checkpoint_bytes(plain) == pytest.approx(
        4 * plain.param_counts(1).parameters, abs=1
    )


def test_moments_in_bf16_take_half_the_memory_but_for_vectors():
    whole, half = (plan_of(moment_dtype=dtype) for dtype in ("fp32", "bf16"))
    parameters = list(job_of().make_meta_model().parameters())
    vectors = num_elements(p for p in parameters if p.ndim < 2)
    assert whole.memory.optimizer == pytest.approx(8 * num_elements(parameters), rel=0.01)
    expected = 4 * num_elements(parameters) + 4 * vectors
    assert half.memory.optimizer == pytest.approx(expected, rel=0.01)


def test_a_model_without_attention_is_planned():
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 512}
    overrides = ",".join(f"{name}={size}" for name, size in sizes.items())
    shape = dict.fromkeys(("num_layers", "hidden_size", "num_attention_heads"))
    plan = plan_of(model_type="mamba", config_overrides=overrides, block_size=4, **shape)
    model = MambaForCausalLM(MambaConfig(**sizes))
    assert plan.memory.parameters == num_elements(model.parameters())


def test_a_mixture_of_experts_is_planned_in_every_precision():
    shape = dict.fromkeys(("num_layers", "hidden_size", "num_attention_heads"))
    sizes = "hidden_size=64,intermediate_size=128,num_hidden_layers=2,vocab_size=512"
    options = {"model_type": "mixtral", "config_overrides": sizes, **shape}
    fp32, bf16, fp16 = (
        job_of(mixed_precision=precision, **options).trace(1, 1)
        for precision in ("no", "bf16", "fp16")
    )
    assert fp16.block == bf16.block
    assert fp32.block_casts == 0 < bf16.block_casts
    assert fp32.block_flops == bf16.block_flops


def test_a_model_that_the_trainer_refuses_is_refused():
    shape = dict.fromkeys(("num_layers", "hidden_size", "num_attention_heads"))
    sizes = "hidden_size=32,num_hidden_layers=2,num_attention_heads=2,vocab_size=320"
    for model_type in ("bert", "xlnet"):
        with pytest.raises(ConfigError, match=f"In this {model_type} model, tokens see later"):
            plan_of(model_type=model_type, config_overrides=sizes, **shape)


def test_a_model_that_reads_its_values_is_refused(monkeypatch):
    forward = GPT2Model.forward

    def skips_empty(self, input_ids, **other):
        return forward(self, input_ids, **other) if input_ids.any().item() else None

    monkeypatch.setattr(GPT2Model, "forward", skips_empty)
    with pytest.raises(ConfigError, match="The gpt2 model cannot be planned, because its passes"):
        plan_of()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, 8), ({"global_batch_size": 8 * 36}, 9), ({"memory_gib": 1e-3}, 1)],
    ids=["a power of two", "a divisor of a rank's samples", "one if nothing fits"],
)
def test_the_largest_batch_that_fits_is_found(changes, expected):
    batch = changes.get("global_batch_size")
    plan = plan_of(per_device_train_batch_size=9, global_batch_size=batch)
    options = {**SMALL, "memory_gib": plan.memory.total / 2**30, **changes}
    options["per_device_train_batch_size"] = "auto"
    assert fit_batch_size(PlanOptions(**options)).per_device_train_batch_size == expected


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_ranks_shard_has_the_size_that_fully_shard_gives_on_64_ranks(family):
    model = job_of(model_type=family).make_meta_model()
    param_counts = count_parameters(model)
    counted = sum(
        shard_sizes(block, 64)[0] for block in (*param_counts.blocks, param_counts.other_weights)
    )

    with fake_ranks(64):
        mesh = init_device_mesh("cpu", (64,))
        for block in find_blocks(model):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        held = sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor))

    assert counted == held


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama", "qwen3"])
def test_a_tensor_parallel_rank_holds_its_shard_of_every_block_matrix(family):
    job = job_of(model_type=family)
    whole, part = job.make_meta_model(), job.make_meta_model()
    split_model(part, 4)

    parameters = (find_blocks(model)[0].parameters() for model in (whole, part))
    for one, other in zip(*parameters, strict=True):
        if one.ndim == 2:
            assert other.numel() * 4 == one.numel()
    embeddings = [model.get_input_embeddings().weight for model in (whole, part)]
    assert embeddings[1].shape[0] == -(-embeddings[0].shape[0] // 4)
    # It still computes: the trace runs through the narrow block.
    assert job.trace(4, 1).block_flops == job.trace(1, 1).block_flops / 4


def test_a_sequence_shard_attends_to_the_keys_of_all_shards():
    job = job_of()
    whole, half = job.trace(1, 1), job.trace(1, 2)

    assert half.block_flops * 2 == whole.block_flops
    assert half.hidden * 2 == whole.hidden
    assert half.block > whole.block / 2


def test_a_device_of_little_memory_is_planned_with_small_chunks_of_logits():
    # 2,048 tokens of 50,304 columns are one chunk of 196 MiB in bf16, or 8 of 25 MiB in 2 GiB.
    sizes = {"device": "a100-40gb", "config_overrides": "vocab_size=50257", "block_size": 1024}
    large, small = job_of(**sizes).trace(1, 1), job_of(**sizes, memory_gib=2.0).trace(1, 1)

    assert large.loss_extra > 196 * 2**20
    assert small.loss_extra < 150 * 2**20


def test_a_trace_does_not_depend_on_when_python_collects_garbage():
    threshold = gc.get_threshold()
    traces = []
    for often in (100_000, 10):
        gc.set_threshold(often, 50, 1000)
        try:
            job = job_of(model_type="qwen3", activation_checkpointing="full")
            traces.append(job.trace(1, 2))
        finally:
            gc.set_threshold(*threshold)
    assert traces[0] == traces[1]


def test_the_memory_meter_counts_live_and_peak_bytes():
    known = torch.zeros(256)
    meter = MemoryMeter([known])
    with meter:
        kept = known + 1
        temporary = kept * 2
        view = known.view(16, 16)
        half = known.to(torch.bfloat16)
        del temporary
        level = meter.mark()

    assert level.live == 1024 + 512  # kept and half; a view has no memory of its own
    assert level.peak == 1024 + 1024 + 512
    assert level.casts == half.nbytes == 512
    assert view.shape == (16, 16)


# Layers of the sizes of docs/guides/parallelism.md.
DEPTHS = {
    "124M": 12,
    "355M": 24,
    "774M": 36,
    "1.5B": 48,
    "1.7B": 24,
    "3.6B": 30,
    "7.5B": 36,
    "18.4B": 40,
    "39.1B": 48,
    "76.1B": 60,
    "145.6B": 80,
    "310.1B": 96,
}


@pytest.mark.parametrize(
    "size",
    [
        "124M",
        pytest.param("355M", marks=pytest.mark.extended),
        *(pytest.param(name, marks=pytest.mark.slow) for name in [*DEPTHS][2:]),
    ],
)
def test_a_pipeline_is_cut_as_the_trainer_cuts_it(size):
    job = Job(PlanOptions(model_size=size, nodes=1, gpus_per_node=1))
    model = job.make_meta_model()
    pieces, loss = find_pipeline_modules(model), LanguageModelLoss(model, is_chunked=False)

    assert job.layers_of_ranks(1) == [[*range(DEPTHS[size])]]
    for ranks in (2, 4, 8, 12):
        stages = cut_model(pieces, loss, ranks, stage_indices=[0]).layers
        assert job.layers_of_ranks(ranks) == [[*layers] for layers in stages]
    with pytest.raises(ConfigError, match=f"and the model has {DEPTHS[size]} layers"):
        job.layers_of_ranks(DEPTHS[size] + 1)


def test_the_output_head_of_a_small_model_takes_the_place_of_layers():
    """The trainer logs of GPT-2 on two stages: layers 0 to 7, and 8 to 11."""
    options = {"model_size": "124M", "nodes": 1, "gpus_per_node": 1}
    plain = Job(PlanOptions(**options))
    assert plain.layers_of_ranks(2) == [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11]]
    assert [len(layers) for layers in plain.layers_of_ranks(4)] == [3, 4, 4, 1]

    schedule = {"pipeline_schedule": "interleaved-1f1b", "virtual_stages": 2}
    interleaved = Job(PlanOptions(**options, **schedule))
    # Stages of 3, 4, 4 and 1 layers, of which each rank has every other one.
    assert interleaved.layers_of_ranks(2) == [[0, 1, 2, 7, 8, 9, 10], [3, 4, 5, 6, 11]]


def test_a_stage_between_the_first_two_and_the_last_may_be_the_fullest():
    plan = plan_of(
        model_size="124M",
        num_layers=None,
        hidden_size=None,
        num_attention_heads=None,
        config_overrides=None,
        block_size=1024,
        gpus_per_node=8,
        pipeline_parallel_size=8,
        gradient_accumulation_steps=64,
        pipeline_schedule="gpipe",
    )
    assert plan.memory.stage == 3  # of [1, 1, 1, 2, 2, 2, 2, 1] layers


def test_micro_batches_in_flight_are_those_of_the_schedules():
    sizes = {"num_stages": 4, "micro_batches": 8}

    assert count_in_flight("gpipe", stage=0, virtual_stages=1, **sizes) == 8
    assert [count_in_flight("1f1b", stage=s, virtual_stages=1, **sizes) for s in range(4)] == [
        4,
        3,
        2,
        1,
    ]
    # Six warm-up parts, four more for the second half of the layers, one at work: 11 halves.
    assert count_in_flight("interleaved-1f1b", stage=0, virtual_stages=2, **sizes) == 5.5


def test_a_ring_crosses_each_node_boundary_once():
    job = job_of(nodes=2, gpus_per_node=2)
    (sent,) = list_transfers(job, ParallelDims(replicate=4))

    whole = 2 * 3 / 4 * 4 * job.param_counts(1).parameters  # an all-reduce of fp32 over four ranks
    assert sent.axis == "replicate"
    assert sent.in_node == sent.between_nodes == whole / 2


def test_tensor_parallel_ranks_stay_in_their_node():
    job = job_of(nodes=2, gpus_per_node=4)
    by_axis = {t.axis: t for t in list_transfers(job, ParallelDims(shard=2, tensor=4))}

    # Two sums forward and two backward, each of 2 x 64 tokens of width 64 in fp32, in 4 layers.
    assert by_axis["tensor"].in_node == 4 * 4 * (2 * 64 * 64 * 4) * 2 * 3 / 4
    assert by_axis["tensor"].between_nodes == 0
    assert by_axis["shard"].in_node == 0


def test_sequence_parallelism_keeps_less_and_sends_less():
    options = {"mixed_precision": "bf16", "tensor_parallel_size": 4, "gpus_per_node": 4}
    whole, shared = (
        plan_of(model_type="llama", sequence_parallel=shared, **options) for shared in (False, True)
    )
    # Without it, the gradients of the inputs of five matrices are summed in fp32.
    per_element = [2 * 2 + 5 * 4, 4 * 2]
    for plan, size in zip((whole, shared), per_element, strict=True):
        (sent,) = plan.transfers
        assert sent.in_node == 4 * size * (2 * 64 * 64) * 2 * 3 / 4
    assert shared.memory.activations < 0.6 * whole.memory.activations
    assert shared.memory.weights == whole.memory.weights


def test_gathers_in_float8_send_and_hold_half_of_those_in_bf16():
    options = {"mixed_precision": "fp8", "gpus_per_node": 4, "data_parallel_shard_size": 4}
    in_bf16, in_fp8 = (plan_of(fp8_all_gather=each, **options) for each in (False, True))
    block = num_elements(job_of().param_counts(1).blocks[0])

    # Each rank gathers four blocks twice, and holds one and the next.
    (bf16,), (fp8,) = in_bf16.transfers, in_fp8.transfers
    assert bf16.in_node - fp8.in_node == 4 * 2 * block * 3 / 4
    assert in_bf16.memory.buffers - in_fp8.memory.buffers == 2 * block


def test_weights_gradients_and_moments_shrink_with_the_shard_size():
    whole = plan_of(gpus_per_node=4).memory
    quarter = plan_of(gpus_per_node=4, data_parallel_shard_size=4).memory

    for kind in ("weights", "optimizer"):
        assert getattr(quarter, kind) == pytest.approx(getattr(whole, kind) / 4, rel=0.01)


@pytest.fixture
def whole_logits(monkeypatch):
    """Plans count the logits of all tokens at once, as a model without a plain output head does."""

    def make_loss(model, **settings):
        return LanguageModelLoss(model, **settings | {"is_chunked": False})

    monkeypatch.setattr(plan_trace, "LanguageModelLoss", make_loss)


def test_casts_of_weights_stay_for_all_micro_batches_of_a_step(whole_logits):
    totals = []
    for accumulation in (1, 2):
        job = job_of(mixed_precision="bf16", gradient_accumulation_steps=accumulation)
        moments = {memory.moment: memory for memory in StagePlan(job, job.dims, 0).moments()}
        totals.append(moments["backward of its first layer"].activations)
    trace, counts = job.trace(1, 1), job.param_counts(1)

    casts = 3 * trace.block_casts + 2 * num_elements(counts.head)
    assert totals[1] - totals[0] == casts + trace.block_casts - trace.backward_casts


def test_a_later_pipeline_stage_holds_fewer_activations_and_no_embedding(whole_logits):
    job = job_of(gpus_per_node=4, global_batch_size=16)
    plans = {p: estimate(job, ParallelDims(pipeline=p, replicate=4 // p)) for p in (1, 2, 4)}

    assert plans[1].bubble == 0
    assert plans[4].bubble == pytest.approx(3 / (8 + 3))
    assert plans[4].memory.parameters < plans[1].memory.parameters
    assert {plan.tokens_per_step for plan in plans.values()} == {16 * 64}


def test_the_search_puts_the_fastest_that_fits_first():
    job = job_of(gpus_per_node=4, global_batch_size=64, memory_gib=0.008)
    found = search(job)

    fitting = [plan for plan in found if plan.fits]
    assert 0 < len(fitting) < len(found)
    assert found[: len(fitting)] == fitting
    rates = [plan.tokens_per_second for plan in fitting]
    assert rates == sorted(rates, reverse=True)


SMALLER = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
SMALLEST = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 16}
RECOMPUTED = {"activation_checkpointing": "full"}


@pytest.mark.parametrize(
    ("memory_gib", "remedy"),
    [
        (0.27, SMALLER),
        (0.03, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, **RECOMPUTED}),
        (0.013, {**SMALLEST, **RECOMPUTED, "data_parallel_shard_size": 2}),
        (0.001, None),
    ],
)
def test_a_run_that_does_not_fit_is_given_the_cheapest_remedy(memory_gib, remedy):
    changes = {
        "gpus_per_node": 2,
        "num_layers": 8,
        "block_size": 256,
        "per_device_train_batch_size": 16,
        "config_overrides": "vocab_size=512,n_positions=256",
        "memory_gib": memory_gib,
    }
    job = job_of(**changes)

    found = find_remedy(job, None)

    assert not estimate(job, job.dims).fits
    assert found == remedy
    assert found is None or plan_of(**{**changes, **found}).fits


def test_a_model_without_recomputation_is_given_another_remedy(monkeypatch):
    monkeypatch.setattr(GPT2LMHeadModel, "supports_gradient_checkpointing", False)
    job = job_of(gpus_per_node=2, per_device_train_batch_size=1, memory_gib=0.006)

    assert find_remedy(job, None) == {"data_parallel_shard_size": 2}


def test_the_budget_is_that_of_the_run_in_tokens_or_by_the_models_size():
    def budget(**options: Any) -> float | None:
        job = job_of(gpus_per_node=2, **options)
        return job.token_budget(job.dims)

    parameters = job_of().param_counts(1).parameters
    assert budget() is None
    assert budget(max_duration=Duration("1.5M tokens")) == 1_500_032  # 23,437.5 samples of 64
    assert budget(max_duration=Duration("2 tokens per parameter")) == -(-2 * parameters // 64) * 64


def test_a_batch_that_grows_is_planned_at_its_largest():
    growing = {
        "gpus_per_node": 2,
        "global_batch_size": "2@0,16@1K",
        "max_duration": Duration("10 steps"),
    }
    job = job_of(**growing)

    # 1,000 tokens are 15.6 samples, which 8 steps of 2 reach; two steps of 16 follow.
    assert job.token_budget(job.dims) == (8 * 2 + 2 * 16) * 64
    plain = plan_of(**{**growing, "global_batch_size": 16})
    assert estimate(job, job.dims) == plain


def test_kfac_has_separate_memory():
    memory = plan_of(kfac=True, gpus_per_node=1).memory

    # The two factors of the narrowest kind of layer alone are 65 x 65 and 64 x 64, in fp32.
    assert memory.extra["kfac"] > 4 * 2 * 4 * (65**2 + 64**2)
    assert plan_of(gpus_per_node=1).memory.extra == {}


def test_owners_share_the_state_of_matrices_and_send_updates():
    whole, shards = (
        plan_of(kfac=True, gpus_per_node=2, data_parallel_shard_size=size) for size in (1, 2)
    )
    state = job_of(kfac=True, gpus_per_node=1).optimizer.extra["kfac"]
    held = shards.memory.extra["kfac"]
    assert held == pytest.approx(state.replicated / 2 + state.recording, rel=0.3)
    assert held < whole.memory.extra["kfac"]

    muon = plan_of(optimizer="muon", gpus_per_node=2, data_parallel_shard_size=2)
    (sent,) = [t for t in muon.transfers if "owners" in t.what]
    # A float32 gradient and a bf16 update of each matrix: half of it is another rank's, and half of
    # that is sent.
    assert sent.in_node == pytest.approx(6 * 4 * 12 * 64**2 / 4, rel=0.05)


_SMALLEST = (
    "--config_overrides vocab_size=512 --num_layers 2 --hidden_size 64 --num_attention_heads 4 "
    "--block_size 64 --device cpu --gpus_per_node 2"
)
WORDS = _SMALLEST.split()


def test_a_toml_file_comes_first_and_options_override_it(tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_text('model_type = "llama"\nnum_layers = 2\nmax_train_steps = 10\n')

    assert main([str(path), *WORDS[4:], "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["model"] == "llama"
    assert plan["budget_tokens"] == 10 * 8 * 2 * 64
    assert plan["memory"]["total"] == sum(
        plan["memory"][kind]
        for kind in (
            "weights", "gradients", "optimizer", "activations", "logits", "buffers"
        )
    )  # fmt: skip
    assert plan["node_hours"] == pytest.approx(plan["days"] * 24)


def test_a_fraction_of_a_node_hour_is_not_rounded_to_0(capsys):
    assert main([*WORDS, "--memory_gib", "64", "--num_tokens", "1000000000"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"1,000,000,000 tokens take 2\.\d hours, [1-9]\.\d\d node-hours", printed)


def test_a_length_in_epochs_needs_the_number_of_tokens(capsys):
    assert main([*WORDS, "--memory_gib", "64", "--max_duration", "2 epochs"]) == 0
    assert (
        "\ndays: the length of 2 epochs depends on the data: give --num_tokens, or --max_duration "
        "in tokens or steps\n"
    ) in capsys.readouterr().out
    assert main([*WORDS, "--memory_gib", "64"]) == 0
    assert "\ndays: the default length of 3 epochs depends on" in capsys.readouterr().out


def test_the_epochs_of_token_files_are_planned_with_the_trainers_warning(tmp_path, capsys):
    # 100 samples of 64 tokens, and 50.
    web, code = (
        str(write_pair(tmp_path / name, [[1] * size]))
        for name, size in (("web", 6401), ("code", 3201))
    )
    words = [*WORDS, "--memory_gib", "64", "--train_data_path"]
    assert main([*words, web, "--max_duration", "400 samples"]) == 0
    assert "of the peak\ndata: 4 epochs of web\na checkpoint" in capsys.readouterr().out

    assert main([*words, web, "--max_duration", "416 samples"]) == 0
    assert (
        "\ndata: 4.16 epochs of web\nThe run takes 4.2 epochs of its data, and text that is "
        "repeated more than 4 times teaches little: set --max_duration to '25600 tokens' at most, "
        "or allow the epochs with --max_epochs 5.\n"
    ) in capsys.readouterr().out

    assert main([*words, "0.5", web, "0.5", code, "--num_tokens", "25600", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["epochs"] == {"web": 2, "code": 4}
    assert main([*words, "0.5", web, "0.5", code, "--num_tokens", "32000"]) == 0
    assert "The run takes 5.0 epochs of the source code, and" in capsys.readouterr().out


def test_a_run_of_more_epochs_than_it_allows_is_refused_as_by_the_trainer(tmp_path, capsys):
    web = str(write_pair(tmp_path / "web", [[1] * 6401]))
    words = [*WORDS, "--memory_gib", "64", "--data_path", web, "--split", "1,0,0", "--max_epochs"]
    assert main([*words, "4", "--max_duration", "400 samples"]) == 0
    assert main([*words, "4", "--max_duration", "416 samples"]) == 2
    error = capsys.readouterr().err
    assert "--max_epochs is 4 for the source web, which has 100 samples, and the run " in error
    assert "would take 416 (4.16 epochs); give it less weight or more text" in error
    branch = ["--branch_from", str(tmp_path), "--output_dir", str(tmp_path / "branch")]
    assert main([*words, "4", "--max_duration", "416 samples", *branch]) == 0


def test_a_length_in_epochs_is_planned_from_the_token_files_that_are_here(tmp_path, capsys):
    words = [*WORDS, "--memory_gib", "64", "--max_duration", "2 epochs", "--train_data_path"]
    assert main([*words, str(write_pair(tmp_path / "web", [[1] * 6401]))]) == 0
    printed = capsys.readouterr().out
    assert "12,800 tokens take" in printed
    assert "data: 2 epochs of web\na checkpoint" in printed

    assert main([*words, str(tmp_path / "elsewhere")]) == 0
    printed = capsys.readouterr().out
    assert "depends on the data: give --num_tokens" in printed
    assert "\ndata: " not in printed


def test_a_plan_that_does_not_fit_is_reported_with_exit_code_1(capsys):
    assert main([*WORDS, "--memory_gib", "0.001"]) == 1
    assert "nor another layout of these devices helps" in capsys.readouterr().out

    assert main([*WORDS, "--memory_gib", "0.009"]) == 1
    verdict = re.search(r"It does not fit, .*", capsys.readouterr().out)[0]
    assert verdict.endswith(
        "It fits with --per_device_train_batch_size 4 --gradient_accumulation_steps 2."
    )


class _Initialized(TorchFunctionMode):
    """Records which functions of torch.nn.init are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            self.names.add(func.__name__)
        return func(*args, **(kwargs or {}))


def test_a_plan_draws_no_initial_weights_which_would_take_most_of_its_time():
    with _Initialized() as initialized:
        plan_of()
    assert initialized.names == set()


def test_a_plot_is_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "memory.png"
    assert main([*WORDS, "--search", "--top", "2", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert "tokens/s  fits" in capsys.readouterr().out


def test_a_plot_has_the_colors_of_matplotlibs_settings(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    path = tmp_path / "memory.svg"
    with matplotlib.rc_context({"text.color": "#123456"}):
        assert main([*WORDS, "--plot", str(path)]) == 0
    assert "stroke: #123456" in path.read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--nodes 2", "Name the model with"),
        ("--model_size 2B", "2B"),
        ("--device h900", "h100-80gb"),
        (
            "--num_attention_heads 4 --tensor_parallel_size 8",
            "does not divide the 4 num_attention_heads of gpt2",
        ),
        ("--data_parallel_shard_size 3", "which do not divide the 2"),
        (
            "--global_batch_size 7",
            "is not a multiple of 16 (--per_device_train_batch_size 8 x 2 ranks); take 16.",
        ),
        ("--context_parallel_size 2 --block_size 63", "cannot be cut into 4 equal chunks"),
        ("--links 5", "--links takes two numbers"),
        ("--data_parallel gossip", "--data_parallel gossip cannot be planned yet"),
        ("--mixed_precision fp8 --device a100-80gb", "fp8 needs an NVIDIA GPU of compute"),
        ("--mixed_precision fp8 --device mi250x", "the device is mi250x; use bf16 or no."),
        ("--fp8_head --device pvc", "the device is pvc; leave it out."),
        ("--plot memory.doc", "must end in .png"),
        ("--memory_gib 1e308", "--memory_gib must be at most 1000000"),
        ("--per_device_train_batch_size 100000000000000000000", "exceeds the limit of"),
        ("--model_type bloom --num_layers none --tensor_parallel_size 2", "bloom"),
    ],
)
def test_impossible_plans_end_with_one_sentence_and_exit_code_2(words, says, capsys):
    given = [] if words.startswith("--nodes") else [*WORDS, "--gpus_per_node", "2"]
    if "tensor_parallel_size 8" in words:
        given += ["--gpus_per_node", "8"]
    assert main([*given, *words.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert says in error


def test_the_option_names_every_device_of_the_table():
    for name in DEVICES:
        assert PlanOptions(device=name).device == name
    assert {"h100-80gb", "a100-40gb", "cpu"} <= DEVICES.keys()


@pytest.mark.parametrize("device", ["h100-80gb", "h100-64gb", "h200-141gb", "gh200-96gb"])
def test_float8_is_planned_for_the_devices_that_have_it(device):
    options = PlanOptions(**{**SMALL, "device": device, "mixed_precision": "fp8"})
    check(options)
    assert find_float8_problems(options, device) == []
    assert find_float8_problems(options, "a100-80gb") != []


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [8, 384])
@pytest.mark.parametrize(
    "size", ["1.7B", "3.6B", "7.5B", "18.4B", "39.1B", "76.1B", "145.6B", "310.1B"]
)
def test_every_size_of_the_paper_is_searched_in_a_minute(size, nodes, capsys):
    words = (
        f"--model_size {size} --nodes {nodes} --block_size 2048 --per_device_train_batch_size 1 "
        f"--global_batch_size {8 * nodes} --mixed_precision bf16 "
        "--activation_checkpointing full --search"
    )
    began = time.process_time()
    assert main(words.split()) in (0, 1)
    assert time.process_time() - began < 60
    assert "parameters, on" in capsys.readouterr().out
