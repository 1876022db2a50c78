"""The planned run: its model, its batch and its devices."""

import copy
import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from llm.data.batch_plan import BatchPlan, plan_batches
from llm.errors import ConfigError
from llm.metrics.hardware import GIB, PEAK_TFLOPS
from llm.models.build import build_model
from llm.models.causality import check_meta_model_causal
from llm.models.configuration import load_config
from llm.models.mixtures import mixture_size
from llm.models.patches.recomputation import recompute_activations
from llm.models.sizes import find_blocks
from llm.parallel.dims import ParallelDims
from llm.parallel.pipeline.pipeline_schedule import check_micro_batches
from llm.parallel.pipeline.split import PipelineModules, find_pipeline_modules
from llm.parallel.pipeline.stage import check_num_stages
from llm.tools.plan.options import PlanOptions
from llm.tools.plan.planned_data import open_planned_data
from llm.tools.plan.rank_model import (
    ParamCounts,
    count_columns,
    count_optimizer_memory,
    count_parameters,
    split_model,
)
from llm.tools.plan.trace import Trace, trace
from llm.trainers.gpt.inputs import choose_block_size, choose_dims
from llm.trainers.gpt.seams import list_transforms, make_extensions

USABLE_FRACTION = 0.95
"""Usable fraction of a GPU's memory; fragmentation takes the rest."""


@dataclasses.dataclass(frozen=True)
class Device:
    """A device that holds one rank, in the units of data sheets.

    Attributes:
        gib: GiB that a process can allocate.
        tflops: Dense bf16 TFLOP/s of matrix products; for a GPU, as for the log's MFU.
        fp32_tflops: The same in fp32, without tf32.
        bandwidth: GB/s of its memory.
        node_link: GB/s, one way, to other devices of the node.
        network_link: GB/s, one way, to other nodes: the node's adapters divided by its devices.
    """

    gib: float
    tflops: float
    fp32_tflops: float
    bandwidth: float
    node_link: float
    network_link: float


DEVICES = {
    # NVIDIA's data sheets of H100 SXM5 and H200 SXM. NVLink 4 has 900 GB/s in both directions
    # together, and a DGX H100 has one 400 Gbit/s adapter per GPU.
    "h100-80gb": Device(79.1, PEAK_TFLOPS["H100"], 67, 3350, 450, 50),
    "h200-141gb": Device(139.8, PEAK_TFLOPS["H200"], 67, 4800, 450, 50),
    # MareNostrum 5's H100 with 64 GB of HBM2, for which NVIDIA has no data sheet: arithmetic of the
    # H100, memory bandwidth of the A100 with 80 GB; one 200 Gbit/s adapter per GPU.
    "h100-64gb": Device(63.5, PEAK_TFLOPS["H100"], 67, 2039, 450, 25),
    # NVIDIA's data sheet of the GH200 with HBM3; in Vista it is alone in its node, with one
    # 400 Gbit/s adapter.
    "gh200-96gb": Device(94.5, PEAK_TFLOPS["GH200"], 67, 4000, 450, 50),
    # NVIDIA's data sheets of A100 SXM4. NVLink 3 has 600 GB/s in both directions together, and a
    # DGX A100 has one 200 Gbit/s adapter per GPU.
    "a100-40gb": Device(39.4, PEAK_TFLOPS["A100"], 19.5, 1555, 300, 25),
    "a100-80gb": Device(79.1, PEAK_TFLOPS["A100"], 19.5, 2039, 300, 25),
    # Leonardo's A100 with 64 GB, for which NVIDIA has no data sheet: figures of the A100 with
    # 40 GB; one 100 Gbit/s port per GPU (CINECA's page).
    "a100-64gb": Device(63.4, PEAK_TFLOPS["A100"], 19.5, 1555, 300, 12.5),
    # One of the two dies of an AMD MI250X (data sheet: 383 TFLOP/s, 3.2 TB/s and 128 GB in
    # all); in Frontier and LUMI a die reaches its neighbors over 50 GB/s links (four are counted),
    # and one 200 Gbit/s adapter serves two dies.
    "mi250x": Device(64.0, PEAK_TFLOPS["MI250X"], 47.9, 1638, 100, 12.5),
    # One of the two stacks (tiles) of an Intel Data Center GPU Max 1550 (data sheet: 839
    # TFLOP/s with XMX, 3.2 TB/s and 128 GB in all); in Aurora twelve share eight 200 Gbit/s
    # adapters, and Xe Link has 15 GB/s a way to each other card.
    "pvc": Device(64.0, PEAK_TFLOPS["GPU Max 1550"], 26, 1638, 75, 16.7),
    # A core of a server; --memory_gib and --device_peak_tflops replace these figures.
    "cpu": Device(16.0, 0.1, 0.1, 20, 10, 1),
}


