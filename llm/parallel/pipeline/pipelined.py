"""Pipeline parallelism: layers are assigned to stages, and micro-batches are pipelined.

The pipeline uses the micro-batches of gradient accumulation. Replicas and shards are formed inside
a stage: a rank holds only the weights of its stages.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from transformers import PreTrainedModel

from llm.data.loader import MicroBatch
from llm.models.sizes import find_blocks
from llm.parallel.base import MakeOptimizer
from llm.parallel.dims import ParallelDims
from llm.parallel.flat_buffers import FlatBuffer, group_for_flat_buffers
from llm.parallel.fsdp import ShardedStrategy, full_tensor, reshard
from llm.parallel.options import ParallelOptions
from llm.parallel.pipeline.pipeline_schedule import compute_bubble_fraction, make_schedule
from llm.parallel.pipeline.split import find_pipeline_modules
from llm.parallel.pipeline.stage import LocalStages, cut_model
from llm.runtime.agreement import gather
from llm.runtime.labels import IGNORED
from llm.runtime.logging import counted
from llm.runtime.rng import seed_torch

logger = logging.getLogger("llm.parallel")


class PipelineStrategy(ShardedStrategy):
    """Every rank holds some of the layers, or shards of them.

    Args:
        options: The schedule, and the stages of each rank (`virtual_stages`).
        accelerator: The processes, devices and precision.
        dims: How many ranks each kind of parallelism has.
        init_weights: Allocates and initializes this rank's shards of a model on the meta device; it
            receives the model with only this rank's stages. None if the model has weights.

    Attributes:
        num_stages: Stages of the whole pipeline.
        stage_indices: The stages of this rank, from the first to the last.
    """

    def __init__(
        self,
        options: ParallelOptions,
        accelerator: Accelerator,
        dims: ParallelDims,
        *,
        init_weights: Callable[[PreTrainedModel], None] | None = None,
    ) -> None:
        super().__init__(options, accelerator, dims, init_weights=init_weights)
        self._schedule_name = options.pipeline_schedule
        self._schedule: Any = None
        self._schedule_shape: tuple[int, int, int] | None = None
        self.num_stages = dims.pipeline * options.virtual_stages
        self._stage_rank = dims.coordinates(self.rank)["pipeline"]
        self.stage_indices = range(self._stage_rank, self.num_stages, dims.pipeline)
        self._pipeline_group = self.mesh.get_group("pipeline")
        # Ranks of the first and the last stage that hold the same shards, for tied weights.
        first_and_last_ranks = [
            [ranks[0], ranks[-1]] for ranks in dims.list_rank_groups("pipeline")
        ]
        self._tied_group, _ = dist.new_subgroups_by_enumeration(first_and_last_ranks)
        # Hidden states can exceed the range of fp16, and autocast does not keep them in fp16
        # either.
        self._sent_dtype = torch.bfloat16 if self._gathers_in_bf16 else torch.float32
        self._sums: list[Tensor] = []

    def prepare(self, loss: nn.Module, make_optimizer: MakeOptimizer) -> None:
        """Cut the model, inside its loss, and make the optimizer of this rank's shards."""
        super().prepare(loss, make_optimizer)
        parameter_by_name = dict(self.model.named_parameters())
        tied_parameters = {parameter_by_name[name] for name in self._cut.tied}
        parameter_pairs = zip(self.parameters, self.local_parameters, strict=True)
        self._tied_params = [
            local_parameter
            for parameter, local_parameter in parameter_pairs
            if parameter in tied_parameters
        ]
        # A weight on both the first and the last stage counts once in the norm.
        params_of_first_stage = tied_parameters if self._stage_rank else set()
        self._norm_params = [p for p in self.parameters if p not in params_of_first_stage]

    def _shard_model(self) -> None:
        """Cut the model into stages, and shard those of this rank."""
        # In this order: stages are found in the plain model; then its layers are divided.
        modules = find_pipeline_modules(self.model)
        blocks = find_blocks(self.model)
        self._divide_layers()
        self._zero_sums = self.loss.zero_sums(self.device)
        cut = self._cut = cut_model(modules, self.loss, self.num_stages, self.stage_indices)
        self.stages = cut.stages
        for stage in self.stages:
            stage.autocast = self.autocast
            stage.sent_dtype = self._sent_dtype
        # The whole model has no reference left here: layers of other stages can be freed.
        self.loss, self.model = nn.ModuleList(self.stages), cut.model
        self._log_stages(cut)
        if self.mesh["shard"].size() > 1:
            self._shard_stages(blocks, self.mesh["shard"])
        self._allocate_weights(self.stages)

    def _shard_stages(self, blocks: nn.ModuleList, mesh: DeviceMesh) -> None:
        """Shard this rank's stages, each with those of the model's blocks that it contains.

        Weights stay gathered for all micro-batches of a step, and gradients unsharded: the schedule
        reduce-scatters them once.
        """
        for stage in self.stages:
            stage_modules = set(stage.modules())
            stage_blocks = [block for block in blocks if block in stage_modules]
            self._divide_experts(stage, mesh)
            if not self.dims.shards_only_experts:
                self._shard_modules(stage, stage_blocks, mesh, reshard_after_forward=False)

    def _log_stages(self, cut: LocalStages) -> None:
        """Log the rank, the layers and the size of each stage of the pipeline."""
        for stage_index, layers in enumerate(cut.layers):
            logger.info(
                f"stage {stage_index} on rank {stage_index % self.dims.pipeline} of the pipeline: "
                f"layers {layers.start} to {layers.stop - 1}, "
                f"{cut.num_parameters[stage_index]:,} parameters"
            )

    def _wrap_loss(self) -> nn.Module:
        wrapped: nn.Module = self.loss
        return wrapped

    def _accumulate_gradients(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Run the pipeline's schedule of a step; return the sums for the log on all stages."""
        self._sums = []
        self.loss_scale()  # creates the scale on all stages: only the last one scales its loss
        if self._stage_rank:
            # Each stage draws separate dropout masks; all ranks of a slice share the step's seed.
            seed_torch((torch.initial_seed() + self._stage_rank) % 2**63)
        num_samples, num_tokens = micro_batches[0].input_ids.shape
        shape = len(micro_batches), num_samples, num_tokens
        if self._schedule_shape != shape:
            self._schedule, self._schedule_shape = self._make_schedule(*shape), shape
        step_arguments = _join_arguments(micro_batches)  # the schedule splits them again
        stage_inputs = [step_arguments["input_ids"]] if self._stage_rank == 0 else []
        with self._record_step():
            self._schedule.step(
                *stage_inputs,
                target=step_arguments["labels"],
                return_outputs=False,
                **step_arguments,
            )
        return self._sum_on_all_stages(self._sums)

    def _make_schedule(self, num_micro_batches: int, num_samples: int, num_tokens: int) -> Any:
        """Make the schedule of a step with micro-batches of [num_samples, num_tokens]."""
        # Given the shapes, the stages do not need an extra forward pass to find them.
        ids = torch.empty(num_samples, num_tokens, dtype=torch.int64, device="meta")
        hidden_shape = num_samples, num_tokens, self._cut.width
        hidden = torch.empty(
            hidden_shape, dtype=self._sent_dtype, device="meta", requires_grad=True
        )
        losses = torch.empty((), device="meta"), self._zero_sums.to("meta")
        stages = [
            PipelineStage(
                stage,
                stage_index,
                self.num_stages,
                self.device,
                input_args=ids if stage_index == 0 else hidden,
                output_args=losses if stage_index == self.num_stages - 1 else hidden,
                group=self._pipeline_group,
            )
            for stage_index, stage in zip(self.stage_indices, self.stages, strict=True)
        ]
        self._log_schedule(num_micro_batches)
        return make_schedule(
            self._schedule_name,
            stages,
            num_micro_batches=num_micro_batches,
            compute_objective=self._last_stage_objective,
        )

    def _log_schedule(self, num_micro_batches: int) -> None:
        """Log the schedule of a step, and the time that ranks wait for each other."""
        bubble = compute_bubble_fraction(
            num_ranks=self.dims.pipeline,
            stages_per_rank=len(self.stages),
            num_micro_batches=num_micro_batches,
        )
        logger.info(
            f"pipeline: {counted(num_micro_batches, 'micro-batch')} per step through "
            f"{self.num_stages} stages on {self.dims.pipeline} ranks by {self._schedule_name}; "
            f"bubble {bubble:.1%} of a step"
        )

    def _last_stage_objective(self, output: tuple[Tensor, Tensor], _: Tensor) -> Tensor:
        """Return the last stage's objective for a micro-batch."""
        objective, sums = output
        self._sums.append(sums)
        return self._scale_objective(objective * self.token_weight)

    def _sum_on_all_stages(self, sums: Sequence[Tensor]) -> Tensor:
        """Return the total of the last stage's sums on all stages; the others have none."""
        return self._from_last_stage(torch.stack([*sums] or [self._zero_sums]).sum(0))

    def _from_last_stage(self, values: Tensor) -> Tensor:
        """Return the last stage's values on all stages; the others give zeros."""
        dist.all_reduce(values, group=self._pipeline_group)
        return values

    def _reduce_gradients(self) -> None:
        """Average gradients over the ranks that share weights, and sum those of tied weights."""
        super()._reduce_gradients()
        if self.dims.shards_only_experts:  # the other weights are the same on the ranks of `shard`
            expert_gradients = {p.grad for p in self._divided_experts}
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            self._average_gradients(
                [gradient for gradient in gradients if gradient not in expert_gradients], "shard"
            )
        self._average_gradients(
            [p.grad for p in self.local_parameters if p.grad is not None], "replicate"
        )
        # A tied weight gets the sum of its gradients as embedding and as output head.
        _all_reduce([p.grad for p in self._tied_params if p.grad is not None], self._tied_group)

    def _average_gradients(self, gradients: list[Tensor], axis: str) -> None:
        """Average gradients over the ranks of an axis, in place."""
        num_ranks = self.mesh[axis].size()
        if num_ranks > 1:
            _all_reduce(gradients, self.mesh.get_group(axis))
            torch._foreach_div_(gradients, num_ranks)

    def _norm_parameters(self) -> list[Tensor]:
        return self._norm_params

    def _compute_gradient_norm(self) -> Tensor:
        square = super()._compute_gradient_norm().square()
        dist.all_reduce(square, group=self._pipeline_group)
        return square.sqrt()

    @torch.no_grad()
    def evaluate(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return the sum of token losses and the number of labels, of this rank's slice."""
        outputs = self._run_stages(_stage_arguments(micro_batch))
        total = self._sum_on_all_stages([sums for _, sums in outputs])
        return total[0], (micro_batch.labels != IGNORED).sum()

    @torch.no_grad()
    def predict(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return the likeliest next tokens, int64, and the labels' log-probabilities, float32."""
        outputs = self._run_stages(_stage_arguments(micro_batch), predicting=True)
        zeros = torch.zeros_like(micro_batch.input_ids)
        likeliest, log_probs = zip(*(outputs or [(zeros, zeros.float())]), strict=True)
        likeliest_on_all_stages = self._from_last_stage(torch.cat(likeliest))
        return likeliest_on_all_stages, self._from_last_stage(torch.cat(log_probs))

    def _run_stages(self, arguments: dict[str, Tensor], *, predicting: bool = False) -> list[Any]:
        """Run a micro-batch through all stages; return the outputs of the last one, if it is here.

        The rows are split into as many pieces as ranks, so that stages compute at the same time.
        """
        if self.wrapped.training:
            self.wrapped.eval()
        next_rank = (self._stage_rank + 1) % self.dims.pipeline
        pending_sends, outputs = [], []
        for piece in _split_rows(arguments, num_pieces=self.dims.pipeline):
            for stage_index, stage in zip(self.stage_indices, self.stages, strict=True):
                stage_input = piece["input_ids"]
                if stage_index > 0:
                    stage_input = self._receive_hidden(*stage_input.shape)
                output = stage(stage_input, **piece, predicting=predicting)
                if stage_index == self.num_stages - 1:
                    outputs.append(output)
                else:
                    send = dist.isend(output, group=self._pipeline_group, group_dst=next_rank)
                    pending_sends.append((send, output))
        # Keep the outputs alive until their messages have been sent.
        for send, _ in pending_sends:
            if send is not None:
                send.wait()
        return outputs

    def _receive_hidden(self, num_samples: int, num_tokens: int) -> Tensor:
        """Return the previous stage's hidden states [num_samples, num_tokens, width]."""
        shape = num_samples, num_tokens, self._cut.width
        hidden = torch.empty(shape, dtype=self._sent_dtype, device=self.device)
        previous_rank = (self._stage_rank - 1) % self.dims.pipeline
        dist.recv(hidden, group=self._pipeline_group, group_src=previous_rank)
        return hidden

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`; this rank takes the names of its stages."""
        local_state = self.state_dict()
        selected = {
            key: {name: state[key][name] for name in local_state[key] if name in state[key]}
            for key in ("model", "optimizer")
        }
        super().load_state_dict({**state, **selected})

    def _stage_ranks(self, path: str) -> Sequence[int]:
        """Return the ranks of this rank's stage, or of the first stage for a tied weight.

        This holds for every part of a checkpoint, so a new part needs no entry here. If several
        stages hold the same tensor, torch.distributed.checkpoint writes one copy.
        """
        stage_rank = self._stage_rank if self._cut.tied.isdisjoint(path.split("/")) else 0
        return self.dims.list_rank_groups("replicate", "shard", "context", "tensor")[stage_rank]

    def gather_full_state_dict(self) -> dict[str, Tensor]:
        """Return the whole model's parameters and persistent buffers on rank 0's host."""
        reshard(self.wrapped)
        specs_by_rank = gather(
            {name: (tensor.shape, tensor.dtype) for name, tensor in self.model.state_dict().items()}
        )
        sender_by_name: dict[str, int] = {}
        for rank in self.dims.list_rank_groups("pipeline")[0]:  # stage by stage
            for name in specs_by_rank[rank]:
                sender_by_name.setdefault(name, rank)
        state_dict = {}
        for name, tensor in self.model.state_dict().items():
            full_weight = full_tensor(tensor)  # on all ranks, because it is an all-gather
            if self.rank == 0:
                state_dict[name] = full_weight.detach().cpu()
            elif self.rank == sender_by_name[name]:
                dist.send(full_weight.detach().cpu().contiguous(), 0)
        if self.rank == 0:
            # In the senders' order, stage by stage: messages of one rank arrive in order.
            for name, sender in sender_by_name.items():
                if sender > 0:
                    shape, dtype = specs_by_rank[sender][name]
                    state_dict[name] = torch.empty(shape, dtype=dtype)
                    dist.recv(state_dict[name], sender)
        return state_dict


def _stage_arguments(micro_batch: MicroBatch) -> dict[str, Tensor]:
    """Return the arguments of a stage that are not None."""
    return {name: value for name, value in micro_batch._asdict().items() if value is not None}


def _join_arguments(micro_batches: Sequence[MicroBatch]) -> dict[str, Tensor]:
    """Return the arguments of a stage for all micro-batches, joined along the samples."""
    arguments = [_stage_arguments(micro_batch) for micro_batch in micro_batches]
    return {name: torch.cat([values[name] for values in arguments]) for name in arguments[0]}


def _split_rows(arguments: dict[str, Tensor], *, num_pieces: int) -> Iterator[dict[str, Tensor]]:
    """Yield the arguments of a stage for consecutive pieces of the rows of a micro-batch."""
    chunks_by_argument = (tensor.chunk(num_pieces) for tensor in arguments.values())
    for chunks in zip(*chunks_by_argument, strict=True):
        yield dict(zip(arguments, chunks, strict=True))


def _all_reduce(tensors: Sequence[Tensor], group: Any) -> None:
    """Sum tensors over ranks, in place, in a few large messages."""
    for group_tensors in group_for_flat_buffers(tensors):
        buffer = FlatBuffer(group_tensors)
        buffer.pack()
        dist.all_reduce(buffer.flat, group=group)
        buffer.unpack()
