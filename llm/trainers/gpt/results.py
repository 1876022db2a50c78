"""Output of a run: the exported model, its card, its results, and their upload."""

import dataclasses
import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel

from llm import __version__
from llm.checkpoint.run_folder import MODEL_FILE_PATTERN
from llm.config.options import fields, non_default
from llm.config.shell import shell_line
from llm.config.toml import values_as_toml
from llm.errors import ConfigError, one_line
from llm.metrics.reporter import task_values
from llm.metrics.wall_time import goodput_rows
from llm.models.model_card import Card, mixture_rows
from llm.models.sizes import parameter_counts
from llm.runtime.files import json_safe, write_whole
from llm.runtime.logging import counted
from llm.trainers.gpt.config import CoreConfig, packages_in_use
from llm.trainers.gpt.load_trained_model import export_trained_model
from llm.trainers.gpt.loop import Trainer

_EXCLUDED_FROM_UPLOAD = (
    "*/*",
    "*.toml",
    "*.jsonl",
    "log.txt",
    "status.json",
    "goodput.json",
    "eval_results.json",
)
"""Patterns of the files in a run's folder that are not part of the model."""

logger = logging.getLogger("llm")


def write_results(
    trainer: Trainer,
    model: PreTrainedModel,
    task_results: Mapping[str, Mapping[str, float]],
) -> None:
    """Export the model and write its card and `all_results.json`; every rank calls it."""
    # The last gradients take as much memory as the exported weights.
    trainer.strategy.optimizer.zero_grad(set_to_none=True)
    # If ranks hold shards, this is a collective: all ranks gather, rank 0 writes.
    state_dict = trainer.strategy.gather_full_state_dict()
    trainer.count_energy()
    if trainer.strategy.rank != 0:
        return
    results = _collect_results(trainer, task_results)
    goodput = trainer.reporter.wall_time.results()
    run, folder = trainer.run, trainer.run.folder.path
    card = make_card(
        run.config,
        name=folder.name,
        rows=_make_card_rows(trainer, model, results) | goodput_rows(goodput),
        results=trainer.results,
        task_results=task_results,
        initial_weights=run.initial_weights,
        ranks=run.dims.world_size,
    )
    export_trained_model(run.config, model, run.tokenizer, state_dict, folder=folder, card=card)
    write_whole(folder / "all_results.json", json.dumps(results | goodput, indent=1) + "\n")
    trainer.reporter.wall_time.write(is_finished=True)


def _collect_results(
    trainer: Trainer, task_results: Mapping[str, Mapping[str, float]]
) -> dict[str, float | None]:
    """Return the results of the run under their names in `all_results.json`."""
    evaluation = {
        ("perplexity" if name == "perplexity" else f"eval_{name}"): value
        for name, value in trainer.results.items()
    }
    evaluation |= task_values(task_results)
    state = trainer.state
    if state.best_loss is not None:
        evaluation["best_eval_loss"] = state.best_loss
    return {
        **{name: json_safe(value) for name, value in evaluation.items()},
        "steps": state.step,
        "samples": state.samples,
        "tokens": state.tokens,
        "seconds": state.seconds,
        "tokens_per_second": state.tokens / state.seconds if state.seconds else None,
    }


def _make_card_rows(
    trainer: Trainer, model: PreTrainedModel, results: dict[str, float | None]
) -> dict[str, object]:
    """Return the table of the model card."""
    run, exported_weights = trainer.run, trainer.exported_weights
    return {
        "architecture": model.config.model_type,
        "parameters": f"{parameter_counts(model)['total']:,}",
        **mixture_rows(model),
        "initial weights": run.initial_weights,
        **({"weights": exported_weights.card} if exported_weights else {}),
        "data": describe_data(run.config),
        "block size": run.block_size,
        "global batch size": run.batch_plan.format_batch_schedule(run.block_size),
        "learning rate": f"{run.config.learning_rate:g}, {run.config.lr_scheduler_type}",
        "weight decay": run.config.weight_decay,
        "mixed precision": run.config.mixed_precision,
        **{
            name: row
            for extension in trainer.extensions
            for name, row in extension.card_rows().items()
        },
        "seed": run.seed,
        **{name.replace("_", " "): value for name, value in results.items()},
    }


