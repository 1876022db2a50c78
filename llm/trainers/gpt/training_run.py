"""A training run: its batches, the samples that it skips, and its learning rates."""

import dataclasses
import math
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedConfig

from llm.checkpoint.format import Checkpoint
from llm.checkpoint.run_folder import check_options_unchanged
from llm.config.duration import Duration
from llm.data.batch_plan import BatchPlan, plan_batches
from llm.data.batch_schedule import plan_batch_phases
from llm.data.corpus import Samples
from llm.data.epoch_limits import refuse_excess_epochs
from llm.data.skipped_samples import NO_SKIPPED_SAMPLES, SkippedSamples, parse_skipped_ranges
from llm.errors import ConfigError
from llm.models.build import build_model
from llm.models.sizes import parameter_counts
from llm.optim.schedule import Schedule, make_schedule
from llm.parallel.pipeline.pipeline_schedule import check_micro_batches
from llm.tokenizers.load_tokenizer import compute_fingerprint
from llm.trainers.gpt.branch import Branch
from llm.trainers.gpt.config import CoreConfig, extension_name, packages_in_use
from llm.trainers.gpt.recorded_options import make_options_record
from llm.trainers.gpt.seams import Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingRun(Run):
    """A training: also its samples, batches and learning rates.

    Attributes:
        branch: The point where the run left its parent; None if it is not a branch.
        data_digest: Digests of the training tokens, from `data_digest.compute_corpus_digests`.
        samples: The training samples.
        batch_plan: Batch arithmetic.
        skipped: The samples to skip.
        schedule: Learning rate by step.
    """

    branch: Branch | None
    data_digest: dict[str, Any]
    samples: Samples
    batch_plan: BatchPlan
    skipped: SkippedSamples
    schedule: Schedule


def make_checkpoint_metadata(run: TrainingRun) -> dict[str, Any]:
    """Return the information about the run in every checkpoint."""
    batch_option = run.config.global_batch_size  # with the user's units, for messages
    if batch_option is None and run.start is not None and not run.config.change_on_resume:
        batch_option = run.start.metadata.get("batch_option")
    packages = dict(packages_in_use(run.config))
    return {
        **make_options_record(run.config),
        **({"packages": packages} if packages else {}),
        "global_batch_size": run.batch_plan.format_batch_schedule(run.block_size),
        "batch_option": batch_option,
        "data": run.data_digest,
        "tokenizer": compute_fingerprint(run.tokenizer),
        "initial_weights": run.initial_weights,
        "skip_samples": str(run.skipped),
        "loss_chunks": None if run.loss_chunks is None else dataclasses.asdict(run.loss_chunks),
        "branch": None if run.branch is None else dataclasses.asdict(run.branch),
        **run.layout.metadata(),
    }


def _count_budget_parameters(
    config: CoreConfig, model_config: PreTrainedConfig, *, vocab_size: int
) -> int | None:
    """Return the number of parameters (tied ones once) if the run's length depends on it."""
    if config.max_duration.unit != "tokens per parameter":
        return None
    model = build_model(
        config,
        model_config,
        seed=0,
        device=torch.device("meta"),
        vocab_size=vocab_size,
        tensor_parallel_size=config.tensor_parallel_size,
    )
    return parameter_counts(model)["total"]


def read_inherited_global_batch(run: Run) -> int | str | None:
    """Return the global batch of the checkpoint that a run starts from, if it keeps the batch.

    The order of samples depends on it. With another number of ranks, accumulation changes.

    Raises:
        CheckpointError: The options set another batch.
    """
    if run.start is None or "global_batch_size" in run.config.change_on_resume:
        return None
    saved_batch: int | str = run.start.metadata["global_batch_size"]
    requested_batch = run.config.global_batch_size
    if requested_batch is None:
        requested_batch = saved_batch
    saved_phases = plan_batch_phases(saved_batch, block_size=run.block_size)
    requested_phases = plan_batch_phases(requested_batch, block_size=run.block_size)
    if tuple(saved_phases) != tuple(requested_phases):
        check_options_unchanged(
            {"global_batch_size": run.start.metadata.get("batch_option") or saved_batch},
            {"global_batch_size": requested_batch},
            allowed_names=(),
            branch_from=run.branch_from.path if run.branch_from else None,
        )
    return saved_batch


