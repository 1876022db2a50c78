"""The format of a checkpoint: its files, its manifest, and the training state in them.

A checkpoint is a folder with a manifest, which lists the size and checksum of every file and ends
with a checksum of itself. A folder without a valid manifest does not count. Tensors are
safetensors, read through `torch.distributed.checkpoint`, so any layout of ranks can read them;
everything else is JSON. Nothing is a pickle. The folder also contains the model's configuration and
the tokenizer, so a checkpoint is self-contained. torch is imported only to read tensors.
"""

import dataclasses
import datetime
import json
import os
import re
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path, PurePosixPath
from types import NoneType
from typing import TYPE_CHECKING, Any, Protocol

import xxhash

from llm.errors import CheckpointError, one_line
from llm.runtime.files import checksum, sync_file

if TYPE_CHECKING:
    import torch

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
STATE_FILE = "state.json"
MODEL_FOLDER = "model"
"""In a checkpoint: the model's configuration and its Python code, if it has any."""

TOKENIZER_FOLDER = "tokenizer"
"""In a checkpoint: the tokenizer."""

MODEL_TENSORS = "strategy/model/"
"""Prefix of the paths of the model's tensors."""

OPTIMIZER_TENSORS = "strategy/optimizer/"
"""Prefix of the paths of the optimizer's tensors, followed by the name of a parameter."""

REPLACED_SUFFIX = ".replaced"
"""Suffix of a checkpoint while a new one of the same step takes its name."""

SUPERSEDED_SUFFIX = ".superseded"
"""Suffix of a checkpoint later than the step that the run resumed from: no resume chooses it."""

MEAN_FILE = "mean.json"
"""In the export of a mean of checkpoints: the folder of their `run`, and their `steps`."""

STAGING_RECORD = "staged.json"
"""In a run's `checkpoints` folder: where the last start stages its checkpoints."""

TENSOR_FILE_SUFFIX = ".safetensors"
"""Suffix of the files of tensors, at the top of a checkpoint."""

_CHECKPOINT_NAME = re.compile(rf"step_([0-9]{{1,18}})({re.escape(REPLACED_SUFFIX)})?")
_CHECKSUM_ENTRY = ',\n "checksum": "'
_JSON_END = "\n}"
_TUPLE_TAG = "__tuple__"


