"""Checkpoints on the disk: found, verified, loaded."""

import json
import logging
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from llm.checkpoint.format import (
    PLAIN,
    Checkpoint,
    Stateful,
    checkpoint_folders,
    merge_state,
    read_manifest,
    split_state,
)
from llm.checkpoint.state import model_tensors
from llm.errors import CheckpointError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("llm")

_MODEL = "strategy/model/"


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """The checkpoints in a run's `checkpoints` folder that are whole, oldest first.

    A folder without a manifest, or whose files have other sizes, does not count.
    """
    checkpoints = []
    for path in checkpoint_folders(folder):
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
    for path in reversed(checkpoint_folders(folder)):
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


def load_state(checkpoint: Checkpoint, parts: Mapping[str, Stateful]) -> None:
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
        part.load_state_dict(merge_state(plain[name], tensors, prefix=name))


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
