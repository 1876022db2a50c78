"""Reports of a run: the lines of its log with their commands, and its trackers."""

import contextlib
import dataclasses
import json
import logging
import math
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, TensorBoardTracker, get_available_trackers
from transformers import PreTrainedModel

from llm import __version__
from llm.checkpoint.format import TrainState
from llm.checkpoint.run_folder import RunFolder
from llm.config.options import format_default, non_default
from llm.config.program import COMMAND
from llm.config.shell import shell_line
from llm.config.toml import to_toml
from llm.data.corpus import CorpusSource
from llm.data.loader import TrainLoader
from llm.data.order import stage_starts
from llm.errors import ConfigError, DivergedError, one_line
from llm.metrics.hardware import device_peak_flops
from llm.metrics.tracker import Tracker
from llm.models.sampling import sample_text
from llm.models.sizes import flops_per_token, parameter_counts
from llm.parallel.base import AcceleratedStrategy
from llm.runtime.agreement import gather
from llm.runtime.files import write_whole
from llm.runtime.logging import counted, event
from llm.runtime.process_settings import allocator_settings
from llm.runtime.world import task_launcher
from llm.trainers.gpt.config import CoreConfig, values_of_preset
from llm.trainers.gpt.run_setup import RunSetup, TrainSetup
from llm.trainers.gpt.seams import ExtraWeights

SAMPLE_TOKENS = 120

_DEFAULT_PROJECT = "llm"

logger = logging.getLogger("llm")


def log_start(
    config: CoreConfig, setup: RunSetup, strategy: AcceleratedStrategy, model: PreTrainedModel
) -> None:
    """Log preset, model, data, batch arithmetic, ranks, precision and versions."""
    start = setup.start
    _log_options(config, setup)
    _log_model(config, setup, strategy, model)
    _log_data("training", setup.corpus.train, setup)
    _log_data("validation", setup.corpus.validation, setup)
    if not setup.corpus.validation:
        logger.info("no validation data: the loss is not evaluated")
    total_steps, order = None, {}
    if isinstance(setup, TrainSetup):
        total_steps, order = setup.plan.total_steps, _sample_order(config, setup)
        _log_length(config, setup, model)
        if setup.skipped.ranges:
            logger.info(f"left out: samples {setup.skipped} (--skip_samples)")
        for option, reason in _without_effect(config, setup, strategy):
            logger.info(f"--{option} changes nothing {reason}.")
        _log_stages(setup)
        _log_sources(setup, setup.plan.total_samples, "will serve")
        for line in setup.layout.describe():
            logger.info(line)
    for line in strategy.run_optimizer.describe().splitlines():
        logger.info(line)
    switches = {
        "sequence parallelism": config.sequence_parallel,
        "TF32": config.tf32,
        "compiled blocks": config.torch_compile,
    }
    faster = "".join(f"{name}, " for name, on in switches.items() if on)
    layout = f"{setup.dims.describe()}, " if strategy.world_size > 1 else ""
    logger.info(
        f"world: {counted(strategy.world_size, 'rank')}, {layout}{strategy.device.type}, "
        f"mixed precision {config.mixed_precision}, {faster}seed {setup.seed}",
        extra=event(
            "start",
            step=start.step if start else 0,
            total_steps=total_steps,
            architecture=setup.model_config.model_type,
            parameters=parameter_counts(model)["total"],
            ranks=strategy.world_size,
            device=strategy.device.type,
            mixed_precision=config.mixed_precision,
            **order,
        ),
    )
    if strategy.device.type == "cuda":
        logger.info(f"GPU memory: {allocator_settings()}")
    logger.info(
        f"versions: llm-trainers {__version__}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"accelerate {accelerate.__version__}"
    )


def _without_effect(
    config: CoreConfig, setup: TrainSetup, strategy: AcceleratedStrategy
) -> Iterator[tuple[str, str]]:
    """Yield options of the traffic that this run does not have, with the reason."""
    if config.all_reduce_dtype != "fp32" and strategy.world_size == 1:
        yield f"all_reduce_dtype {config.all_reduce_dtype}", "with one rank"
    plan = setup.plan
    max_micro_batches = max(plan.shape(phase.first_step)[0] for phase in plan.phases)
    if config.unsharded_gradients and max_micro_batches == 1:
        yield "unsharded_gradients", "with one micro-batch per step"


