"""What is planned: a model, its batch and its devices, whatever the layout."""

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Literal

from transformers import PreTrainedModel

from llm.errors import ConfigError
from llm.models.blocks import find_blocks
from llm.models.pieces import Pieces, find_pieces
from llm.models.stages import check_depth
from llm.parallel.layout import Layout
from llm.parallel.schedules import check_micro_batches
from llm.plan.census import Census, shard_sizes, take_census
from llm.plan.devices import Device
from llm.plan.split import split_model
from llm.plan.trace import Trace, trace

Schedule = Literal["gpipe", "1f1b", "interleaved-1f1b"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extra:
    """Memory of the optimizer, found by making it on the meta device.

    Attributes:
        per_element: Bytes of optimizer state for each trained element.
        kfac: Bytes of K-FAC's factors and bases on one rank.
        kfac_recording: Bytes that it takes while a step is computed whose tokens it records.
        kfac_step: Bytes that it takes while the optimizer steps.
    """

    per_element: float
    kfac: int = 0
    kfac_recording: int = 0
    kfac_step: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What is planned.

    Attributes:
        outline: Makes the model on the meta device.
        extra: Of the optimizer.
        micro_batch_size: Samples of a micro-batch.
        length: Tokens of a sample.
        accumulation: Micro-batches of a step, where `global_batch_size` does not decide.
        global_batch_size: Samples of a step, or None.
        mixed_precision: no, fp8, fp16 or bf16.
        gradient_checkpointing: Whether activations are recomputed.
        chunked_loss: Whether the loss is computed in chunks.
        schedule: Of the pipeline.
        virtual_stages: Parts of the model that a rank of an interleaved pipeline holds.
        device: What holds a rank.
        gpus_per_node: Devices of a node.
        efficiency: Share of the device's peak that products are expected to reach.
    """

    outline: Callable[[], PreTrainedModel]
    extra: Extra
    micro_batch_size: int
    length: int
    accumulation: int
    global_batch_size: int | None
    mixed_precision: str
    gradient_checkpointing: bool
    chunked_loss: bool
    schedule: Schedule
    virtual_stages: int
    device: Device
    gpus_per_node: int
    efficiency: float

    def micro_batches(self, layout: Layout) -> int:
        """Micro-batches of a step on each rank.

        Raises:
            ConfigError: The global batch cannot be divided, or the pipeline needs more of them.
        """
        found = self._micro_batches(layout)
        check_micro_batches(self.schedule, ranks=layout.pipeline, micro_batches=found)
        return found

    def _micro_batches(self, layout: Layout) -> int:
        if self.global_batch_size is None:
            return self.accumulation
        together = self.micro_batch_size * layout.data_ranks
        if self.global_batch_size % together:
            raise ConfigError(
                f"--global_batch_size {self.global_batch_size} is no multiple of {together}, which "
                f"is --per_device_train_batch_size {self.micro_batch_size} on {layout.data_ranks} "
                "data-parallel ranks; change one of them."
            )
        return self.global_batch_size // together

    def samples(self, layout: Layout) -> int:
        """Samples of one step over all ranks."""
        return self.micro_batches(layout) * self.micro_batch_size * layout.data_ranks


class Shares:
    """What one rank holds and does, by how layers and samples are divided; found once for each.

    Args:
        job: What is planned.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._parts = functools.cache(self._count_and_cut)
        self.layers_of_ranks = functools.cache(self._layers_of_ranks)
        self.trace = functools.cache(self._trace)
        self.block_shards = functools.cache(self._block_shards)

    def census(self, tensor: int) -> Census:
        """The parameters of a rank that computes one of so many parts of every layer."""
        return self._parts(tensor)[0]

    @functools.cached_property
    def _pieces(self) -> Pieces:
        return find_pieces(self._job.outline())

    def _layers_of_ranks(self, pipeline: int) -> list[list[int]]:
        """The numbers of the layers that each rank of a pipeline holds, as the trainer cuts them.

        Raises:
            ConfigError: The model cannot be cut, or into fewer stages only.
        """
        num_layers = len(self.census(1).blocks)
        if pipeline == 1:
            return [[*range(num_layers)]]
        num_stages = pipeline * self._job.virtual_stages
        check_depth(num_layers, num_stages)
        stages = self._pieces.share_out(num_stages)
        return [[*itertools.chain(*stages[rank::pipeline])] for rank in range(pipeline)]

    def _block_shards(self, tensor: int, ranks: int) -> list[tuple[int, int]]:
        """For each block, the elements on one of so many ranks: all, and those trained."""
        return [shard_sizes(block, ranks) for block in self.census(tensor).blocks]

    def _count_and_cut(self, tensor: int) -> tuple[Census, PreTrainedModel]:
        """The census, and the model with one block left, which is all that a trace takes."""
        model = self._job.outline()
        split_model(model, tensor)
        census = take_census(model)
        del find_blocks(model)[1:]
        return census, model

    def _trace(self, tensor: int, context: int) -> Trace:
        job = self._job
        if job.length % context:
            raise ConfigError(
                f"--context_parallel_size {context} does not divide the {job.length} tokens of a "
                "sample; choose a divisor of --block_size."
            )
        return trace(
            copy.deepcopy(self._parts(tensor)[1]),
            micro_batch_size=job.micro_batch_size,
            length=job.length,
            mixed_precision=job.mixed_precision,
            chunked_loss=job.chunked_loss,
            tensor=tensor,
            context=context,
            on_host=job.device.on_host,
        )
