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
from llm.optim.kfac.factors import block_widths
from llm.optim.kfac.layers import find_layers
from llm.parallel.layout import Layout, lay_out
from llm.plan.census import FP32
from llm.plan.devices import GIB, Device, find_device
from llm.plan.job import Extra, Job
from llm.plan.meter import MemoryMeter
from llm.plan.options import PlanOptions
from llm.rules import recomputation, ties_gradients
from llm.trainers.gpt.inputs import choose_block_size, open_model_config
from llm.trainers.gpt.kfac import covers_stacks, make_kfac, make_optimizer_of, max_dim


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
    device = find_device(options.device)
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
    if options.kfac:
        return _kfac_extra(options, model, world_size=world_size)
    accum_steps = (options.accum_steps or 1) if options.optimizer == "accumadamw" else None
    optimizer = make_optimizer_of(options, model, accum_steps=accum_steps)
    return Extra(per_element=_per_element(optimizer, model))


def _kfac_extra(options: PlanOptions, model: PreTrainedModel, *, world_size: int) -> Extra:
    """What K-FAC keeps, and what it takes in a step in which all factors are due, as the first."""
    meter = MemoryMeter([*model.parameters(), *model.buffers()])
    with fake_ranks(world_size), meter:
        kfac = make_kfac(options, model)
        kept = meter.mark().live
    coverage = find_layers(
        model, skip_layers=options.kfac_skip_layers, stacks=covers_stacks(options)
    )
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    per_element = _per_element(kfac.optimizer, model)
    sizes = {(layer.input_name, "A"): layer.columns for layer in coverage.layers}
    sizes |= {(layer.name, "G"): layer.rows for layer in coverage.layers}
    widest = max_dim(options, model)
    sums = sum(w * w for size in sizes.values() for w in block_widths(size, widest))
    return Extra(
        per_element=per_element,
        kfac=int(kept - per_element * trained),
        kfac_recording=FP32 * sums,
        kfac_step=FP32 * (sums + coverage.num_covered),
    )


def _per_element(optimizer: torch.optim.Optimizer, model: nn.Module) -> float:
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return _tensor_bytes(list(optimizer.state.values())) / trained


def _tensor_bytes(values: object) -> int:
    """Bytes of all tensors in nested containers, each once."""
    leaves = tree_leaves(values)
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
    return sum(t.numel() * t.element_size() for t in tensors.values())


@contextmanager
def fake_ranks(world_size: int) -> Iterator[None]:
    """Be rank 0 of so many, none of which exist: collectives return at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