class Stateful(Protocol):
    """An object with a state that can be saved and loaded."""

    def state_dict(self) -> dict[str, Any]:
        """Return nested dicts of tensors and plain values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""


@dataclasses.dataclass(kw_only=True)
class TrainState:
    """Counters of a run.

    Attributes:
        step: Optimizer steps done, including skipped ones; also the data position.
        samples: Samples consumed by all ranks.
        tokens: Tokens predicted by all ranks.
        seconds: Training time over all starts of the run.
        best_loss: Lowest validation loss so far.
        evaluated_at: Step of the last evaluation.
        last_periodic_steps: Last step after which each periodic work of extensions was done, by
            the name of the work.
        skipped_in_a_row: Number of consecutive steps that were just skipped.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best_loss: float | None = None
    evaluated_at: int = 0
    last_periodic_steps: dict[str, int] = dataclasses.field(default_factory=dict)
    skipped_in_a_row: int = 0

    def advance(self, *, samples: int, tokens: int) -> None:
        """Count one optimizer step."""
        self.step += 1
        self.samples += samples
        self.tokens += tokens

    def state_dict(self) -> dict[str, Any]:
        """Return the counters by name; `last_periodic_steps` as NAME_at."""
        counters = dataclasses.asdict(self)
        last_periodic_steps = counters.pop("last_periodic_steps")
        return counters | {f"{name}_at": step for name, step in last_periodic_steps.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counters."""
        counters = dict(state)
        for field in dataclasses.fields(self):
            if field.name != "last_periodic_steps":
                setattr(self, field.name, counters.pop(field.name))
        self.last_periodic_steps = {
            name.removesuffix("_at"): step for name, step in counters.items()
        }


def model_tensors(model: "torch.nn.Module") -> dict[str, "torch.Tensor"]:
    """Return the parameters and persistent buffers; tied parameters only under their first name."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    persistent = model.state_dict(keep_vars=True)
    buffers = {name: b for name, b in model.named_buffers() if name in persistent}
    return parameters | buffers


def check_same_parameters(
    state_name: str, local_state: Mapping[str, Any], saved_state: Mapping[str, Any]
) -> None:
    """Refuse a saved state with other parameters than this run's.

    Args:
        state_name: Name of the state, such as `optimizer`, for the message.
        local_state: This rank's state by parameter.
        saved_state: The state to load by parameter; an empty dict belongs to another rank.

    Raises:
        CheckpointError: The parameters differ.
    """
    if _names_with_state(local_state) != _names_with_state(saved_state):
        raise CheckpointError(f"The {state_name} of the saved state has other parameters.")


def _names_with_state(state: Mapping[str, Any]) -> set[str]:
    """Return the names of a state without those of empty dicts."""
    return {name for name, value in state.items() if not isinstance(value, Mapping) or value}


def tag_tuples(value: Any) -> Any:
    """Return plain values with tuples as `{"__tuple__": [...]}`, because JSON has only lists."""
    if isinstance(value, Mapping):
        return {key: tag_tuples(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [tag_tuples(item) for item in value]
        return {_TUPLE_TAG: items} if isinstance(value, tuple) else items
    return value


def untag_tuple(json_object: dict[str, Any]) -> Any:
    """Return the tuple that `tag_tuples` has tagged, or another JSON object as it is."""
    is_tuple = json_object.keys() == {_TUPLE_TAG}
    return tuple(json_object[_TUPLE_TAG]) if is_tuple else json_object


def split_state(state: Mapping[str, Any]) -> tuple[dict[str, "torch.Tensor"], dict[str, Any]]:
    """Split a nested dict into its tensors, by path such as `model/wte.weight`, and the rest."""
    import torch

    tensors: dict[str, Any] = {}
    plain_values: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            tensors[key] = value
        elif isinstance(value, Mapping):
            child_tensors, plain_values[key] = split_state(value)
            tensors.update({f"{key}/{path}": tensor for path, tensor in child_tensors.items()})
        else:
            plain_values[key] = value
    return tensors, plain_values


def merge_state(
    plain_values: dict[str, Any], tensors: Mapping[str, Any], *, part_name: str
) -> dict[str, Any]:
    """Insert the tensors of a part into its nested dict, in place; inverse of `split_state`.

    Args:
        plain_values: The part without its tensors; changed and returned.
        tensors: Tensors of any part, by path.
        part_name: Name of the part, the first component of the paths of its tensors.
    """
    for path, tensor in tensors.items():
        first_component, *keys = path.split("/")
        if first_component == part_name:
            parent_dict = plain_values
            for key in keys[:-1]:
                parent_dict = parent_dict.setdefault(key, {})
            parent_dict[keys[-1]] = tensor
    return plain_values


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint as described by its manifest.

    Attributes:
        path: Its folder.
        step: Optimizer steps done when it was saved.
        saved_time: Local time with its zone, in ISO 8601.
        world_size: Number of ranks that wrote it.
        metadata: Plain values: validation loss, configuration, batch.
        files: Size in bytes and xxh3_128 of each file.
    """

    path: Path
    step: int
    saved_time: str
    world_size: int
    metadata: dict[str, Any]
    files: dict[str, tuple[int, str]]

    def find_problem(self, *, files_to_verify: Container[str] = ()) -> str | None:
        """Return why the checkpoint is not valid, or None.

        Args:
            files_to_verify: Files to compare by checksum, too, not only by name and size.
        """
        return self.find_unlisted_file() or self.find_damage(
            self.files, files_to_verify=files_to_verify
        )

    def find_unlisted_file(self) -> str | None:
        """Return which file the manifest does not list but libraries would read, or None."""
        unlisted_files = _list_discoverable_files(self.path) - self.files.keys()
        return f"{min(unlisted_files)} does not belong to it" if unlisted_files else None

    def find_damage(
        self, names: Iterable[str], *, files_to_verify: Container[str] = ()
    ) -> str | None:
        """Return why a file is not valid, or None.

        Args:
            names: The files to compare by name and size.
            files_to_verify: Files to compare by checksum, too.
        """
        for name in names:
            size, digest = self.files[name]
            path = self.path / name
            try:
                if any(parent.is_symlink() for parent in (path, *path.parents[: name.count("/")])):
                    return f"{name} is a link instead of a file"
                if not path.is_file():
                    return f"{name} is missing"
                if path.stat().st_size != size:
                    return f"{name} has {path.stat().st_size} bytes instead of {size}"
                if name in files_to_verify and checksum(path) != digest:
                    return f"{name} does not match its checksum"
            except OSError as error:
                return f"{name} cannot be read ({error.strerror})"
        return None


def checkpoint_name(step: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"step_{step:08d}"


def checkpoint_step(path: Path) -> int | None:
    """Return the step in the name of a checkpoint's folder; None for another folder."""
    match = _CHECKPOINT_NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def list_checkpoint_folders(folder: Path) -> list[Path]:
    """Return the folders named like checkpoints, valid or not, oldest first.

    Args:
        folder: The run's `checkpoints` folder.
    """
    folders = [path for path in folder.glob("step_*") if checkpoint_step(path) is not None]
    # If two have the same step, the one being replaced is older.
    return sorted(
        folders, key=lambda path: (checkpoint_step(path) or 0, path.suffix != REPLACED_SUFFIX)
    )


def write_manifest(checkpoint: Checkpoint) -> None:
    """Write the manifest of a checkpoint after all other files."""
    manifest = {
        "format": FORMAT_VERSION,
        "step": checkpoint.step,
        "saved_at": checkpoint.saved_time,
        "world_size": checkpoint.world_size,
        "facts": checkpoint.metadata,  # the key in existing checkpoints
        "files": checkpoint.files,
    }
    path = checkpoint.path / MANIFEST
    path.write_text(add_checksum(json.dumps(manifest, indent=1)), encoding="utf-8")
    sync_file(path)


def read_manifest(path: Path) -> Checkpoint:
    """Read the manifest of a checkpoint.

    Raises:
        CheckpointError: The manifest is missing, damaged, or has another format.
    """
    manifest = _read_manifest_json(path)
    problem = _find_manifest_problem(manifest)
    if problem is not None:
        raise CheckpointError(f"{path / MANIFEST} is damaged: {problem}.")
    if checkpoint_step(path) not in (None, manifest["step"]):
        raise CheckpointError(
            f"{path} is damaged: its manifest belongs to step {manifest['step']}."
        )
    return Checkpoint(
        path=path,
        step=manifest["step"],
        saved_time=manifest["saved_at"],
        world_size=manifest["world_size"],
        metadata=manifest["facts"],
        files={name: (size, digest) for name, (size, digest) in manifest["files"].items()},
    )


def _read_manifest_json(path: Path) -> dict[str, Any]:
    """Read the JSON object of a manifest, and verify its format version and its checksum.

    Args:
        path: The folder of the checkpoint.

    Raises:
        CheckpointError: The file is missing, is not JSON, has another format or checksum.
    """
    try:
        content = (path / MANIFEST).read_bytes().decode()
        manifest: dict[str, Any] = json.loads(content)
        if not isinstance(manifest, dict) or "format" not in manifest:
            raise ValueError("it is not a JSON object with a format")
        if manifest["format"] != FORMAT_VERSION:
            raise CheckpointError(
                f"{path} has checkpoint format {manifest['format']}; this version reads "
                f"{FORMAT_VERSION}."
            )
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{path} is not a checkpoint: it has no {MANIFEST}.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path / MANIFEST} is damaged: {one_line(error)}.") from error
    if content != add_checksum(content.rpartition(_CHECKSUM_ENTRY)[0] + _JSON_END):
        raise CheckpointError(f"{path / MANIFEST} is damaged: it does not match its checksum.")
    return manifest


def _find_manifest_problem(manifest: dict[str, Any]) -> str | None:
    """Return why a manifest with a correct checksum is ill-formed, or None."""
    for field_name, is_valid in _MANIFEST_FIELD_CHECKS.items():
        if field_name not in manifest:
            return f"it has no {field_name!r}"
        if not is_valid(manifest[field_name]):
            return f"its {field_name!r} has a value of another kind"
    for file_name, entry in manifest["files"].items():
        if not _is_file_name(file_name):
            return f"{file_name!r} is not the name of a file in a checkpoint"
        if not (isinstance(entry, list) and [type(item) for item in entry] == [int, str]):
            return f"{file_name!r} has no size and checksum"
    if STATE_FILE not in manifest["files"]:
        return f"it lists no {STATE_FILE}"
    metadata = manifest["facts"]
    for field_name, is_valid in _METADATA_CHECKS.items():
        if field_name in metadata and not is_valid(metadata[field_name]):
            return f"its {field_name!r} has a value of another kind"
    return None


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_time(value: Any) -> bool:
    try:
        datetime.datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return False
    return True


def _is_branch_record(value: Any) -> bool:
    if value is None:
        return True
    types_by_field = {"parent": (str,), "step": (int,), "cooldown_from": (int, NoneType)}
    return (
        isinstance(value, dict)
        and value.keys() == types_by_field.keys()
        and all(type(value[name]) in types for name, types in types_by_field.items())
    )


def _is_file_name(name: str) -> bool:
    """Return whether a name is a path within a folder, in its only spelling."""
    path = PurePosixPath(name)
    is_relative = not path.is_absolute() and ".." not in path.parts and path.parts != ()
    return is_relative and str(path) == name and name.isprintable()


_MANIFEST_FIELD_CHECKS: dict[str, Callable[[Any], bool]] = {
    "step": _is_count,
    "saved_at": _is_time,
    "world_size": _is_count,
    "facts": lambda value: isinstance(value, dict),
    "files": lambda value: isinstance(value, dict),
}
"""The fields of a manifest, with a check of each value."""

_METADATA_CHECKS: dict[str, Callable[[Any], bool]] = {
    "eval_loss": lambda value: type(value) in (int, float, NoneType),
    "keep_every": lambda value: value is None or _is_count(value),
    "fixed": lambda value: isinstance(value, dict),
    "logged": lambda value: isinstance(value, dict),
    "global_batch_size": lambda value: type(value) in (int, str),
    "batch_option": lambda value: type(value) in (int, str, NoneType),
    "data": lambda value: isinstance(value, dict),
    "tokenizer": lambda value: isinstance(value, str),
    "initial_weights": lambda value: isinstance(value, str),
    "skip_samples": lambda value: isinstance(value, str),
    "packages": lambda value: (
        isinstance(value, dict) and all(isinstance(version, str) for version in value.values())
    ),
    "branch": _is_branch_record,
}
"""The metadata that the core records in the checkpoints of a run, with a check of each value."""


def _list_discoverable_files(folder: Path) -> set[str]:
    """Return the files that libraries find by themselves, by their path in the checkpoint.

    torch.distributed.checkpoint reads every file of tensors at the top, and transformers looks for
    further files next to the model's configuration and the tokenizer.
    """
    paths = [*folder.glob(f"*{TENSOR_FILE_SUFFIX}")]
    for subfolder in (MODEL_FOLDER, TOKENIZER_FOLDER):
        for parent, folder_names, file_names in os.walk(folder / subfolder):
            entries = [Path(parent, name) for name in (*folder_names, *file_names)]
            paths += [entry for entry in entries if entry.is_symlink() or not entry.is_dir()]
    return {path.relative_to(folder).as_posix() for path in paths}


def add_checksum(content: str) -> str:
    """Add the checksum of a manifest as its last entry.

    Args:
        content: A JSON object, indented by one.
    """
    content = content.removesuffix(_JSON_END)
    return f'{content}{_CHECKSUM_ENTRY}{xxhash.xxh3_128_hexdigest(content.encode())}"{_JSON_END}'
