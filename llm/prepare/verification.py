"""The checksums of token files, and a check that reads the files completely."""

from pathlib import Path

import numpy as np
import xxhash

from llm.data.formats.flat import AnyTokenFile, FlatTokenFile, locate_token_file, open_token_file
from llm.data.formats.megatron import TokenFile, add_suffix
from llm.data.formats.parts import TokenFileParts, part_prefix
from llm.data.formats.sidecar import Sidecar, check_parts, read_sidecar
from llm.errors import DataError

CHUNK_BYTES = 64 << 20
"""Bytes per checksum; a changed byte is located to this accuracy."""

_READ_BYTES = 1 << 20
_TOKENS_PER_READ = 1 << 20


class ChunkHash:
    """The result of `compute_checksums`, for the bytes that were passed in so far."""

    def __init__(self) -> None:
        self._digests: list[str] = []
        self._start_chunk()

    def _start_chunk(self) -> None:
        self._hash = xxhash.xxh3_128()
        self._num_bytes_left = CHUNK_BYTES

    def update(self, data: memoryview) -> None:
        """Add bytes [num_bytes]."""
        while len(data):
            piece, data = data[: self._num_bytes_left], data[self._num_bytes_left :]
            self._hash.update(piece)
            self._num_bytes_left -= len(piece)
            if not self._num_bytes_left:
                self._digests.append(self._hash.hexdigest())
                self._start_chunk()

    def digests(self) -> list[str]:
        """Return the hex digests of the chunks; the last chunk may be shorter."""
        if self._num_bytes_left == CHUNK_BYTES:
            return self._digests
        return [*self._digests, self._hash.hexdigest()]


def compute_checksums(path: Path) -> list[str]:
    """Return the XXH3-128 hex digests of a file's consecutive chunks of 64 MiB; [] if it is empty.

    Raises:
        DataError: The file cannot be read.
    """
    # Read into one buffer, without Python's buffering: this runs at the speed of the disk.
    buffer = memoryview(bytearray(_READ_BYTES))
    chunks = ChunkHash()
    try:
        with open(path, "rb", buffering=0) as file:
            while num_bytes := file.readinto(buffer):
                chunks.update(buffer[:num_bytes])
        return chunks.digests()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


def find_token_file_faults(path: Path) -> list[str]:
    """Read token files completely, and return all their faults.

    With a sidecar, every changed byte is found. Without one, only faults in the index's tables are.

    Args:
        path: As for `open_token_file`.

    Returns:
        A sentence for each fault.

    Raises:
        DataError: The files do not exist.
    """
    prefix, _ = locate_token_file(path)
    faults: list[str] = []
    sidecar: Sidecar | None = None
    try:
        sidecar = read_sidecar(prefix)
    except DataError as error:
        faults.append(str(error))
    if sidecar is not None:
        faults += _find_changed_bytes(prefix, sidecar)
    try:
        token_file = open_token_file(path)
        if sidecar is not None:
            check_parts(token_file, sidecar)
    except DataError as error:
        return [*faults, str(error)]
    faults += _find_index_faults(token_file)
    if token_file.num_tokens == 0:
        faults.append(f"{add_suffix(prefix, '.bin')} is empty: it contains no tokens.")
    if sidecar is not None:
        faults += _find_sidecar_faults(token_file, sidecar)
    return faults


def _find_changed_bytes(prefix: Path, sidecar: Sidecar) -> list[str]:
    """Compare the files with the checksums of their sidecar; return a sentence for each fault."""
    faults: list[str] = []
    for key, path in _list_files_by_key(prefix, num_parts=len(sidecar.part_tokens)).items():
        expected = sidecar.checksums.get(key)
        if expected is not None:
            faults += _compare_checksums(path, expected)
        elif path.exists():
            faults.append(f"{prefix}.json has no checksums of {path}.")
    return faults


def _list_files_by_key(prefix: Path, *, num_parts: int) -> dict[str, Path]:
    """Return the files of a prefix by their keys in a sidecar; `num_parts` is 0 for one file."""
    kinds = ("bin", "idx")
    if not num_parts:
        return {kind: add_suffix(prefix, f".{kind}") for kind in kinds}
    path_by_key: dict[str, Path] = {}
    for part_index in range(num_parts):
        part = part_prefix(prefix, part_index, num_parts)
        path_by_key |= {f"{part_index:05d}.{kind}": add_suffix(part, f".{kind}") for kind in kinds}
    return path_by_key


def _compare_checksums(path: Path, expected_checksums: list[str]) -> list[str]:
    """Return a sentence for each chunk of a file with another checksum."""
    try:
        actual_checksums = compute_checksums(path)
    except DataError as error:
        return [str(error)]
    faults = []
    size = path.stat().st_size
    for chunk_index, digest in enumerate(actual_checksums):
        if expected_checksums[chunk_index : chunk_index + 1] != [digest]:
            start = chunk_index * CHUNK_BYTES
            end = min(start + CHUNK_BYTES, size)
            faults.append(
                f"{path}: somewhere in the bytes {start:,} to {end - 1:,} it has changed "
                "since it was written."
            )
    if len(actual_checksums) < len(expected_checksums):
        faults.append(f"{path} ends after {size:,} bytes; it was longer when it was written.")
    return faults


def _find_index_faults(token_file: AnyTokenFile) -> list[str]:
    """Return a sentence for each fault in the tables of the indices; reads them completely."""
    parts: list[TokenFile] = []
    if isinstance(token_file, TokenFile):
        parts = [token_file]
    elif isinstance(token_file, TokenFileParts):
        parts = token_file.parts
    return [
        f"{add_suffix(part.prefix, '.idx')} {fault}."
        for part in parts
        for fault in part.find_index_faults(sample=False)
    ]


def _find_sidecar_faults(token_file: AnyTokenFile, sidecar: Sidecar) -> list[str]:
    """Return a sentence for each entry of a sidecar that the tokens contradict; reads them all."""
    path = add_suffix(token_file.prefix, ".bin")
    smallest_id, largest_id = _find_id_range(token_file)
    faults = []
    if smallest_id < 0:
        faults.append(f"{path} has negative ids, down to {smallest_id}.")
    if largest_id >= sidecar.vocab_size:
        faults.append(
            f"{path} has ids up to {largest_id}, which a vocabulary of {sidecar.vocab_size} does "
            "not reach."
        )
    actual_by_entry: dict[str, object] = {
        "dtype": token_file.tokens.dtype.name,
        "tokens": token_file.num_tokens,
        "largest_token": largest_id,
    }
    if not isinstance(token_file, FlatTokenFile):
        actual_by_entry["documents"] = token_file.num_documents
    for entry, actual in actual_by_entry.items():
        recorded = getattr(sidecar, entry)
        if recorded != actual:
            faults.append(f"{token_file.prefix}.json says {entry} {recorded}, but it is {actual}.")
    return faults


def _find_id_range(token_file: AnyTokenFile) -> tuple[int, int]:
    """Return the smallest and the largest id of all tokens; (0, -1) without tokens."""
    tokens = token_file.tokens
    smallest, largest = 0, -1
    for start in range(0, tokens.size, _TOKENS_PER_READ):
        chunk = np.asarray(tokens[start : start + _TOKENS_PER_READ])
        chunk_min, chunk_max = int(chunk.min()), int(chunk.max())
        smallest = min(smallest, chunk_min) if start else chunk_min
        largest = max(largest, chunk_max) if start else chunk_max
    return smallest, largest