class _SkippedInit(TorchFunctionMode):
    """Skips `torch.nn.init`, which takes most of the time to create a model on the meta device."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function; functions of `torch.nn.init` return their tensor unchanged."""
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == nn.init.__name__:
            return kwargs.get("tensor", args[0] if args else None)
        return func(*args, **kwargs)


class Job:
    """A run to plan; traces and layer counts are computed once for each layout.

    Args:
        options: The run and its devices.

    Attributes:
        options: The same.
        length: Tokens of a sample.
        data: The token files; None if the run reads text, or files of another machine.
        dims: The layout that the options describe.
        device: The device of each rank.
        usable_bytes: Bytes of its memory available to tensors.
        efficiency: Expected fraction of the device's peak for matrix products.
        optimizer: Memory of the optimizer.
        is_compiled: Whether the steps that need the most memory are compiled.
        trace: Trace of one micro-batch, by sizes of tensor and context parallelism.
        layers_of_ranks: Indices of the layers on each rank, by size of pipeline parallelism.

    Raises:
        ConfigError: The model cannot be loaded, does not have this shape, or does not fit this
            number of ranks; or a stage of the data is too short.
    """

    def __init__(self, options: PlanOptions) -> None:
        options = _choose_defaults(options)
        self.options = options
        self._config = load_config(options)
        self.length = choose_block_size(options, self._config)
        self.data = open_planned_data(options, block_size=self.length)
        self.dims = choose_dims(options, self._config, options.nodes * options.gpus_per_node)
        self.device = _make_device(options)
        self._memory_bytes = int(self.device.gib * GIB)
        self.usable_bytes = self._memory_bytes
        if options.device != "cpu":
            self.usable_bytes = int(USABLE_FRACTION * self._memory_bytes)
        self.efficiency = options.efficiency or _choose_efficiency(self.model)
        self.optimizer = count_optimizer_memory(options, self.model)
        # Steps that record something of each layer run uncompiled.
        has_recording_steps = any(state.recording for state in self.optimizer.extra.values())
        self.is_compiled = bool(options.torch_compile) and not has_recording_steps
        self._rank_model = functools.cache(self._make_rank_model)
        self.trace = functools.cache(self._trace_micro_batch)
        self.layers_of_ranks = functools.cache(self._assign_layers)
        _, block_model = self._rank_model(1)
        check_meta_model_causal(block_model)

    def with_micro_batch(self, changes: Mapping[str, Any]) -> "Job":
        """Return the run with another micro-batch or recomputation; both share the model."""
        job = copy.copy(self)
        job.options = dataclasses.replace(self.options, **changes)
        job.trace = functools.cache(job._trace_micro_batch)
        return job

    def make_meta_model(self) -> PreTrainedModel:
        """Create the model on the meta device as the trainer does, without recomputation."""
        options = dataclasses.replace(self.options, activation_checkpointing="none")
        if "flash" in (options.attention_implementation or ""):
            # flash_attention_2's package need not be installed, and SDPA's kernel keeps the same
            # tensors.
            options = dataclasses.replace(options, attention_implementation=None)
        with _SkippedInit():
            return build_model(
                options,
                self._config,
                seed=0,
                device=torch.device("meta"),
                vocab_size=self._config.get_text_config().vocab_size,
                tensor_parallel_size=options.tensor_parallel_size,
                transforms=list_transforms(make_extensions(options), self._config),
            )

    def batches(self, dims: ParallelDims) -> BatchPlan:
        """Return the batches of the run; if the batch grows, the largest one.

        Raises:
            ConfigError: The layout does not divide the global batch, or its pipeline needs more
                micro-batches.
        """
        options = self.options
        plan = self._plan_batches(dims)
        largest_batch = max(phase.global_batch_size for phase in plan.phases)
        batches = dataclasses.replace(plan, global_batch_size=largest_batch, later_phases=())
        check_micro_batches(
            options.pipeline_schedule,
            num_ranks=dims.pipeline,
            num_micro_batches=batches.accumulation,
        )
        return batches

    def _plan_batches(self, dims: ParallelDims) -> BatchPlan:
        return plan_batches(
            self.options,
            num_windows=1 if self.data is None else self.data.num_windows,
            world_size=dims.data_ranks,
            block_size=self.length,
            num_parameters=self.param_counts(1).parameters,
        )

    def token_budget(self, dims: ParallelDims) -> float | None:
        """Return the number of tokens of the whole run; None if options and data do not tell."""
        options = self.options
        is_known = options.max_duration.unit != "epochs" or self.data is not None
        if options.num_tokens is None and is_known:
            return float(self._plan_batches(dims).total_samples * self.length)
        return options.num_tokens

    def count_samples(self, dims: ParallelDims) -> int | None:
        """Return the number of samples of the whole run; None if it is unknown."""
        budget = self.token_budget(dims)
        return None if budget is None else math.ceil(budget / self.length)

    def param_counts(self, tensor: int) -> ParamCounts:
        """Return the parameters on one rank of this size of tensor parallelism."""
        param_counts, _ = self._rank_model(tensor)
        return param_counts

    def _make_rank_model(self, tensor: int) -> tuple[ParamCounts, PreTrainedModel]:
        """Return the parameter counts, and the model with its typical block only, for a trace."""
        model = self.make_meta_model()
        sequence_parallel = self.options.sequence_parallel and tensor > 1
        split_model(model, tensor, sequence_parallel=sequence_parallel)
        param_counts = count_parameters(model)
        blocks = find_blocks(model)
        blocks[0] = blocks[param_counts.typical_layer]
        del blocks[1:]
        return param_counts, model

    def _trace_micro_batch(self, tensor: int, context: int) -> Trace:
        """Trace a micro-batch on one rank, by the sizes of tensor and context parallelism."""
        if self.length % context:
            raise ConfigError(
                f"--context_parallel_size {context} does not divide the {self.length} tokens of a "
                "sample; choose a divisor of --block_size."
            )
        if self.options.sequence_parallel and (tensor == 1 or context > 1 or self.length % tensor):
            raise ConfigError(
                f"--sequence_parallel goes neither with --tensor_parallel_size {tensor} nor "
                f"--context_parallel_size {context} for samples of {self.length} tokens; leave it "
                "out."
            )
        _, block_model = self._rank_model(tensor)
        model = copy.deepcopy(block_model)
        recompute_activations(model, self.options.activation_checkpointing)
        return trace(
            model,
            self.options,
            memory_bytes=self._memory_bytes,
            length=self.length,
            tensor=tensor,
            context=context,
            is_compiled=self.is_compiled,
        )

    @functools.cached_property
    def model(self) -> PreTrainedModel:
        """The model on the meta device, undivided; not to be changed."""
        return self.make_meta_model()

    @functools.cached_property
    def column_matrices(self) -> float:
        """Mean number of matrices of a layer that tensor parallelism divides by columns."""
        return count_columns(self.model) / len(self.param_counts(1).blocks)

    @functools.cached_property
    def _pipeline_modules(self) -> PipelineModules:
        return find_pipeline_modules(self.model)

    def _assign_layers(self, pipeline: int) -> list[list[int]]:
        """Assign layers to the ranks of a pipeline as the trainer does.

        Raises:
            ConfigError: The model cannot be cut, or only into fewer stages.
        """
        num_layers = len(self.param_counts(1).blocks)
        if pipeline == 1:
            return [[*range(num_layers)]]
        num_stages = pipeline * self.options.virtual_stages
        check_num_stages(num_layers, num_stages)
        stages = self._pipeline_modules.assign_layers(num_stages)
        return [[*itertools.chain(*stages[rank::pipeline])] for rank in range(pipeline)]


