"""From the options of the plan to what is planned."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig, PreTrainedModel

from llm.models.gpt import build_model
from llm.optim.kfac.curvature import Curvature
from llm.parallel.layout import Layout, lay_out
from llm.plan.census import FP32
from llm.plan.devices import DEVICES, GIB, Device
from llm.plan.job import Extra, Job
from llm.plan.options import PlanOptions
from llm.rules import recomputation, ties_gradients
from llm.trainers.gpt.inputs import choose_block_size, open_model_config
from llm.trainers.gpt.kfac import make_kfac, make_optimizer_of


def make_job(options: PlanOptions) -> Job:
    """What the options describe.

    Raises:
        ConfigError: The model cannot be had, or not in this shape.
    """
    config = open_model_config(options)

    def outline() -> PreTrainedModel:
        return _outline(options, config)

    world_size = options.nodes * options.gpus_per_node
    return Job(
        outline=outline,
        extra=_extra(options, outline(), world_size=world_size),
        micro_batch_size=options.per_device_train_batch_size,
        length=choose_block_size(options, config),
        accumulation=options.gradient_accumulation_steps,
        global_batch_size=options.global_batch_size,
        mixed_precision=options.mixed_precision,
        gradient_checkpointing=recomputation(options) == "full",
        chunked_loss=options.chunked_loss,
        schedule=options.pipeline_schedule,
        virtual_stages=options.virtual_stages,
        device=_device(options),
        gpus_per_node=options.gpus_per_node,
        efficiency=options.efficiency,
    )


def make_layout(options: PlanOptions) -> Layout:
    """The layout that the options describe.

    Raises:
        ConfigError: Its sizes do not divide the number of ranks.
    """
    return lay_out(
        options.nodes * options.gpus_per_node,
        pipeline=options.pipeline_parallel_size,
        shard=options.data_parallel_shard_size,
        context=options.context_parallel_size,
        tensor=options.tensor_parallel_size,
    )


def model_name(options: PlanOptions) -> str:
    """The model, as a page calls it."""
    name = options.config_name or options.model_name_or_path or options.model_type or "gpt2"
    return name if options.model_size is None else f"{name} {options.model_size}"


def budget(options: PlanOptions, *, samples: int, length: int) -> float | None:
    """Tokens of the whole run; None where the options do not say."""
    if options.num_tokens is not None:
        return options.num_tokens
    if options.max_train_steps is not None:
        return float(options.max_train_steps * samples * length)
    if options.max_train_samples is not None:
        return float(options.max_train_samples * length)
    return None


def _outline(options: PlanOptions, config: PreTrainedConfig) -> PreTrainedModel:
    attention = options.attention_implementation
    if attention is not None and "flash" in attention:
        attention = None  # its package need not be here, and SDPA's kernel keeps the same
    return build_model(
        config=config,
        weights_from=None,
        seed=0,
        device=torch.device("meta"),
        vocab_size=config.get_text_config().vocab_size,
        attention_implementation=attention,
        activation_checkpointing=recomputation(options),
        no_bias=options.no_bias,
        pad_vocab_to_multiple_of=options.pad_vocab_to_multiple_of,
        fused_gelu=options.fused_gelu,
        tied_gradients=ties_gradients(options),
        trust_remote_code=options.trust_remote_code,
    )


def _device(options: PlanOptions) -> Device:
    device = DEVICES[options.device]
    if options.memory_gib is not None:
        device = dataclasses.replace(device, memory=int(options.memory_gib * GIB))
    if options.device_peak_tflops is not None:
        peak = options.device_peak_tflops * 1e12
        device = dataclasses.replace(device, flops=peak, fp32_flops=peak)
    if options.links:
        in_node, between = options.links
        device = dataclasses.replace(device, node_link=in_node * 1e9, network_link=between * 1e9)
    return device


def _extra(options: PlanOptions, model: PreTrainedModel, *, world_size: int) -> Extra:
    """Make the optimizer on the meta device and count what it holds."""
    if not options.kfac:
        accum_steps = (options.accum_steps or 1) if options.optimizer == "accumadamw" else None
        optimizer = make_optimizer_of(options, model, accum_steps=accum_steps)
        return Extra(per_element=_per_element(optimizer, model))
    with fake_ranks(world_size):
        kfac = make_kfac(options, model)
    curvature = kfac.recorder
    assert isinstance(curvature, Curvature)  # `check` refuses the library
    # In a step in which all factors are due, as in the first.
    sums = FP32 * sum(width**2 for factor in curvature.factors for width in factor.widths)
    return Extra(
        per_element=_per_element(kfac.optimizer, model),
        kfac=curvature.num_bytes(),
        kfac_recording=sums,
        kfac_step=sums + FP32 * curvature.coverage.num_covered,
    )


def _per_element(optimizer: torch.optim.Optimizer, model: nn.Module) -> float:
    """Bytes of optimizer state for each trained element."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    leaves = tree_leaves(list(optimizer.state.values()))
    tensors = {leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
    return sum(tensor.nbytes for tensor in tensors) / trained


@contextmanager
def fake_ranks(world_size: int) -> Iterator[None]:
    """Be rank 0 of so many, none of which exist: collectives return at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
