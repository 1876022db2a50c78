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

_BLOCK_ELEMENTS = 1 << 18
"""Elements that are averaged at once."""


def compute_mean_state(checkpoints: Sequence[Checkpoint], model: nn.Module) -> dict[str, Tensor]:
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
    checkpoint_models = [_CheckpointModel(checkpoint) for checkpoint in checkpoints]
    tensors = model_tensors(model)
    for checkpoint_model in checkpoint_models:
        checkpoint_model.check_tensors(tensors)
    means = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()
    }
    # One buffer for all blocks: the allocator would keep the memory of every freed one.
    max_row_elements = max(math.prod(mean.shape[1:]) for mean in means.values())
    buffer = torch.empty(max(_BLOCK_ELEMENTS, max_row_elements), dtype=torch.float64)
    for name, mean in means.items():
        _average_tensor(name, mean, checkpoint_models, buffer)
    named_tensors = [*model.named_parameters(), *model.named_buffers()]
    name_by_tensor_id = {id(tensor): name for name, tensor in named_tensors}
    state = model.state_dict(keep_vars=True)
    return {name: means[name_by_tensor_id[id(tensor)]] for name, tensor in state.items()}


def _average_tensor(
    name: str, mean: Tensor, checkpoint_models: Sequence["_CheckpointModel"], buffer: Tensor
) -> None:
    """Write the mean of a tensor over checkpoints by blocks, with float64 sums in `buffer`."""
    rows = mean.view(-1) if mean.ndim == 0 else mean
    rows_per_block = max(1, _BLOCK_ELEMENTS // max(1, math.prod(rows.shape[1:])))
    for first_row in range(0, len(rows), rows_per_block):
        block = rows[first_row : first_row + rows_per_block]
        total = buffer[: block.numel()].view(block.shape).zero_()
        for checkpoint_model in checkpoint_models:
            shards = checkpoint_model.read_shards(name, first_row, first_row + len(block))
            for block_index, values in shards:
                total[block_index].add_(values)
        block.copy_(total.div_(len(checkpoint_models)))


class _CheckpointModel:
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

    def check_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise a CheckpointError unless the names and shapes of its tensors match."""
        for name, tensor in tensors.items():
            metadata = self._tensors.get(MODEL_TENSORS + name)
            if getattr(metadata, "size", None) != tensor.shape:
                raise CheckpointError(
                    f"{self._path} does not fit this model, which has another {name}."
                )

    def read_shards(
        self, name: str, first_row: int, end_row: int
    ) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
        """Yield the index of each shard in a block of rows, and its values there."""
        tensor_name = MODEL_TENSORS + name
        for offset, shape, file_path in self._shards[tensor_name]:
            # Opened again for each part, because the pages of a mapped file count as memory until
            # it is closed.
            with safe_open(file_path, framework="pt") as file:
                if not shape:
                    yield (slice(None),), file.get_tensor(tensor_name)
                    continue
                shard_start, shard_end = offset[0], offset[0] + shape[0]
                shared_start, shared_end = max(first_row, shard_start), min(end_row, shard_end)
                if shared_start >= shared_end:
                    continue
                block_rows = slice(shared_start - first_row, shared_end - first_row)
                other_dims = zip(offset[1:], shape[1:], strict=True)
                block_index = (
                    block_rows,
                    *(slice(start, start + size) for start, size in other_dims),
                )
                shard = file.get_slice(tensor_name)
                yield block_index, shard[shared_start - shard_start : shared_end - shard_start]
