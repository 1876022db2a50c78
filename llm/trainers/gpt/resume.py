"""Find the start of a run: a checkpoint, a branch, weights, or a seed; check what it must keep."""

import dataclasses
import json
import logging
import os
from pathlib import Path
from typing import Any

import torch

from llm.checkpoint.format import MANIFEST, Checkpoint, checkpoint_folders, name_of, step_of
from llm.checkpoint.load import newest_valid, read_valid
from llm.checkpoint.retention import BEST
from llm.checkpoint.run_folder import RunFolder, check_unchanged, differences
from llm.config import options
from llm.data.batch_plan import BatchPlan
from llm.data.data_digest import has_changed
from llm.data.formats.parts import part_files
from llm.data.options import LENGTHS, SOURCES
from llm.data.skipped_samples import NONE_SKIPPED, SkippedSamples, skipped_ranges
from llm.errors import CheckpointError, ConfigError
from llm.models.compilation import can_compile
from llm.optim.schedule import is_constant
from llm.parallel.accelerator import default_precision
from llm.runtime.rng import draw_seed
from llm.trainers.gpt.config import CoreConfig

_NOT_INPUTS = ("output_dir", "data_cache_dir")
_BY_DEVICE = ("mixed_precision", "tf32", "torch_compile")
"""Options with a default that depends on the device."""

_RECORDED = (
    *("fixed", "logged", "global_batch_size", "data", "tokenizer", "initial_weights"),
    "skip_samples",
)
"""Metadata of a checkpoint that a run needs to start from it."""

logger = logging.getLogger("llm")


def find_resume(config: CoreConfig, run: RunFolder) -> Checkpoint | None:
    """Return the checkpoint of `resume_from_checkpoint`; None if none exists yet.

    Args:
        config: The options.
        run: The run's folder.

    Raises:
        CheckpointError: The named checkpoint, or every one in the run's folder, is damaged, or a
            fixed option has changed.
        ConfigError: The run has finished without a checkpoint.
    """
    if not config.resume_from_checkpoint:
        return None
    if isinstance(config.resume_from_checkpoint, str):
        path = Path(config.resume_from_checkpoint)
        if not (path / MANIFEST).exists():
            raise CheckpointError(
                f"--resume_from_checkpoint {path} is not a checkpoint: it has no {MANIFEST}; name "
                "a folder such as RUN/checkpoints/step_00001000, or no path for the newest one of "
                "--output_dir."
            )
        checkpoint = read_valid(path, together=True)
    else:
        newest = newest_valid(run.checkpoints, together=True)
        if newest is None:
            # A fresh start never replaces checkpoints, not even damaged ones.
            damaged = checkpoint_folders(run.checkpoints)
            if damaged:
                raise CheckpointError(
                    f"--resume_from_checkpoint: none of the {len(damaged)} checkpoints in "
                    f"{run.checkpoints} can be used (the lines above say why), and a fresh start "
                    "would replace them; name a sound one, or start in another --output_dir."
                )
            run.check_unfinished()
            logger.info(
                f"No checkpoint in {run.checkpoints} yet: the run starts from the beginning."
            )
            return None
        checkpoint = newest
    check_known(config, checkpoint)
    if config.eval_only:
        return checkpoint  # only its weights are loaded
    saved = _saved_options(config, checkpoint, "fixed")
    allowed = (*named_changes(config), *lengthened(config, checkpoint))
    fixed = fixed_options(config, like=saved)
    # If an older checkpoint lacks an option, the option did not exist yet, so it has not changed.
    state_options = _state_options(dataclasses.replace(config, **saved))
    changed = differences(state_options, _state_options(config))
    if changed:
        new_options = {
            n: v for n, v in fixed.items() if n not in state_options and n not in allowed
        }
        raise CheckpointError(
            f"{checkpoint.path} holds another state of the optimizer: "
            f"{'; '.join([*differences(saved, new_options), *changed])}. Give the former values, "
            "or start another run from its weights with --init_from."
        )
    check_unchanged(saved, fixed, allowed=allowed)
    return checkpoint


