"""The plan against the peak that torch's allocator reports for real steps.

The measure is the profiler's record of every allocation and release of the CPU allocator, from
before the model is built; it holds tensors only, neither the interpreter nor libraries.
"""

import os
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from llm.config.command_line import parse_options
from llm.data.loader import MicroBatch
from llm.models.build import build_model
from llm.models.configuration import load_config
from llm.models.loss import LanguageModelLoss
from llm.parallel.accelerator import make_accelerator
from llm.parallel.base import AcceleratedStrategy
from llm.parallel.fsdp import ShardedStrategy
from llm.tools.plan.estimate import estimate
from llm.tools.plan.job import Job
from llm.tools.plan.options import PlanOptions
from llm.trainers.gpt.inputs import choose_dims
from llm.trainers.gpt.seams import choose_factory, make_extensions
from tests.support.ranks import run_ranks, values

MODEL = (
    "--num_layers 4 --hidden_size 256 --num_attention_heads 4 --block_size 256 "
    "--per_device_train_batch_size 4 --device cpu --nodes 1"
)


def options_of(words: str) -> PlanOptions:
    return parse_options(PlanOptions, words.split(), prog="", description="")


def measure(words: str) -> int:
    """Bytes allocated at most in two steps of the trainer's own strategy, on this rank."""
    options = options_of(words)
    if options.gpus_per_node == 1:
        # As `python -m` starts it: under a launcher even one rank has DistributedDataParallel.
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
    cpu = torch.device("cpu")
    accelerator = make_accelerator(options, device=cpu)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        strategy = make_strategy(options, accelerator)
        length = options.block_size
        ids = torch.zeros(options.per_device_train_batch_size, length, dtype=torch.long)
        batches = [MicroBatch(ids, ids)] * options.gradient_accumulation_steps
        for _ in range(2):
            strategy.forward_backward(
                batches, num_tokens=ids.numel() * len(batches) * strategy.data_ranks
            )
            strategy.set_learning_rate(1e-3)
            strategy.optimizer_step(1.0)
    strategy.close()
    return highest(recorded)


def make_strategy(options: PlanOptions, accelerator: Any) -> AcceleratedStrategy:
    config = load_config(options)
    model = build_model(
        options,
        config,
        weights_from=None,
        seed=1,
        device=torch.device("cpu"),
        vocab_size=1,
        tensor_parallel_size=options.tensor_parallel_size,
    )
    dims = choose_dims(options, config, options.nodes * options.gpus_per_node)
    strategy: Any = AcceleratedStrategy(accelerator)
    if not dims.is_replicated:
        strategy = ShardedStrategy(options, accelerator, dims)
    factory = choose_factory(options, make_extensions(options), seed=1)
    factory.inspect_model(model)
    loss = LanguageModelLoss(model)
    strategy.prepare(loss, factory.make)
    return strategy


def highest(recorded: Any) -> int:
    """The most bytes that were allocated at once."""
    peak, events = 0, list(recorded.profiler.kineto_results.experimental_event_tree())
    while events:
        event = events.pop()
        events += event.children
        peak = max(peak, getattr(event.extra_fields, "total_allocated", 0))
    return peak


def planned(words: str) -> int:
    options = options_of(words)
    job = Job(options)
    return estimate(job, job.dims).memory.total


SLOW = pytest.mark.slow
# Small, since some processors take a hundred times as long for products in bf16.
HALF = "--mixed_precision bf16 --block_size 64 --config_overrides vocab_size=8192"
MIXTURE = (
    "--model_type qwen3_moe --block_size 128 --per_device_train_batch_size 4 --device cpu "
    "--nodes 1 --config_overrides "
    "vocab_size=1024,num_hidden_layers=4,hidden_size=128,num_attention_heads=4,"
    "num_key_value_heads=2,head_dim=32,num_experts=16,num_experts_per_tok=2,"
    "moe_intermediate_size=256"
)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (1, ""),
        pytest.param(2, "--data_parallel_shard_size 2", marks=SLOW),
        pytest.param(2, "--data_parallel_shard_size 2 --model_type llama", marks=SLOW),
        pytest.param(
            2,
            "--data_parallel_shard_size 2 --gradient_accumulation_steps 2 --unsharded_gradients "
            "--num_layers 2",
            marks=SLOW,
        ),
        pytest.param(2, "--tensor_parallel_size 2 --sequence_parallel", marks=SLOW),
        pytest.param(
            2, "--tensor_parallel_size 2 --sequence_parallel --model_type llama", marks=SLOW
        ),
        pytest.param(2, "--data_parallel_shard_size 2 --optimizer muon", marks=SLOW),
        pytest.param(2, "--data_parallel_shard_size 2 --kfac", marks=SLOW),
        pytest.param(1, "--gradient_accumulation_steps 2 --model_type llama", marks=SLOW),
        pytest.param(1, HALF, marks=SLOW),
        pytest.param(1, f"{HALF} --gradient_accumulation_steps 2", marks=SLOW),
        pytest.param(1, "--kfac", marks=SLOW),
        pytest.param(1, "--activation_checkpointing full", marks=SLOW),
        pytest.param(2, "--gradient_accumulation_steps 2", marks=SLOW),
        pytest.param(4, "--data_parallel_shard_size 2 --gradient_accumulation_steps 2", marks=SLOW),
    ],
)
def test_the_planned_memory_is_within_a_tenth_of_the_measured_peak(ranks, words):
    words = f"{MODEL} {words} --gpus_per_node {ranks}"
    peaks = values(run_ranks(measure, ranks, words))
    assert planned(words) == pytest.approx(max(peaks), rel=0.1)


SHARDED = "--data_parallel_shard_size 2 --expert_parallel_size 2"
SHARED = "--data_parallel_shard_size 4 --expert_parallel_size 2"


@SLOW
@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, SHARDED),
        (2, f"{SHARDED} --activation_checkpointing full"),
        (2, f"{SHARDED} --mixed_precision bf16"),
        (2, f"{SHARDED} --optimizer muon"),
        (4, SHARED),
        (4, f"{SHARED} --activation_checkpointing full"),
        (2, "--expert_parallel_size 2"),
        (2, "--expert_parallel_size 2 --gradient_accumulation_steps 2"),
    ],
)
def test_the_planned_memory_of_divided_experts_is_near_the_measured_peak(ranks, words):
    """The load of the fullest rank is a guess, and the routers of two steps are not trained."""
    words = f"{MIXTURE} {words} --gpus_per_node {ranks}"
    peaks = values(run_ranks(measure, ranks, words))
    assert planned(words) == pytest.approx(max(peaks), rel=0.15)
