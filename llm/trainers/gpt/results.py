"""What a run leaves behind: the Hugging Face folder, the results, the last lines of the log."""

import json
import logging
import math
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from llm import __version__
from llm.checkpoint.run_folder import RunFolder
from llm.data.corpus import CorpusSource
from llm.models.export import export_model, write_model_card
from llm.models.sizes import parameter_counts
from llm.parallel.base import AcceleratedStrategy
from llm.runtime.files import write_whole
from llm.runtime.logging import event
from llm.runtime.world import task_launcher
from llm.trainers.gpt.config import GPTConfig
from llm.trainers.gpt.inputs import RunSetup, TrainSetup
from llm.trainers.gpt.loop import Trainer
from llm.trainers.gpt.reporting import write_sample

logger = logging.getLogger("llm")


def log_beginning(
    config: GPTConfig, setup: RunSetup, strategy: AcceleratedStrategy, model: PreTrainedModel
) -> None:
    """State model, data, batch arithmetic, world, precision and versions."""
    import accelerate
    import transformers

    counts = parameter_counts(model)
    logger.info(
        f"model: {setup.model_config.model_type}, {counts['total']:,} parameters "
        f"({counts['embedding']:,} embedding, {counts['other']:,} other, "
        f"{counts['frozen']:,} frozen)"
    )
    _log_data("training", setup.corpus.train, setup, partial=False)
    # The last window of a validation text may be a partial one.
    _log_data("validation", setup.corpus.validation, setup, partial=True)
    total_steps = None
    if isinstance(setup, TrainSetup):
        plan, total_steps = setup.plan, setup.plan.total_steps
        logger.info(
            f"batch: {plan.micro_batch_size} samples a device x {plan.world_size} ranks x "
            f"{plan.accumulation} micro-batches = {plan.global_batch_size} samples "
            f"({plan.global_batch_size * setup.block_size:,} tokens) a step"
        )
        logger.info(
            f"length: {plan.total_steps:,} steps, {plan.total_samples:,} samples, "
            f"{plan.epochs:.4g} epochs"
        )
        if len(setup.corpus.train) > 1:
            _log_sources(setup, plan.total_samples, "will serve")
    if strategy.second_order is not None:
        for line in strategy.second_order.describe().splitlines():
            logger.info(line)
    logger.info(
        f"world: {strategy.world_size} ranks, {setup.layout.describe()}, {strategy.device.type}, "
        f"mixed precision {config.mixed_precision}, seed {setup.seed}",
        extra=event(
            "start",
            step=setup.resume_from.step if setup.resume_from else 0,
            total_steps=total_steps,
            architecture=setup.model_config.model_type,
            parameters=counts["total"],
            ranks=strategy.world_size,
            device=strategy.device.type,
            mixed_precision=config.mixed_precision,
        ),
    )
    logger.info(
        f"versions: llm-trainers {__version__}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"accelerate {accelerate.__version__}"
    )


def _log_data(name: str, parts: Sequence[CorpusSource], setup: RunSetup, *, partial: bool) -> None:
    read = [part for part in parts if part.weight > 0]
    for part in read:
        stream = part.stream
        tokens = stream.num_tokens
        windows = math.ceil((tokens - 1) / setup.block_size) if partial else None
        which = f" {part.name} ({part.weight:.2%})" if len(parts) > 1 else ""
        documents = f"{stream.num_documents:,} documents, " if stream.num_documents else ""
        logger.info(
            f"{name} data{which}: {documents}{tokens:,} tokens, "
            f"{tokens // setup.block_size if windows is None else windows:,} windows of "
            f"{setup.block_size}"
        )


def _log_sources(setup: TrainSetup, num_samples: int, verb: str) -> None:
    """Say what each source of a blend gives to so many samples."""
    served = setup.samples.served(num_samples)
    for number, (part, samples) in enumerate(zip(setup.corpus.train, served, strict=True)):
        windows = setup.samples.windows_of(number)
        if windows:
            logger.info(
                f"source {part.name} {verb} {samples:,} samples ({samples / num_samples:.2%}), "
                f"{samples / windows:.4g} epochs of its own"
            )


def write_results(
    config: GPTConfig, setup: TrainSetup, trainer: Trainer, model: PreTrainedModel
) -> None:
    """Export the model and write card and results; every rank calls it."""
    state_dict = trainer.strategy.full_state_dict()
    if trainer.strategy.rank != 0:
        return
    results = collect_results(trainer)
    folder = setup.run.path
    export_model(
        config=model.config,
        state_dict=state_dict,
        folder=folder,
        tokenizer=setup.tokenizer,
        generation_config=model.generation_config,
        trust_remote_code=config.trust_remote_code,
    )
    write_whole(folder / "all_results.json", json.dumps(results, indent=1) + "\n")
    write_model_card(folder, _card(config, setup, results, model))


def collect_results(trainer: Trainer) -> dict[str, float | None]:
    """Results of the run under the names that `all_results.json` has."""
    evaluation = {
        ("perplexity" if name == "perplexity" else f"eval_{name}"): value
        for name, value in trainer.results.items()
    }
    state = trainer.state
    if state.best_loss is not None:
        evaluation["best_eval_loss"] = state.best_loss
    return {
        **{name: value if math.isfinite(value) else None for name, value in evaluation.items()},
        "steps": state.step,
        "samples": state.samples,
        "tokens": state.tokens,
        "seconds": state.seconds,
        "tokens_per_second": state.tokens / state.seconds if state.seconds else None,
    }


