"""The arithmetic of a run from its options: batches, length, and the learning rate of each step."""

import dataclasses
import math
from fractions import Fraction

import torch
from transformers import PreTrainedConfig

from llm.checkpoint.run_folder import check_unchanged
from llm.data.batch_plan import BatchPlan, plan_batches
from llm.data.batch_schedule import batch_phases
from llm.data.corpus import Samples
from llm.data.epoch_limits import check_epochs
from llm.data.skipped_samples import SkippedSamples
from llm.errors import ConfigError
from llm.models.build import build_model
from llm.models.sizes import parameter_counts
from llm.optim.schedule import Schedule, make_schedule
from llm.parallel.pipeline.pipeline_schedule import check_micro_batches
from llm.trainers.gpt.branches import Branch
from llm.trainers.gpt.config import CoreConfig
from llm.trainers.gpt.resume import choose_skipped
from llm.trainers.gpt.run_setup import RunSetup


def budget_parameters(
    config: CoreConfig, model_config: PreTrainedConfig, *, vocab_size: int
) -> int | None:
    """Return the number of parameters (tied ones once) if the budget depends on it."""
    if config.tokens_per_parameter is None:
        return None
    model = build_model(
        config,
        model_config,
        weights_from=None,
        seed=0,
        device=torch.device("meta"),
        vocab_size=vocab_size,
        tensor_parallel_size=config.tensor_parallel_size,
    )
    return parameter_counts(model)["total"]


def saved_batch(config: CoreConfig, setup: RunSetup) -> int | str | None:
    """Return the global batch of the checkpoint that a run starts from, if it keeps the batch.

    The order of samples depends on it. With another number of ranks, accumulation changes.

    Raises:
        CheckpointError: The options set another batch.
    """
    if setup.start is None or "global_batch_size" in config.change_on_resume:
        return None
    saved: int | str = setup.start.metadata["global_batch_size"]
    given = saved if config.global_batch_size is None else config.global_batch_size
    phases = (batch_phases(batch, block_size=setup.block_size) for batch in (saved, given))
    if len({tuple(each) for each in phases}) > 1:
        check_unchanged(
            {"global_batch_size": setup.start.metadata.get("batch_option") or saved},
            {"global_batch_size": given},
            allowed=(),
            branch_from=setup.branch_from.path if setup.branch_from else None,
        )
    return saved


def plan_learning_rates(
    config: CoreConfig, plan: BatchPlan, *, block_size: int, cooldown_from: int | None = None
) -> Schedule:
    """Create the schedule; the options may set its phases in samples or tokens.

    With `lr_batch_scaling` sqrt it grows with the square root of the global batch, which keeps the
    noise of adaptive optimizers the same (Malladi et al. 2022, arXiv:2205.10287).

    Raises:
        ConfigError: The phases do not fit into the run.
    """
    warmup, decay = None, None
    if config.num_warmup_samples is not None:
        warmup = plan.steps_at(config.num_warmup_samples)
    if config.num_warmup_tokens is not None:
        warmup = plan.steps_at(Fraction(config.num_warmup_tokens, block_size))
    if config.num_decay_tokens is not None:
        decay_samples = Fraction(config.num_decay_tokens, block_size)
        decay = plan.total_steps - plan.steps_at(plan.total_samples - decay_samples)
    schedule = make_schedule(
        config,
        total_steps=plan.total_steps,
        warmup=warmup,
        decay=decay,
        cooldown_from=cooldown_from,
    )
    if config.lr_batch_scaling == "none":
        return schedule

    def scaled(step: float) -> float:
        growth = plan.phase(step).global_batch_size / plan.global_batch_size
        return schedule(step) * math.sqrt(growth)

    return scaled


def add_cooldown(
    config: CoreConfig, branch: Branch | None, plan: BatchPlan, *, block_size: int
) -> tuple[BatchPlan, Schedule]:
    """Return batch plan and schedule of a run; a cooldown replaces the end.

    Args:
        config: The options.
        branch: The parent of a branch, or None.
        plan: The plan without a cooldown.
        block_size: Tokens of a sample.

    Raises:
        ConfigError: The parent's learning rate is not stable at this step, or the cooldown is
            shorter than a step.
    """
    schedule = plan_learning_rates(config, plan, block_size=block_size)
    if branch is None or branch.cooldown_from is None or config.cooldown_tokens is None:
        return plan, schedule
    step = branch.cooldown_from
    samples = math.ceil(config.cooldown_tokens / block_size)
    batch = plan.phase(step).global_batch_size
    if samples < batch:
        raise ConfigError(
            f"--cooldown_tokens {config.cooldown_tokens:,} is less than one step of "
            f"{batch * block_size:,} tokens; make it longer."
        )
    plan = dataclasses.replace(plan, total_samples=plan.samples_at(step) + samples)
    falling = plan_learning_rates(config, plan, block_size=block_size, cooldown_from=step)
    if schedule(step) != falling(step):
        raise ConfigError(
            f"--cooldown_tokens begins at the stable rate {falling(step):g}, but after step {step} "
            f"of {branch.parent} --lr_scheduler_type {config.lr_scheduler_type} has "
            f"{schedule(step):g}; branch from constant, constant_with_warmup or "
            "warmup_stable_decay between warm-up and decay."
        )
    return plan, falling


def plan_training(
    config: CoreConfig, setup: RunSetup, samples: Samples, branch: Branch | None
) -> tuple[BatchPlan, SkippedSamples, Schedule]:
    """Return the batch plan, the samples to skip and the schedule.

    Raises:
        LLMError: The options do not fit the data or the start.
    """
    plan = plan_batches(
        config,
        num_windows=samples.num_windows,
        world_size=setup.dims.data_ranks,
        block_size=setup.block_size,
        num_parameters=budget_parameters(
            config, setup.model_config, vocab_size=len(setup.tokenizer)
        ),
        global_batch_size=saved_batch(config, setup),
    )
    plan, schedule = add_cooldown(config, branch, plan, block_size=setup.block_size)
    if setup.branch_from is not None and setup.branch_from.step >= plan.total_steps:
        raise ConfigError(
            f"--branch_from {config.branch_from} has all {plan.total_steps:,} steps done: give "
            "--cooldown_tokens, or a greater length."
        )
    for phase in plan.phases:
        micro_batches, _ = plan.shape(phase.first_step)
        check_micro_batches(
            config.pipeline_schedule, ranks=setup.dims.pipeline, micro_batches=micro_batches
        )
    skipped = choose_skipped(config, setup.start, plan)
    _, passed = skipped.span((0, plan.total_samples))  # skipped samples count as used
    check_epochs(config, setup.corpus.train, samples, num_samples=passed)
    return plan, skipped, schedule