def open_repository(config: CoreConfig, folder: Path) -> str | None:
    """Create the repository to push to, before training; rank 0 calls it.

    Args:
        config: Contains `push_to_hub` and `hub_model_id`.
        folder: The run's folder; its name is the default name of the repository.

    Returns:
        The repository's full name; None without `push_to_hub`.

    Raises:
        ConfigError: The user is not logged in, the name cannot be used, or the Hub cannot be
            reached.
    """
    if not config.push_to_hub:
        return None
    import huggingface_hub

    if huggingface_hub.get_token() is None:
        raise ConfigError(
            "--push_to_hub needs you to be known to the Hub: run `hf auth login`, or set HF_TOKEN."
        )
    name = config.hub_model_id or folder.resolve().name
    try:
        url = huggingface_hub.HfApi().create_repo(name, private=True, exist_ok=True)
    except Exception as error:  # the library raises many types: network, Hub, name
        raise ConfigError(
            f"--push_to_hub cannot open the repository {name}: {one_line(error)}. Check "
            "--hub_model_id, the token's rights and the network, or train without --push_to_hub "
            f"and push with `{_upload_command(name, folder)}`."
        ) from error
    return url.repo_id


def push_model(folder: Path, repository: str) -> None:
    """Upload an exported model; a failure is only logged: the model is safe in its folder."""
    import huggingface_hub

    patterns = [
        f"{path.name}/*" if path.is_dir() else path.name
        for path in folder.iterdir()
        if re.fullmatch(rf"{MODEL_FILE_PATTERN}|all_results\.json", path.name)
    ]
    try:
        huggingface_hub.HfApi().upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message="Pretrained with llm-trainers",
            allow_patterns=patterns,
        )
    except Exception as error:
        logger.error(
            f"The model was not pushed to {repository}: {one_line(error)}. It is in {folder}; "
            f"`{_upload_command(repository, folder)}` tries again."
        )
        return
    logger.info(f"model on the Hub: {repository}")


def _upload_command(repository: str, folder: Path) -> str:
    flags = [word for pattern in _EXCLUDED_FROM_UPLOAD for word in ("--exclude", pattern)]
    return shell_line(["hf", "upload", repository, folder, *flags])


def make_card(
    config: CoreConfig,
    *,
    name: str,
    rows: Mapping[str, object],
    results: Mapping[str, float],
    task_results: Mapping[str, Mapping[str, float]],
    initial_weights: str,
    ranks: int,
) -> Card:
    """Return the card of a model that a run has trained.

    Args:
        config: The run's options, as recorded in its `config.toml`.
        name: The model's name.
        rows: Rows of the table about the training.
        results: Results on the validation data by name.
        task_results: Results of tasks by task and metric.
        initial_weights: Source of the weights at step 0, such as `from gpt2`.
        ranks: Ranks of the run.
    """
    packages = "".join(f", {package}" for package in packages_in_use(config))
    software = f"llm-trainers {__version__}, torch {torch.__version__}{packages}"
    base_model = initial_weights.removeprefix("from ")
    torchrun = f"torchrun --standalone --nproc_per_node={ranks} -m llm.trainers.gpt"
    program = "llm-trainers train" if ranks == 1 else torchrun
    return Card(
        name=name,
        rows={**rows, "software": software},
        license=config.model_license,
        languages=config.model_languages,
        dataset=config.dataset_name,
        base_model=base_model if base_model != initial_weights else None,
        validation=config.validation_file
        or " ".join(map(str, config.valid_data_path))
        or describe_data(config),
        results=results,
        task_results=task_results,
        command=f"{program} --config config.toml",
        options=_format_options_to_repeat(config, name),
        software=f"{software}, on {counted(ranks, 'rank')}",
    )


def _format_options_to_repeat(config: CoreConfig, name: str) -> str:
    """Return the options that train the model again, as TOML; "" for a branch: it needs its parent.

    They include the preset's values instead of its name: the preset would also set options that
    have their default in the run.
    """
    if config.branch_from is not None:
        return ""
    one_shot_defaults = {
        field.name: field.default for field in fields(type(config)) if field.option.one_shot
    }
    changes = {**one_shot_defaults, "preset": None, "output_dir": f"runs/{name}"}
    return values_as_toml(non_default(dataclasses.replace(config, **changes)))


def describe_data(config: CoreConfig) -> str:
    """Return the training data as named by the options."""
    data = config.dataset_name or config.train_file
    if data is None:
        blends = [stage.data_path for stage in config.data_stage]
        blends = blends or [config.data_path or config.train_data_path]
        data = ", then ".join(" ".join(map(str, blend)) for blend in blends)
    return f"{data} ({config.dataset_config_name})" if config.dataset_config_name else data