def _card(
    config: GPTConfig,
    setup: TrainSetup,
    results: dict[str, float | None],
    model: PreTrainedModel,
) -> dict[str, object]:
    data = config.dataset_name or config.train_file
    if data is None:
        data = " ".join(map(str, config.data_path or config.train_data_path))
    if config.dataset_config_name:
        data = f"{data} ({config.dataset_config_name})"
    return {
        "name": setup.run.path.name,
        "architecture": setup.model_config.model_type,
        "parameters": f"{parameter_counts(model)['total']:,}",
        "weights started from": setup.weights_from or "scratch",
        "data": data,
        "block size": setup.block_size,
        "global batch size": setup.plan.global_batch_size,
        "learning rate": f"{config.learning_rate:g}, {config.lr_scheduler_type}",
        "weight decay": config.weight_decay,
        "mixed precision": config.mixed_precision,
        "seed": setup.seed,
        **{name.replace("_", " "): value for name, value in results.items()},
        "software": f"llm-trainers {__version__}, torch {torch.__version__}",
    }


def log_sample(config: GPTConfig, setup: TrainSetup, model: PreTrainedModel) -> None:
    """Let the model continue `sample_prompt`."""
    if config.sample_prompt is None:
        return
    if not setup.layout.is_replicated:
        logger.info(
            "No rank has the whole model, so --sample_prompt is left to "
            + shlex.join([_python(), "-m", "llm.generate", str(setup.run.path)])
        )
        return
    text = write_sample(config, setup, model)
    if text is None:
        return
    logger.info(f"a sample that the model wrote:\n\n{text}\n")


def log_ending(config: GPTConfig, setup: TrainSetup, trainer: Trainer) -> None:
    """Say what was read, where everything lies and how to go on."""
    if len(setup.corpus.train) > 1 and trainer.state.samples:
        _log_sources(setup, trainer.state.samples, "served")
    folder = setup.run.path
    loss = trainer.results.get("loss")
    if loss is not None:
        logger.info(
            f"validation loss {loss:.4f}, perplexity {trainer.results['perplexity']:.2f} after "
            f"{trainer.state.step:,} steps, {trainer.state.tokens:,} tokens, "
            f"{trainer.state.seconds:.1f} s of training"
        )
    if loss is not None and not math.isfinite(loss):
        logger.warning("The validation loss is not finite: the run has diverged.")
    logger.info(f"model and tokenizer: {folder} (AutoModelForCausalLM.from_pretrained loads it)")
    logger.info(f"results: {folder / 'all_results.json'}, metrics: {setup.run.metrics}")
    if setup.run.checkpoints.is_dir():
        logger.info(f"checkpoints: {setup.run.checkpoints}")
    if "tensorboard" in config.report_to:
        found = shutil.which("tensorboard") is not None
        board = ["tensorboard"] if found else [_python(), "-m", "tensorboard.main"]
        logger.info("curves: " + shlex.join([*board, "--logdir", str(folder / "tensorboard")]))
    world_size = setup.layout.world_size
    again = start_command(world_size, "--config", str(folder / "config.toml"))
    logger.info(f"again with other settings: {again} --output_dir NEW")
    trust = ["--trust_remote_code"] if config.trust_remote_code else []
    onward = start_command(world_size, *trust, "--model_name_or_path", str(folder))
    logger.info(f"go on from this model: {onward} --train_file FILE")


def resume_command(config: GPTConfig, run: RunFolder, world_size: int) -> str:
    """The command line that goes on with a run that has been stopped, on as many ranks."""
    words = ["--config", str(run.path / "config.toml"), "--resume_from_checkpoint"]
    if config.push_to_hub:  # config.toml does not record it, and it has not been done
        words += ["--push_to_hub"]
        words += ["--hub_model_id", config.hub_model_id] if config.hub_model_id else []
    return start_command(world_size, *words)


def start_command(world_size: int, *words: str) -> str:
    """The command line that starts the trainer on as many ranks as now; HOST:PORT is to be named.

    Args:
        world_size: Number of ranks.
        words: The trainer's arguments.
    """
    python = _python()
    module = ["-m", "llm.trainers.gpt", *words]
    if world_size == 1:
        return shlex.join([python, *module])
    launcher = task_launcher(os.environ)
    if launcher is not None:
        return shlex.join([launcher, "-n", str(world_size), python, *module])
    torchrun = ["torchrun"] if python == "python" else [python, "-m", "torch.distributed.run"]
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    where = ["--standalone"]
    if local < world_size:
        nodes = str(world_size // local)
        where = ["--nnodes", nodes, "--rdzv_backend", "c10d", "--rdzv_endpoint", "HOST:PORT"]
    return shlex.join([*torchrun, *where, "--nproc_per_node", str(local), *module])


def _python() -> str:
    """How the user would start this Python again."""
    if shutil.which("python") == sys.executable:
        return "python"
    near = os.path.relpath(sys.executable)
    return sys.executable if near.startswith("..") else near
