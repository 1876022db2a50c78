"""`PREFIX.json`, the sidecar of token files: recipe and checksums."""

import dataclasses
import json
import logging
import os
import types
import typing
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from llm.data.formats.flat import AnyTokenFile, FlatTokenFile, locate, open_token_file
from llm.data.formats.megatron import TokenFile, add_suffix
from llm.data.formats.parts import TokenFileParts, part_prefix
from llm.errors import DataError
from llm.runtime.files import write_whole

FORMAT = 1
CHUNK_BYTES = 64 << 20
"""Bytes per checksum; a changed byte is located to this accuracy."""

_READ_BYTES = 1 << 20
_NUM_TOKENS = 1 << 20  # tokens that are checked at once
_LARGEST_SIDECAR = 256 << 20  # bytes, enough for the checksums of a .bin of 400 TB

log = logging.getLogger("llm.data")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sidecar:
    """How this package made a pair of token files, or a flat file.

    Attributes:
        tokenizer: Its name, as given.
        tokenizer_fingerprint: Equal for tokenizers that give equal ids.
        vocab_size: Number of tokens of the tokenizer.
        eos_token_id: Its end-of-text token, if it has one.
        append_eos: Whether each document ends with that token.
        dtype: Dtype of the token ids in the file: `uint16` or `int32`.
        documents: Documents in the file.
        tokens: Tokens in the file.
        text_bytes: UTF-8 bytes of their text.
        empty_documents: Documents without text, which are not in the file.
        skipped_documents: Documents that could not be read, which are not in the file.
        largest_token: The largest id; -1 without tokens.
        sources: Names of the files and data sets that were read.
        plan: Digest of the input and the options. If you repeat a command, it finds its digest and
            stops.
        checksums: For `bin` and `idx` (a flat file has none), the result of `checksums`; for each
            part, `00000.bin` and `00000.idx`.
        part_tokens: Tokens of each part; empty if the file is whole.
        format: Version of these fields.
    """

    tokenizer: str
    tokenizer_fingerprint: str
    vocab_size: int
    eos_token_id: int | None
    append_eos: bool
    dtype: str
    documents: int
    tokens: int
    text_bytes: int
    empty_documents: int
    skipped_documents: int
    largest_token: int
    sources: list[str]
    plan: str
    checksums: dict[str, list[str]]
    part_tokens: list[int] = dataclasses.field(default_factory=list)
    format: int = FORMAT


def write_sidecar(prefix: Path, sidecar: Sidecar) -> None:
    """Write `PREFIX.json`; a kill leaves the old one or the new one.

    Raises:
        DataError: The file system refuses it.
    """
    path = add_suffix(prefix, ".json")
    text = json.dumps(dataclasses.asdict(sidecar), indent=1, ensure_ascii=True) + "\n"
    try:
        write_whole(path, text)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}.") from error


