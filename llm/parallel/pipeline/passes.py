"""In which order a pipeline's ranks take the passes of a step.

The schedules are those of torch.distributed.pipelining: GPipe (Huang et al. 2019,
arXiv:1811.06965), 1F1B and interleaved 1F1B (Narayanan et al. 2021, arXiv:2104.04473).
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from llm.errors import ConfigError

Schedule = Literal["gpipe", "1f1b", "interleaved-1f1b"]


def check_micro_batches(schedule: Schedule, *, ranks: int, micro_batches: int) -> None:
    """Refuse a number of micro-batches that a schedule cannot run.

    Args:
        schedule: Its name.
        ranks: Of the pipeline; 1 is none.
        micro_batches: Of a step, on each share of the data.

    Raises:
        ConfigError: What the schedule needs.
    """
    remedy = "change --gradient_accumulation_steps (or --global_batch_size), or choose gpipe."
    if ranks > 1 and schedule == "1f1b" and micro_batches < ranks:
        raise ConfigError(
            f"--pipeline_schedule 1f1b needs at least {ranks} micro-batches a step for {ranks} "
            f"stages, and this run has {micro_batches}; {remedy}"
        )
    rounds = max(1, micro_batches // ranks)
    if ranks > 1 and schedule == "interleaved-1f1b" and micro_batches % rounds:
        raise ConfigError(
            f"--pipeline_schedule interleaved-1f1b cannot send {micro_batches} micro-batches "
            f"through {ranks} ranks in {rounds} equal rounds; {remedy}"
        )


def bubble_fraction(*, ranks: int, virtual_stages: int, micro_batches: int) -> float:
    """The part of a step in which a rank waits for others (the pipeline's bubble).

    Args:
        ranks: Of the pipeline, with stages of equal cost.
        virtual_stages: Stages of each rank.
        micro_batches: Of a step.
    """
    waiting = (ranks - 1) / virtual_stages
    return waiting / (micro_batches + waiting)


def make_schedule(
    schedule: Schedule,
    stages: Sequence[PipelineStage],
    *,
    micro_batches: int,
    objective: Callable[[Any, Tensor], Tensor],
) -> Any:
    """The schedule of a rank.

    Args:
        schedule: Its name.
        stages: Of this rank; one, unless interleaved.
        micro_batches: Of a step.
        objective: Of a micro-batch, from the last stage's output; gradients are summed.
    """
    if schedule == "interleaved-1f1b":
        return ScheduleInterleaved1F1B(
            list(stages), micro_batches, loss_fn=objective, scale_grads=False
        )
    single = ScheduleGPipe if schedule == "gpipe" else Schedule1F1B
    return single(stages[0], micro_batches, loss_fn=objective, scale_grads=False)


class Chunk(nn.Module):
    """A stage as the schedule runs it: in the run's precision, with fp32 between stages."""

    def __init__(
        self, stage: nn.Module, precision: Callable[[], contextlib.AbstractContextManager[Any]]
    ) -> None:
        super().__init__()
        self.stage = stage
        self._precision = precision

    def forward(self, received: Tensor, **arguments: Tensor) -> Any:
        """As the stage's."""
        with self._precision():
            output = self.stage(received, **arguments)
        if isinstance(output, Tensor) and output.is_floating_point():
            return output.float().contiguous()
        return output
