"""Checkpoints as they lie on the disk: which are valid, what they hold, which are kept.

A checkpoint is a folder with a manifest that names the size and checksum of every file, and ends
with a checksum of its own. What has no valid manifest does not count. Tensors are safetensors,
read through `torch.distributed.checkpoint`, so they know no rank layout; everything else is JSON.
Nothing is a pickle. `llm.checkpoint.save` writes them; torch is imported only to read tensors.
"""

import dataclasses
import json
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import xxhash

from llm.errors import CheckpointError
from llm.runtime.files import checksum
from llm.checkpoint.state import model_tensors

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("llm")

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
PLAIN = "state.json"
REPLACED = ".replaced"
"""What is added to a checkpoint's name while another of the same step takes its place."""

_TENSORS = ".safetensors"
_MODEL = "strategy/model/"
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
        facts: What was said about it: validation loss, configuration, batch.
        files: Size in bytes and xxh3_128 of each file.
    """

    path: Path
    step: int
    saved_at: str
    world_size: int
    facts: dict[str, Any]
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


def folders(folder: Path) -> list[Path]:
    """What is named as a checkpoint in a run's `checkpoints` folder, valid or not, oldest first."""
    named = [
        (match, path) for path in folder.glob("step_*") if (match := _NAME.fullmatch(path.name))
    ]
    # Of two with the same step, the one that was to be replaced is the older.
    named.sort(key=lambda item: (int(item[0][1]), item[0][2] is None))
    return [path for _, path in named]


def found(folder: Path) -> list[Checkpoint]:
    """The checkpoints in a run's `checkpoints` folder that are whole, oldest first.

    A folder without a manifest, or whose files have other sizes, does not count.
    """
    checkpoints = []
    for path in folders(folder):
        try:
            checkpoint = read_manifest(path)
        except CheckpointError:
            continue
        if checkpoint.problem() is None:
            checkpoints.append(checkpoint)
    return checkpoints


def newest_valid(folder: Path, *, say: Callable[[str], object] = logger.info) -> Checkpoint | None:
    """The newest checkpoint whose every byte is as it was written; None if there is none.

    Args:
        folder: Where checkpoints lie.
        say: Told of each damaged one that is passed over.
    """
    for path in reversed(folders(folder)):
        try:
            return read_valid(path)
        except CheckpointError as error:
            say(f"A checkpoint is passed over. {error}")
    return None


def read_valid(path: Path) -> Checkpoint:
    """Read a checkpoint's manifest and compare every byte with it.

    Raises:
        CheckpointError: There is no manifest, or a file is missing or damaged.
    """
    checkpoint = read_manifest(path)
    problem = checkpoint.problem(read=True)
    if problem is not None:
        raise CheckpointError(f"{path} is damaged: {problem}.")
    return checkpoint


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
    if content != seal(content.rpartition(_SEAL)[0] + _END):
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
        facts=manifest["facts"],
        files={name: (size, digest) for name, (size, digest) in manifest["files"].items()},
    )


_SEAL = ',\n "checksum": "'
_END = "\n}"


def seal(content: str) -> str:
    """Add the checksum of a manifest as its last entry.

    Args:
        content: A JSON object, indented by one.
    """
    content = content.removesuffix(_END)
    return f'{content}{_SEAL}{xxhash.xxh3_128_hexdigest(content.encode())}"{_END}'


def load(checkpoint: Checkpoint, parts: Mapping[str, Stateful]) -> None:
    """Bring every part to the state that it had when the checkpoint was saved.

    Raises:
        CheckpointError: The checkpoint holds other parts or tensors of other shapes.
    """
    plain = json.loads((checkpoint.path / PLAIN).read_text(encoding="utf-8"))
    missing = parts.keys() - plain.keys()
    if missing:
        raise CheckpointError(f"{checkpoint.path} holds no {', '.join(sorted(missing))}.")
    # Read straight into the live tensors: no second copy of the model is made.
    states = {name: part.state_dict() for name, part in parts.items()}
    tensors, _ = split_state(states)
    # A part may ask for some of its entries only, such as the model without the optimizer.
    asked = [
        f"{name}/{key}/"
        for name, state in states.items()
        for key, value in state.items()
        if isinstance(value, Mapping)
    ]
    read_tensors(checkpoint, tensors, of=asked)
    for name, part in parts.items():
        part.load_state_dict(_merge(plain[name], tensors, prefix=name))


def load_model(checkpoint: Checkpoint, model: "torch.nn.Module") -> None:
    """Read the weights and persistent buffers of a model, and nothing else of its run.

    Raises:
        CheckpointError: The checkpoint is that of another model.
    """
    tensors = {f"{_MODEL}{name}": tensor for name, tensor in model_tensors(model).items()}
    read_tensors(checkpoint, tensors, of=[_MODEL])


def read_tensors(
    checkpoint: Checkpoint, tensors: Mapping[str, "torch.Tensor"], *, of: Iterable[str]
) -> None:
    """Read the values of tensors, by their paths; every rank calls it.

    Args:
        checkpoint: Where to read.
        tensors: What to overwrite.
        of: How the paths begin of which the checkpoint may hold no others than these.

    Raises:
        CheckpointError: It holds other tensors, or tensors of other shapes or types.
    """
    import torch
    from torch import distributed
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(str(checkpoint.path))
    planner = DefaultLoadPlanner()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            alone = not (distributed.is_available() and distributed.is_initialized())
            load(dict(tensors), storage_reader=reader, planner=planner, no_dist=alone)
    except CheckpointException as error:
        raise CheckpointError(
            f"{checkpoint.path} does not fit this model or optimizer: {cause(error)}"
        ) from error
    assert planner.metadata is not None  # since a plan was made
    # A rank may have a part of them; together the ranks must have all that one of them asks for.
    paths, asked = sorted(planner.metadata.state_dict_metadata), tuple(of)
    found = torch.tensor([2 if p in tensors else int(p.startswith(asked)) for p in paths])
    if asked and not alone:
        # Where the model is: the groups of some backends take nothing of the host.
        devices = {tensor.device for tensor in tensors.values()}
        found = found.to(min(devices, key=lambda device: device.type == "cpu"))
        distributed.all_reduce(found, distributed.ReduceOp.MAX)
    others = [path for path, how in zip(paths, found.tolist(), strict=True) if how == 1]
    if others:
        raise CheckpointError(
            f"{checkpoint.path} does not fit this model or optimizer, which has no {min(others)}."
        )


def cause(error: BaseException) -> str:
    """What went wrong, out of an error of torch.distributed.checkpoint, which wraps all ranks'."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).strip() or type(error).__name__).splitlines()[-1]


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


def _merge(plain: dict[str, Any], tensors: Mapping[str, Any], *, prefix: str) -> dict[str, Any]:
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
