"""The order of the forward and backward passes of a step on the ranks of a pipeline.

The schedules are the same as in torch.distributed.pipelining: GPipe (Huang et al. 2019,
arXiv:1811.06965), 1F1B and interleaved 1F1B (Narayanan et al. 2021, arXiv:2104.04473).
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from llm.errors import ConfigError


def check_micro_batches(schedule: str, *, num_ranks: int, num_micro_batches: int) -> None:
    """Refuse a number of micro-batches that a schedule cannot run.

    Args:
        schedule: The value of `pipeline_schedule`.
        num_ranks: Ranks of the pipeline; 1 means without a pipeline.
        num_micro_batches: Micro-batches of a step on one rank of the data.

    Raises:
        ConfigError: The schedule does not fit.
    """
    remedy = "change --gradient_accumulation_steps (or --global_batch_size), or choose gpipe."
    if num_ranks > 1 and schedule == "1f1b" and num_micro_batches < num_ranks:
        raise ConfigError(
            f"--pipeline_schedule 1f1b needs at least {num_ranks} micro-batches per step for "
            f"{num_ranks} stages, and this run has {num_micro_batches}; {remedy}"
        )
    num_rounds = max(1, num_micro_batches // num_ranks)
    if num_ranks > 1 and schedule == "interleaved-1f1b" and num_micro_batches % num_rounds:
        raise ConfigError(
            f"--pipeline_schedule interleaved-1f1b cannot send {num_micro_batches} micro-batches "
            f"through {num_ranks} ranks in {num_rounds} equal rounds; {remedy}"
        )


def compute_bubble_fraction(
    *, num_ranks: int, stages_per_rank: int, num_micro_batches: int
) -> float:
    """Return the fraction of a step that a rank waits for others (the pipeline bubble).

    Args:
        num_ranks: Ranks of the pipeline; their stages take the same time.
        stages_per_rank: Stages of each rank.
        num_micro_batches: Micro-batches of a step.
    """
    idle_passes = (num_ranks - 1) / stages_per_rank
    return idle_passes / (num_micro_batches + idle_passes)


def make_schedule(
    schedule: str,
    stages: Sequence[PipelineStage],
    *,
    num_micro_batches: int,
    compute_objective: Callable[[Any, Tensor], Tensor],
) -> Any:
    """Return the schedule that a rank runs in each step.

    Args:
        schedule: The value of `pipeline_schedule`.
        stages: This rank's stages; one, unless interleaved.
        num_micro_batches: Micro-batches of a step.
        compute_objective: Returns what to differentiate for a micro-batch, from the last stage's
            output; gradients are summed over micro-batches.
    """
    if schedule == "interleaved-1f1b":
        return ScheduleInterleaved1F1B(
            list(stages), num_micro_batches, loss_fn=compute_objective, scale_grads=False
        )
    schedule_class = _GPipe if schedule == "gpipe" else Schedule1F1B
    return schedule_class(
        stages[0], num_micro_batches, loss_fn=compute_objective, scale_grads=False
    )


class _GPipe(ScheduleGPipe):
    """GPipe, also for fewer micro-batches than stages: PyTorch 2.10 refuses them needlessly."""

    def __init__(self, stage: PipelineStage, n_microbatches: int, **kwargs: Any) -> None:
        super().__init__(stage, max(n_microbatches, stage.num_stages), **kwargs)
        self._n_microbatches = n_microbatches
