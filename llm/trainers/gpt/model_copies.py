"""The copies of model configuration and tokenizer that each checkpoint has.

The options name the model's configuration and the tokenizer by path, and the files can change or
disappear. A resumed run or a branch compares them with the copies.
"""

import copy
import inspect
import json
import logging
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import custom_object_save

from llm.checkpoint.format import MODEL_FOLDER, TOKENIZER_FOLDER, Checkpoint
from llm.checkpoint.run_folder import differences
from llm.errors import CheckpointError
from llm.models.configuration import (
    load_config,
)
from llm.models.options import ARCHITECTURE
from llm.runtime.files import temporary_folder
from llm.tokenizers.load_tokenizer import fingerprint
from llm.tokenizers.options import TOKENIZER_FILES
from llm.trainers.gpt.config import CoreConfig
from llm.trainers.gpt.load_trained_model import generation_settings, tokenizer_of, with_copies
from llm.trainers.gpt.recorded_options import named_changes
from llm.trainers.gpt.seams import Run

_COMPARED = {"model_type", "tie_word_embeddings"}
"""Fields to compare even if a model's class does not declare them."""


_NOT_COMPARED = {"use_cache", *inspect.signature(PreTrainedConfig).parameters} - _COMPARED
"""Fields that a model's class may declare but that do not change training."""

logger = logging.getLogger("llm")


def copy_model(run: Run, model: PreTrainedModel) -> dict[str, bytes]:
    """Return a checkpoint's files of the model and the tokenizer, by path in the checkpoint.

    Args:
        run: The run's model configuration, as its options describe it, and its tokenizer.
        model: The model, possibly with custom Python code.
    """
    with temporary_folder() as parent:
        folder = parent / MODEL_FOLDER
        folder.mkdir()
        config = copy.deepcopy(run.model_config)
        config.name_or_path = ""
        for custom in (config, model):
            if custom.is_custom_code():
                custom_object_save(custom, folder, config=config)
        # Write every field: a later version of the library may have other defaults.
        config.to_json_file(folder / "config.json", use_diff=False)
        # The generation settings belong to the run's pretrained weights.
        if run.weights_from is not None or generation_settings(run.start) is not None:
            model.generation_config.save_pretrained(folder)
        run.tokenizer.save_pretrained(parent / TOKENIZER_FOLDER)
        files = (path for path in sorted(parent.rglob("*")) if path.is_file())
        return {path.relative_to(parent).as_posix(): path.read_bytes() for path in files}


def read_model_config(config: CoreConfig, start: Checkpoint | None) -> PreTrainedConfig:
    """Load the model's configuration, and compare it with the copy in a checkpoint.

    Args:
        config: The options, which name it.
        start: The checkpoint that the run starts from. If the options name nothing on this machine,
            its copy is returned.

    Raises:
        CheckpointError: The configuration has changed since the checkpoint was written.
        ConfigError: It cannot be loaded.
    """
    if start is None:
        return load_config(config)
    allowed = _is_change_allowed(config, ARCHITECTURE)
    name = config.config_name or config.model_name_or_path
    if name is not None and not Path(name).exists() and not allowed:
        logger.info(
            f"{name} is not a local path: the model's configuration is the copy in {start.path}."
        )
        return load_config(with_copies(config, start))
    current = load_config(config)
    changed = config_changes(config, start, current)
    if changed and not allowed:
        option_name = next(option for option in ARCHITECTURE if getattr(config, option) is not None)
        raise CheckpointError(
            f"The model's configuration has changed since {start.path} was written: "
            f"{'; '.join(changed)}. Restore it, or allow the change with --change_on_resume "
            f"{option_name}."
        )
    if changed:
        logger.info(f"The model's configuration changes: {'; '.join(changed)}.")
    return current


def log_other_model(config: CoreConfig, init_from: Checkpoint, current: PreTrainedConfig) -> None:
    """Log how a new run's configuration differs from the run that provides its weights."""
    changed = config_changes(config, init_from, current)
    if changed:
        logger.info(
            f"The weights of {init_from.path} were trained in another configuration: "
            f"{'; '.join(changed)}."
        )


def config_changes(
    config: CoreConfig, checkpoint: Checkpoint, current: PreTrainedConfig
) -> list[str]:
    """Return a clause for each field that differs from the copy in a checkpoint."""
    saved = load_config(with_copies(config, checkpoint))
    # Built from all fields, like the copy: some classes then derive other values.
    rebuilt = type(current).from_dict(current.to_dict())
    # A field on only one side comes from another version of the library, or is never read.
    changed = differences(_model_fields(saved), _model_fields(rebuilt))
    # The model's Python code, if it comes from a folder.
    folder = config.config_name or config.model_name_or_path
    for path in sorted((checkpoint.path / MODEL_FOLDER).glob("*.py")):
        code_file = Path(folder or "", path.name)
        if folder and code_file.is_file() and code_file.read_bytes() != path.read_bytes():
            changed.append(f"{path.name} has another content")
    return changed


def _model_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the fields that affect a model, by name; `a.b` is field b of the inner object a."""
    bases = [base for base in type(config).__mro__ if issubclass(base, PreTrainedConfig)]
    declared = {name for base in bases for name in inspect.signature(base).parameters}
    fields: dict[str, Any] = {}
    for name, value in json.loads(config.to_json_string(use_diff=False)).items():
        inner = vars(config).get(name)  # attributes raise if layers may differ
        if name not in _COMPARED | (declared - _NOT_COMPARED):
            continue
        if isinstance(inner, PreTrainedConfig):
            fields |= {f"{name}.{key}": field for key, field in _model_fields(inner).items()}
        else:
            fields[name] = value
    return fields


def read_tokenizer(config: CoreConfig, start: Checkpoint | None) -> PreTrainedTokenizerBase:
    """Load the tokenizer, and compare it with the copy in a checkpoint.

    Args:
        config: The options, which name it.
        start: The checkpoint that the run starts from. If the options name nothing on this machine,
            its copy is returned.

    Raises:
        CheckpointError: It does not give the same ids as when the checkpoint was written.
        ConfigError: It cannot be loaded.
    """
    if start is None:
        return tokenizer_of(config)
    names = (*TOKENIZER_FILES, "model_name_or_path")
    option = next(option for option in names if getattr(config, option) is not None)
    files = [getattr(config, option)]
    if option == "vocab_file":
        files.append(config.merges_file)
    allowed = _is_change_allowed(config, names)
    if not all(Path(file).exists() for file in files) and not allowed:
        logger.info(f"{files[0]} is not a local path: the tokenizer is the copy in {start.path}.")
        return tokenizer_of(with_copies(config, start))
    tokenizer = tokenizer_of(config)
    ids = fingerprint(tokenizer)
    # Another version of the library may compute another fingerprint for the same tokenizer.
    changed = ids != start.metadata["tokenizer"] and ids != fingerprint(
        tokenizer_of(with_copies(config, start))
    )
    if allowed:
        comparison = "changes: it gives other ids than" if changed else "gives the same ids as"
        logger.info(f"The tokenizer {files[0]} {comparison} the copy in {start.path}.")
    elif changed:
        raise CheckpointError(
            f"The tokenizer {files[0]} gives other ids than the copy in {start.path}: it has "
            f"changed. Restore it, or allow the change with --change_on_resume {option}."
        )
    return tokenizer


def _is_change_allowed(config: CoreConfig, names: tuple[str, ...]) -> bool:
    """Return whether `change_on_resume` names one of these options."""
    return not set(names).isdisjoint(named_changes(config))
