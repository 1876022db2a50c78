"""Finds, verifies and loads checkpoints."""

import contextlib
import json
import logging
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm.checkpoint.format import (
    MODEL_TENSORS,
    STATE_FILE,
    Checkpoint,
    Stateful,
    list_checkpoint_folders,
    merge_state,
    model_tensors,
    read_manifest,
    split_state,
    untag_tuple,
)
from llm.errors import CheckpointError, ParallelError, explain_os_error, extract_os_error, one_line
from llm.runtime.agreement import gather, on_all_ranks
from llm.runtime.world import world_from_environment

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint.metadata import Metadata

logger = logging.getLogger("llm")


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """Return the checkpoints with complete files, judged by their sizes, oldest first.

    Args:
        folder: The run's `checkpoints` folder.
    """
    checkpoints = []
    for path in list_checkpoint_folders(folder):
        try:
            checkpoint = read_manifest(path)
        except CheckpointError:
            continue
        if checkpoint.find_problem() is None:
            checkpoints.append(checkpoint)
    return checkpoints


def find_newest_checkpoint(
    folder: Path, *, is_collective: bool = False, on_skip: Callable[[str], object] = logger.info
) -> Checkpoint | None:
    """Return the newest checkpoint that matches its checksums completely, or None.

    Args:
        folder: The run's `checkpoints` folder.
        is_collective: Whether all ranks call this; then all return the same checkpoint.
        on_skip: Called with a message about each damaged checkpoint that is skipped.

    Raises:
        ParallelError: Ranks see different folders.
    """
    folders = list_checkpoint_folders(folder)
    if is_collective:
        _check_same_folders(folder, [path.name for path in folders])
    for path in reversed(folders):
        try:
            return read_verified_checkpoint(path, is_collective=is_collective)
        except CheckpointError as error:
            if path.exists():  # a running training may have removed it
                on_skip(f"Skipping a checkpoint: {error}")
    return None


def _check_same_folders(folder: Path, local_checkpoint_names: list[str]) -> None:
    """Refuse to choose a checkpoint if ranks see different ones; every rank calls it.

    Raises:
        ParallelError: Names the first rank that sees other checkpoints than rank 0; raised on all
            ranks.
    """
    checkpoint_names_by_rank = gather(local_checkpoint_names)
    for rank, checkpoint_names in enumerate(checkpoint_names_by_rank):
        if checkpoint_names != checkpoint_names_by_rank[0]:
            raise ParallelError(
                f"Rank {rank} sees other checkpoints in {folder} than rank 0: the folder is "
                "not the same on all nodes, or its contents are out of date there; start again, "
                "and if this does not help, move it to a file system that all nodes share."
            )


def read_verified_checkpoint(path: Path, *, is_collective: bool = False) -> Checkpoint:
    """Read a checkpoint's manifest and compare every byte with its checksums.

    Args:
        path: Its folder.
        is_collective: Whether all ranks call this. Then each rank reads some of the files, and
            damage that one rank finds is raised on all ranks.

    Raises:
        CheckpointError: The manifest or a file is missing or damaged.
    """
    checkpoint = local_problem = None
    try:
        checkpoint = read_manifest(path)
        _verify_files(checkpoint, is_collective=is_collective)
    except CheckpointError as error:
        local_problem = str(error)
    problems = gather(local_problem) if is_collective else [local_problem]
    first_problem = next((problem for problem in problems if problem is not None), None)
    if checkpoint is None or first_problem is not None:
        raise CheckpointError(first_problem or f"{path} is damaged.")
    return checkpoint


def _verify_files(checkpoint: Checkpoint, *, is_collective: bool) -> None:
    """Compare the files of a checkpoint, or this rank's share of them, with their checksums.

    Raises:
        CheckpointError: A file is missing or damaged.
    """
    if not is_collective:
        file_names = {*checkpoint.files}
        problem = checkpoint.find_problem(files_to_verify=file_names)
    else:
        file_names = _choose_local_files(checkpoint.files)
        problem = checkpoint.find_unlisted_file() if world_from_environment().is_main else None
        problem = problem or checkpoint.find_damage(file_names, files_to_verify=file_names)
    if problem is not None:
        raise CheckpointError(f"{checkpoint.path} is damaged: {problem}.")
    if STATE_FILE in file_names:
        _read_plain_state(checkpoint)


