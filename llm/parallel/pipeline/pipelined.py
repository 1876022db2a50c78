"""Layers divided over stages, through which the micro-batches of a step run one behind the other.

Gradient accumulation is what fills the pipeline: the micro-batches of a step are the pipeline's.
Replicas and parts of weights lie inside a stage. No rank but those of one stage knows its weights.
"""

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from llm.data.loader import MicroBatch
from llm.parallel.dims import ParallelDims
from llm.parallel.fsdp import ShardedStrategy
from llm.parallel.pipeline.passes import Chunk, Schedule, bubble_fraction, make_schedule
from llm.parallel.strategy import MakeOptimizer
from llm.runtime.rng import seed_torch

logger = logging.getLogger("llm.parallel")


class Cut(Protocol):
    """A rank's share of a model that was cut into stages; see `models.stages.Cut`."""

    @property
    def stages(self) -> Sequence[nn.Module]:
        """This rank's stages, from the first to the last."""

    @property
    def part(self) -> nn.Module:
        """What this rank holds, under the names that it has in the whole model."""

    @property
    def tied(self) -> Collection[str]:
        """Names of parameters that the first and the last stage both hold."""

    @property
    def width(self) -> int:
        """Of the hidden states between two stages."""

    @property
    def layers(self) -> Sequence[range]:
        """Of each stage of the pipeline."""

    @property
    def parameters(self) -> Sequence[int]:
        """How many each stage of the pipeline holds."""


