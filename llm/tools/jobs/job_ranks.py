"""Checks layout, batch, schedule and epochs of a run on the ranks of a job, before it is queued."""

from dataclasses import replace

from llm.config.duration import Duration
from llm.data.batch_plan import plan_batches
from llm.optim.schedule import make_schedule
from llm.parallel.dims import make_parallel_dims
from llm.tools.plan.planned_data import open_planned_data
from llm.trainers.gpt.config import CoreConfig
from llm.trainers.gpt.seams import choose_layout, make_extensions


def check_ranks(config: CoreConfig, *, nodes: int, ranks_per_node: int) -> None:
    """Refuse a number of ranks that layout or global batch do not allow.

    Raises:
        ConfigError: The ranks cannot be divided this way; the message is the trainer's.
    """
    num_ranks = nodes * ranks_per_node
    dims = make_parallel_dims(config, num_ranks)
    choose_layout(
        config, make_extensions(config), ranks=num_ranks, ranks_per_node=ranks_per_node, start=None
    )
    # Without the length, because it may need the model and the data.
    config = replace(config, max_duration=Duration("1 epoch"))
    plan_batches(config, num_windows=1, world_size=dims.data_ranks, block_size=1)


def check_schedule(config: CoreConfig) -> None:
    """Refuse phases of the learning rate that are longer than the run, if all are in steps.

    Other units need the model or the data.

    Raises:
        ConfigError: The phases do not fit; the message is the trainer's.
    """
    durations = [config.max_duration, config.warmup, config.decay]
    in_steps = all(duration is None or duration.unit == "steps" for duration in durations)
    if in_steps and config.branch_from is None:
        make_schedule(
            config,
            total_steps=int(config.max_duration.value),
            warmup_steps=config.warmup.value,
            decay_steps=None if config.decay is None else config.decay.value,
        )


def check_epochs(config: CoreConfig, *, nodes: int, ranks_per_node: int) -> None:
    """Refuse a run that takes more epochs than `max_epochs`, if its token files are here.

    Without `block_size`, or with a length per parameter, the number of samples depends on the
    model, and a cooldown may end a branch earlier; such runs are not checked.

    Raises:
        ConfigError: A source is used up before the end; the message is the trainer's.
    """
    block_size = config.block_size
    if block_size is None or config.max_duration.unit == "tokens per parameter":
        return
    if not config.max_epochs or config.branch_from is not None:
        return
    data = open_planned_data(config, block_size=block_size)
    if data is not None:
        plan = plan_batches(
            config,
            num_windows=data.num_windows,
            world_size=make_parallel_dims(config, nodes * ranks_per_node).data_ranks,
            block_size=block_size,
        )
        data.refuse_excess_epochs(plan.total_samples)
