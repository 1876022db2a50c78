"""The inputs of a run, as `inputs.py` reads them; its steps, batches and learning rates."""

import dataclasses
import math
from fractions import Fraction
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from llm.checkpoint.format import Checkpoint
from llm.checkpoint.run_folder import RunFolder, check_unchanged
from llm.data.batch_plan import BatchPlan, plan_batches
from llm.data.batch_schedule import batch_phases
from llm.data.corpus import Corpus, Samples
from llm.data.epoch_limits import check_epochs
from llm.data.order import DocumentBoundaries
from llm.data.skipped_samples import SkippedSamples
from llm.errors import ConfigError
from llm.models.build import build_model
from llm.models.sizes import parameter_counts
from llm.optim.schedule import Schedule, make_schedule
from llm.parallel.dims import ParallelDims
from llm.parallel.layout import Layout
from llm.parallel.pipeline.pipeline_schedule import check_micro_batches
from llm.tokenizers.load_tokenizer import fingerprint
from llm.trainers.gpt.config import CoreConfig
from llm.trainers.gpt.resume import Branch, choose_skipped, recorded_options
from llm.trainers.gpt.seams import Extension


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSetup:
    """Inputs of a training and an evaluation, read before they start.

    Attributes:
        run: The run's folder.
        resume_from: The checkpoint to resume from or to evaluate, or None.
        branch_from: The parent's checkpoint that a new branch starts from, or None.
        init_from: The checkpoint that gives a new run its weights, or None.
        seed: The run's seed, drawn unless the options have one.
        by_device: Values of the options with a default that depends on the device, by name.
        tokenizer: The tokenizer.
        model_config: The model's Hugging Face configuration.
        weights_from: Source of pretrained weights, or None to start from scratch.
        initial_weights: Source of the weights at step 0, also in a resumed run or a branch: such as
            `from gpt2`, or `random, seed 1`.
        block_size: Tokens of a sample.
        corpus: Training and validation tokens.
        document_boundaries: How to keep the documents of a sample apart; None ignores them.
        metrics: Metrics of the evaluate library by name.
        extensions: The extensions, in calling order; they have read their inputs.
        dims: How the ranks divide one model and its data.
        layout: How the ranks train.
    """

    run: RunFolder
    resume_from: Checkpoint | None
    branch_from: Checkpoint | None
    init_from: Checkpoint | None
    seed: int
    by_device: dict[str, Any]
    tokenizer: PreTrainedTokenizerBase
    model_config: PreTrainedConfig
    weights_from: str | None
    initial_weights: str
    block_size: int
    corpus: Corpus
    document_boundaries: DocumentBoundaries | None
    metrics: dict[str, Any]
    extensions: tuple[Extension[Any], ...]
    dims: ParallelDims
    layout: Layout

    @property
    def start(self) -> Checkpoint | None:
        """The checkpoint that training resumes from: the run's, or its parent's."""
        return self.resume_from or self.branch_from


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSetup(RunSetup):
    """Further inputs of a training.

    Attributes:
        branch: The point where the run left its parent; None if it is not a branch.
        data_digest: Digests of the training tokens, from `data_digest.digest_of`.
        samples: The training samples.
        plan: Batch arithmetic.
        skipped: The samples to skip.
        schedule: Learning rate by step.
    """

    branch: Branch | None
    data_digest: dict[str, Any]
    samples: Samples
    plan: BatchPlan
    skipped: SkippedSamples
    schedule: Schedule


def resolved_config(config: CoreConfig, setup: TrainSetup) -> CoreConfig:
    """Return the options for `config.toml`, including the setup's choices."""
    return dataclasses.replace(
        config,
        seed=setup.seed,
        output_dir=str(setup.run.path),
        skip_samples=str(setup.skipped) or None,
        # RUN alone could be a later checkpoint if the branch starts again before its first save.
        branch_from=setup.branch.parent if setup.branch else None,
        per_device_train_batch_size=setup.plan.micro_batch_size,
        **setup.by_device,
    )


def checkpoint_metadata(config: CoreConfig, setup: TrainSetup) -> dict[str, Any]:
    """Return the information about the run in every checkpoint."""
    batch = config.global_batch_size  # with the user's units, for messages
    if batch is None and setup.start is not None and not config.change_on_resume:
        batch = setup.start.metadata.get("batch_option")
    return {
        **recorded_options(config),
        "global_batch_size": setup.plan.batch_schedule(setup.block_size),
        "batch_option": batch,
        "data": setup.data_digest,
        "tokenizer": fingerprint(setup.tokenizer),
        "initial_weights": setup.initial_weights,
        "skip_samples": str(setup.skipped),
        "branch": None if setup.branch is None else dataclasses.asdict(setup.branch),
        **setup.layout.metadata(),
    }


def _budget_parameters(
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
    requested_batch = saved if config.global_batch_size is None else config.global_batch_size
    phases = (
        batch_phases(batch, block_size=setup.block_size) for batch in (saved, requested_batch)
    )
    if len({tuple(phase_list) for phase_list in phases}) > 1:
        check_unchanged(
            {"global_batch_size": setup.start.metadata.get("batch_option") or saved},
            {"global_batch_size": requested_batch},
            allowed=(),
            branch_from=setup.branch_from.path if setup.branch_from else None,
        )
    return saved


def _plan_learning_rates(
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
        warmup = plan.count_steps(config.num_warmup_samples)
    if config.num_warmup_tokens is not None:
        warmup = plan.count_steps(Fraction(config.num_warmup_tokens, block_size))
    if config.num_decay_tokens is not None:
        decay_samples = Fraction(config.num_decay_tokens, block_size)
        decay = plan.total_steps - plan.count_steps(plan.total_samples - decay_samples)
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


def _add_cooldown(
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
    schedule = _plan_learning_rates(config, plan, block_size=block_size)
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
    plan = dataclasses.replace(plan, total_samples=plan.count_samples(step) + samples)
    falling = _plan_learning_rates(config, plan, block_size=block_size, cooldown_from=step)
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
        num_parameters=_budget_parameters(
            config, setup.model_config, vocab_size=len(setup.tokenizer)
        ),
        global_batch_size=saved_batch(config, setup),
    )
    plan, schedule = _add_cooldown(config, branch, plan, block_size=setup.block_size)
    if setup.branch_from is not None and setup.branch_from.step >= plan.total_steps:
        raise ConfigError(
            f"--branch_from {config.branch_from} has all {plan.total_steps:,} steps done: give "
            "--cooldown_tokens, or a greater length."
        )
    start = setup.resume_from
    if start is not None and start.step > plan.total_steps:
        raise ConfigError(
            f"{start.path} has {start.step:,} steps, more than the {plan.total_steps:,} of this "
            "run: give a greater length, or an earlier checkpoint with --resume_from_checkpoint."
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
