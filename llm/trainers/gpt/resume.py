"""Where a run starts from: a checkpoint of its own, the weights of another run, or a seed."""

import logging
import os
from pathlib import Path
from typing import Any

from llm.checkpoint.format import MANIFEST, Checkpoint, checkpoint_folders, name_of
from llm.checkpoint.load import newest_valid, read_valid
from llm.checkpoint.run_folder import RunFolder, check_unchanged, differences
from llm.config import options
from llm.errors import CheckpointError, ConfigError
from llm.runtime.rng import draw_seed
from llm.trainers.gpt.config import GPTConfig

NOT_READ = ("output_dir", "data_cache_dir")
DATA = ("dataset_name", "train_file", "data_path", "train_data_path")
LENGTHS = ("max_train_steps", "max_train_samples", "num_train_epochs")

logger = logging.getLogger("llm")


def find_resume(config: GPTConfig, run: RunFolder) -> Checkpoint | None:
    """The checkpoint that `resume_from_checkpoint` goes on from; None where there is none yet.

    Raises:
        CheckpointError: The one that is named is damaged, or a fixed option has changed.
        ConfigError: The run has ended without a checkpoint.
    """
    if isinstance(config.resume_from_checkpoint, str):
        found = read_valid(Path(config.resume_from_checkpoint))
    else:
        newest = newest_valid(run.checkpoints)
        if newest is None:
            _refuse_unreadable(run)
            run.check_unfinished()
            logger.info(f"No checkpoint in {run.checkpoints} yet: the run starts afresh.")
            return None
        found = newest
    if config.eval_only:
        return found  # its weights are all that is taken
    saved = _saved_options(found, "fixed")
    present = options.renamed(GPTConfig)
    named = [present.get(name, name) for name in config.change_on_resume]
    allowed = (*named, *_lengthened(config, found))
    check_unchanged(saved, fixed_options(config, like=saved), allowed=allowed)
    return found


def check_folder(
    config: GPTConfig, run: RunFolder, resume_from: Checkpoint | None, *, config_file: Path | None
) -> None:
    """Refuse to write a run over another one, over other files, or over what it is made from.

    Args:
        config: The options.
        run: The run's folder.
        resume_from: The checkpoint that the run goes on from.
        config_file: The TOML file that options are from.

    Raises:
        ConfigError: The folder is taken, or an input lies in it where the run would replace it.
    """
    own = {Path(os.path.realpath(run.path)), Path(os.path.realpath(run.checkpoints))}
    if resume_from is not None and not own.isdisjoint(resume_from.path.resolve().parents):
        run.check(resume=True, overwrite=False)
        return
    read = [(name, text) for name, text in options.paths(config) if name not in NOT_READ]
    if config_file is not None and config.overwrite_output_dir:
        read.append(("config", str(config_file)))
    for name, text in read:
        sources = [text, f"{text}.bin", f"{text}.idx"]  # a prefix names two files
        if name == "init_from" and not os.path.exists(text):
            sources = [str(Path(text).parent)]  # RUN/STEP
        if any(run.endangers(Path(source)) for source in sources if os.path.exists(source)):
            raise ConfigError(
                f"--{name} {text} lies in --output_dir {run.path}, which this run would replace; "
                "name another --output_dir, or move it."
            )
    # A checkpoint of another run is no reason to go on with the one that this folder holds.
    resume = config.resume_from_checkpoint is True
    run.check(resume=resume, overwrite=config.overwrite_output_dir)


def check_same_data(config: GPTConfig, found: Checkpoint | None, digest: str) -> None:
    """Refuse to go on with other training data than before.

    Raises:
        CheckpointError: The tokens have changed since the checkpoint was written.
    """
    if found is None:
        return
    before = found.metadata.get("data")
    allowed = set(DATA) & set(config.change_on_resume)
    if before is not None and before != digest and not allowed:
        raise CheckpointError(
            f"The training data are no longer those with which {found.path} was reached, although "
            "the options that name them are the same; restore them, allow the change with "
            "--change_on_resume and the option's name, or start in another --output_dir."
        )


