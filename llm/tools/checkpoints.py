"""Lists, verifies, exports and averages a run's checkpoints: `llm-trainers checkpoints runs/wiki`.

Exit codes: 0 success; 1 `--verify` found damage; 2 an option cannot work, or a file cannot be read
or written.
"""

import contextlib
import dataclasses
import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llm.checkpoint.format import (
    MEAN_FILE,
    REPLACED_SUFFIX,
    SUPERSEDED_SUFFIX,
    Checkpoint,
    checkpoint_step,
    list_checkpoint_folders,
    read_manifest,
)
from llm.checkpoint.load import list_checkpoints, read_part_names, read_verified_checkpoint
from llm.checkpoint.retention import BEST_LINK, is_permanent, list_leftovers
from llm.checkpoint.run_folder import MODEL_FILE_PATTERN, find_surrounding_run
from llm.config.command_line import parse_options
from llm.config.options import missing_requirements, option, option_group
from llm.config.program import program
from llm.errors import CheckpointError, ConfigError, one_line_with_path, os_error_remedy
from llm.runtime.files import delete, try_lock, write_whole
from llm.runtime.logging import counted, quiet_libraries
from llm.runtime.offline import forbid_downloads
from llm.runtime.process_settings import limit_spin_wait
from llm.runtime.world import ignore_ranks
from llm.trainers.gpt.config import CoreConfig
from llm.trainers.gpt.extensions import EXTENSIONS
from llm.trainers.gpt.load_trained_model import (
    build_untrained_model,
    choose_checkpoint,
    export_trained_model,
    load_trained_model,
    read_while_training,
    resolve_best_link,
    use_checkpoint_copies,
)
from llm.trainers.gpt.recorded_config import read_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from llm.models.model_card import Card
    from llm.trainers.gpt.seams import SavedWeights

_UNFINISHED_MARKER = ".unfinished"
"""Marks the folder of an export until it is complete."""
_EXPORT_NAMES = "|".join(
    [
        MODEL_FILE_PATTERN,
        re.escape(MEAN_FILE),
        re.escape(_UNFINISHED_MARKER),
        r"\.export-.*",
        r"\..*\.tmp",
    ]
)
"""Pattern of the file names in the folder of an export."""

_ROW_FORMAT = "{:>10}  {:>15}  {:>9}  {:<16}  {:>5}  {}"


@option_group("Checkpoints")
class CoreCheckpointsOptions:
    """The run, and the action on its checkpoints."""

    run: str = option("", "Folder of the run or of its checkpoints.", path=True)
    verify: bool = option(False, "Compare every byte with its checksum; exit with 1 on damage.")
    export: tuple[str, ...] = option(
        (),
        "STEP DIR: export a checkpoint (a number, latest or best) as a Hugging Face folder.",
        path=True,
    )
    last: int = option(
        5, "average RUN: newest checkpoints to average.", at_least=1, requires=("output",)
    )
    output: str | None = option(None, "average RUN: folder for the mean of the weights.", path=True)
    trust_remote_code: bool = option(
        False,
        "Run Python code that comes with a model, tokenizer or data set.",
        requires=("export", "output"),
    )
    export_dtype: Literal["fp32", "bf16", "fp16"] | None = option(
        None,
        "Precision of the exported weights: fp32, bf16 or fp16; by default the run's.",
        requires=("export", "output"),
    )


