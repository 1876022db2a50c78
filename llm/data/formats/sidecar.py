"""`PREFIX.json`, the sidecar of token files: provenance and checksums."""

import dataclasses
import json
import logging
import os
import types
import typing
from pathlib import Path
from typing import Any, TypedDict

from llm.data.formats.flat import AnyTokenFile, FlatTokenFile, locate_token_file, open_token_files
from llm.data.formats.megatron import TokenFile, add_suffix
from llm.data.formats.parts import TokenFileParts, find_parts, part_prefix
from llm.errors import DataError, one_line
from llm.runtime.files import write_whole
from llm.runtime.logging import SAME_ON_ALL_RANKS

FORMAT = 1
_MAX_SIDECAR_BYTES = 256 << 20  # bytes, enough for the checksums of a .bin of 400 TB

logger = logging.getLogger("llm.data")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sidecar:
    """How this package made a pair of token files, or a flat file.

    Attributes:
        tokenizer: Its name, as given.
        tokenizer_fingerprint: Equal for tokenizers that give equal ids.
        vocab_size: Number of tokens of the tokenizer.
        eos_token_id: Its end-of-text token, if it has one.
        append_eos: Whether each document ends with that token.
        prepend_bos: Whether each document begins with its beginning-of-text token.
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
    prepend_bos: bool = False
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
    """Read and check `PREFIX.json`.

    Returns:
        Its content, or None if the file does not exist.

    Raises:
        DataError: It cannot be read, or is not a sidecar.
    """
    path = add_suffix(prefix, ".json")
    if not os.path.exists(path):
        return None
    content = _read_json_object(path)
    if type(content.get("format")) is int and content["format"] > FORMAT:
        raise DataError(
            f"{path} has the format {content['format']}, of a newer version of this package; "
            f"update it, or make the token file again (this version reads the format {FORMAT})."
        )
    content = {"part_tokens": [], "prepend_bos": False, **content}  # of an earlier version
    type_by_key = typing.get_type_hints(Sidecar)
    fault = _find_sidecar_fault(content, type_by_key)
    if fault is not None:
        raise _invalid_sidecar_error(path, fault)
    return Sidecar(**{key: content[key] for key in type_by_key})


def _read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        DataError: The file cannot be read, is too large, or is not a JSON object.
    """
    try:
        if not path.is_file() or path.stat().st_size > _MAX_SIDECAR_BYTES:
            raise _invalid_sidecar_error(path, "it is not a file of this kind")
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise _invalid_sidecar_error(path, f"it is not JSON ({one_line(error)})") from error
    if not isinstance(content, dict):
        raise _invalid_sidecar_error(path, "it is not a JSON object")
    return content


def _invalid_sidecar_error(path: Path, fault: str) -> DataError:
    """Return the error for a file that is not a sidecar."""
    return DataError(
        f"{path} does not describe its token file: {fault}; restore it, or move it away to use "
        "the token file without it."
    )


def _find_sidecar_fault(content: dict[str, Any], type_by_key: dict[str, Any]) -> str | None:
    """Return the first fault of a sidecar's values, as a clause of a sentence; None without one."""
    for key, expected_type in type_by_key.items():
        if key not in content:
            return f"it lacks the key '{key}'"
        value = content[key]
        if not _has_type(value, expected_type):
            return f"the value of '{key}' has the wrong type"
        smallest_number = -1 if key == "largest_token" else 0
        if type(value) is int and value < smallest_number:
            return f"the value of '{key}' is {value}"
    if content["format"] != FORMAT:
        return f"its format is {content['format']}, not {FORMAT}"
    return None


def _has_type(value: Any, expected_type: Any) -> bool:
    """Return whether a value of a JSON file has a type; here, `true` is not an integer."""
    if isinstance(expected_type, types.UnionType):
        return any(_has_type(value, member) for member in typing.get_args(expected_type))
    container_type = typing.get_origin(expected_type) or expected_type
    if type(value) is not container_type or container_type not in (list, dict):
        return type(value) is container_type
    item_type = typing.get_args(expected_type)[-1]  # the keys of a JSON object are strings
    items = value.values() if container_type is dict else value
    return all(_has_type(item, item_type) for item in items)


class TokenFileDescription(TypedDict):
    """All that opening token files in a folder needs to know; JSON can hold it.

    Attributes:
        name: Their name without suffix.
        is_flat: Whether it is a flat file.
        num_parts: The number of parts; 0 for one file.
        sidecar: The fields of the sidecar, if there is one.
    """

    name: str
    is_flat: bool
    num_parts: int
    sidecar: dict[str, Any] | None


def describe_token_files(path: Path) -> TokenFileDescription:
    """Find token files of any kind and read their sidecar; opens none of them.

    Raises:
        DataError: They are missing, parts are missing, or the sidecar is damaged.
    """
    prefix, is_flat = locate_token_file(path)
    num_parts = 0 if is_flat else len(find_parts(prefix))
    sidecar = read_sidecar(prefix)
    return {
        "name": prefix.name,
        "is_flat": is_flat,
        "num_parts": num_parts,
        "sidecar": None if sidecar is None else dataclasses.asdict(sidecar),
    }