def _plan_learning_rates(
    config: CoreConfig, batch_plan: BatchPlan, *, block_size: int, cooldown_from: int | None = None
) -> Schedule:
    """Return the schedule; the options may set its phases in steps, samples or tokens.

    With `lr_batch_scaling` sqrt, the learning rate grows with the square root of the global batch,
    which keeps the noise of adaptive optimizers the same (Malladi et al. 2022, arXiv:2205.10287).

    Raises:
        ConfigError: The phases do not fit into the run.
    """
    decay_steps = _count_decay_steps(config.decay, batch_plan, block_size=block_size)
    schedule = make_schedule(
        config,
        total_steps=batch_plan.total_steps,
        warmup_steps=batch_plan.count_duration_steps(config.warmup, block_size=block_size),
        decay_steps=decay_steps,
        cooldown_from=cooldown_from,
    )
    if config.lr_batch_scaling == "none":
        return schedule
    return partial(_scale_by_batch_growth, schedule, batch_plan)


def _count_decay_steps(
    decay: Duration | None, batch_plan: BatchPlan, *, block_size: int
) -> float | None:
    """Return the steps of the decay at the end of a run; None for the schedule's default."""
    if decay is None or decay.unit == "steps":
        return None if decay is None else decay.value
    decay_samples = batch_plan.count_duration_samples(decay, block_size=block_size)
    return batch_plan.total_steps - batch_plan.count_steps(batch_plan.total_samples - decay_samples)


def _scale_by_batch_growth(schedule: Schedule, batch_plan: BatchPlan, step: float) -> float:
    """Return the learning rate of a step times the square root of the growth of its batch."""
    batch_growth = batch_plan.phase(step).global_batch_size / batch_plan.global_batch_size
    return schedule(step) * math.sqrt(batch_growth)


def _plan_with_cooldown(
    config: CoreConfig, branch: Branch | None, batch_plan: BatchPlan, *, block_size: int
) -> tuple[BatchPlan, Schedule]:
    """Return batch plan and schedule of a run; a cooldown, if there is one, replaces its end.

    Raises:
        ConfigError: The parent's learning rate is not stable at this step, or the cooldown is
            shorter than a step.
    """
    schedule = _plan_learning_rates(config, batch_plan, block_size=block_size)
    if branch is None or branch.cooldown_from is None or config.cooldown_tokens is None:
        return batch_plan, schedule
    step = branch.cooldown_from
    batch_plan = _end_after_cooldown(
        batch_plan, step, cooldown_tokens=config.cooldown_tokens, block_size=block_size
    )
    cooldown_schedule = _plan_learning_rates(
        config, batch_plan, block_size=block_size, cooldown_from=step
    )
    stable_rate, cooldown_rate = schedule(step), cooldown_schedule(step)
    if stable_rate != cooldown_rate:
        raise ConfigError(
            f"--cooldown_tokens begins at the stable rate {cooldown_rate:g}, but after step {step} "
            f"of {branch.parent} --lr_scheduler_type {config.lr_scheduler_type} has "
            f"{stable_rate:g}; branch from constant, constant_with_warmup or "
            "warmup_stable_decay between warm-up and decay."
        )
    return batch_plan, cooldown_schedule


def _end_after_cooldown(
    batch_plan: BatchPlan, first_step: int, *, cooldown_tokens: int, block_size: int
) -> BatchPlan:
    """Return a batch plan that ends so many tokens after the first step of a cooldown."""
    num_samples = math.ceil(cooldown_tokens / block_size)
    global_batch_size = batch_plan.phase(first_step).global_batch_size
    if num_samples < global_batch_size:
        raise ConfigError(
            f"--cooldown_tokens {cooldown_tokens:,} is less than one step of "
            f"{global_batch_size * block_size:,} tokens; make it longer."
        )
    total_samples = batch_plan.count_samples(first_step) + num_samples
    return dataclasses.replace(batch_plan, total_samples=total_samples)