def _log_options(config: CoreConfig, setup: RunSetup) -> None:
    """Log the preset's options, or that the default learning rate is not for random weights."""
    starts_from_weights = setup.start or setup.init_from or setup.weights_from
    if config.preset is not None:
        texts = [
            f"{name} {format_default(value)}" for name, value in values_of_preset(config).items()
        ]
        logger.info(f"preset {config.preset}: {', '.join(texts) or 'overridden by other options'}")
    elif not starts_from_weights and "learning_rate" not in non_default(config):
        logger.info(
            "advice: the default --learning_rate is for fine-tuning; random weights learn faster "
            "with --preset pretrain, or if you set a higher rate."
        )


def _log_model(
    config: CoreConfig, setup: RunSetup, strategy: AcceleratedStrategy, model: PreTrainedModel
) -> None:
    """Log the size of the model and of each rank's part, and the source of its weights."""
    counts = parameter_counts(model)
    logger.info(
        f"model: {setup.model_config.model_type}, {counts['total']:,} parameters "
        f"({counts['embedding']:,} embedding, {counts['other']:,} other, "
        f"{counts['frozen']:,} frozen)"
    )
    if config.pad_vocab_to_multiple_of is not None:
        rows = model.config.get_text_config().vocab_size  # without the padding
        padding = -rows % config.pad_vocab_to_multiple_of
        logger.info(f"padded vocabulary: {rows} + {padding} = {rows + padding}")
    if not setup.dims.is_replicated:
        local = sum(parameter.numel() for parameter in strategy.local_parameters)
        sizes = gather(local)
        span = f"{min(sizes):,}" + (f" to {max(sizes):,}" if min(sizes) < max(sizes) else "")
        logger.info(f"trained parameters per rank: {span}")
    start = setup.start
    logger.info(f"weights: {f'from {start.path}' if start else setup.initial_weights}")


def _log_length(config: CoreConfig, setup: TrainSetup, model: PreTrainedModel) -> None:
    """Log the batches, the length and, for a budget in tokens, the operations."""
    plan = setup.plan
    for phase in plan.phases:
        if phase.first_step >= plan.total_steps:
            logger.warning(
                f"The run ends before --global_batch_size {config.global_batch_size} grows to "
                f"{phase.global_batch_size} samples."
            )
            break
        micro_batches, size = plan.shape(phase.first_step)
        since = f" from step {phase.first_step + 1:,} on" if phase.first_step else ""
        logger.info(
            f"batch{since}: {counted(size, 'sample')} per device x "
            f"{counted(plan.world_size, 'rank')} x {counted(micro_batches, 'micro-batch')} = "
            f"{counted(phase.global_batch_size, 'sample')} "
            f"({phase.global_batch_size * setup.block_size:,} tokens) per step"
        )
    logger.info(
        f"length: {counted(plan.total_steps, 'step')}, {counted(plan.total_samples, 'sample')}, "
        f"{plan.epochs:.4g} epochs"
    )
    validation = sum(_num_windows(source, setup) for source in setup.corpus.validation)
    logger.info(
        f"samples: {plan.total_samples:,} in training, {validation:,} in validation, 0 in test"
    )
    if config.max_train_tokens is not None or config.tokens_per_parameter is not None:
        tokens, parameters = plan.total_samples * setup.block_size, parameter_counts(model)["total"]
        logger.info(
            f"budget: {tokens:,} tokens, {tokens / parameters:.4g} for each of {parameters:,} "
            f"parameters; {tokens * flops_per_token(model, block_size=setup.block_size):.4g} FLOPs"
        )