def read_part_names(checkpoint: Checkpoint) -> list[str]:
    """Return the names of a checkpoint's parts.

    Raises:
        CheckpointError: The state is ill-formed.
    """
    return [*_read_plain_state(checkpoint)]


def _read_plain_state(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """Return the state without its tensors, by the name of the part."""
    path = checkpoint.path / STATE_FILE
    try:
        content = _read_state_file(path, checkpoint.files[STATE_FILE])
        parts = json.loads(content, object_hook=untag_tuple)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}).") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{checkpoint.path} is damaged: {STATE_FILE} is not JSON.") from error
    if not (isinstance(parts, dict) and all(isinstance(part, dict) for part in parts.values())):
        raise CheckpointError(
            f"{checkpoint.path} is damaged: {STATE_FILE} is not a table of parts."
        )
    return parts


@lru_cache(maxsize=1)
def _read_state_file(path: Path, entry: tuple[int, str]) -> bytes:
    """Return the content of a `state.json`, which a start needs several times.

    Args:
        path: The file.
        entry: Its size and checksum in the manifest, which tell a later file of this name.
    """
    return path.read_bytes()


def _choose_local_files(files: Mapping[str, tuple[int, str]]) -> set[str]:
    """Divide the files among ranks by size; return the names of the files that this rank reads.

    Args:
        files: Size in bytes and checksum by name.
    """
    world = world_from_environment()
    bytes_by_rank = [0] * world.world_size
    local_files = set()
    size_by_name = {name: size for name, (size, _) in files.items()}
    # The largest file first, and files of one size by name, so that all ranks divide them equally.
    for name in sorted(size_by_name, key=lambda name: (-size_by_name[name], name)):
        reader_rank = min(range(world.world_size), key=bytes_by_rank.__getitem__)
        bytes_by_rank[reader_rank] += size_by_name[name]
        if reader_rank == world.rank:
            local_files.add(name)
    return local_files


def load_state(checkpoint: Checkpoint, parts: Mapping[str, Stateful]) -> None:
    """Restore the state that each part had when the checkpoint was saved; every rank calls it.

    Args:
        checkpoint: What to read from.
        parts: The objects to restore, by name.

    Raises:
        CheckpointError: The checkpoint holds other parts, tensors of other shapes, or a state that
            a part cannot read.
    """
    plain_parts = _read_plain_state(checkpoint)
    missing_parts = parts.keys() - plain_parts.keys()
    if missing_parts:
        raise CheckpointError(f"{checkpoint.path} holds no {', '.join(sorted(missing_parts))}.")
    # Read directly into the model's tensors, without a second copy.
    states = {name: part.state_dict() for name, part in parts.items()}
    tensors, _ = split_state(states)
    # A part may load only some of its entries, such as the model without the optimizer.
    restored_prefixes = [
        f"{name}/{key}/"
        for name, state in states.items()
        for key, value in state.items()
        if isinstance(value, Mapping)
    ]
    read_tensors(checkpoint, tensors, required_prefixes=restored_prefixes)
    for name, part in parts.items():
        try:
            part.load_state_dict(merge_state(plain_parts[name], tensors, part_name=name))
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{checkpoint.path / STATE_FILE} does not hold the state of {name} that this "
                f"version reads: {type(error).__name__}: {one_line(error)}."
            ) from error


def load_model(checkpoint: Checkpoint, target_tensors: Mapping[str, "torch.Tensor"]) -> None:
    """Load the weights and persistent buffers of a model, but no other state of its run.

    Args:
        checkpoint: What to read from.
        target_tensors: The tensors to overwrite, by name, as `model_tensors` returns them; they may
            be shards.

    Raises:
        CheckpointError: The checkpoint belongs to another model.
    """
    tensors = {f"{MODEL_TENSORS}{name}": tensor for name, tensor in target_tensors.items()}
    read_tensors(checkpoint, tensors, required_prefixes=[MODEL_TENSORS])


