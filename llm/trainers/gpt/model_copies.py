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
from llm.checkpoint.run_folder import describe_changes
from llm.errors import CheckpointError
from llm.models.configuration import load_config
from llm.models.options import ARCHITECTURE_OPTIONS
from llm.runtime.files import temporary_folder
from llm.tokenizers.load_tokenizer import compute_fingerprint
from llm.tokenizers.options import TOKENIZER_FILES
from llm.trainers.gpt.config import CoreConfig
from llm.trainers.gpt.load_trained_model import (
    load_run_tokenizer,
    read_generation_settings,
    use_checkpoint_copies,
)
from llm.trainers.gpt.recorded_options import list_changeable_options
from llm.trainers.gpt.seams import Run

_UNDECLARED_MODEL_FIELDS = {"model_type", "tie_word_embeddings"}
"""Fields that change training even if a model's class does not declare them."""

_GENERAL_FIELDS = {"use_cache", *inspect.signature(PreTrainedConfig).parameters}
"""Fields that a model's class may declare but that do not change training."""

_TOKENIZER_OPTIONS = (*TOKENIZER_FILES, "model_name_or_path")
"""The options that can name a tokenizer, in their order of preference."""

logger = logging.getLogger("llm")


def collect_model_files(run: Run, model: PreTrainedModel) -> dict[str, bytes]:
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
        for code_owner in (config, model):
            if code_owner.is_custom_code():
                custom_object_save(code_owner, folder, config=config)
        # Write every field: a later version of the library may have other defaults.
        config.to_json_file(folder / "config.json", use_diff=False)
        # The generation settings belong to the run's pretrained weights.
        if run.weights_from is not None or read_generation_settings(run.start) is not None:
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
    is_change_allowed = _is_change_allowed(config, ARCHITECTURE_OPTIONS)
    name = config.config_name or config.model_name_or_path
    if name is not None and not Path(name).exists() and not is_change_allowed:
        logger.info(
            f"{name} is not a local path: the model's configuration is the copy in {start.path}."
        )
        return load_config(use_checkpoint_copies(config, start))
    model_config = load_config(config)
    changes = describe_config_changes(config, start, model_config)
    if changes and not is_change_allowed:
        option_name = next(
            option for option in ARCHITECTURE_OPTIONS if getattr(config, option) is not None
        )
        raise CheckpointError(
            f"The model's configuration has changed since {start.path} was written: "
            f"{'; '.join(changes)}. Restore it, or allow the change with --change_on_resume "
            f"{option_name}."
        )
    if changes:
        logger.info(f"The model's configuration changes: {'; '.join(changes)}.")
    return model_config


def log_config_changes(
    config: CoreConfig, init_from: Checkpoint, model_config: PreTrainedConfig
) -> None:
    """Log how a new run's configuration differs from the run that provides its weights."""
    changes = describe_config_changes(config, init_from, model_config)
    if changes:
        logger.info(
            f"The weights of {init_from.path} were trained in another configuration: "
            f"{'; '.join(changes)}."
        )


def describe_config_changes(
    config: CoreConfig, checkpoint: Checkpoint, model_config: PreTrainedConfig
) -> list[str]:
    """Return a clause for each difference between a model's configuration and a checkpoint's copy.

    Args:
        config: The options. If they name a folder, its Python files are compared too.
        checkpoint: The checkpoint with the copy.
        model_config: The model's configuration, as the options describe it.
    """
    saved_config = load_config(use_checkpoint_copies(config, checkpoint))
    # Built from all fields, like the copy: some classes then derive other values.
    rebuilt_config = type(model_config).from_dict(model_config.to_dict())
    # A field in only one of them comes from another version of the library, or is never read.
    changes = describe_changes(_list_model_fields(saved_config), _list_model_fields(rebuilt_config))
    code_folder = config.config_name or config.model_name_or_path
    if code_folder:
        for saved_file in sorted((checkpoint.path / MODEL_FOLDER).glob("*.py")):
            code_file = Path(code_folder, saved_file.name)
            if code_file.is_file() and code_file.read_bytes() != saved_file.read_bytes():
                changes.append(f"{saved_file.name} has another content")
    return changes