class PipelineStrategy(ShardedStrategy):
    """Every rank holds some of the layers; replicas and parts lie inside a stage.

    Args:
        accelerator: Accelerate's view of the processes, devices and precision.
        mixed_precision: no, fp16 or bf16.
        layout: Where the ranks stand.
        blocks: The model's layers, each of which is gathered as a whole where parts lie.
        cut: Cuts the model inside its loss, given the number of stages and a rank's own.
        schedule: In which order a stage takes forward and backward passes.
        virtual_stages: Stages of each rank; more than one with interleaved-1f1b only.
        divide_layers: Leaves of each layer what this rank of the `tensor` axis computes.
        fill: As for `ShardedStrategy`; of the model, it gets what this rank's stages hold.
    """

    def __init__(
        self,
        *,
        accelerator: Accelerator,
        mixed_precision: str,
        layout: ParallelDims,
        blocks: Iterable[nn.Module],
        cut: Callable[[Any, int, Sequence[int]], Cut],
        schedule: Schedule,
        virtual_stages: int,
        divide_layers: Callable[[DeviceMesh], None] | None = None,
        fill: Callable[[Any], None] | None = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            mixed_precision=mixed_precision,
            layout=layout,
            blocks=blocks,
            divide_layers=divide_layers,
            fill=fill,
        )
        self._cut_model = cut
        self._schedule_name = schedule
        self._schedule: tuple[tuple[int, ...], Any] | None = None
        self.num_stages = layout.pipeline * virtual_stages
        self._stage_rank = layout.coordinates(self.rank)["pipeline"]
        self.stage_numbers = range(self._stage_rank, self.num_stages, layout.pipeline)
        self._pipeline = self.mesh.get_group("pipeline")
        self._ends = self._group_of_ends()
        self._weight = 1.0
        self._loss_sums: list[Tensor] = []

    def _group_of_ends(self) -> dist.ProcessGroup | None:
        """The ranks of the first and the last stage that hold the same parts; every rank calls."""
        pairs = [[group[0], group[-1]] for group in self.layout.groups("pipeline")]
        group, _ = dist.new_subgroups_by_enumeration(pairs)
        return group if isinstance(group, dist.ProcessGroup) else None

    def prepare(self, loss: nn.Module, make_optimizer: MakeOptimizer) -> None:
        """Cut the model (inside its loss) and make the optimizer of this rank's parts."""
        super().prepare(loss, make_optimizer)
        named = dict(self.model.named_parameters())
        tied = {named[name] for name in self._cut.tied}
        both = zip(self.parameters, self.stepped, strict=True)
        self._tied = [part for parameter, part in both if parameter in tied]
        # What the first and the last stage share counts on the first.
        elsewhere = tied if self._stage_rank else set()
        self._counted = [p for p in self.parameters if p not in elsewhere]

    def _divide(self, loss: nn.Module) -> None:
        """Keep this rank's stages, and of their parameters this rank's parts."""
        if self._divide_layers is not None:
            self._divide_layers(self.mesh["tensor"])
        cut = self._cut_model(loss, self.num_stages, self.stage_numbers)
        del self._divide_layers, self._cut_model  # they hold the whole model
        self.chunks = [Chunk(stage, self._precision) for stage in cut.stages]
        self.model = cut.part
        self.wrapped = nn.ModuleList(self.chunks)
        self.loss = None  # it holds the whole model
        self._cut = cut
        self._log_stages()
        own = set(self.wrapped.modules())
        self._blocks = [block for block in self._blocks if block in own]
        if self.mesh["shard"].size() == 1:
            return
        # Weights stay whole for the micro-batches of a step, and gradients too: the schedule sums
        # them into parts once.
        mesh = self.mesh["shard"]
        for block in self._blocks:
            self._shard_block(block, mesh, reshard_after_forward=False)
        for chunk in self.chunks:
            fully_shard(chunk, mesh=mesh, reshard_after_forward=False)

    @property
    def _divided(self) -> Sequence[nn.Module]:
        return self.chunks

    def _wrap(self, loss: nn.Module) -> nn.Module:
        return self.wrapped

    def _log_stages(self) -> None:
        shares = zip(self._cut.layers, self._cut.parameters, strict=True)
        for number, (layers, size) in enumerate(shares):
            logger.info(
                f"stage {number} on rank {number % self.layout.pipeline} of the pipeline: layers "
                f"{layers.start} to {layers.stop - 1}, {size:,} parameters"
            )

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        return self._autocast() if self._fp16_on_cpu else self.accelerator.autocast()

    def forward_backward(self, micro_batches: Sequence[MicroBatch], *, num_tokens: int) -> Tensor:
        """Compute the gradient of one step's mean loss; see `Strategy`."""
        if not self.wrapped.training:
            self.wrapped.train()
        self._zero_gradients()
        self._weight = self._averaged_ranks / num_tokens
        self._loss_sums = []
        self.loss_scale()  # a scaler is ready from its first use on; only the last stage has one
        if self._stage_rank:
            # Layers of other stages shall not drop the same units.
            seed_torch((torch.initial_seed() + self._stage_rank) % 2**63)
        schedule = self._schedule_of(micro_batches)
        parts = [_given(micro_batch) for micro_batch in micro_batches]
        # The schedule cuts them again as they are joined here.
        joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        received = [joined["input_ids"]] if self._stage_rank == 0 else []
        schedule.step(*received, target=joined["labels"], return_outputs=False, **joined)
        self._hand_over_gradients()
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        return self._told_all(torch.stack(self._loss_sums or [self._no_loss()]).sum())

    def _schedule_of(self, micro_batches: Sequence[MicroBatch]) -> Any:
        """The schedule for so many micro-batches of this shape; made when they first come."""
        shape = len(micro_batches), *micro_batches[0].input_ids.shape
        if self._schedule is None or self._schedule[0] != shape:
            self._schedule = shape, self._make_schedule(*shape)
        return self._schedule[1]

    def _make_schedule(self, micro_batches: int, rows: int, length: int) -> Any:
        # What stages send is told, so that no passes are run only to find it out.
        ids = torch.empty(rows, length, dtype=torch.int64, device="meta")
        hidden = torch.empty(rows, length, self._cut.width, device="meta", requires_grad=True)
        losses = torch.empty((), device="meta"), torch.empty((), device="meta")
        stages = [
            PipelineStage(
                chunk,
                number,
                self.num_stages,
                self.device,
                input_args=ids if number == 0 else hidden,
                output_args=losses if number == self.num_stages - 1 else hidden,
                group=self._pipeline,
            )
            for number, chunk in zip(self.stage_numbers, self.chunks, strict=True)
        ]
        idle = bubble_fraction(
            ranks=self.layout.pipeline, virtual_stages=len(stages), micro_batches=micro_batches
        )
        logger.info(
            f"pipeline: {micro_batches} micro-batches a step through {self.num_stages} stages on "
            f"{self.layout.pipeline} ranks by {self._schedule_name}; bubble {idle:.1%} of a step"
        )
        return make_schedule(
            self._schedule_name, stages, micro_batches=micro_batches, objective=self._objective
        )

    def _objective(self, output: tuple[Tensor, Tensor], _: Tensor) -> Tensor:
        """What the last stage differentiates for a micro-batch."""
        objective, loss_sum = output
        self._loss_sums.append(loss_sum.detach())
        return self._scaled(objective * self._weight)

    def _no_loss(self) -> Tensor:
        return torch.zeros((), device=self.device)

    def _told_all(self, values: Tensor) -> Tensor:
        """What the last stage has found, on all stages; the others give zeros."""
        dist.all_reduce(values, group=self._pipeline)
        return values

    def _hand_over_gradients(self) -> None:
        super()._hand_over_gradients()
        gradients = [part.grad for part in self.stepped if part.grad is not None]
        if self.layout.replicate > 1:
            _sum_over(gradients, self.mesh.get_group("replicate"))
            torch._foreach_div_(gradients, self.layout.replicate)
        _sum_over([part.grad for part in self._tied if part.grad is not None], self._ends)

    def _normed(self) -> list[Tensor]:
        return self._counted

    def _gradient_norm(self) -> Tensor:
        square = super()._gradient_norm().square()
        dist.all_reduce(square, group=self._pipeline)
        return square.sqrt()

    @torch.no_grad()
    def evaluate(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Sum of token losses and number of tokens that count, on this rank's share of the data."""
        losses = [loss_sum for _, loss_sum in self._forward(micro_batch)]
        loss_sum = self._told_all(torch.stack(losses or [self._no_loss()]).sum())
        return loss_sum, (micro_batch.labels != -100).sum()

    @torch.no_grad()
    def predict(self, micro_batch: MicroBatch) -> Tensor:
        """The likeliest next token at each position, int64 of the inputs' shape."""
        found = self._forward(micro_batch, labelled=False)
        return self._told_all(
            torch.cat(found) if found else torch.zeros_like(micro_batch.input_ids)
        )

    def _forward(self, micro_batch: MicroBatch, *, labelled: bool = True) -> list[Any]:
        """Run a micro-batch through all stages; what the last one returns, part by part."""
        if self.wrapped.training:
            self.wrapped.eval()
        ranks = self.layout.pipeline
        before, after = (self._stage_rank - 1) % ranks, (self._stage_rank + 1) % ranks
        given = _given(micro_batch)
        if not labelled:
            del given["labels"]
        # Several parts, so that stages have something to do at the same time.
        parts = zip(*(whole.chunk(ranks) for whole in given.values()), strict=True)
        sent, found = [], []
        for part in parts:
            rows = dict(zip(given, part, strict=True))
            for number, chunk in zip(self.stage_numbers, self.chunks, strict=True):
                received = rows["input_ids"]
                if number > 0:
                    received = torch.empty(*received.shape, self._cut.width, device=self.device)
                    dist.recv(received, group=self._pipeline, group_src=before)
                output = chunk(received, **rows)
                if number == self.num_stages - 1:
                    found.append(output)
                else:
                    work = dist.isend(output, group=self._pipeline, group_dst=after)
                    sent.append((work, output))
        for work, _ in sent:
            if work is not None:
                work.wait()
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave, of which other stages' names are left to them."""
        own = self.state_dict()
        parts = {
            part: {name: state[part][name] for name in own[part] if name in state[part]}
            for part in ("model", "optimizer")
        }
        super().load_state_dict({**state, **parts})

    def owner_ranks(self, path: str) -> Sequence[int]:
        """The ranks of this rank's stage; of the first one, for what it shares with the last."""
        part, _, name = path.removeprefix("strategy/").partition("/")
        if part not in ("model", "optimizer"):
            return range(self.world_size)
        tied = name.partition("/")[0] in self._cut.tied
        stage = 0 if tied else self._stage_rank
        return self.layout.groups("replicate", "shard", "context", "tensor")[stage]

    def full_state_dict(self) -> dict[str, Tensor]:
        """The model's parameters and persistent buffers on rank 0's host; empty elsewhere."""
        self._reshard()
        held = {name: (t.shape, t.dtype) for name, t in self.model.state_dict().items()}
        listed = self.gather_objects(held)
        sender: dict[str, int] = {}
        for rank in self.layout.groups("pipeline")[0]:  # stage by stage
            for name in listed[rank]:
                sender.setdefault(name, rank)
        whole = {}
        for name, tensor in self.model.state_dict().items():
            gathered = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if self.rank == 0:
                whole[name] = gathered.detach().cpu()
            elif self.rank == sender[name]:
                dist.send(gathered.detach().cpu().contiguous(), 0, group=self._host_group)
        for name, rank in sender.items():
            if self.rank == 0 and rank > 0:
                shape, dtype = listed[rank][name]
                whole[name] = torch.empty(shape, dtype=dtype)
                dist.recv(whole[name], rank, group=self._host_group)
        return whole


def _given(micro_batch: MicroBatch) -> dict[str, Tensor]:
    """The arguments of a stage that there are."""
    return {name: value for name, value in micro_batch._asdict().items() if value is not None}


def _sum_over(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Sum tensors over ranks, in place, many at a time."""
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    for work in works:
        if work is not None:
            work.wait()
