"""Identifies a text and its token files without reading the text."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from llm.errors import DataError

COMPRESSIONS = (".gz", ".xz", ".bz2", ".zst")
KINDS = (".txt", ".csv", ".json", ".jsonl", ".ndjson", ".parquet")
SHARD_BYTES = 1 << 26
"""Bytes on disk that one worker takes at once; a killed run repeats this much per worker."""

_PROVENANCE_FORMAT = 1
"""Version of the shards that texts are tokenized into."""
_NUM_SAMPLED_BLOCKS, _SAMPLED_BLOCK_BYTES = 16, 1 << 16
_LFS_POINTER_START, _MAX_LFS_POINTER_BYTES = b"version https://git-lfs.github.com/spec/", 1024

Json = str | int | bool | None | list[list[str | int]]
Stamps = dict[Path, dict[str, int]]
"""Size and modification time of files."""
TextUnit = Literal["line", "paragraph", "file"]
Provenance = dict[str, Any]
"""Input and options, as JSON; equal provenances give equal bytes."""


def is_compressed(path: Path) -> bool:
    """Return whether the name ends with `.gz`, `.xz`, `.bz2` or `.zst`."""
    return path.suffix.lower() in COMPRESSIONS


def kind_of(path: Path) -> str:
    """Return the suffix that tells the format of a file: `.jsonl` for `wiki.jsonl.zst`."""
    return (Path(path.stem) if is_compressed(path) else path).suffix.lower()


def bare_name(path: Path) -> str:
    """Return a file's name without the suffixes of its format and compression.

    Other dots belong to the name: `c4-train.00000-of-01024` for `c4-train.00000-of-01024.json.gz`.
    """
    name = path.stem if is_compressed(path) else path.name
    return Path(name).stem if kind_of(path) in KINDS else name


def file_stamp(path: Path) -> dict[str, int]:
    """Return size and modification time; if either differs, the file has changed."""
    stat = path.stat()
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def check_text_file(path: Path, option: str) -> None:
    """Refuse a file that cannot be read as text.

    Args:
        path: The file.
        option: The option that named it, for messages.

    Raises:
        DataError: The file is missing, a folder, empty, unreadable, of another kind, or a pointer
            of Git LFS.
    """
    kind = kind_of(path)
    if not os.path.exists(path):
        if "*" in path.name:
            raise DataError(
                f"{option} {path} is a pattern, and {option} takes one file; name the folder with "
                "--dataset_name."
            )
        raise DataError(
            f"{option} {path} does not exist, or its folder is not readable; check the path."
        )
    if path.is_dir():
        raise DataError(f"{option} {path} is a folder; name it with --dataset_name.")
    if not path.is_file():
        raise DataError(f"{option} {path} is not a regular file; write its text to a file first.")
    if kind not in KINDS or (kind == ".parquet" and is_compressed(path)):
        raise DataError(
            f"{option} {path} has an unknown format; give one of {', '.join(KINDS)}, all but the "
            f"last may be compressed, as in .jsonl.gz ({', '.join(COMPRESSIONS)}). Plain text "
            "such as source code has to be in files that end in .txt."
        )
    if path.stat().st_size == 0:
        raise DataError(f"{option} {path} is empty; give a file with text.")
    if path.stat().st_size < _MAX_LFS_POINTER_BYTES and _read_beginning(path).startswith(
        _LFS_POINTER_START
    ):
        raise DataError(
            f"{option} {path} is a pointer of Git LFS, not the file itself; run `git lfs pull` in "
            "its repository."
        )


def _read_beginning(path: Path) -> bytes:
    """Return at most 1,024 bytes from the beginning of a file."""
    try:
        with open(path, "rb") as file:
            return file.read(_MAX_LFS_POINTER_BYTES)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


def file_options(
    path: Path, *, text_column: str | None, keep_linebreaks: bool, text_unit: TextUnit
) -> dict[str, Json]:
    """Return the options that affect the texts of a file."""
    if kind_of(path) != ".txt":
        return {"text_column": text_column}
    return {"keep_linebreaks": keep_linebreaks and text_unit == "file", "text_unit": text_unit}


def file_identity(path: Path, stamp: dict[str, int], options: dict[str, Json]) -> dict[str, Json]:
    """Return values that identify the text of a file.

    Args:
        path: The file.
        stamp: Its size and modification time, as `file_stamp` returns them.
        options: The options that affect its text, as `file_options` returns them.
    """
    return {"path": os.path.abspath(path), **stamp, **options}


def compute_sampled_digest(path: Path) -> str:
    """Return a digest of a file: of all bytes up to 1 MiB, else of 16 blocks of 64 KiB."""
    import xxhash  # imported here because --help runs without packages

    digest = xxhash.xxh3_128()
    try:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size <= _NUM_SAMPLED_BLOCKS * _SAMPLED_BLOCK_BYTES:
                return str(xxhash.xxh3_128_hexdigest(file.read()))
            for block_index in range(_NUM_SAMPLED_BLOCKS):
                file.seek((size - _SAMPLED_BLOCK_BYTES) * block_index // (_NUM_SAMPLED_BLOCKS - 1))
                digest.update(file.read(_SAMPLED_BLOCK_BYTES))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    return str(digest.hexdigest())


def check_dataset_name(dataset_name: str, file_option: str) -> None:
    """Refuse a name that is neither a data set nor a folder.

    Args:
        dataset_name: A Hub name, or a folder.
        file_option: The option for a file, for messages.

    Raises:
        DataError: The name is empty, a file, or a path that does not exist.
    """
    if not dataset_name:  # pathlib would take it for the working directory
        raise DataError("--dataset_name is empty; name a data set or a folder.")
    path = Path(dataset_name)
    if path.is_file():
        raise DataError(f"--dataset_name {dataset_name} is a file; name it with {file_option}.")
    is_path = path.is_absolute() or dataset_name.startswith(("./", "../", "~"))
    if is_path and not path.is_dir():
        raise DataError(f"--dataset_name {dataset_name} does not exist; check the path.")


def stamp_dataset_files(dataset_name: str) -> Stamps:
    """Return the stamps of the files that `save_to_disk` wrote; none for a data set on the Hub.

    Raises:
        DataError: The folder has a broken link.
    """
    if not Path(dataset_name).is_dir():
        return {}
    paths = sorted(Path(os.path.abspath(dataset_name)).rglob("*"))
    refuse_broken_links(paths, f"--dataset_name {dataset_name}:")
    return {path: file_stamp(path) for path in paths if path.is_file()}


def identify_dataset(
    dataset_name: str,
    dataset_config_name: str | None,
    *,
    split: str,
    text_column: str | None,
    stamps: Stamps,
) -> dict[str, Json]:
    """Return values that identify a split; of a data set on the Hub, these are only names."""
    identity: dict[str, Json] = {
        "dataset": dataset_name,
        "config": dataset_config_name,
        "split": split,
        "text_column": text_column,
    }
    if Path(dataset_name).is_dir():
        folder = os.path.abspath(dataset_name)
        identity["dataset"] = os.path.realpath(dataset_name)
        identity["files"] = [
            [str(file.relative_to(folder)), *stamp.values()] for file, stamp in stamps.items()
        ]
    return identity


def refuse_broken_links(paths: list[Path], location: str) -> None:
    """Raise a DataError that begins with `location` if a path is a broken link."""
    for path in paths:
        if os.path.islink(path) and not os.path.exists(path):
            raise DataError(
                f"{location} {path} is a broken link; remove it, or name the files to read."
            )


def make_provenance(
    identities: Sequence[dict[str, Json]],
    *,
    tokenizer_fingerprint: str,
    end_token: int | None,
    dtype: str,
    begin_token: int | None = None,
    allow_special_tokens: bool = False,
    on_error: Literal["stop", "skip"] = "stop",
    shuffle_seed: int | None = None,
    validation_percentage: float = 0.0,
    part_bytes: int = SHARD_BYTES,
) -> Provenance:
    """Return the provenance of token files."""
    # A change of any key or value changes the digests, and no existing cache or token file fits.
    return {
        "format": _PROVENANCE_FORMAT,
        "part_bytes": part_bytes,
        "sources": list(identities),
        "tokenizer_fingerprint": tokenizer_fingerprint,
        "end_token": end_token,
        "dtype": dtype,
        "allow_special_tokens": allow_special_tokens,
        "on_error": on_error,
        "shuffle_seed": shuffle_seed,
        "validation_percentage": validation_percentage,
        **({} if begin_token is None else {"begin_token": begin_token}),
    }


def provenance_digest(provenance: Provenance) -> str:
    """Return a digest of a provenance: equal digests, equal bytes."""
    import xxhash  # imported here because --help runs without packages

    return xxhash.xxh3_128_hexdigest(json.dumps(provenance, sort_keys=True).encode())