def _list_model_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the fields that affect a model, by name; `a.b` is field b of sub-configuration a."""
    bases = [base for base in type(config).__mro__ if issubclass(base, PreTrainedConfig)]
    declared_names = {name for base in bases for name in inspect.signature(base).parameters}
    model_names = _UNDECLARED_MODEL_FIELDS | (declared_names - _GENERAL_FIELDS)
    fields: dict[str, Any] = {}
    for name, value in json.loads(config.to_json_string(use_diff=False)).items():
        if name not in model_names:
            continue
        attribute = vars(config).get(name)  # `getattr` raises if layers may differ
        if isinstance(attribute, PreTrainedConfig):
            fields |= {
                f"{name}.{key}": field for key, field in _list_model_fields(attribute).items()
            }
        else:
            fields[name] = value
    return fields


def read_tokenizer(
    config: CoreConfig, model_config: PreTrainedConfig, start: Checkpoint | None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer, and compare it with the copy in a checkpoint.

    Args:
        config: The options, which name it.
        model_config: The model's configuration.
        start: The checkpoint that the run starts from. If the options name nothing on this machine,
            its copy is returned.

    Raises:
        CheckpointError: It does not give the same ids as when the checkpoint was written.
        ConfigError: It cannot be loaded.
    """
    if start is None:
        return load_run_tokenizer(config, model_config)
    option_name = next(name for name in _TOKENIZER_OPTIONS if getattr(config, name) is not None)
    source = getattr(config, option_name)
    files = [source, config.merges_file] if option_name == "vocab_file" else [source]
    is_local = all(Path(file).exists() for file in files)
    if not is_local and not _is_change_allowed(config, _TOKENIZER_OPTIONS):
        logger.info(f"{source} is not a local path: the tokenizer is the copy in {start.path}.")
        return load_run_tokenizer(use_checkpoint_copies(config, start))
    tokenizer = load_run_tokenizer(config, model_config)
    _check_same_tokenizer(config, start, tokenizer, option_name=option_name)
    return tokenizer


def _check_same_tokenizer(
    config: CoreConfig, start: Checkpoint, tokenizer: PreTrainedTokenizerBase, *, option_name: str
) -> None:
    """Refuse a tokenizer with other ids than a checkpoint's copy, or log an allowed change."""
    source = getattr(config, option_name)
    has_changed = _has_tokenizer_changed(config, start, tokenizer)
    if _is_change_allowed(config, _TOKENIZER_OPTIONS):
        relation = "changes: it gives other ids than" if has_changed else "gives the same ids as"
        logger.info(f"The tokenizer {source} {relation} the copy in {start.path}.")
    elif has_changed:
        raise CheckpointError(
            f"The tokenizer {source} gives other ids than the copy in {start.path}: it has "
            f"changed. Restore it, or allow the change with --change_on_resume {option_name}."
        )


def _has_tokenizer_changed(
    config: CoreConfig, start: Checkpoint, tokenizer: PreTrainedTokenizerBase
) -> bool:
    """Return whether a tokenizer gives other ids than the one that wrote a checkpoint."""
    digest = compute_fingerprint(tokenizer)
    if digest == start.metadata["tokenizer"]:
        return False
    # Another version of the library may compute another fingerprint for the same tokenizer.
    copied_tokenizer = load_run_tokenizer(use_checkpoint_copies(config, start))
    return digest != compute_fingerprint(copied_tokenizer)


def _is_change_allowed(config: CoreConfig, option_names: tuple[str, ...]) -> bool:
    """Return whether `change_on_resume` names one of these options."""
    return not set(option_names).isdisjoint(list_changeable_options(config))
