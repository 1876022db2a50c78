"""The first and the last lines of a run's log."""

import logging
import math
import platform
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

import accelerate
import torch
import transformers
from transformers import PreTrainedModel

from llm import __version__
from llm.checkpoint.format import TrainState
from llm.config.options import format_default, non_default
from llm.config.shell import shell_line
from llm.data.corpus import CorpusSource
from llm.data.epoch_limits import describe_repeated_data
from llm.data.order import find_stage_starts
from llm.models.attention import kernel_dtype
from llm.models.attention_kernels import attention_kernel
from llm.models.mixtures import mixture_size
from llm.models.patches.routers import float32_routers
from llm.models.sizes import flops_per_token, parameter_counts
from llm.parallel.base import AcceleratedStrategy
from llm.runtime.agreement import gather
from llm.runtime.logging import SAME_ON_ALL_RANKS, counted, event
from llm.runtime.process_settings import allocator_settings
from llm.trainers.gpt.commands import python_command, start_command
from llm.trainers.gpt.compute_optimal_preset import COMPUTE_OPTIMAL, describe_uncounted_tokens
from llm.trainers.gpt.config import packages_in_use, values_of_preset
from llm.trainers.gpt.seams import ExtraWeights, Run
from llm.trainers.gpt.step_samples import describe_sample_order
from llm.trainers.gpt.training_run import TrainingRun

logger = logging.getLogger("llm")


def log_start(run: Run, strategy: AcceleratedStrategy, model: PreTrainedModel) -> None:
    """Log preset, model, data, batch arithmetic, ranks, precision and versions."""
    _log_options(run)
    _log_model(run, strategy, model)
    _log_data("training", run.corpus.train, run)
    _log_data("validation", run.corpus.validation, run)
    if not run.corpus.validation:
        logger.info("no validation data: the loss is not evaluated")
    if isinstance(run, TrainingRun):
        _log_training_plan(run, strategy, model)
    for line in strategy.run_optimizer.describe().splitlines():
        logger.info(line)
    _log_world(run, strategy, model)
    _log_kernels(run, strategy, model)
    _log_versions(run)


def _log_training_plan(
    run: TrainingRun, strategy: AcceleratedStrategy, model: PreTrainedModel
) -> None:
    """Log the length of a training, its samples by source, and its layout."""
    _log_length(run, model)
    if run.skipped.ranges:
        logger.info(f"left out: samples {run.skipped} (--skip_samples)")
    for option, reason in _find_options_without_effect(run, strategy):
        logger.info(f"--{option} changes nothing {reason}.")
    _log_stages(run)
    _log_samples_per_source(run, run.batch_plan.total_samples, "will serve")
    _warn_about_repeated_data(run)
    for line in run.layout.describe():
        logger.info(line)


def _log_kernels(run: Run, strategy: AcceleratedStrategy, model: PreTrainedModel) -> None:
    """Log the attention kernel, the allocator of a GPU, and the chunks of the loss."""
    with strategy.autocast():
        dtype = kernel_dtype(torch.float32, strategy.device)
    kernel = attention_kernel(model, device=strategy.device, dtype=dtype, block_size=run.block_size)
    logger.info(f"attention: {kernel}")
    if strategy.device.type == "cuda":
        logger.info(f"GPU memory: {allocator_settings()}")
    if strategy.device.type != "cpu" and run.loss_chunks is not None:
        logger.info(f"loss: {run.loss_chunks.describe()}")


def _log_versions(run: Run) -> None:
    """Log the versions of Python and of the packages that affect a run."""
    package_versions = "".join(f", {package}" for package in packages_in_use(run.config))
    logger.info(
        f"versions: llm-trainers {__version__}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"accelerate {accelerate.__version__}{package_versions}"
    )


def _log_world(run: Run, strategy: AcceleratedStrategy, model: PreTrainedModel) -> None:
    """Log ranks, layout and precision, with the event that records the start of the run."""
    is_mixed = run.config.mixed_precision != "no"
    features = {
        "routers in float32": is_mixed and bool(float32_routers(model)),
        "sequence parallelism": run.config.sequence_parallel,
        "TF32": run.config.tf32,
        "compiled blocks": run.config.torch_compile,
    }
    feature_text = "".join(f"{name}, " for name, is_on in features.items() if is_on)
    layout = f"{run.dims.describe()}, " if strategy.world_size > 1 else ""
    logger.info(
        f"world: {counted(strategy.world_size, 'rank')}, {layout}{strategy.device.type}, "
        f"mixed precision {run.config.mixed_precision}, {feature_text}seed {run.seed}",
        extra=_make_start_event(run, strategy, model),
    )