_SAVED_WEIGHTS = [
    extension.saved_weights for extension in EXTENSIONS if extension.saved_weights is not None
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointsOptions(CoreCheckpointsOptions, *(weights.options for weights in _SAVED_WEIGHTS)):  # type: ignore[misc]
    """The options of this program, including extensions' options."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A folder with the name of a checkpoint.

    Attributes:
        path: The folder.
        checkpoint: Its manifest; None if the manifest cannot be read.
        problem: Why it is not valid, or None.
    """

    path: Path
    checkpoint: Checkpoint | None
    problem: str | None


@program
def main(argv: Sequence[str]) -> int:
    """Run the program; return the exit code."""
    ignore_ranks()
    is_average = [*argv[:1]] == ["average"]
    options = parse_options(
        CheckpointsOptions,
        argv[1:] if is_average else argv,
        prog="llm-trainers checkpoints [average]",
        description="Show a run's checkpoints, verify them, export a model from one, or "
        "average the weights of several.",
        positional="run",
    )
    _check_options(options, is_average=is_average)
    run, checkpoints_folder = _locate_folders(Path(options.run))
    exit_code = 0
    if options.output is not None:
        with forbid_downloads():
            lines = [_average_checkpoints(run, checkpoints_folder, options, options.output)]
    elif options.export:
        with forbid_downloads():
            lines = [_export_checkpoint(run, checkpoints_folder, options)]
    else:
        lines, exit_code = _list_checkpoints(checkpoints_folder, verify=options.verify)
    sys.stdout.write("\n".join(lines) + "\n")
    return exit_code


def _check_options(options: CheckpointsOptions, *, is_average: bool) -> None:
    """Refuse options that cannot work together."""
    if problems := missing_requirements(options):
        raise ConfigError(" ".join(problems))
    if is_average != (options.output is not None):
        problem = "--output is missing" if is_average else "the word average is missing"
        raise ConfigError(
            "The mean of checkpoints is written by llm-trainers checkpoints average RUN --last 5 "
            f"--output DIR; {problem}."
        )
    if is_average and (options.verify or options.export):
        raise ConfigError(
            "average verifies the checkpoints that it reads; leave out --verify and --export."
        )
    if not options.run:
        raise ConfigError(
            "No run is named: give its folder first, as in llm-trainers checkpoints runs/wiki "
            "--verify."
        )
    if options.verify and options.export:
        raise ConfigError("--export verifies the checkpoint; leave out --verify.")
    if options.export and len(options.export) != 2:
        raise ConfigError(
            f"--export expects a step and a folder, as in --export latest DIR, not "
            f"'{' '.join(options.export)}'."
        )


def _locate_folders(path: Path) -> tuple[Path, Path]:
    """Return the run folder and its checkpoints folder, which need not exist."""
    if not path.is_dir():
        raise ConfigError(f"RUN {path} is not a folder; name the folder of a run.")
    if (path / "checkpoints").is_dir() or (path / "config.toml").is_file():
        return path, path / "checkpoints"
    if path.resolve().name == "checkpoints" or list_checkpoint_folders(path):
        return path.resolve().parent, path
    raise ConfigError(f"RUN {path} holds no run: neither config.toml nor checkpoints.")


def _list_checkpoints(folder: Path, *, verify: bool) -> tuple[list[str], int]:
    """Return the lines of the list, and the exit code."""
    all_entries = [_read_entry(path, verify=verify) for path in list_checkpoint_folders(folder)]
    # A running training may have removed some in the meantime.
    entries = [entry for entry in all_entries if os.path.lexists(entry.path)]
    leftovers = list_leftovers(folder)
    superseded = sorted(folder.glob(f"step_*{SUPERSEDED_SUFFIX}"))
    if not (entries or leftovers or superseded):
        return [f"{folder} holds no checkpoint."], 0
    valid_checkpoints = [
        entry.checkpoint for entry in entries if entry.checkpoint and entry.problem is None
    ]
    latest = valid_checkpoints[-1] if valid_checkpoints else None
    best, best_remark = resolve_best_link(folder)
    path_by_label = {"latest": latest.path if latest else None, BEST_LINK: best}
    keep_every = latest.metadata.get("keep_every") if latest else None

    lines = [_ROW_FORMAT.format("step", "validation loss", "size", "saved", "ranks", "state")]
    lines += [
        _format_row(entry, _list_labels(entry, path_by_label, keep_every)) for entry in entries
    ]
    lines += [_describe_leftover(path) for path in leftovers]
    lines += [
        f"{path.name}, {_format_bytes(_folder_bytes(path))}: later than the step that the run "
        "resumed from; you can remove it."
        for path in superseded
    ]
    lines += _describe_lineage(latest)
    lines.append(f"latest, where training resumes: {latest.path.name if latest else 'none'}")
    lines.append(f"best, with the lowest validation loss: {best_remark}")
    if not verify:
        return [*lines, "Only names and sizes were compared; --verify reads every byte."], 0
    num_damaged = len(entries) - len(valid_checkpoints)
    verdict = f"{num_damaged} of {len(entries)} damaged" if num_damaged else "no damage"
    return [*lines, f"Every byte was read: {verdict}."], 1 if num_damaged else 0


def _list_labels(
    entry: Entry, path_by_label: Mapping[str, Path | None], keep_every: int | None
) -> list[str]:
    """Return the labels of a checkpoint in the list, such as `latest` and `permanent`."""
    labels = [label for label, path in path_by_label.items() if path == entry.path]
    if entry.checkpoint is not None and is_permanent(entry.checkpoint, keep_every=keep_every):
        labels.append("permanent")
    return labels


def _describe_leftover(path: Path) -> str:
    """Return the line of a folder that is no checkpoint yet, or no longer."""
    return (
        f"{path.name}, {_format_bytes(_folder_bytes(path))}: from a save or removal that is "
        "running or was interrupted; the next save or start removes it."
    )


def _describe_lineage(checkpoint: Checkpoint | None) -> list[str]:
    """Return the line that names the parent of a branch; empty for another run."""
    branch = checkpoint.metadata.get("branch") if checkpoint else None
    if branch is None:
        return []
    cooldown_step = branch["cooldown_from"]
    cooldown = "" if cooldown_step is None else f", with a cooldown after step {cooldown_step}"
    return [f"a branch of {branch['parent']}{cooldown}"]


def _read_entry(path: Path, *, verify: bool) -> Entry:
    """Return the row of a checkpoint's folder; `verify` reads every byte of its files."""
    try:
        checkpoint = read_manifest(path)
    except CheckpointError as error:
        # The row already has the name and says that it is not valid.
        problem = str(error).rstrip(".")
        for prefix in (f"{path}/", f"{path} ", "is damaged: ", "is not a checkpoint: "):
            problem = problem.removeprefix(prefix)
        return Entry(path=path, checkpoint=None, problem=problem)
    files = checkpoint.files if verify else ()
    return Entry(
        path=path, checkpoint=checkpoint, problem=checkpoint.find_problem(files_to_verify=files)
    )


def _format_row(entry: Entry, labels: list[str]) -> str:
    """Return the line of a checkpoint; labels are such as `latest` and `best`."""
    checkpoint = entry.checkpoint
    loss = None if checkpoint is None else checkpoint.metadata.get("eval_loss")
    state = "valid" if entry.problem is None else f"not valid: {entry.problem}"
    if entry.path.name.endswith(REPLACED_SUFFIX):
        state += " (replaced by a later save of this step)"
    return _ROW_FORMAT.format(
        str(checkpoint_step(entry.path)),
        "-" if loss is None else f"{loss:.4f}",
        _format_bytes(_folder_bytes(entry.path)),
        "-" if checkpoint is None else checkpoint.saved_time[:16].replace("T", " "),
        "-" if checkpoint is None else checkpoint.world_size,
        ", ".join([state, *labels]),
    )


def _folder_bytes(folder: Path) -> int:
    num_bytes = 0
    with contextlib.suppress(FileNotFoundError):  # a running training may remove it
        for path in folder.rglob("*"):
            num_bytes += 0 if path.is_dir() else path.lstat().st_size
    return num_bytes


def _format_bytes(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def _export_checkpoint(run: Path, checkpoints_folder: Path, options: CheckpointsOptions) -> str:
    """Verify every file that the export needs, then write a Hugging Face folder."""
    step, folder_name = options.export
    export_folder = Path(folder_name)
    _check_export_folder(export_folder, f"--export {step}")
    config = _export_config(run, options)
    chosen_weights = (weights for weights in _SAVED_WEIGHTS if getattr(options, weights.part))
    saved_weights = next(chosen_weights, None)
    limit_spin_wait()
    quiet_libraries()
    checkpoint, model, tokenizer = read_while_training(
        checkpoints_folder,
        partial(_read_checkpoint, config, checkpoints_folder, step, saved_weights),
    )
    card_rows: dict[str, object] = {"steps": checkpoint.step}
    results: dict[str, float] = {}
    loss = checkpoint.metadata.get("eval_loss")
    if saved_weights is not None:
        card_rows["weights"] = saved_weights.card
    elif loss is not None:
        card_rows["eval loss"] = loss
        results["loss"] = loss
    card = _make_card(run, config, checkpoint, model, card_rows, results=results)
    with _mark_unfinished(export_folder, f"--export {step}"):
        export_trained_model(
            config, model, tokenizer, model.state_dict(), folder=export_folder, card=card
        )
    return (
        f"{checkpoint.path} is exported: "
        f"AutoModelForCausalLM.from_pretrained({str(export_folder)!r}) loads it."
    )


def _export_config(run: Path, options: CheckpointsOptions) -> CoreConfig:
    """Return the run's configuration, with the precision of the export."""
    config = read_config(run, trust_remote_code=options.trust_remote_code)
    return dataclasses.replace(config, export_dtype=options.export_dtype or config.export_dtype)


def _read_checkpoint(
    config: CoreConfig, checkpoints_folder: Path, step: str, saved_weights: "SavedWeights | None"
) -> tuple[Checkpoint, "PreTrainedModel", "PreTrainedTokenizerBase"]:
    """Return the checkpoint of a step, `latest` or `best`, and its model and tokenizer."""
    checkpoint = choose_checkpoint(checkpoints_folder, step, option="--export")
    if saved_weights is not None and saved_weights.part not in read_part_names(checkpoint):
        raise CheckpointError(f"{checkpoint.path} has no {saved_weights.description}.")
    part = saved_weights.part if saved_weights else None
    return checkpoint, *load_trained_model(config, checkpoint, part=part)


def _average_checkpoints(
    run: Path, checkpoints_folder: Path, options: CheckpointsOptions, output: str
) -> str:
    """Write the mean of the newest checkpoints as a Hugging Face folder."""
    export_folder, num_checkpoints = Path(output), options.last
    _check_export_folder(export_folder, "--output")
    config = _export_config(run, options)
    checkpoints, model, tokenizer, state = read_while_training(
        checkpoints_folder, lambda: _read_mean(config, checkpoints_folder, num_checkpoints)
    )
    steps = ", ".join(str(checkpoint.step) for checkpoint in checkpoints)
    card = _make_card(run, config, checkpoints[-1], model, {"mean of steps": steps}, results={})
    record = {"run": str(run.resolve()), "steps": [checkpoint.step for checkpoint in checkpoints]}
    with _mark_unfinished(export_folder, "--output"):
        export_trained_model(config, model, tokenizer, state, folder=export_folder, card=card)
        write_whole(export_folder / MEAN_FILE, json.dumps(record) + "\n")
    noun = "step" if len(checkpoints) == 1 else "steps"
    return (
        f"The mean of the weights after {noun} {steps} is exported: "
        f"AutoModelForCausalLM.from_pretrained({str(export_folder)!r}) loads it."
    )


def _read_mean(
    config: CoreConfig, checkpoints_folder: Path, num_checkpoints: int
) -> tuple[list[Checkpoint], "PreTrainedModel", "PreTrainedTokenizerBase", dict[str, Any]]:
    """Return the newest checkpoints, their model and tokenizer, and the mean of their weights."""
    newest_paths = _find_newest_checkpoints(checkpoints_folder, num_checkpoints)
    checkpoints = [read_verified_checkpoint(path) for path in newest_paths]
    limit_spin_wait()
    quiet_libraries()
    from llm.tools.mean_state import compute_mean_state

    _check_same_model(config, checkpoints)
    # Not initialized: a second copy of the weights would double the memory.
    model, tokenizer = build_untrained_model(config, checkpoints[-1], device="meta")
    return checkpoints, model, tokenizer, compute_mean_state(checkpoints, model)


def _find_newest_checkpoints(checkpoints_folder: Path, num_checkpoints: int) -> list[Path]:
    """Return the folders of the newest checkpoints; refuse fewer."""
    newest = list_checkpoints(checkpoints_folder)[-num_checkpoints:]
    if len(newest) < num_checkpoints:
        available = counted(len(newest), "valid checkpoint") if newest else "no valid checkpoint"
        remedy = "; choose a smaller number" if newest else ""
        raise ConfigError(
            f"--last {num_checkpoints}: {checkpoints_folder} holds {available}{remedy}."
        )
    return [checkpoint.path for checkpoint in newest]


def _check_same_model(config: CoreConfig, checkpoints: Sequence[Checkpoint]) -> None:
    """Refuse to average checkpoints if the model's configuration changed between them."""
    from llm.models.configuration import load_config
    from llm.trainers.gpt.model_copies import describe_config_changes

    newest = checkpoints[-1]
    options = use_checkpoint_copies(config, newest)
    model_config = load_config(options)
    for checkpoint in checkpoints:
        changes = describe_config_changes(options, checkpoint, model_config)
        if changes:
            raise CheckpointError(
                f"{newest.path} and {checkpoint.path} have different models: {'; '.join(changes)}. "
                "Average checkpoints of one model, with a smaller --last."
            )


def _check_export_folder(target: Path, option: str) -> None:
    """Refuse the folder of an export if it is within a run, or has files of another origin."""
    if target.exists() and not target.is_dir():
        raise ConfigError(f"{option} {target} is a file; name a new folder.")
    if target.exists() and any(target.iterdir()) and not _is_unfinished(target):
        raise ConfigError(f"{option} {target} is not empty; name a new folder.")
    if (run := find_surrounding_run(target)) is not None:
        raise ConfigError(
            f"{option} {target} is within the files of the run {run}; name a folder outside of "
            "them."
        )


def _is_unfinished(folder: Path) -> bool:
    """Return whether all files in a folder are of an export that has failed or was killed."""
    names = [path.name for path in folder.iterdir()]
    return _UNFINISHED_MARKER in names and all(re.fullmatch(_EXPORT_NAMES, name) for name in names)


@contextlib.contextmanager
def _mark_unfinished(target: Path, option: str) -> Iterator[None]:
    """Mark a folder as unfinished while the context writes an export to it.

    The files of an unfinished export are removed first, and again if this one fails.
    """
    marker = target / _UNFINISHED_MARKER
    _check_export_folder(target, option)  # again: another export may have finished in the meantime
    try:
        target.mkdir(parents=True, exist_ok=True)
        with marker.open("a") as file:
            if not try_lock(file.fileno()):
                logging.getLogger("llm").warning(
                    f"{target} is on a file system without locks: start no second program that "
                    "writes it."
                )
            _clear_folder(target, except_path=marker)
            try:
                yield
            except BaseException:
                with contextlib.suppress(OSError):
                    _clear_folder(target)
                raise
            marker.unlink()
    except BlockingIOError as error:
        raise ConfigError(
            f"{option} {target} is being written by another process; wait for it, or name another "
            "folder."
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"{target} cannot be written: {one_line_with_path(error)}; {os_error_remedy(error)}."
        ) from error


def _clear_folder(folder: Path, *, except_path: Path | None = None) -> None:
    for path in folder.iterdir():
        if path != except_path:
            delete(path)


def _make_card(
    run: Path,
    config: CoreConfig,
    checkpoint: Checkpoint,
    model: "PreTrainedModel",
    rows: dict[str, object],
    *,
    results: dict[str, float],
) -> "Card":
    """Return the model card of a checkpoint, with further rows for its table."""
    from llm.models.model_card import mixture_rows
    from llm.trainers.gpt.results import describe_data, make_card

    return make_card(
        config,
        name=run.resolve().name,
        rows={
            "initial weights": checkpoint.metadata["initial_weights"],
            "data": describe_data(config),
            **mixture_rows(model),
            **rows,
            "seed": config.seed,
        },
        results=results,
        task_results={},
        initial_weights=checkpoint.metadata["initial_weights"],
        ranks=checkpoint.world_size,
    )