def _state_options(config: CoreConfig) -> dict[str, Any]:
    """Return the options that determine an optimizer's state, with the default optimizer's name."""
    declared = options.fields(type(config))
    names = [field.name for field in declared if field.option.resume == "state"]
    values = {name: getattr(config, name) for name in names}
    return values | {"optimizer": config.optimizer or config.default_optimizer}


def check_known(config: CoreConfig, checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint with fixed options that this installation does not have.

    Raises:
        CheckpointError: Names the options; without them the run would silently train another model.
            Or the checkpoint lacks a record of its run, or an option has a value of another type.
    """
    missing = [name for name in _RECORDED if name not in checkpoint.metadata]
    if missing:
        raise CheckpointError(
            f"{checkpoint.path} has no record of {' and '.join(missing)}, so no run can start "
            "from it; name another checkpoint."
        )
    _check_types(config, checkpoint)
    option_names = {field.name for field in options.fields(type(config))}
    unknown = _saved_options(config, checkpoint, "fixed").keys() - option_names
    if unknown:
        names = " and ".join(f"--{name}" for name in sorted(unknown))
        raise CheckpointError(
            f"{checkpoint.path} was trained with {names}, which this installation does not have. "
            "Install the extension or the version of llm-trainers that has them, or start another "
            "run from the exported model by --model_name_or_path."
        )


def _check_types(config: CoreConfig, checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint with values of another type in the record of its options."""
    declared = {field.name: field for field in options.fields(type(config))}
    for kind in ("fixed", "logged"):
        for name, value in checkpoint.metadata[kind].items():
            if name in declared and not _has_type(declared[name], value):
                raise CheckpointError(
                    f"{checkpoint.path} is damaged: it records {value!r} as --{name}; name another "
                    "checkpoint."
                )


def _has_type(field: options.Field, value: Any) -> bool:
    """Return whether a JSON value can be an option's, perhaps one of another version."""
    if value is None:
        return field.optional or field.default is None
    if field.many != isinstance(value, list):
        return False
    types: set[type] = {*field.members}
    if any(map(dataclasses.is_dataclass, types)):
        types.add(dict)
    if not types.isdisjoint((float, options.Tokens)):
        types.add(int)
    return all(type(item) in types for item in (value if field.many else [value]))


def check_folder(
    config: CoreConfig, run: RunFolder, resume_from: Checkpoint | None, *, config_file: Path | None
) -> None:
    """Refuse to write a run over another run, over other files, or over its own inputs.

    Args:
        config: The options.
        run: The run's folder.
        resume_from: The checkpoint that the run resumes from.
        config_file: The TOML file of `--config`.

    Raises:
        ConfigError: The folder is taken, or the run would replace an input inside it.
    """
    run_folders = {Path(os.path.realpath(run.path)), Path(os.path.realpath(run.checkpoints))}
    if resume_from is not None and not run_folders.isdisjoint(resume_from.path.resolve().parents):
        run.check(resume=True, overwrite=False)
        return
    inputs = [(name, text) for name, text in options.paths(config) if name not in _NOT_INPUTS]
    if config_file is not None and config.overwrite_output_dir:
        inputs.append(("config", str(config_file)))
    for name, text in inputs:
        # A prefix names two files, or parts.
        sources = [text, f"{text}.bin", f"{text}.idx", *map(str, part_files(Path(text)))]
        if name in ("init_from", "branch_from") and not os.path.exists(text):
            sources = [str(Path(text).parent)]  # RUN/STEP
        if any(run.endangers(Path(source)) for source in sources if os.path.exists(source)):
            raise ConfigError(
                f"--{name} {text} is in --output_dir {run.path}, which this run would replace; "
                "name another --output_dir, or move it."
            )
    # A checkpoint of another run does not resume the run in this folder.
    resume = config.resume_from_checkpoint is True
    run.check(resume=resume, overwrite=config.overwrite_output_dir)


def check_same_data(
    config: CoreConfig, checkpoint: Checkpoint | None, digest: dict[str, Any], *, is_branch: bool
) -> None:
    """Refuse to resume or to branch with other training data, or log an allowed change.

    Args:
        config: The options.
        checkpoint: The checkpoint that the run starts from.
        digest: Result of `digest_of` for the training data.
        is_branch: Whether the start begins a branch.

    Raises:
        CheckpointError: The tokens have changed since the checkpoint was written.
    """
    if checkpoint is None:
        return
    changed = has_changed(checkpoint.metadata["data"], digest)
    if not set(SOURCES).isdisjoint(named_changes(config)):
        comparison = "change: they are not those" if changed else "are the same as those"
        logger.info(f"The training data {comparison} with which {checkpoint.path} was reached.")
    elif changed:
        alternative = "" if is_branch else ", or start in another --output_dir"
        raise CheckpointError(
            f"The training data have changed since {checkpoint.path} was saved, although the "
            "options that name them are the same; restore the data, or allow the change with "
            f"--change_on_resume and the option's name{alternative}."
        )


def lengthened(config: CoreConfig, checkpoint: Checkpoint) -> list[str]:
    """Return the length options that may grow, because past learning rates do not change."""
    saved = checkpoint.metadata["fixed"]
    kind = saved.get("lr_scheduler_type")
    if kind == "warmup_stable_decay":
        total = saved.get("max_train_steps")
        if total is None or saved.get("num_decay_tokens") is not None:
            return []
        decay = saved.get("num_decay_steps")
        if checkpoint.step > total - (max(1, total // 10) if decay is None else decay):
            return []  # the decay has begun
    elif not is_constant(kind):
        return []
    return [
        name
        for name in (*LENGTHS, "num_train_epochs")
        if saved.get(name) is not None and (getattr(config, name) or 0) >= saved[name]
    ]


def find_start(location: str, *, option: str) -> Checkpoint:
    """Return a checkpoint of another run: the newest valid one, or a given step.

    Args:
        location: RUN, RUN/STEP, RUN/best, or the checkpoint's own folder.
        option: The option that names it, for messages.

    Raises:
        CheckpointError: The checkpoint is missing or damaged.
    """
    path = Path(location)
    if (path / MANIFEST).exists():
        return read_valid(path, together=True)
    for run, name in ((path, None), (path.parent, path.name)):
        folder = RunFolder(run).checkpoints
        if not folder.is_dir():
            continue
        if name is None:
            newest = newest_valid(folder, together=True)
            if newest is not None:
                return newest
        else:
            chosen = folder / (name_of(int(name)) if name.isdigit() else name)
            if not (chosen / MANIFEST).exists():
                steps = ", ".join(str(step_of(path)) for path in checkpoint_folders(folder))
                raise CheckpointError(
                    f"--{option} {path} names no checkpoint of {run}, which has the steps "
                    f"{steps or '(none)'}; name one of them."
                )
            return read_valid(chosen, together=True)
    raise CheckpointError(
        f"--{option} {path} holds no valid checkpoint; name a run's folder, RUN/STEP, or a "
        "checkpoint's own folder."
    )


def fixed_options(config: CoreConfig, *, like: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the options that a resumed run must keep, as JSON values.

    Args:
        config: The options.
        like: Fixed options of a checkpoint; provide seed and precision if the options do not.
    """
    fixed = _recorded_values(config, "fixed")
    for name in ("seed", *_BY_DEVICE):
        if like is not None and name in fixed and fixed[name] is None:
            fixed[name] = like.get(name)
    return fixed


def _recorded_values(config: CoreConfig, kind: str) -> dict[str, Any]:
    """Return the options that checkpoints record as fixed or as logged, as JSON values."""
    return _as_json(
        {field.name: getattr(config, field.name) for field in _recorded_fields(config, kind)}
    )


def _recorded_fields(config: CoreConfig, kind: str) -> list[options.Field]:
    """Return the options that checkpoints record as fixed or as logged."""
    kinds = ("state", "fixed") if kind == "fixed" else (kind,)
    return [field for field in options.fields(type(config)) if field.option.resume in kinds]


def _as_json(values: dict[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(values, default=dataclasses.asdict))
    return plain


def recorded_options(config: CoreConfig) -> dict[str, dict[str, Any]]:
    """Return the options for a checkpoint's record, without extension options at their default."""
    default_names = {
        field.name
        for field in options.fields(type(config))
        if field.option.extension and getattr(config, field.name) == field.default
    }
    kinds = {"fixed": fixed_options(config), "logged": _recorded_values(config, "logged")}
    return {
        kind: {name: value for name, value in values.items() if name not in default_names}
        for kind, values in kinds.items()
    }


def _saved_options(config: CoreConfig, checkpoint: Checkpoint, kind: str) -> dict[str, Any]:
    """Return the fixed or the logged options of a checkpoint.

    Extension options that it does not record have their default.
    """
    defaults = {
        field.name: field.default
        for field in _recorded_fields(config, kind)
        if field.option.extension
    }
    saved: dict[str, Any] = checkpoint.metadata[kind]
    return _as_json(defaults) | saved


def named_changes(config: CoreConfig) -> list[str]:
    """Return the options in `change_on_resume`, with aliases resolved."""
    names = options.names_by_alias(type(config))
    return [names.get(name, name) for name in config.change_on_resume]


def log_changes(config: CoreConfig, checkpoint: Checkpoint, *, ranks: int) -> None:
    """Log settings that affect the numbers and differ from the checkpoint."""
    fixed, logged = (_saved_options(config, checkpoint, kind) for kind in ("fixed", "logged"))
    changed = [
        *differences(fixed, fixed_options(config, like=fixed)),
        *differences(logged, _recorded_values(config, "logged")),
        *differences({"number of ranks": checkpoint.world_size}, {"number of ranks": ranks}),
    ]
    if changed:
        logger.info(f"The run continues with other settings: {'; '.join(changed)}.")
    names = lengthened(config, checkpoint)
    longer = [name for name in names if getattr(config, name) > fixed[name]]
    if longer and config.cooldown_tokens is not None and checkpoint.metadata.get("branch"):
        logger.warning(
            f"--{longer[0]} does not make the run longer: the cooldown sets its length, "
            f"--cooldown_tokens {config.cooldown_tokens:,}."
        )


def choose_by_device(
    config: CoreConfig, resume_from: Checkpoint | None, device: torch.device
) -> dict[str, Any]:
    """Return the options in `_BY_DEVICE`: as set, from the checkpoint, or the device's defaults.

    Raises:
        ConfigError: A compiled run on a GPU is to be deterministic.
    """
    compiles = can_compile(device) and not config.deterministic
    values = {**default_precision(device), "torch_compile": compiles}
    if resume_from is not None and not config.eval_only:
        fixed, logged = (_saved_options(config, resume_from, kind) for kind in ("fixed", "logged"))
        values = {name: (fixed | logged)[name] for name in _BY_DEVICE}
    overrides = {name: getattr(config, name) for name in _BY_DEVICE}
    values |= {name: value for name, value in overrides.items() if value is not None}
    if config.deterministic and values["torch_compile"] and device.type == "cuda":
        # On an H200 with PyTorch 2.11, the first gradient after a resume differed in 3 of 6 runs.
        raise ConfigError(
            "--deterministic cannot be combined with --torch_compile on a GPU: a compiled run may "
            "have other bits after a resume. Set --no_torch_compile, or leave --deterministic out."
        )
    return values


def keep_batch_size(config: CoreConfig, resume_from: Checkpoint | None) -> CoreConfig:
    """Return the options with the checkpoint's micro-batch instead of `auto`."""
    if resume_from is None or config.per_device_train_batch_size != "auto":
        return config
    name = "per_device_train_batch_size"
    size = _saved_options(config, resume_from, "logged")[name]
    return dataclasses.replace(config, **{name: size})


def choose_seed(config: CoreConfig, resume_from: Checkpoint | None) -> int:
    """Return the seed from the options or the checkpoint, or a new one."""
    if config.seed is not None:
        return config.seed
    if resume_from is not None:
        return int(resume_from.metadata["fixed"]["seed"])
    return draw_seed()


def choose_skipped(
    config: CoreConfig, resume_from: Checkpoint | None, plan: BatchPlan
) -> SkippedSamples:
    """Return the samples to skip, from the options and the checkpoint.

    Raises:
        ConfigError: The options name samples that the checkpoint has trained on or skipped: every
            later sample would move to another step.
    """
    new_ranges = skipped_ranges(config.skip_samples)
    if resume_from is None:
        return NONE_SKIPPED.skip(new_ranges)
    saved = NONE_SKIPPED.skip(skipped_ranges(resume_from.metadata["skip_samples"]))
    skipped = saved.skip(new_ranges)
    position, _ = plan.step_positions(resume_from.step)
    _, reached = saved.span((0, position))
    if skipped.ranges_below(reached) != saved.ranges_below(reached):
        raise ConfigError(
            f"--skip_samples {config.skip_samples} names samples below {reached:,}, which "
            f"{resume_from.path} has been trained on or has passed; name later ones, or resume "
            "from an earlier checkpoint with --resume_from_checkpoint PATH."
        )
    return skipped


_OF_COOLDOWN = ("cooldown_tokens", "cooldown_shape", "min_learning_rate")
"""Fixed options that a branch with a cooldown may change, because they first apply in it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Branch:
    """The point where a branch left its parent; its checkpoints record this as `branch`.

    Attributes:
        parent: The parent's checkpoint, an absolute path.
        step: The step of that checkpoint.
        cooldown_from: Steps done when the learning rate begins to fall; None without a cooldown.
    """

    parent: str
    step: int
    cooldown_from: int | None


def find_parent(config: CoreConfig, resume_from: Checkpoint | None) -> Checkpoint | None:
    """Return the checkpoint that a new branch starts from; None for any other run.

    Args:
        config: The options.
        resume_from: The checkpoint that the run resumes from, instead of its parent's.

    Raises:
        CheckpointError: The checkpoint is missing or damaged, a fixed option differs from the
            parent's, or the resumed run is not this branch.
    """
    if config.branch_from is None:
        return None
    if resume_from is not None:
        _check_same_parent(config.branch_from, resume_from)
        return None
    parent = find_start(config.branch_from, option="branch_from")
    check_known(config, parent)
    saved = _saved_options(config, parent, "fixed")
    allowed = (*named_changes(config), *lengthened(config, parent))
    check_unchanged(
        saved,
        fixed_options(config, like=saved),
        allowed=allowed if config.cooldown_tokens is None else (*allowed, *_OF_COOLDOWN),
        branch_from=parent.path,
    )
    return parent


def _check_same_parent(parent_name: str, resume_from: Checkpoint) -> None:
    recorded = resume_from.metadata.get("branch")
    if recorded is None:
        raise CheckpointError(
            f"--branch_from {parent_name} starts a branch in a separate folder, but "
            f"{resume_from.path} belongs to a run that is not a branch; name another --output_dir."
        )
    parent = Path(recorded["parent"])
    run = parent.parent.parent
    names = {parent, run, run / str(recorded["step"]), run / BEST}
    if Path(os.path.realpath(parent_name)) not in names:
        raise CheckpointError(
            f"{resume_from.path} belongs to a branch from {parent}, not from --branch_from "
            f"{parent_name}; name another --output_dir for another branch."
        )


def branch_of(
    config: CoreConfig, resume_from: Checkpoint | None, parent: Checkpoint | None
) -> Branch | None:
    """Return the record of a branch; None if the run is not a branch.

    Args:
        config: The options.
        resume_from: The checkpoint that the run resumes from.
        parent: The checkpoint that a new branch starts from.

    Raises:
        CheckpointError: The parent is in another cooldown.
    """
    start = resume_from or parent
    recorded = None if start is None else start.metadata.get("branch")
    if parent is None:
        return None if recorded is None else Branch(**recorded)
    cooldown_from = None if config.cooldown_tokens is None else parent.step
    falls_from = recorded["cooldown_from"] if recorded else None
    if falls_from is not None and cooldown_from is not None:
        # A branch of a run in its cooldown continues the same cooldown.
        if parent.metadata["fixed"]["cooldown_tokens"] != config.cooldown_tokens:
            raise CheckpointError(
                f"--cooldown_tokens {config.cooldown_tokens:,} begins at a stable rate, and "
                f"{parent.path} is in a cooldown already; branch from before its start."
            )
        cooldown_from = falls_from
    return Branch(
        parent=os.path.realpath(parent.path), step=parent.step, cooldown_from=cooldown_from
    )
