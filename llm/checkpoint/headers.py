"""The headers of a checkpoint's tensor files: which tensors and shards each file holds.

`torch.distributed.checkpoint` opens all files on all ranks to read them. There is a file for each
rank that wrote a part, so the opened files of a resume would grow with the square of the ranks.
Here each rank reads the headers of some files, and sends them to the others.
"""

import pickle
import zlib
from collections.abc import Sequence

import torch
from torch import distributed
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from llm.checkpoint.format import TENSOR_FILE_SUFFIX, Checkpoint
from llm.errors import CheckpointError, explain_os_error, extract_os_error, one_line
from llm.runtime.agreement import gather_results


class HeaderReader(HuggingFaceStorageReader):
    """Reads tensors from a checkpoint whose headers are known."""

    def __init__(self, checkpoint: Checkpoint, headers: Metadata) -> None:
        super().__init__(str(checkpoint.path))
        self._headers = headers

    def read_metadata(self) -> Metadata:
        """Return the headers."""
        return self._headers


class _FileList(FileSystem):
    """A file system that lists only some files."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths

    def ls(self, path: object) -> list[str]:
        """Return the files."""
        return [*self._paths]


def read_headers(checkpoint: Checkpoint) -> Metadata:
    """Read the headers of all tensor files, each on one rank; every rank calls it.

    Args:
        checkpoint: A verified checkpoint: only files in its manifest are read.

    Raises:
        CheckpointError: A file cannot be read.
    """
    file_names = sorted(
        name for name in checkpoint.files if name.endswith(TENSOR_FILE_SUFFIX) and "/" not in name
    )
    if not (distributed.is_available() and distributed.is_initialized()):
        return _read_file_headers(checkpoint, file_names)
    local_file_names = file_names[distributed.get_rank() :: distributed.get_world_size()]

    def read_local_headers() -> bytes:
        """Read this rank's share of the files; compress their headers, to a tenth of the bytes."""
        return zlib.compress(pickle.dumps(_read_file_headers(checkpoint, local_file_names)))

    compressed_headers = gather_results(read_local_headers)
    return _merge_headers(
        [pickle.loads(zlib.decompress(headers)) for headers in compressed_headers]
    )


def _read_file_headers(checkpoint: Checkpoint, file_names: Sequence[str]) -> Metadata:
    """Return the headers of some files.

    Raises:
        CheckpointError: A file cannot be read.
    """
    reader = HuggingFaceStorageReader(str(checkpoint.path))
    reader.fs = _FileList([str(checkpoint.path / file_name) for file_name in file_names])
    try:
        return reader.read_metadata()
    except Exception as error:  # safetensors has a class of errors for each kind of damage
        if (failure := extract_os_error(error, checkpoint.path)) is not None:
            raise CheckpointError(explain_os_error(failure)) from error
        raise CheckpointError(f"{checkpoint.path} cannot be read: {one_line(error)}.") from error


def _merge_headers(headers_by_rank: Sequence[Metadata]) -> Metadata:
    """Merge the headers that each rank has read; several files may have shards of a tensor."""
    merged = Metadata(state_dict_metadata={}, storage_data={})
    for headers in headers_by_rank:
        merged.storage_data |= headers.storage_data
        for path, entry in headers.state_dict_metadata.items():
            merged_entry = merged.state_dict_metadata.setdefault(path, entry)
            if merged_entry is not entry:
                assert isinstance(merged_entry, TensorStorageMetadata)
                assert isinstance(entry, TensorStorageMetadata)
                merged_entry.chunks += entry.chunks
                merged_entry.size = torch.Size(map(max, merged_entry.size, entry.size))
    return merged
