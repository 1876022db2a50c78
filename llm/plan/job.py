"""What is planned, and what one rank holds and does of it, by how the work is divided."""

import copy
import dataclasses
import functools
import itertools

import torch
from transformers import PreTrainedModel

from llm.data.batch_plan import BatchPlan, plan_batches
from llm.errors import ConfigError
from llm.models.blocks import find_blocks
from llm.models.build import build_model
from llm.models.configuration import load_config
from llm.parallel.dims import ParallelDims
from llm.parallel.pipeline.schedule import check_micro_batches
from llm.parallel.pipeline.split import PipelineModules, find_pipeline_modules
from llm.parallel.pipeline.stage import check_depth
from llm.plan.devices import DEVICES, GIB, Device
from llm.plan.optimizer import optimizer_memory
from llm.plan.options import PlanOptions
from llm.plan.param_counts import ParamCounts, count_parameters
from llm.plan.tensor_share import split_model
from llm.plan.trace import Trace, trace
from llm.trainers.gpt.inputs import choose_block_size, choose_layout

USABLE = 0.95
"""Of a GPU's memory; the rest is lost between blocks of unlike size."""


class Job:
    """A model, its batch and its devices; what a rank of some layout holds is found once for each.

    Args:
        options: What is planned.

    Attributes:
        options: The same.
        length: Tokens of a sample.
        layout: The layout that the options describe.
        device: What holds a rank.
        usable: Bytes of it that can be filled.
        optimizer: What the optimizer keeps.

    Raises:
        ConfigError: The model cannot be had, or not in this shape, or not on so many ranks.
    """

    def __init__(self, options: PlanOptions) -> None:
        self.options = options
        self._config = load_config(options)
        self.length = choose_block_size(options, self._config)
        self.layout = choose_layout(options, self._config, options.nodes * options.gpus_per_node)
        self.device = _device(options)
        memory = int(self.device.gib * GIB)
        self.usable = memory if options.device == "cpu" else int(USABLE * memory)
        self.optimizer = optimizer_memory(options, self.outline())
        self._rank_model = functools.cache(self._make_rank_model)
        self.trace = functools.cache(self._trace)
        self.layers_of_ranks = functools.cache(self._layers_of_ranks)

    def outline(self) -> PreTrainedModel:
        """Make the model on the meta device, as the trainer makes it."""
        options = self.options
        if "flash" in (options.attention_implementation or ""):
            # Its package need not be here, and SDPA's kernel keeps the same.
            options = dataclasses.replace(options, attention_implementation=None)
        return build_model(
            options,
            self._config,
            weights_from=None,
            seed=0,
            device=torch.device("meta"),
            vocab_size=self._config.get_text_config().vocab_size,
            tensor_parallel_size=options.tensor_parallel_size,
        )

    def batches(self, layout: ParallelDims) -> BatchPlan:
        """The batches of a run.

        Raises:
            ConfigError: The global batch cannot be divided, or the pipeline needs more of them.
        """
        options = self.options
        batches = plan_batches(options, num_windows=1, world_size=layout.data_ranks)
        check_micro_batches(
            options.pipeline_schedule, ranks=layout.pipeline, micro_batches=batches.accumulation
        )
        return batches

    def budget(self, layout: ParallelDims) -> float | None:
        """Tokens of the whole run; None where the options do not say."""
        options = self.options
        if options.num_tokens is None and (options.max_train_steps or options.max_train_samples):
            return float(self.batches(layout).total_samples * self.length)
        return options.num_tokens

    def param_counts(self, tensor: int) -> ParamCounts:
        """The parameters of a rank that computes one of so many parts of every layer."""
        return self._rank_model(tensor)[0]

    def _make_rank_model(self, tensor: int) -> tuple[ParamCounts, PreTrainedModel]:
        """The parameter counts, and the model with one block left, all that a trace takes."""
        model = self.outline()
        split_model(model, tensor)
        param_counts = count_parameters(model)
        del find_blocks(model)[1:]
        return param_counts, model

    def _trace(self, tensor: int, context: int) -> Trace:
        if self.length % context:
            raise ConfigError(
                f"--context_parallel_size {context} does not divide the {self.length} tokens of a "
                "sample; choose a divisor of --block_size."
            )
        model = copy.deepcopy(self._rank_model(tensor)[1])
        return trace(model, self.options, length=self.length, tensor=tensor, context=context)

    @functools.cached_property
    def _modules(self) -> PipelineModules:
        return find_pipeline_modules(self.outline())

    def _layers_of_ranks(self, pipeline: int) -> list[list[int]]:
        """The numbers of the layers that each rank of a pipeline holds, as the trainer cuts them.

        Raises:
            ConfigError: The model cannot be cut, or into fewer stages only.
        """
        num_layers = len(self.param_counts(1).blocks)
        if pipeline == 1:
            return [[*range(num_layers)]]
        num_stages = pipeline * self.options.virtual_stages
        check_depth(num_layers, num_stages)
        stages = self._modules.assign_layers(num_stages)
        return [[*itertools.chain(*stages[rank::pipeline])] for rank in range(pipeline)]


def _device(options: PlanOptions) -> Device:
    """The device of the table, with what the options say of it."""
    peak = options.device_peak_tflops
    in_node, between = options.links or (None, None)
    given = {
        "gib": options.memory_gib,
        "tflops": peak,
        "fp32_tflops": peak,
        "node_link": in_node,
        "network_link": between,
    }
    changed = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(DEVICES[options.device], **changed)