def _make_start_event(
    run: Run, strategy: AcceleratedStrategy, model: PreTrainedModel
) -> dict[str, Any]:
    """Return the event of a start, with what `find_step_samples` needs to find its samples."""
    total_steps, order = None, {}
    if isinstance(run, TrainingRun):
        total_steps, order = run.batch_plan.total_steps, describe_sample_order(run)
    mixture = mixture_size(model)
    experts = {}
    if mixture is not None:
        experts = {"active_parameters": mixture.active, "experts": mixture.describe()}
    packages = packages_in_use(run.config)
    return event(
        "start",
        step=run.start.step if run.start else 0,
        total_steps=total_steps,
        architecture=run.model_config.model_type,
        parameters=parameter_counts(model)["total"],
        **experts,
        **({"packages": dict(packages)} if packages else {}),
        ranks=strategy.world_size,
        device=strategy.device.type,
        mixed_precision=run.config.mixed_precision,
        **order,
    )


def _find_options_without_effect(
    run: TrainingRun, strategy: AcceleratedStrategy
) -> Iterator[tuple[str, str]]:
    """Yield each option that concerns something which this run does not have, and the reason."""
    is_compiled_for_gpu = run.config.torch_compile and strategy.device.type == "cuda"
    if run.config.fused_kernels != "measured" and not is_compiled_for_gpu:
        yield f"fused_kernels {run.config.fused_kernels}", "without compiled blocks on a GPU"
    if run.config.all_reduce_dtype != "fp32" and strategy.world_size == 1:
        yield f"all_reduce_dtype {run.config.all_reduce_dtype}", "with one rank"
    batch_plan = run.batch_plan
    max_micro_batches = max(
        batch_plan.micro_batch_shape(phase.first_step)[0] for phase in batch_plan.phases
    )
    if run.config.unsharded_gradients and max_micro_batches == 1:
        yield "unsharded_gradients", "with one micro-batch per step"


def _log_options(run: Run) -> None:
    """Log the preset's options, or that the default learning rate is not for random weights."""
    starts_from_weights = run.start or run.init_from or run.weights_from
    if run.config.preset is not None:
        preset_values = values_of_preset(run.config)
        value_list = ", ".join(
            f"{name} {format_default(value)}" for name, value in preset_values.items()
        )
        logger.info(f"preset {run.config.preset}: {value_list or 'overridden by other options'}")
        if run.config.preset == COMPUTE_OPTIMAL and run.start is None:
            warning = describe_uncounted_tokens(vars(run.config), len(run.tokenizer))
            if warning is not None:
                logger.warning(warning, extra=SAME_ON_ALL_RANKS)
    elif not starts_from_weights and "learning_rate" not in non_default(run.config):
        logger.info(
            "advice: the default --learning_rate is for fine-tuning; random weights learn faster "
            "with --preset pretrain, or if you set a higher rate."
        )


def _log_model(run: Run, strategy: AcceleratedStrategy, model: PreTrainedModel) -> None:
    """Log the size of the model and of each rank's part, and the source of its weights."""
    counts = parameter_counts(model)
    logger.info(
        f"model: {run.model_config.model_type}, {counts['total']:,} parameters "
        f"({counts['embedding']:,} embedding, {counts['other']:,} other, "
        f"{counts['frozen']:,} frozen)"
    )
    if run.config.pad_vocab_to_multiple_of is not None:
        vocab_size = model.config.get_text_config().vocab_size  # without the padding
        padding = -vocab_size % run.config.pad_vocab_to_multiple_of
        logger.info(f"padded vocabulary: {vocab_size} + {padding} = {vocab_size + padding}")
    if not run.dims.is_replicated:
        num_local_parameters = sum(parameter.numel() for parameter in strategy.local_parameters)
        counts_by_rank = gather(num_local_parameters)
        lowest, highest = min(counts_by_rank), max(counts_by_rank)
        count_range = f"{lowest:,}" + (f" to {highest:,}" if lowest < highest else "")
        logger.info(f"trained parameters per rank: {count_range}")
    start = run.start
    logger.info(f"weights: {f'from {start.path}' if start else run.initial_weights}")


