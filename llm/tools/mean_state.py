"""The mean of several checkpoints' weights, with only a few rows in memory at a time."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from llm.checkpoint.format import MODEL_TENSORS, Checkpoint, model_tensors
from llm.errors import CheckpointError, one_line

_BLOCK = 1 << 18
"""Elements that are averaged at once."""


def mean_state(checkpoints: Sequence[Checkpoint], model: nn.Module) -> dict[str, Tensor]:
    """Return the mean of the weights and persistent buffers of checkpoints, in host memory.

    Sums are float64 and rounded once. Apart from the mean, only one block of rows is in memory.

    Args:
        checkpoints: Checkpoints of one run, saved on any layout.
        model: Defines the names, shapes and types of the tensors; it may be on the meta device.

    Returns:
        The tensors by the names of `model.state_dict()`; tied tensors share one tensor.

    Raises:
        CheckpointError: A checkpoint belongs to another model.
    """
    saved = [_SavedModel(checkpoint) for checkpoint in checkpoints]
    tensors = model_tensors(model)
    for checkpoint_model in saved:
        checkpoint_model.check(tensors)
    means = {n: torch.empty(t.shape, dtype=t.dtype) for n, t in tensors.items()}
    # One buffer for all blocks: the allocator would keep the memory of every freed one.
    widest = max(math.prod(mean.shape[1:]) for mean in means.values())
    buffer = torch.empty(max(_BLOCK, widest), dtype=torch.float64)
    for name, mean in means.items():
        rows = mean.view(-1) if mean.ndim == 0 else mean
        step = max(1, _BLOCK // max(1, math.prod(rows.shape[1:])))
        for first in range(0, len(rows), step):
            block = rows[first : first + step]
            total = buffer[: block.numel()].view(block.shape).zero_()
            for checkpoint_model in saved:
                for place, part in checkpoint_model.parts(name, first, first + len(block)):
                    total[place].add_(part)
            block.copy_(total.div_(len(saved)))
    named_tensors = [*model.named_parameters(), *model.named_buffers()]
    first_name = {id(tensor): name for name, tensor in named_tensors}
    state = model.state_dict(keep_vars=True)
    return {name: means[first_name[id(tensor)]] for name, tensor in state.items()}


class _SavedModel:
    """The tensors of the model in a checkpoint, and the shards and files that hold them."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._path = checkpoint.path
        try:
            metadata = HuggingFaceStorageReader(str(checkpoint.path)).read_metadata()
        except OSError:
            raise
        except Exception as error:  # of safetensors, of JSON, or of an unforeseen record of shards
            raise CheckpointError(
                f"{checkpoint.path} is damaged: its tensors cannot be read ({one_line(error)})."
            ) from error
        self._tensors = metadata.state_dict_metadata
        self._shards = defaultdict(list)
        for index, file in (metadata.storage_data or {}).items():
            offset = torch.Size(index.offset or ())
            self._shards[index.fqn].append((offset, file.shape, file.relative_path))

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise a CheckpointError unless the names and shapes of its tensors match."""
        for name, tensor in tensors.items():
            saved = self._tensors.get(MODEL_TENSORS + name)
            if getattr(saved, "size", None) != tensor.shape:
                raise CheckpointError(
                    f"{self._path} does not fit this model, which has another {name}."
                )

    def parts(self, name: str, first: int, stop: int) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
        """Yield each shard's part of some rows, and its place among them."""
        path = MODEL_TENSORS + name
        for offset, shape, file_path in self._shards[path]:
            # Opened again for each part, because the pages of a mapped file count as memory until
            # it is closed.
            with safe_open(file_path, framework="pt") as file:
                if not shape:
                    yield (slice(None),), file.get_tensor(path)
                    continue
                low, high = max(first, offset[0]), min(stop, offset[0] + shape[0])
                if low < high:
                    rows = slice(low - first, high - first)
                    columns = zip(offset[1:], shape[1:], strict=True)
                    place = (rows, *(slice(at, at + size) for at, size in columns))
                    yield place, file.get_slice(path)[low - offset[0] : high - offset[0]]