def load_weights_from_part(
    part_name: str, checkpoint: Checkpoint, model: "torch.nn.Module"
) -> None:
    """Load a model, with the trained weights that another part of the checkpoint holds.

    Args:
        part_name: A part with a tensor for each trained parameter, such as a moving average.
        checkpoint: What to read from.
        model: The model to load.

    Raises:
        CheckpointError: The checkpoint lacks this part, or belongs to another model.
    """
    load_model(checkpoint, model_tensors(model))
    parameters = model.named_parameters()
    weights = {f"{part_name}/{name}": p.detach() for name, p in parameters if p.requires_grad}
    read_tensors(checkpoint, weights, required_prefixes=[f"{part_name}/"])


def list_saved_tensors(checkpoint: Checkpoint) -> "dict[str, torch.Tensor]":
    """Return the tensors of a checkpoint by path, on the meta device; every rank calls it.

    Raises:
        CheckpointError: A file cannot be read.
    """
    import torch
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from llm.checkpoint.headers import read_headers

    metadata = read_headers(checkpoint)
    return {
        path: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        for path, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read_tensors(
    checkpoint: Checkpoint,
    tensors: Mapping[str, "torch.Tensor"],
    *,
    required_prefixes: Iterable[str],
) -> None:
    """Read tensors from a checkpoint, in place; every rank calls it.

    Args:
        checkpoint: What to read from.
        tensors: The tensors to overwrite, by path.
        required_prefixes: Prefixes of paths. Some rank must read every tensor below them.

    Raises:
        CheckpointError: It contains other tensors, or tensors with other shapes or types; or the
            system refuses to read it.
    """
    from torch import distributed

    from llm.checkpoint.headers import read_headers

    is_single_process = not (distributed.is_available() and distributed.is_initialized())
    headers = read_headers(checkpoint)
    read_local_tensors = partial(_read_local_tensors, checkpoint, headers, tensors)
    if is_single_process:
        read_local_tensors()
    else:
        on_all_ranks(read_local_tensors)
    unread_path = _find_unread_tensor(
        headers.state_dict_metadata,
        tensors,
        required_prefixes=tuple(required_prefixes),
        is_single_process=is_single_process,
    )
    if unread_path is not None:
        raise CheckpointError(
            f"{checkpoint.path} does not fit this model or optimizer, which has no {unread_path}."
        )


def _read_local_tensors(
    checkpoint: Checkpoint, headers: "Metadata", tensors: Mapping[str, "torch.Tensor"]
) -> None:
    """Read this rank's tensors, in place.

    Every rank knows all headers, so ranks need no common plan.

    Raises:
        CheckpointError: As for `read_tensors`.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    from llm.checkpoint.headers import HeaderReader

    try:
        with warnings.catch_warnings(), _quiet_root_logger():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(dict(tensors), storage_reader=HeaderReader(checkpoint, headers), no_dist=True)
    except CheckpointException as error:
        if (failure := extract_os_error(error, checkpoint.path)) is not None:
            raise CheckpointError(explain_os_error(failure)) from error
        raise CheckpointError(
            f"{checkpoint.path} does not fit this model or optimizer: {one_line(error)}."
        ) from error


def _find_unread_tensor(
    saved_paths: Iterable[str],
    read_paths: Container[str],
    *,
    required_prefixes: tuple[str, ...],
    is_single_process: bool,
) -> str | None:
    """Return the first required tensor of a checkpoint that no rank reads, or None.

    Args:
        saved_paths: Paths of the tensors in the checkpoint.
        read_paths: Paths of the tensors that this rank reads, perhaps only some of them.
        required_prefixes: Prefixes of the paths of required tensors.
        is_single_process: Whether no other ranks read tensors.
    """
    import torch
    from torch import distributed

    # The maximum over ranks of 2 (read), 1 (required, but not on this rank) and 0 (not required)
    # is 1 for a required tensor that no rank reads.
    paths = sorted(saved_paths)
    read_marks = torch.tensor(
        [2 if path in read_paths else int(path.startswith(required_prefixes)) for path in paths]
    )
    if required_prefixes and not is_single_process:
        distributed.all_reduce(read_marks, distributed.ReduceOp.MAX)
    marks_by_path = zip(paths, read_marks.tolist(), strict=True)
    return next((path for path, mark in marks_by_path if mark == 1), None)


@contextlib.contextmanager
def _quiet_root_logger() -> Iterator[None]:
    """Suppress the stack that torch logs as a warning before it raises an error."""
    root = logging.getLogger()
    former_level = root.level
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(former_level)