def _log_length(run: TrainingRun, model: PreTrainedModel) -> None:
    """Log the batches, the length and, for a length in tokens, the FLOPs of the run."""
    batch_plan = run.batch_plan
    _log_batch_phases(run)
    logger.info(
        f"length: {counted(batch_plan.total_steps, 'step')}, "
        f"{counted(batch_plan.total_samples, 'sample')}, {batch_plan.epochs:.4g} epochs"
    )
    validation_samples = sum(_num_windows(source, run) for source in run.corpus.validation)
    logger.info(
        f"samples: {batch_plan.total_samples:,} in training, {validation_samples:,} in validation, "
        "0 in test"
    )
    if run.config.max_duration.unit.startswith("tokens"):
        _log_token_budget(run, model)


def _log_batch_phases(run: TrainingRun) -> None:
    """Log the batch of each phase, and warn of phases after the end of the run."""
    batch_plan = run.batch_plan
    for phase in batch_plan.phases:
        if phase.first_step >= batch_plan.total_steps:
            logger.warning(
                f"The run ends before --global_batch_size {run.config.global_batch_size} grows to "
                f"{phase.global_batch_size} samples.",
                extra=SAME_ON_ALL_RANKS,
            )
            break
        num_micro_batches, micro_batch_size = batch_plan.micro_batch_shape(phase.first_step)
        phase_label = f" from step {phase.first_step + 1:,} on" if phase.first_step else ""
        logger.info(
            f"batch{phase_label}: {counted(micro_batch_size, 'sample')} per device x "
            f"{counted(batch_plan.world_size, 'rank')} x "
            f"{counted(num_micro_batches, 'micro-batch')} = "
            f"{counted(phase.global_batch_size, 'sample')} "
            f"({phase.global_batch_size * run.block_size:,} tokens) per step"
        )


def _log_token_budget(run: TrainingRun, model: PreTrainedModel) -> None:
    """Log the tokens of a run, also relative to the parameters, and its FLOPs."""
    num_tokens = run.batch_plan.total_samples * run.block_size
    num_parameters = parameter_counts(model)["total"]
    num_flops = num_tokens * flops_per_token(model, block_size=run.block_size)
    logger.info(
        f"budget: {num_tokens:,} tokens, {num_tokens / num_parameters:.4g} for each of "
        f"{num_parameters:,} parameters; {num_flops:.4g} FLOPs"
    )


def _log_data(split_name: str, sources: Sequence[CorpusSource], run: Run) -> None:
    """Log the sizes of the sources of a split, which is `training` or `validation`."""
    for source in sources:
        if source.weight == 0:
            continue
        num_tokens = source.stream.num_tokens
        num_windows = num_tokens // run.block_size
        if split_name == "validation":
            num_windows = _num_windows(source, run)
        source_label = f" {source.name} ({source.weight:.2%})" if len(sources) > 1 else ""
        if split_name == "training" and run.corpus.stages:
            source_label = f" {source.name}"  # the weights of each stage follow
        num_documents = source.stream.num_documents
        documents = f"{counted(num_documents, 'document')}, " if num_documents else ""
        logger.info(
            f"{split_name} data{source_label}: {documents}{num_tokens:,} tokens, "
            f"{counted(num_windows, 'window')} of {run.block_size}"
        )


def _num_windows(source: CorpusSource, run: Run) -> int:
    """Return the windows of a source of the validation data; the last one may be shorter."""
    tokens = source.stream.num_tokens
    return math.ceil((tokens - 1) / run.block_size) if source.weight > 0 else 0