def _choose_defaults(options: PlanOptions) -> PlanOptions:
    """Return the options with the precision and the compilation that the trainer would choose."""
    is_cuda = options.device not in ("cpu", "pvc")
    if options.mixed_precision is None:
        options = dataclasses.replace(options, mixed_precision="bf16" if is_cuda else "no")
    if options.torch_compile is None:
        compiles = is_cuda and not options.deterministic
        options = dataclasses.replace(options, torch_compile=compiles)
    return options


def _choose_efficiency(model: PreTrainedModel) -> float:
    """Return the fraction of a device's peak to expect of a model.

    A compiled GPT-2 124M reached 0.46 on an H200, and torchtitan's Llama 8B 0.39 on 8 H100. No
    mixture of experts has been measured.
    """
    return 0.4 if mixture_size(model) is None else 0.2


def _make_device(options: PlanOptions) -> Device:
    """Return the device from the table, with figures replaced by the options."""
    peak_tflops = options.device_peak_tflops
    node_link, network_link = options.links or (None, None)
    overrides = {
        "gib": options.memory_gib,
        "tflops": peak_tflops,
        "fp32_tflops": peak_tflops,
        "node_link": node_link,
        "network_link": network_link,
    }
    figures = {name: value for name, value in overrides.items() if value is not None}
    return dataclasses.replace(DEVICES[options.device], **figures)