def _sample_order(config: CoreConfig, setup: TrainSetup) -> dict[str, object]:
    """Return the settings that determine a rank's samples in each step."""
    return {
        "seed": setup.seed,
        "block_size": setup.block_size,
        "per_device_train_batch_size": config.per_device_train_batch_size,
        "global_batch_size": setup.plan.batch_schedule(setup.block_size),
        "total_samples": setup.plan.total_samples,
        "data_ranks": setup.plan.world_size,
        "data": setup.data_digest,
    }


def _log_data(name: str, sources: Sequence[CorpusSource], setup: RunSetup) -> None:
    for source in sources:
        if source.weight == 0:
            continue
        tokens = source.stream.num_tokens
        windows = tokens // setup.block_size
        if name == "validation":
            windows = _num_windows(source, setup)
        source_label = f" {source.name} ({source.weight:.2%})" if len(sources) > 1 else ""
        if name == "training" and setup.corpus.stages:
            source_label = f" {source.name}"  # the weights of each stage follow
        num_documents = source.stream.num_documents
        documents = f"{counted(num_documents, 'document')}, " if num_documents else ""
        logger.info(
            f"{name} data{source_label}: {documents}{tokens:,} tokens, "
            f"{counted(windows, 'window')} of {setup.block_size}"
        )


def _num_windows(source: CorpusSource, setup: RunSetup) -> int:
    """Return the windows of a source of the validation data; the last one may be shorter."""
    tokens = source.stream.num_tokens
    return math.ceil((tokens - 1) / setup.block_size) if source.weight > 0 else 0


def _log_stages(setup: TrainSetup) -> None:
    """Log the border and the weights of each stage of the data."""
    stages, num_samples = setup.corpus.stages, setup.plan.total_samples
    starts = stage_starts(stages, block_size=setup.block_size)
    for number, (start, stage) in enumerate(zip(starts, stages, strict=False), start=1):
        weights = zip(setup.corpus.train, stage.weights, strict=True)
        blend = ", ".join(f"{source.name} {weight:.2%}" for source, weight in weights if weight)
        logger.info(f"data stage {number} from sample {start:,}: {blend}")
        if start >= num_samples:
            logger.warning(
                f"data_stage {number} begins after the last of {num_samples:,} samples: the "
                "run never reads it."
            )


def _log_sources(setup: TrainSetup, num_samples: int, verb: str) -> None:
    """Log how many of a number of samples each source of a blend serves."""
    if len(setup.corpus.train) == 1 or not num_samples:
        return
    samples_served = setup.skipped.served(setup.samples.served, num_samples)
    for number, (source, samples) in enumerate(
        zip(setup.corpus.train, samples_served, strict=True)
    ):
        windows = setup.samples.windows_of(number)
        if windows:
            logger.info(
                f"source {source.name} {verb} {samples:,} samples ({samples / num_samples:.2%}), "
                f"{samples / windows:.4g} epochs of its data"
            )


def log_sample(
    config: CoreConfig,
    setup: TrainSetup,
    strategy: AcceleratedStrategy,
    model: PreTrainedModel,
    step: int | None,
    *,
    should_stop: Callable[[], bool],
) -> None:
    """Let the model continue `sample_prompt` and log the text; every rank calls it.

    Args:
        config: The options.
        setup: The run.
        strategy: The prepared model; different weights of ranks are averaged.
        model: The whole model; rank 0 generates.
        step: Steps done during training; None at the end.
        should_stop: Whether to end the text with the next token.
    """
    with strategy.averaged():
        if strategy.rank != 0:
            return
        try:
            with strategy.autocast():
                text = sample_text(
                    model,
                    setup.tokenizer,
                    prompt=config.sample_prompt or "",
                    max_new_tokens=SAMPLE_TOKENS,
                    seed=setup.seed,
                    stopping_criteria=[lambda tokens, scores: should_stop()],
                )
        except DivergedError as error:
            logger.warning(f"No sample was written. {error}")
            return
    if step is None:
        logger.info(f"a sample that the model wrote:\n\n{text}\n")
        return
    logger.info(f"a sample at step {step}:\n\n{text}\n")
    for tracker in strategy.accelerator.trackers:
        if tracker.name == "tensorboard":
            with contextlib.suppress(Exception):  # `Tracker.write` warns of a full disk
                tracker.writer.add_text("sample", f"```\n{text}\n```", step)


