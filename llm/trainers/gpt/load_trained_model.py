"""The model of a finished or running training, loaded from one of its checkpoints."""

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from llm.checkpoint.format import (
    MODEL_FOLDER,
    TOKENIZER_FOLDER,
    Checkpoint,
    checkpoint_step,
    list_checkpoint_folders,
    model_tensors,
)
from llm.checkpoint.load import (
    find_newest_checkpoint,
    load_model,
    load_weights_from_part,
    read_verified_checkpoint,
)
from llm.checkpoint.retention import BEST_LINK
from llm.errors import CheckpointError, ConfigError
from llm.models.options import ARCHITECTURE_OPTIONS
from llm.runtime.offline import offline_if_unreachable
from llm.tokenizers.options import TOKENIZER_FILES
from llm.trainers.gpt.config import CoreConfig
from llm.trainers.gpt.seams import list_transforms, make_extensions

if TYPE_CHECKING:
    import torch
    from transformers import (
        GenerationConfig,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
    )

    from llm.models.model_card import Card

_Read = TypeVar("_Read")
_MAX_READ_ATTEMPTS = 5


def use_checkpoint_copies(config: CoreConfig, checkpoint: Checkpoint) -> CoreConfig:
    """Return options that name a checkpoint's copies of model configuration and tokenizer.

    Raises:
        CheckpointError: It lacks a copy. A path that does not exist could be a name on the Hub.
        ConfigError: The copies have Python code, which the options do not trust.
    """
    for required_prefix in (f"{MODEL_FOLDER}/config.json", f"{TOKENIZER_FOLDER}/"):
        if not any(name.startswith(required_prefix) for name in checkpoint.files):
            raise CheckpointError(f"{checkpoint.path} is incomplete: it has no {required_prefix}.")
    code_files = [name for name in checkpoint.files if name.endswith(".py")]
    if code_files and not config.trust_remote_code:
        raise ConfigError(
            f"The model of {checkpoint.path} has its own Python code ({', '.join(code_files)}): "
            "add --trust_remote_code to this command if you trust its authors."
        )
    copy_options: dict[str, Any] = dict.fromkeys((*ARCHITECTURE_OPTIONS, *TOKENIZER_FILES)) | {
        "config_name": str(checkpoint.path / MODEL_FOLDER),
        "tokenizer_name": str(checkpoint.path / TOKENIZER_FOLDER),
    }
    return dataclasses.replace(config, **copy_options)


def load_run_tokenizer(
    config: CoreConfig, model_config: "PreTrainedConfig | None" = None
) -> "PreTrainedTokenizerBase":
    """Load the tokenizer that the options name; it gets the template of the training texts.

    Raises:
        ConfigError: It cannot be loaded.
    """
    from llm.tokenizers.load_tokenizer import choose_begin_token, load_tokenizer
    from llm.tokenizers.template import match_training_template

    with offline_if_unreachable(config.tokenizer_name or config.model_name_or_path):
        tokenizer = load_tokenizer(
            config,
            model_name_or_path=config.model_name_or_path,
            model_config=model_config,
            trust_remote_code=config.trust_remote_code,
        )
    match_training_template(
        tokenizer, choose_begin_token(tokenizer.bos_token_id, config.prepend_bos)
    )
    return tokenizer


def read_generation_settings(checkpoint: Checkpoint | None) -> "GenerationConfig | None":
    """Return the generation settings of a run's pretrained weights."""
    from transformers import GenerationConfig

    name = f"{MODEL_FOLDER}/generation_config.json"
    if checkpoint is None or name not in checkpoint.files:
        return None
    return GenerationConfig.from_pretrained(checkpoint.path / MODEL_FOLDER)


def resolve_best_link(folder: Path) -> tuple[Path | None, str]:
    """Return the target of the link `best`, or None, and a description of it for messages.

    Args:
        folder: The run's `checkpoints` folder.
    """
    link = folder / BEST_LINK
    if not link.is_symlink():
        return None, "no link (--save_top_k keeps one)"
    target = link.readlink()
    if not link.exists():
        return None, f"a link to {target}, which does not exist"
    return folder / target, str(target)


def choose_checkpoint(folder: Path, step: str, *, option: str) -> Checkpoint:
    """Return the checkpoint of a step, with verified checksums.

    Args:
        folder: The run's `checkpoints` folder.
        step: A number, `latest` or `best`.
        option: The option that names the step, for messages.

    Raises:
        CheckpointError: It is damaged or missing.
        ConfigError: No checkpoint has this step.
    """
    if step == "latest":
        return _read_newest_checkpoint(folder)
    if step == BEST_LINK:
        best_path, remark = resolve_best_link(folder)
        if best_path is None:
            raise CheckpointError(f"{folder / BEST_LINK} cannot be followed: {remark}.")
        return read_verified_checkpoint(best_path)
    path_by_step = {str(checkpoint_step(path)): path for path in list_checkpoint_folders(folder)}
    if step not in path_by_step:
        names = [*path_by_step, "latest", *(["best"] if (folder / BEST_LINK).exists() else [])]
        raise ConfigError(
            f"{option} {step} names no checkpoint of {folder}; there are {', '.join(names)}."
        )
    return read_verified_checkpoint(path_by_step[step])