def open_described_files(
    folder: Path, description: TokenFileDescription
) -> tuple[AnyTokenFile, Sidecar | None]:
    """Open token files, and return them with their sidecar if they have one.

    Args:
        folder: Their folder, which may have another path than on the rank that described them.
        description: The result of `describe_token_files`.

    Raises:
        DataError: They are missing or damaged, or the sidecar describes other parts.
    """
    prefix, num_parts = folder / description["name"], description["num_parts"]
    parts = [part_prefix(prefix, part_index, num_parts) for part_index in range(num_parts)]
    file = open_token_files(prefix, parts, is_flat=description["is_flat"])
    if description["sidecar"] is None:
        return file, None
    sidecar = Sidecar(**description["sidecar"])
    check_parts(file, sidecar)
    return file, sidecar


def check_parts(file: AnyTokenFile, sidecar: Sidecar) -> None:
    """Refuse parts that differ from the parts in a sidecar, in their number or their tokens."""
    parts = file.parts if isinstance(file, TokenFileParts) else []
    if bool(parts) != bool(sidecar.part_tokens):
        described_kind, actual_kind = (
            ("parts", "a whole file") if sidecar.part_tokens else ("a whole file", "parts")
        )
        raise DataError(
            f"{file.prefix}.json describes {described_kind}, but it belongs to {actual_kind}; "
            "restore the files that were prepared together."
        )
    part_tokens = [part.num_tokens for part in parts]
    if len(part_tokens) != len(sidecar.part_tokens):
        raise DataError(
            f"{file.prefix}.json describes {len(sidecar.part_tokens):,} parts, not "
            f"{len(part_tokens):,}; restore the files that were prepared together."
        )
    for part, num_recorded_tokens in zip(parts, sidecar.part_tokens, strict=True):
        if part.num_tokens != num_recorded_tokens:
            raise DataError(
                f"The token file {part.prefix}.bin is of another preparation: it has "
                f"{part.num_tokens:,} tokens, and {file.prefix}.json says {num_recorded_tokens:,}; "
                "restore the files that were prepared together."
            )


def find_damage(prefix: Path, *, is_flat: bool = False, has_row_bytes: bool = False) -> list[str]:
    """Return faults of finished files that their sizes and headers show.

    Args:
        prefix: Their path without suffix.
        is_flat: Whether it is a flat file.
        has_row_bytes: Whether `PREFIX.bytes` is one of them.

    Returns:
        One sentence per fault; empty if the files are complete.
    """
    try:
        sidecar = read_sidecar(prefix)
        file = _open_finished_files(prefix, sidecar, is_flat=is_flat)
        row_bytes_size = add_suffix(prefix, ".bytes").stat().st_size if has_row_bytes else None
    except (DataError, FileNotFoundError) as error:
        return [str(error)]
    if sidecar is None:
        return [f"{prefix}.json is missing."]
    if isinstance(file, TokenFile) and row_bytes_size not in (None, 4 * file.num_sequences):
        return [f"{prefix}.bytes does not have a number for each of {file.num_sequences:,} texts."]
    if file.num_tokens != sidecar.tokens:
        return [
            f"{prefix}.bin holds {file.num_tokens:,} tokens, not {sidecar.tokens:,} as "
            f"{prefix}.json says."
        ]
    return []


def _open_finished_files(prefix: Path, sidecar: Sidecar | None, *, is_flat: bool) -> AnyTokenFile:
    """Open token files of the kind that their sidecar describes; a flat file has no index.

    Raises:
        DataError: They are missing or damaged.
    """
    if is_flat:
        return FlatTokenFile(add_suffix(prefix, ".bin"))
    if sidecar is not None and sidecar.part_tokens:
        file, _ = open_described_files(prefix.parent, describe_token_files(prefix))
        return file
    return TokenFile(prefix)


def check_prepend_bos(prefix: Path, sidecar: Sidecar, prepend_bos: bool) -> None:
    """Refuse token files with documents that begin in another way than the run's.

    Args:
        prefix: Path of the token files without suffix, for messages.
        sidecar: Their sidecar.
        prepend_bos: Whether a document of the run begins with the beginning-of-text token.

    Raises:
        DataError: They differ.
    """
    if sidecar.prepend_bos == prepend_bos:
        return
    if sidecar.prepend_bos:
        preposition, remedy = "with", "pass --prepend_bos"
    else:
        preposition, remedy = "without", "leave --prepend_bos out"
    raise DataError(
        f"The token file {prefix} was made {preposition} --prepend_bos; {remedy}, or prepare it "
        "again."
    )


def check_tokenizer(
    prefix: Path, sidecar: Sidecar, fingerprint: str, ignore_mismatch: bool
) -> None:
    """Refuse token files that were made with another tokenizer than the run's.

    Args:
        prefix: Path of the token files without suffix, for messages.
        sidecar: Their sidecar.
        fingerprint: Fingerprint of the tokenizer of the run.
        ignore_mismatch: Whether to log a warning instead of raising.

    Raises:
        DataError: The fingerprints differ, and `ignore_mismatch` is not set.
    """
    if sidecar.tokenizer_fingerprint == fingerprint:
        return
    mismatch = (
        f"The token file {prefix} was made with the tokenizer {sidecar.tokenizer} (fingerprint "
        f"{sidecar.tokenizer_fingerprint}), not with the one of this run (fingerprint "
        f"{fingerprint})"
    )
    if not ignore_mismatch:
        raise DataError(
            f"{mismatch}; train with that one, or pass --ignore_tokenizer_mismatch to train all "
            "the same."
        )
    logger.warning(
        f"{mismatch}; continuing because of --ignore_tokenizer_mismatch.", extra=SAME_ON_ALL_RANKS
    )