def log_end(
    config: CoreConfig,
    setup: TrainSetup,
    state: TrainState,
    results: dict[str, float],
    *,
    exported: ExtraWeights | None,
) -> None:
    """Log the last validation loss, the paths of the files, and commands that use them."""
    _log_sources(setup, state.samples, "served")
    folder = setup.run.path
    prefix, of_exported = "", ""
    if exported is not None:
        prefix, of_exported = exported.prefix, f" of {exported.description}"
    loss = results.get(f"{prefix}loss")
    if loss is not None:
        perplexity = results[f"{prefix}perplexity"]
        logger.info(
            f"validation loss{of_exported} {loss:.4f}, perplexity {perplexity:.2f} after "
            f"{counted(state.step, 'step')}, {state.tokens:,} tokens, {state.seconds:.1f} s of "
            "training"
        )
        if not math.isfinite(loss):
            logger.warning("The validation loss is not finite: the run has diverged.")
    logger.info(f"model and tokenizer: {folder} (AutoModelForCausalLM.from_pretrained loads it)")
    logger.info(f"results: {folder / 'all_results.json'}, metrics: {setup.run.metrics}")
    if setup.run.checkpoints.is_dir():
        logger.info(f"checkpoints: {setup.run.checkpoints}")
    if "tensorboard" in config.report_to:
        is_installed = shutil.which("tensorboard") is not None
        board = ["tensorboard"] if is_installed else [python_command(), "-m", "tensorboard.main"]
        logger.info("curves: " + shell_line([*board, "--logdir", folder / "tensorboard"]))
    world_size = setup.dims.world_size
    rerun_command = start_command(world_size, "--config", folder / "config.toml")
    logger.info(f"again with other settings: {rerun_command} --output_dir NEW")
    trust = ["--trust_remote_code"] if config.trust_remote_code else []
    continue_command = start_command(world_size, *trust, "--model_name_or_path", folder)
    logger.info(f"to continue from this model: {continue_command} --train_file FILE")


def generate_command(config: CoreConfig, run: RunFolder) -> str:
    """Return the command line that generates text with the model of a run."""
    trust = ["--trust_remote_code"] if config.trust_remote_code else []
    return shell_line([*program_command("generate"), run.path, *trust])


def inspect_command(run: str, step: int) -> str:
    """Return the command line that shows the text of a step, counted from 1."""
    return shell_line([*program_command("inspect"), Path(run), "--step", str(step)])


def resume_command(config: CoreConfig, run: RunFolder, world_size: int) -> str:
    """Return the command line that resumes a run on the same number of ranks."""
    arguments: list[str | Path] = ["--config", run.path / "config.toml", "--resume_from_checkpoint"]
    if config.push_to_hub:  # config.toml does not record it, and it has not been done
        arguments += ["--push_to_hub"]
        arguments += [f"--hub_model_id={config.hub_model_id}"] if config.hub_model_id else []
    return start_command(world_size, *arguments)