def _refuse_unreadable(run: RunFolder) -> None:
    """Never start afresh over checkpoints, not even over ones that cannot be used."""
    there = checkpoint_folders(run.checkpoints)
    if there:
        raise CheckpointError(
            f"--resume_from_checkpoint: none of the {len(there)} checkpoints in {run.checkpoints} "
            "can be used (the lines above say why), and a fresh start would replace them; name a "
            "sound one, or start in another --output_dir."
        )


def _lengthened(config: GPTConfig, found: Checkpoint) -> list[str]:
    """Options of length that may grow, since no step that was done would have been another."""
    saved = found.metadata["fixed"]
    kind = saved.get("lr_scheduler_type")
    if kind == "warmup_stable_decay":
        total = saved.get("max_train_steps")
        if total is None:
            return []
        decay = saved.get("num_decay_steps")
        if found.step > total - (max(1, total // 10) if decay is None else decay):
            return []  # the decay has begun
    elif kind not in ("constant", "constant_with_warmup"):
        return []
    return [
        name
        for name in LENGTHS
        if saved.get(name) is not None and (getattr(config, name) or 0) >= saved[name]
    ]


def find_init(config: GPTConfig) -> Checkpoint | None:
    """The checkpoint whose weights `init_from` names: a run's newest valid one, or that of a step.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    if config.init_from is None:
        return None
    path = Path(config.init_from)
    if (path / MANIFEST).exists():
        return read_valid(path)
    for run, name in ((path, None), (path.parent, path.name)):
        folder = RunFolder(run).checkpoints
        if not folder.is_dir():
            continue
        if name is None:
            newest = newest_valid(folder)
            if newest is not None:
                return newest
        else:
            step = name_of(int(name)) if name.isdigit() else name
            return read_valid(folder / step)
    raise CheckpointError(
        f"--init_from {path} holds no valid checkpoint; name a run's folder, RUN/STEP, or a "
        "checkpoint's own folder."
    )


def fixed_options(config: GPTConfig, *, like: dict[str, Any] | None = None) -> dict[str, Any]:
    """The options that a resumed run must keep, as JSON has them.

    Args:
        config: The options.
        like: Fixed options of a checkpoint; a seed that nobody gives is taken from there.
    """
    fixed = _options(config, resume="fixed")
    if like is not None and fixed["seed"] is None:
        fixed["seed"] = like.get("seed")
    return fixed


def logged_options(config: GPTConfig) -> dict[str, Any]:
    """The options that a resumed run may change, and logs, as JSON has them."""
    return _options(config, resume="logged")


def _options(config: GPTConfig, *, resume: str) -> dict[str, Any]:
    values = {
        field.name: getattr(config, field.name)
        for field in options.fields(GPTConfig)
        if field.option.resume == resume
    }
    return {n: list(value) if isinstance(value, tuple) else value for n, value in values.items()}


def _saved_options(found: Checkpoint, kind: str) -> dict[str, Any]:
    """Return the fixed or the logged options of a checkpoint, which may have former names."""
    return options.with_present_names(GPTConfig, found.metadata.get(kind, {}))


def log_changes(config: GPTConfig, found: Checkpoint, *, ranks: int) -> None:
    """Log the settings that differ from those before the resume, if they change its numbers."""
    fixed, logged = _saved_options(found, "fixed"), _saved_options(found, "logged")
    changed = [
        *differences(fixed, fixed_options(config, like=fixed)),
        *differences(logged, logged_options(config)),
        *differences({"number of ranks": found.world_size}, {"number of ranks": ranks}),
    ]
    if changed:
        logger.info(f"The run goes on with other settings: {'; '.join(changed)}.")


def choose_seed(config: GPTConfig, resume_from: Checkpoint | None) -> int:
    """The seed that was asked for, that of the run that goes on, or one drawn anew."""
    if config.seed is not None:
        return config.seed
    if resume_from is not None:
        return int(resume_from.metadata["fixed"]["seed"])
    return draw_seed()