def choose_skipped_samples(
    config: CoreConfig, start: Checkpoint | None, batch_plan: BatchPlan
) -> SkippedSamples:
    """Return the samples to skip, from the options and the checkpoint.

    Raises:
        ConfigError: The options name samples that the checkpoint has trained on or skipped: every
            later sample would move to another step.
    """
    new_ranges = parse_skipped_ranges(config.skip_samples)
    if start is None:
        return NO_SKIPPED_SAMPLES.skip(new_ranges)
    saved_skipped = NO_SKIPPED_SAMPLES.skip(parse_skipped_ranges(start.metadata["skip_samples"]))
    skipped = saved_skipped.skip(new_ranges)
    next_position, _ = batch_plan.step_positions(start.step)
    _, next_sample = saved_skipped.sample_range((0, next_position))
    if skipped.ranges_below(next_sample) != saved_skipped.ranges_below(next_sample):
        raise ConfigError(
            f"--skip_samples {config.skip_samples} names samples below {next_sample:,}, which "
            f"{start.path} has been trained on or has passed; name later ones, or resume "
            "from an earlier checkpoint with --resume_from_checkpoint PATH."
        )
    return skipped


def _check_steps_left(run: Run, total_steps: int) -> None:
    """Refuse a start from a checkpoint that is beyond the run, or at the end of a branch."""
    if run.branch_from is not None and run.branch_from.step >= total_steps:
        raise ConfigError(
            f"--branch_from {run.config.branch_from} has all {total_steps:,} steps "
            "done: give --cooldown_tokens, or a greater length."
        )
    checkpoint = run.resume_from
    if checkpoint is not None and checkpoint.step > total_steps:
        raise ConfigError(
            f"{checkpoint.path} has {checkpoint.step:,} steps, more than the {total_steps:,} of "
            "this run: give a greater length, or an earlier checkpoint with "
            "--resume_from_checkpoint."
        )


def plan_training(
    run: Run, samples: Samples, branch: Branch | None
) -> tuple[BatchPlan, SkippedSamples, Schedule]:
    """Return the batch plan, the samples to skip and the schedule.

    Raises:
        LLMError: The options do not fit the data or the start.
    """
    batch_plan = plan_batches(
        run.config,
        num_windows=samples.num_windows,
        world_size=run.dims.data_ranks,
        block_size=run.block_size,
        num_parameters=_count_budget_parameters(
            run.config, run.model_config, vocab_size=len(run.tokenizer)
        ),
        global_batch_size=read_inherited_global_batch(run),
    )
    batch_plan, schedule = _plan_with_cooldown(
        run.config, branch, batch_plan, block_size=run.block_size
    )
    _check_steps_left(run, batch_plan.total_steps)
    core_schedule = schedule
    for extension in run.extensions:
        schedule = extension.change_schedule(schedule, total_steps=batch_plan.total_steps)
        if not callable(schedule):
            raise ConfigError(
                f"The extension {extension_name(type(extension))} returns a value of the "
                f"type {type(schedule).__name__} from change_schedule; let it return a function "
                "from steps done to a learning rate, such as the given one."
            )
    if schedule is not core_schedule:
        schedule = partial(_evaluate_schedule, schedule)
    for phase in batch_plan.phases:
        num_micro_batches, _ = batch_plan.micro_batch_shape(phase.first_step)
        check_micro_batches(
            run.config.pipeline_schedule,
            num_ranks=run.dims.pipeline,
            num_micro_batches=num_micro_batches,
        )
    skipped = choose_skipped_samples(run.config, run.start, batch_plan)
    # Skipped samples count as used.
    _, num_used_samples = skipped.sample_range((0, batch_plan.total_samples))
    refuse_excess_epochs(run.config, run.corpus.train, samples, num_samples=num_used_samples)
    return batch_plan, skipped, schedule


def _evaluate_schedule(schedule: Schedule, step: int) -> float:
    """Return the learning rate of a schedule that extensions have changed.

    Raises:
        ConfigError: It is negative or not finite.
    """
    rate = schedule(step)
    if not (math.isfinite(rate) and rate >= 0):
        raise ConfigError(
            f"The learning rate after {step} steps is {rate}, as an extension has changed it; let "
            "its change_schedule return finite rates that are not negative."
        )
    return rate