def start_command(world_size: int, *arguments: str | Path) -> str:
    """Return the command line that starts the trainer, with HOST:PORT to be filled in.

    Args:
        world_size: Number of ranks.
        arguments: The trainer's arguments.
    """
    if world_size == 1:
        return shell_line([*program_command("train"), *arguments])
    python = python_command()
    module = ["-m", "llm.trainers.gpt", *arguments]
    launcher = task_launcher(os.environ)
    if launcher is not None:
        return shell_line([launcher, "-n", str(world_size), python, *module])
    torchrun = ["torchrun"] if python == "python" else [python, "-m", "torch.distributed.run"]
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    rendezvous = ["--standalone"]
    if local < world_size:
        nodes = str(world_size // local)
        rendezvous = ["--nnodes", nodes, "--rdzv_backend", "c10d", "--rdzv_endpoint", "HOST:PORT"]
    return shell_line([*torchrun, *rendezvous, "--nproc_per_node", str(local), *module])


def program_command(program: str) -> list[str]:
    """Return the words that start a program of this package in this environment."""
    script = Path(sys.executable).with_name(COMMAND)
    if not script.is_file():  # the package is not installed
        return [python_command(), "-m", "llm", program]
    return [_shortest_command(str(script)), program]


def python_command() -> str:
    """Return the command that starts this Python again."""
    return _shortest_command(sys.executable)


def _shortest_command(executable: str) -> str:
    """Return the name of an executable that a shell finds, otherwise its path."""
    name = Path(executable).name
    if shutil.which(name) == executable:
        return name
    path = os.path.relpath(executable)
    return executable if path.startswith("..") else path


def report_skipped(
    steps: Iterable[tuple[int, bool, float]],
    state: TrainState,
    loader: TrainLoader,
    *,
    max_skipped_steps: int,
    run: str,
) -> None:
    """Log skipped steps with their samples; every rank calls it with the same steps.

    Args:
        steps: The result of `Meter.pop_steps`.
        state: Counters of the run, which count the skipped steps in a row.
        loader: The samples of the steps.
        max_skipped_steps: Maximum number of consecutive skipped steps before training stops.
        run: Folder of the run, for the command that shows a step's text.

    Raises:
        DivergedError: Too many steps in a row were skipped.
    """
    for step, skipped, _ in steps:
        state.skipped_in_a_row = state.skipped_in_a_row + 1 if skipped else 0
        if skipped:
            first, stop = loader.sample_range(step, step + 1)
            command = inspect_command(run, step + 1)
            logger.info(
                f"step {step + 1} was skipped: its gradient is not finite (samples {first:,} to "
                f"{stop - 1:,}); its text: {command}",
                extra=event(
                    "skip", step=step + 1, first_sample=first, last_sample=stop - 1, inspect=command
                ),
            )
    if state.skipped_in_a_row >= max_skipped_steps:
        raise DivergedError(
            f"The last {state.skipped_in_a_row} steps were skipped because loss or gradient was "
            "not finite (--max_skipped_steps); resume from an earlier checkpoint with a lower "
            "--learning_rate or other data. Earlier checkpoints are untouched."
        )


def make_tracker(
    config: CoreConfig, setup: TrainSetup, strategy: AcceleratedStrategy, model: PreTrainedModel
) -> Tracker:
    """Return the run's Tracker; it reports to the trackers that are open by then."""

    def find_peak_flops() -> float:
        if config.device_peak_tflops is not None:
            return config.device_peak_tflops * 1e12 * strategy.world_size
        return (
            device_peak_flops(strategy.device, config.mixed_precision or "no") * strategy.world_size
        )

    return Tracker(
        metrics_path=setup.run.metrics if strategy.rank == 0 else None,
        log_to_trackers=lambda values, step: strategy.accelerator.log(values, step=step),
        device=strategy.device,
        total_steps=setup.plan.total_steps,
        flops_per_token=flops_per_token(model, block_size=setup.block_size),
        find_peak_flops=find_peak_flops,
    )


def check_trackers(config: CoreConfig) -> None:
    """Refuse a tracker that Accelerate does not have, or that lacks its package.

    Raises:
        ConfigError: Names the tracker.
    """
    available = {str(tracker) for tracker in get_available_trackers()}
    for name in config.report_to:
        if name != "none" and name not in LOGGER_TYPE_TO_CLASS:
            raise ConfigError(
                f"--report_to {name} is not a tracker; choose from "
                f"{', '.join(sorted(LOGGER_TYPE_TO_CLASS))} and none."
            )
        if name != "none" and name not in available:
            raise ConfigError(
                f"--report_to {name} needs a package that is missing: pip install {name}."
            )


def connect_trackers(config: CoreConfig, setup: TrainSetup, strategy: AcceleratedStrategy) -> None:
    """Open the trackers of `report_to`, except TensorBoard.

    Raises:
        ConfigError: A tracker's library refuses the run; gives its reason.
    """
    accelerator = strategy.accelerator
    names = [name for name in config.report_to if name not in ("none", "tensorboard")]
    accelerator.project_configuration.set_directories(str(setup.run.path))
    accelerator.log_with = names
    project, arguments = _wandb_arguments(config, setup.run)
    try:
        if names:
            accelerator.init_trackers(project, init_kwargs={"wandb": arguments})
    except Exception as error:  # an error of the tracker's library, such as a missing login
        raise ConfigError(
            f"--report_to {' '.join(config.report_to)}: {one_line(error)}. Fix that, or leave the "
            "tracker out."
        ) from error
    for tracker in accelerator.trackers:
        tracker.store_init_configuration(dataclasses.asdict(config))


def _wandb_arguments(config: CoreConfig, run: RunFolder) -> tuple[str, dict[str, Any]]:
    """Return the project of a run in its trackers, and the other arguments of `wandb.init`.

    The project is `project_name`. With W&B it is by default the project of the run in the folder,
    else `WANDB_PROJECT`, and W&B writes into the run's folder.
    """
    if "wandb" not in config.report_to:
        return config.project_name or _DEFAULT_PROJECT, {}
    former: Any = None
    if not config.overwrite_output_dir:
        # It is missing, or not what `remember_wandb` writes.
        with contextlib.suppress(OSError, ValueError, RecursionError):
            former = json.loads(run.wandb.read_text(encoding="utf-8"))
    if not (isinstance(former, dict) and {*map(type, former.values())} == {str}):
        former = {}
    default = former.get("project") or os.environ.get("WANDB_PROJECT") or _DEFAULT_PROJECT
    project = config.project_name or default
    arguments: dict[str, Any] = {"dir": str(run.path)}
    if former.get("project") == project and "id" in former:
        arguments |= {"id": former["id"], "resume": "allow"}
    return project, arguments


def remember_wandb(run: RunFolder, trackers: Sequence[Any]) -> None:
    """Write the id of the W&B run into the run's folder, for a resume; rank 0 calls it.

    Args:
        run: The run's folder.
        trackers: Accelerate's open trackers.
    """
    for tracker in trackers:
        if tracker.name == "wandb":
            run.wandb.parent.mkdir(exist_ok=True)
            record = {"project": tracker.run_name, "id": tracker.run.id}
            write_whole(run.wandb, json.dumps(record) + "\n")


def open_tensorboard(config: CoreConfig, setup: TrainSetup, strategy: AcceleratedStrategy) -> None:
    """Open TensorBoard's files in the run's folder; rank 0 calls it."""
    if "tensorboard" not in config.report_to:
        return
    step = setup.start.step if setup.start else 0
    # TensorBoard drops the points of an earlier start from this step on, so no step appears twice.
    # The points of the checkpoint's step were written before it was saved.
    board = TensorBoardTracker("tensorboard", setup.run.path, purge_step=step + 1)
    board.start()
    board.writer.add_text("config", f"```\n{to_toml(config)}\n```", step)
    _write_hyperparameters(board.writer, config)
    strategy.accelerator.trackers.append(board)


def _write_hyperparameters(writer: Any, config: CoreConfig) -> None:
    """Fill TensorBoard's table of runs, in the same files as the curves."""
    from torch.utils.tensorboard.summary import hparams

    values = {
        name: value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in dataclasses.asdict(config).items()
        if value not in (None, ())
    }
    # The table reads the curves with these names; the zeros are never shown.
    for summary in hparams(values, {"eval/loss": 0.0, "train/loss": 0.0}):
        writer.file_writer.add_summary(summary)


def forget_points(strategy: AcceleratedStrategy, *, step: int) -> None:
    """Let TensorBoard drop the points after a step, for example when a run resumes."""
    for tracker in strategy.accelerator.trackers:
        if tracker.name == "tensorboard":
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog

            start = SessionLog(status=SessionLog.START)
            with contextlib.suppress(Exception):  # `Tracker.write` warns of a full disk
                tracker.writer.file_writer.add_event(Event(step=step + 1, session_log=start))