def read_sidecar(prefix: Path) -> Sidecar | None:
    """Read `PREFIX.json`.

    Returns:
        Its content, or None if the file does not exist.

    Raises:
        DataError: It cannot be read, or is not a sidecar.
    """
    path = add_suffix(prefix, ".json")
    if not os.path.exists(path):
        return None

    def no_sidecar(fault: str) -> DataError:
        return DataError(
            f"{path} does not describe its token file: {fault}; restore it, or move it away to use "
            "the token file without it."
        )

    try:
        if not path.is_file() or path.stat().st_size > _LARGEST_SIDECAR:
            raise no_sidecar("it is not a file of this kind")
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise no_sidecar(f"it is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise no_sidecar("it is not a JSON object")
    if type(content.get("format")) is int and content["format"] > FORMAT:
        raise DataError(
            f"{path} has the format {content['format']}, of a newer version of this package; "
            f"update it, or make the token file again (this version reads the format {FORMAT})."
        )
    content.setdefault("part_tokens", [])  # of an earlier version
    hints = typing.get_type_hints(Sidecar)
    for name, hint in hints.items():
        if name not in content:
            raise no_sidecar(f"it lacks the key '{name}'")
        value = content[name]
        if not _fits(value, hint):
            raise no_sidecar(f"the value of '{name}' has the wrong type")
        if type(value) is int and value < (-1 if name == "largest_token" else 0):
            raise no_sidecar(f"the value of '{name}' is {value}")
    if content["format"] != FORMAT:
        raise no_sidecar(f"its format is {content['format']}, not {FORMAT}")
    return Sidecar(**{name: content[name] for name in hints})


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value of a JSON file has a type; `true` is not an integer here."""
    if isinstance(hint, types.UnionType):
        return any(_fits(value, member) for member in typing.get_args(hint))
    kind = typing.get_origin(hint) or hint
    if type(value) is not kind or kind not in (list, dict):
        return type(value) is kind
    values = value.values() if kind is dict else value  # the keys of a JSON object are strings
    return all(_fits(member, typing.get_args(hint)[-1]) for member in values)


def open_described(path: Path) -> tuple[AnyTokenFile, Sidecar | None]:
    """Open token files of any kind, with their sidecar if they have one.

    Raises:
        DataError: They are missing or damaged, or the sidecar describes other parts.
    """
    file = open_token_file(path)
    sidecar = read_sidecar(file.prefix)
    if sidecar is not None:
        _check_parts(file, sidecar)
    return file, sidecar


def _check_parts(file: AnyTokenFile, sidecar: Sidecar) -> None:
    """Refuse parts that a sidecar does not describe."""
    parts = file.parts if isinstance(file, TokenFileParts) else []
    if bool(parts) != bool(sidecar.part_tokens):
        kinds = ("parts", "a whole file") if sidecar.part_tokens else ("a whole file", "parts")
        raise DataError(
            f"{file.prefix}.json describes {kinds[0]}, but it belongs to {kinds[1]}; restore the "
            "files that were prepared together."
        )
    found = [part.num_tokens for part in parts]
    if len(found) != len(sidecar.part_tokens):
        raise DataError(
            f"{file.prefix}.json describes {len(sidecar.part_tokens):,} parts, not {len(found):,}; "
            "restore the files that were prepared together."
        )
    for part, recorded in zip(parts, sidecar.part_tokens, strict=True):
        if part.num_tokens != recorded:
            raise DataError(
                f"The token file {part.prefix}.bin is of another preparation: it has "
                f"{part.num_tokens:,} tokens, and {file.prefix}.json says {recorded:,}; restore "
                "the files that were prepared together."
            )


class ChunkHash:
    """The result of `checksums`, for the bytes that were passed in so far."""

    def __init__(self) -> None:
        self._digests: list[str] = []
        self._restart()

    def _restart(self) -> None:
        self._hash = xxhash.xxh3_128()
        self._left = CHUNK_BYTES

    def update(self, data: memoryview) -> None:
        """Add bytes [num_bytes]."""
        while len(data):
            piece, data = data[: self._left], data[self._left :]
            self._hash.update(piece)
            self._left -= len(piece)
            if not self._left:
                self._digests.append(self._hash.hexdigest())
                self._restart()

    def digests(self) -> list[str]:
        """Return the hex digests of the chunks; the last chunk may be shorter."""
        if self._left == CHUNK_BYTES:
            return self._digests
        return [*self._digests, self._hash.hexdigest()]


def checksums(path: Path) -> list[str]:
    """Return the XXH3-128 hex digests of a file's consecutive chunks of 64 MiB; [] if it is empty.

    Raises:
        DataError: The file cannot be read.
    """
    # Read into one buffer, without Python's buffering: this runs at the speed of the disk.
    buffer = memoryview(bytearray(_READ_BYTES))
    chunks = ChunkHash()
    try:
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                chunks.update(buffer[:count])
        return chunks.digests()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


def damage(prefix: Path, *, nanogpt: bool = False, row_bytes: bool = False) -> list[str]:
    """Return faults of finished files that their sizes and headers show.

    Args:
        prefix: Their path without suffix.
        nanogpt: Whether it is a flat file.
        row_bytes: Whether `PREFIX.bytes` is one of them.

    Returns:
        One sentence per fault; empty if the files are complete.
    """
    try:
        sidecar = read_sidecar(prefix)
        file: AnyTokenFile
        if nanogpt:
            file = FlatTokenFile(add_suffix(prefix, ".bin"))
        elif sidecar is not None and sidecar.part_tokens:
            file, _ = open_described(prefix)
        else:
            file = TokenFile(prefix)
        sizes = add_suffix(prefix, ".bytes").stat().st_size if row_bytes else None
    except (DataError, FileNotFoundError) as error:
        return [str(error)]
    if sidecar is None:
        return [f"{prefix}.json is missing."]
    if isinstance(file, TokenFile) and sizes not in (None, 4 * file.num_sequences):
        return [f"{prefix}.bytes does not have a number for each of {file.num_sequences:,} texts."]
    if file.num_tokens != sidecar.tokens:
        return [
            f"{prefix}.bin holds {file.num_tokens:,} tokens, not {sidecar.tokens:,} as "
            f"{prefix}.json says."
        ]
    return []


def verify(path: Path) -> list[str]:
    """Read token files completely and list all faults.

    With a sidecar, every changed byte is found. Without one, only faults in the index's tables are.

    Args:
        path: As for `open_token_file`.

    Returns:
        A sentence for each fault.

    Raises:
        DataError: The files do not exist.
    """
    prefix, _ = locate(path)
    faults: list[str] = []
    sidecar: Sidecar | None = None
    try:
        sidecar = read_sidecar(prefix)
    except DataError as error:
        faults.append(str(error))
    if sidecar is not None:
        faults += _changed_bytes(prefix, sidecar)
    try:
        token_file = open_token_file(path)
        if sidecar is not None:
            _check_parts(token_file, sidecar)
    except DataError as error:
        return [*faults, str(error)]
    parts = [token_file] if isinstance(token_file, TokenFile) else []
    if isinstance(token_file, TokenFileParts):
        parts = token_file.parts
    for part in parts:
        index = add_suffix(part.prefix, ".idx")
        faults += [f"{index} {fault}." for fault in part.index_faults(sample=False)]
    if token_file.num_tokens == 0:
        faults.append(f"{add_suffix(prefix, '.bin')} is empty: it contains no tokens.")
    if sidecar is not None:
        faults += _disagreements(token_file, sidecar)
    return faults


def _changed_bytes(prefix: Path, sidecar: Sidecar) -> list[str]:
    faults: list[str] = []
    files = {kind: add_suffix(prefix, f".{kind}") for kind in ("bin", "idx")}
    if count := len(sidecar.part_tokens):
        files = {
            f"{number:05d}.{kind}": add_suffix(part_prefix(prefix, number, count), f".{kind}")
            for number in range(count)
            for kind in ("bin", "idx")
        }
    for kind, path in files.items():
        expected = sidecar.checksums.get(kind)
        if expected is None:
            if path.exists():
                faults.append(f"{prefix}.json has no checksums of {path}.")
            continue
        try:
            actual = checksums(path)
        except DataError as error:
            faults.append(str(error))
            continue
        size = path.stat().st_size
        for number, digest in enumerate(actual):
            if expected[number : number + 1] != [digest]:
                start, stop = number * CHUNK_BYTES, min((number + 1) * CHUNK_BYTES, size)
                faults.append(
                    f"{path}: somewhere in the bytes {start:,} to {stop - 1:,} it has changed "
                    "since it was written."
                )
        if len(actual) < len(expected):
            faults.append(f"{path} ends after {size:,} bytes; it was longer when it was written.")
    return faults


def _disagreements(token_file: AnyTokenFile, sidecar: Sidecar) -> list[str]:
    """Compare a sidecar with the contents of the files; reads all tokens."""
    path = add_suffix(token_file.prefix, ".bin")
    smallest, largest = _id_range(token_file)
    faults = []
    if smallest < 0:
        faults.append(f"{path} has negative ids, down to {smallest}.")
    if largest >= sidecar.vocab_size:
        faults.append(
            f"{path} has ids up to {largest}, which a vocabulary of {sidecar.vocab_size} does not "
            "reach."
        )
    fields: list[tuple[str, object, object]] = [
        ("dtype", sidecar.dtype, token_file.tokens.dtype.name),
        ("tokens", sidecar.tokens, token_file.num_tokens),
        ("largest_token", sidecar.largest_token, largest),
    ]
    if not isinstance(token_file, FlatTokenFile):
        fields.append(("documents", sidecar.documents, token_file.num_documents))
    faults += [
        f"{token_file.prefix}.json says {name} {recorded}, but it is {actual}."
        for name, recorded, actual in fields
        if recorded != actual
    ]
    return faults


def _id_range(token_file: AnyTokenFile) -> tuple[int, int]:
    """Return the smallest and the largest id of all tokens; (0, -1) without tokens."""
    tokens = token_file.tokens
    smallest, largest = 0, -1
    for start in range(0, tokens.size, _NUM_TOKENS):
        chunk = np.asarray(tokens[start : start + _NUM_TOKENS])
        low, high = int(chunk.min()), int(chunk.max())
        smallest = min(smallest, low) if start else low
        largest = max(largest, high) if start else high
    return smallest, largest


def check_tokenizer(
    prefix: Path, sidecar: Sidecar, fingerprint: str, ignore_mismatch: bool
) -> None:
    """Refuse token files that were made with another tokenizer than the run's.

    Args:
        prefix: Path of the token files without suffix, for messages.
        sidecar: Their sidecar.
        fingerprint: Fingerprint of the tokenizer of the run.
        ignore_mismatch: Warn instead of raising.

    Raises:
        DataError: The fingerprints differ, and `ignore_mismatch` is not set.
    """
    if sidecar.tokenizer_fingerprint == fingerprint:
        return
    fault = (
        f"The token file {prefix} was made with the tokenizer {sidecar.tokenizer} (fingerprint "
        f"{sidecar.tokenizer_fingerprint}), not with the one of this run (fingerprint "
        f"{fingerprint})"
    )
    if not ignore_mismatch:
        raise DataError(
            f"{fault}; train with that one, or pass --ignore_tokenizer_mismatch to train all the "
            "same."
        )
    log.warning(f"{fault}; continuing because of --ignore_tokenizer_mismatch.")
