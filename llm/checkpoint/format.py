"""The format of a checkpoint: its files, its manifest, how a state becomes tensors and JSON.

A checkpoint is a folder with a manifest that names the size and checksum of every file, and ends
with a checksum of its own. What has no valid manifest does not count. Tensors are safetensors,
read through `torch.distributed.checkpoint`, so they know no rank layout; everything else is JSON.
Nothing is a pickle. `llm.checkpoint.save` writes them; torch is imported only to read tensors.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import xxhash

from llm.errors import CheckpointError
from llm.runtime.files import checksum

if TYPE_CHECKING:
    import torch

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
PLAIN = "state.json"
REPLACED = ".replaced"
"""What is added to a checkpoint's name while another of the same step takes its place."""

_TENSORS = ".safetensors"
_NAME = re.compile(rf"step_(\d+)({re.escape(REPLACED)})?")


class Stateful(Protocol):
    """Anything that can say and take back its state."""

    def state_dict(self) -> dict[str, Any]:
        """Nested dicts of tensors and plain values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint with a readable manifest.

    Attributes:
        path: Its folder.
        step: Optimizer steps done when it was saved.
        saved_at: Local time with its zone, as ISO 8601 has it.
        world_size: Number of ranks that wrote it.
        metadata: What was said about it: validation loss, configuration, batch.
        files: Size in bytes and xxh3_128 of each file.
    """

    path: Path
    step: int
    saved_at: str
    world_size: int
    metadata: dict[str, Any]
    files: dict[str, tuple[int, str]]

    def problem(self, *, read: bool = False) -> str | None:
        """Why the checkpoint is not valid, or None.

        Args:
            read: Compare the checksums too, not only names and sizes.
        """
        # The reader of the tensors opens every such file that it finds.
        foreign = {path.name for path in self.path.glob(f"*{_TENSORS}")} - self.files.keys()
        if foreign:
            return f"{min(foreign)} does not belong to it"
        for name, (size, digest) in self.files.items():
            path = self.path / name
            try:
                if not path.is_file():
                    return f"{name} is missing"
                if path.stat().st_size != size:
                    return f"{name} has {path.stat().st_size} bytes instead of {size}"
                if read and checksum(path) != digest:
                    return f"{name} does not match its checksum"
            except OSError as error:
                return f"{name} cannot be read ({error.strerror})"
        return None


def name_of(step: int) -> str:
    """The name of a checkpoint's folder."""
    return f"step_{step:08d}"


def step_of(path: Path) -> int | None:
    """The step that a checkpoint's folder has in its name; None for another folder."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def checkpoint_folders(folder: Path) -> list[Path]:
    """What is named as a checkpoint in a run's `checkpoints` folder, valid or not, oldest first."""
    named = [
        (match, path) for path in folder.glob("step_*") if (match := _NAME.fullmatch(path.name))
    ]
    # Of two with the same step, the one that was to be replaced is the older.
    named.sort(key=lambda item: (int(item[0][1]), item[0][2] is None))
    return [path for _, path in named]


def read_manifest(path: Path) -> Checkpoint:
    """Read what a checkpoint says about itself.

    Raises:
        CheckpointError: There is no manifest, or it is damaged or of another format.
    """
    try:
        content = (path / MANIFEST).read_bytes().decode()
        manifest = json.loads(content)
        if manifest["format"] != FORMAT_VERSION:
            raise CheckpointError(
                f"{path} has checkpoint format {manifest['format']}; this version reads "
                f"{FORMAT_VERSION}."
            )
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{path} is no checkpoint: it has no {MANIFEST}.") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / MANIFEST} is damaged: {error}.") from error
    if content != add_checksum(content.rpartition(_SEAL)[0] + _END):
        raise CheckpointError(f"{path / MANIFEST} is damaged: it does not match its checksum.")
    if step_of(path) not in (None, manifest["step"]):
        raise CheckpointError(
            f"{path} is damaged: its manifest is that of step {manifest['step']}."
        )
    return Checkpoint(
        path=path,
        step=manifest["step"],
        saved_at=manifest["saved_at"],
        world_size=manifest["world_size"],
        metadata=manifest["facts"],
        files={name: (size, digest) for name, (size, digest) in manifest["files"].items()},
    )


_SEAL = ',\n "checksum": "'
_END = "\n}"


def add_checksum(content: str) -> str:
    """Add the checksum of a manifest as its last entry.

    Args:
        content: A JSON object, indented by one.
    """
    content = content.removesuffix(_END)
    return f'{content}{_SEAL}{xxhash.xxh3_128_hexdigest(content.encode())}"{_END}'


def split_state(tree: Mapping[str, Any]) -> tuple[dict[str, "torch.Tensor"], dict[str, Any]]:
    """Take a nested dict apart: tensors by their path, and the plain rest."""
    import torch

    tensors: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, torch.Tensor):
            tensors[key] = value
        elif isinstance(value, Mapping):
            inner, plain[key] = split_state(value)
            tensors.update({f"{key}/{path}": tensor for path, tensor in inner.items()})
        else:
            plain[key] = value
    return tensors, plain


def merge_state(
    plain: dict[str, Any], tensors: Mapping[str, Any], *, prefix: str
) -> dict[str, Any]:
    """Undo `split_state` for the tensors whose path starts with the prefix."""
    tree = plain
    for path, tensor in tensors.items():
        first, *keys = path.split("/")
        if first != prefix:
            continue
        node = tree
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = tensor
    return tree