def _log_stages(run: TrainingRun) -> None:
    """Log the first sample and the weights of each stage of the data."""
    stages, num_samples = run.corpus.stages, run.batch_plan.total_samples
    first_samples = find_stage_starts(stages, block_size=run.block_size)
    for stage_number, (first_sample, stage) in enumerate(
        zip(first_samples, stages, strict=False), 1
    ):
        weights = zip(run.corpus.train, stage.weights, strict=True)
        blend = ", ".join(f"{source.name} {weight:.2%}" for source, weight in weights if weight)
        logger.info(f"data stage {stage_number} from sample {first_sample:,}: {blend}")
        if first_sample >= num_samples:
            logger.warning(
                f"data_stage {stage_number} begins after the last of {num_samples:,} samples: the "
                "run never reads it.",
                extra=SAME_ON_ALL_RANKS,
            )


def _log_samples_per_source(run: TrainingRun, num_samples: int, verb: str) -> None:
    """Log how many of the first `num_samples` samples each source `served`, or `will serve`."""
    if len(run.corpus.train) == 1 or not num_samples:
        return
    counts = run.skipped.samples_per_source(run.samples.samples_per_source, num_samples)
    for source_index, (source, count) in enumerate(zip(run.corpus.train, counts, strict=True)):
        num_windows = run.samples.epoch_samples(source_index)
        if num_windows:
            logger.info(
                f"source {source.name} {verb} {count:,} samples ({count / num_samples:.2%}), "
                f"{count / num_windows:.4g} epochs of its data"
            )


def _warn_about_repeated_data(run: TrainingRun) -> None:
    num_samples = run.batch_plan.total_samples
    if not num_samples:
        return
    warning = describe_repeated_data(
        run.config,
        run.corpus.train,
        run.samples,
        run.skipped.samples_per_source(run.samples.samples_per_source, num_samples),
        max_duration=run.config.max_duration,
    )
    if warning is not None:
        logger.warning(warning, extra=SAME_ON_ALL_RANKS)


def log_end(
    run: TrainingRun,
    state: TrainState,
    results: dict[str, float],
    *,
    exported_weights: ExtraWeights | None,
) -> None:
    """Log the last validation loss, the paths of the files, and commands that use them."""
    _log_samples_per_source(run, state.samples, "served")
    _log_validation_loss(state, results, exported_weights)
    _log_output_paths(run)
    _log_next_commands(run)


def _log_validation_loss(
    state: TrainState, results: dict[str, float], exported_weights: ExtraWeights | None
) -> None:
    """Log the validation loss of the exported weights, if the run evaluates."""
    prefix = exported_weights.prefix if exported_weights else ""
    weights_label = f" of {exported_weights.description}" if exported_weights else ""
    loss = results.get(f"{prefix}loss")
    if loss is None:
        return
    perplexity = results[f"{prefix}perplexity"]
    logger.info(
        f"validation loss{weights_label} {loss:.4f}, perplexity {perplexity:.2f} after "
        f"{counted(state.step, 'step')}, {state.tokens:,} tokens, {state.seconds:.1f} s of training"
    )
    if not math.isfinite(loss):
        logger.warning("The validation loss is not finite: the run has diverged.")


def _log_output_paths(run: TrainingRun) -> None:
    """Log where the run's model, results, metrics and checkpoints are."""
    folder = run.folder.path
    logger.info(f"model and tokenizer: {folder} (AutoModelForCausalLM.from_pretrained loads it)")
    logger.info(f"results: {folder / 'all_results.json'}, metrics: {run.folder.metrics}")
    if run.folder.checkpoints.is_dir():
        logger.info(f"checkpoints: {run.folder.checkpoints}")


def _log_next_commands(run: TrainingRun) -> None:
    """Log commands that show the curves, repeat the run, and train its model further."""
    folder, world_size = run.folder.path, run.dims.world_size
    if "tensorboard" in run.config.report_to:
        is_installed = shutil.which("tensorboard") is not None
        tensorboard_command = (
            ["tensorboard"] if is_installed else [python_command(), "-m", "tensorboard.main"]
        )
        logger.info(
            "curves: " + shell_line([*tensorboard_command, "--logdir", folder / "tensorboard"])
        )
    rerun_command = start_command(world_size, "--config", folder / "config.toml")
    logger.info(f"again with other settings: {rerun_command} --output_dir NEW")
    trust_flags = ["--trust_remote_code"] if run.config.trust_remote_code else []
    continue_command = start_command(world_size, *trust_flags, "--model_name_or_path", folder)
    logger.info(f"to continue from this model: {continue_command} --train_file FILE")