def _read_newest_checkpoint(folder: Path) -> Checkpoint:
    """Return the newest valid checkpoint, and name those that are skipped on standard error.

    Raises:
        CheckpointError: None is valid, or training has removed the newest one meanwhile.
    """
    folders = list_checkpoint_folders(folder)
    newest = find_newest_checkpoint(folder, on_skip=lambda text: sys.stderr.write(f"{text}\n"))
    if folders and not os.path.lexists(folders[-1]):  # `read_while_training` tries again
        raise CheckpointError(f"Training removed {folders[-1]} while checkpoints were read.")
    if newest is None:
        raise CheckpointError(f"{folder} holds no valid checkpoint.")
    return newest


def read_while_training(folder: Path, read_checkpoints: Callable[[], _Read]) -> _Read:
    """Call `read_checkpoints` to read checkpoints; call it again if training removes one meanwhile.

    Args:
        folder: The run's `checkpoints` folder.
        read_checkpoints: Chooses and reads checkpoints.

    Raises:
        CheckpointError: Training removes checkpoints faster than they are read.
    """
    for num_remaining_attempts in reversed(range(_MAX_READ_ATTEMPTS)):
        folders = list_checkpoint_folders(folder)
        try:
            return read_checkpoints()
        except Exception:
            is_complete = all(os.path.lexists(path) for path in folders)
            if is_complete:  # training has not removed one, so the error has another cause
                raise
        if num_remaining_attempts:
            sys.stderr.write(f"Training removed checkpoints of {folder}; reading again.\n")
    raise CheckpointError(
        f"A running training has removed checkpoints of {folder} {_MAX_READ_ATTEMPTS} times while "
        "they were read; wait until it has ended, or let it keep more with --keep_checkpoints."
    )


def load_trained_model(
    config: CoreConfig, checkpoint: Checkpoint, *, part: str | None = None
) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase"]:
    """Load the model and the tokenizer of a run, with the weights of a checkpoint.

    Args:
        config: The run's configuration.
        checkpoint: One of its checkpoints.
        part: The part of the checkpoint with the weights, if not the model.

    Returns:
        The model, in fp32 on the CPU, with the vocabulary padded as in training; the tokenizer.

    Raises:
        LLMError: The model or the tokenizer cannot be loaded, or the checkpoint belongs to another
            one.
    """
    model, tokenizer = build_untrained_model(config, checkpoint, device="cpu")
    if part is None:
        load_model(checkpoint, model_tensors(model))
    else:
        load_weights_from_part(part, checkpoint, model)
    return model, tokenizer


def build_untrained_model(
    config: CoreConfig, checkpoint: Checkpoint, *, device: Literal["cpu", "meta"]
) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase"]:
    """Build the model of a run with its vocabulary padded, and load its tokenizer.

    Args:
        config: The run's configuration.
        checkpoint: One of its checkpoints, with copies of the model's configuration and tokenizer.
        device: Device of the model.

    Raises:
        LLMError: The model or the tokenizer cannot be loaded.
    """
    import torch

    from llm.models.build import build_model, set_special_tokens
    from llm.models.configuration import load_config

    config = use_checkpoint_copies(config, checkpoint)
    tokenizer = load_run_tokenizer(config)
    model_config = load_config(config)
    model = build_model(
        dataclasses.replace(config, attention_implementation=None, activation_checkpointing="none"),
        model_config,
        seed=config.seed or 0,
        device=torch.device(device),
        vocab_size=len(tokenizer),
        tensor_parallel_size=config.tensor_parallel_size,
        transforms=list_transforms(make_extensions(config), model_config),
    )
    settings = read_generation_settings(checkpoint)
    if settings is not None:
        model.generation_config = settings
    set_special_tokens(model, tokenizer, is_pretrained=settings is not None)
    return model, tokenizer


def export_trained_model(
    config: CoreConfig,
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    state_dict: Mapping[str, "torch.Tensor"],
    *,
    folder: Path,
    card: "Card",
) -> None:
    """Write a model and its card as a Hugging Face folder.

    Args:
        config: The run's configuration.
        model: The model; its weights are not used.
        tokenizer: The run's tokenizer.
        state_dict: The weights, on the host.
        folder: The folder, which may hold a run.
        card: The model's card.
    """
    from llm.models.export import export_model
    from llm.models.model_card import write_model_card

    export_model(
        config=model.config,
        state_dict=state_dict,
        folder=folder,
        tokenizer=tokenizer,
        generation_config=model.generation_config,
        trust_remote_code=config.trust_remote_code,
        dtype=config.export_dtype,
        transforms=list_transforms(make_extensions(config), model.config),
    )
    write_model_card(folder, card)
