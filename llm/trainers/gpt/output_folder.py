"""The folder that a run writes to, and the refusal to replace anything in it."""

import os
from pathlib import Path

from llm.checkpoint.format import Checkpoint
from llm.checkpoint.run_folder import RunFolder
from llm.config import options
from llm.data.formats.parts import part_files
from llm.data.options import training_paths
from llm.errors import ConfigError
from llm.trainers.gpt.config import CoreConfig

_OUTPUT_OPTIONS = ("output_dir", "data_cache_dir", "metrics_file", "stage_checkpoints")
"""Options with a path that the run writes to."""


def check_output_folder(
    config: CoreConfig,
    folder: RunFolder,
    resume_from: Checkpoint | None,
    *,
    config_file: Path | None,
) -> None:
    """Refuse to write a run over another run, over other files, or over its own inputs.

    Raises:
        ConfigError: The folder is taken, or the run would replace an input inside it.
    """
    run_folders = {Path(os.path.realpath(folder.path)), Path(os.path.realpath(folder.checkpoints))}
    if resume_from is not None and not run_folders.isdisjoint(resume_from.path.resolve().parents):
        folder.check_contents(resume=True, overwrite=False)
        return
    inputs = [
        (name, input_path)
        for name, input_path in options.path_options(config)
        if name not in _OUTPUT_OPTIONS
    ]
    if config_file is not None and config.overwrite_output_dir:
        inputs.append(("config", str(config_file)))
    for name, input_path in inputs:
        _check_input_outside(folder, name, input_path)
    # A checkpoint of another run does not resume the run in this folder.
    resume = config.resume_from_checkpoint is True
    folder.check_contents(resume=resume, overwrite=config.overwrite_output_dir)


def _check_input_outside(folder: RunFolder, option_name: str, input_path: str) -> None:
    """Refuse an input of a run among the files that the run would replace."""
    input_files = _find_input_files(option_name, input_path)
    if any(folder.would_overwrite(file) for file in input_files):
        raise ConfigError(
            f"--{option_name} {input_path} is in --output_dir {folder.path}, which this run would "
            "replace; name another --output_dir, or move it."
        )


def _find_input_files(option_name: str, input_path: str) -> list[Path]:
    """Return the files and folders that a path option names, as far as they exist."""
    if option_name in ("init_from", "branch_from") and not os.path.exists(input_path):
        candidates = [Path(input_path).parent]  # RUN/STEP
    else:
        # A prefix names two files, or parts.
        token_files = [Path(f"{input_path}.bin"), Path(f"{input_path}.idx")]
        candidates = [Path(input_path), *token_files, *part_files(Path(input_path))]
    return [candidate for candidate in candidates if os.path.exists(candidate)]


def choose_default_output_dir(config: CoreConfig) -> str:
    """Return `runs/MODEL-DATA`, named after the model and the data of the options."""
    model = config.model_name_or_path or config.config_name or config.model_type or "gpt2"
    if config.model_size is not None:
        model = f"{Path(model).name}-{config.model_size}"
    text = config.dataset_name or config.train_file or config.validation_file
    if text is not None:
        data = Path(text).stem
    else:
        # Paths, and perhaps their weights in the blend.
        blend = training_paths(config) or config.valid_data_path
        prefixes = [Path(item).name for item in blend if isinstance(item, str)]
        # A prefix may contain dots: remove only the suffix of a flat file.
        data = prefixes[0].removesuffix(".bin") if prefixes else "data"
        if len(prefixes) > 1:
            data += f"+{len(prefixes) - 1}"
    return str(Path("runs") / f"{Path(str(model)).name}-{data}")
