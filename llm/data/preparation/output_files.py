"""The files that prepared shards become: a `.bin`/`.idx` pair, or nanoGPT's two."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llm.data.formats.flat import FlatTokenFile
from llm.data.formats.megatron import TokenFile, beside
from llm.data.formats.sidecar import Sidecar, checksums, read_sidecar, write_sidecar
from llm.data.preparation.assembly import assemble, assemble_shuffled
from llm.data.preparation.encoder import Encoding
from llm.data.preparation.shards import ShardStats, each_row
from llm.errors import DataError
from llm.runtime.files import sync, sync_folder

SUFFIXES = (".json", ".idx", ".bin")
"""Of the files of a prefix, in the order of their renaming."""
_ROW_BYTES = "<u4"
_BLOCK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Output:
    """What to make of the shards.

    Attributes:
        prefix: The path of the files without their suffix. nanoGPT's lie in a folder of this name.
        nanogpt: Write `train.bin` and `val.bin` in place of a `.bin` with its `.idx`.
        validation_percentage: Of the documents, from the first one, that go to `val.bin`.
        shuffle_seed: Shuffle the documents by it; None keeps their order.
        overwrite: Replace what lies there.
        row_bytes: Write `PREFIX.bytes` too: UTF-8 bytes of each text, for a run that cuts them.
        option: The option that chooses the path, for messages.
    """

    prefix: Path
    nanogpt: bool = False
    validation_percentage: float = 0.0
    shuffle_seed: int | None = None
    overwrite: bool = False
    row_bytes: bool = False
    option: str = "--output_prefix"

    @property
    def folder(self) -> Path:
        """The folder of the shards."""
        return self.prefix.with_name(f"{self.prefix.name}.parts")

    @property
    def names(self) -> list[Path]:
        """The prefixes of the files that are written."""
        if not self.nanogpt:
            return [self.prefix]
        splits = ["train", "val"] if self.validation_percentage else ["train"]
        return [self.prefix / split for split in splits]


def assemble_output(
    stems: list[Path],
    stats: list[ShardStats],
    output: Output,
    *,
    encoding: Encoding,
    sources: list[str],
    plan: str,
) -> None:
    """Write the files to be renamed, `out.*`, with their sidecars, into the folder of the shards.

    Args:
        stems: The paths of the shards without their suffix, in their order.
        stats: What they hold.
        output: What to make of them.
        encoding: How their texts became ids.
        sources: The names of what was read.
        plan: A digest of input and options.

    Raises:
        DataError: The sidecar cannot be written.
        OSError: The file system refused a write.
    """
    whole = output.folder / "out"
    if output.shuffle_seed is None:
        assemble(stems, stats, whole, dtype=encoding.dtype)
    else:
        assemble_shuffled(stems, stats, whole, dtype=encoding.dtype, seed=output.shuffle_seed)
    common: dict[str, Any] = {
        "tokenizer": encoding.tokenizer.name,
        "tokenizer_fingerprint": encoding.tokenizer.fingerprint,
        "vocab_size": encoding.tokenizer.size,
        "eos_token_id": encoding.tokenizer.eos_token_id,
        "append_eos": encoding.end_token is not None,
        "dtype": encoding.dtype.name,
        "empty_documents": sum(shard.empty for shard in stats if not shard.one_document),
        "skipped_documents": sum(shard.skipped for shard in stats),
        "sources": sources,
        "plan": plan,
    }
    if output.nanogpt:
        _assemble_flat(stems, output, common)
        return
    sidecar = Sidecar(
        documents=sum(shard.documents for shard in stats),
        tokens=sum(shard.tokens for shard in stats),
        text_bytes=sum(shard.text_bytes for shard in stats),
        largest_token=max(shard.largest_token for shard in stats),
        checksums={kind: checksums(output.folder / f"out.{kind}") for kind in ("bin", "idx")},
        **common,
    )
    write_sidecar(whole, sidecar)
    if output.row_bytes:
        with open(beside(whole, ".bytes"), "wb") as file:
            for block in each_row(stems, ".bytes", _ROW_BYTES, _BLOCK):
                file.write(np.ascontiguousarray(block).data)
            sync(file)


def check_nanogpt_split(output: Output, documents: int) -> None:
    """Check that nanoGPT's two files can be made of so many documents.

    Raises:
        DataError: All of them would go to `val.bin`.
    """
    if output.nanogpt and _num_validation(output, documents) == documents:
        raise DataError(
            f"--validation_split_percentage {output.validation_percentage:g} of {documents:,} "
            "documents leaves none for training; change it, or pass 0."
        )


def _num_validation(output: Output, documents: int) -> int:
    return math.ceil(output.validation_percentage / 100 * documents)  # at least one, as nanoGPT's


def _assemble_flat(stems: list[Path], output: Output, common: dict[str, Any]) -> None:
    """Split the whole at a document's end into nanoGPT's `train.bin` and `val.bin`."""
    folder = output.folder
    whole = TokenFile(folder / "out")
    count = whole.num_documents
    num_validation = _num_validation(output, count)
    sizes = np.concatenate([np.zeros(1, np.int64), *each_row(stems, ".bytes", _ROW_BYTES, _BLOCK)])
    text_bytes = np.cumsum(sizes)
    for name, first, stop in (("val", 0, num_validation), ("train", num_validation, count)):
        if first == stop:
            continue
        tokens = whole.tokens[whole.document_start(first) : whole.document_start(stop)]
        path = folder / f"out.{name}.bin"
        with open(path, "wb") as file:
            tokens.tofile(file)
            sync(file)
        rows = whole.documents[[first, stop]]
        sidecar = Sidecar(
            documents=stop - first,
            tokens=int(tokens.size),
            text_bytes=int(text_bytes[rows[1]] - text_bytes[rows[0]]),
            largest_token=int(tokens.max(initial=0)),
            checksums={"bin": checksums(path)},
            **common,
        )
        write_sidecar(folder / f"out.{name}", sidecar)


def publish(output: Output) -> None:
    """Gives the files their names; the `.bin` comes last, so that what has it is whole."""
    folder = output.folder
    if output.nanogpt:
        output.prefix.mkdir(exist_ok=True)
    if output.nanogpt and not output.validation_percentage:
        # What an earlier split has put aside would be in the training text now.
        for suffix in SUFFIXES:
            (output.prefix / f"val{suffix}").unlink(missing_ok=True)
    for prefix in output.names:
        made = folder / (f"out.{prefix.name}" if output.nanogpt else "out")
        # Whatever else may lie there, from now on nothing looks whole until the new one is.
        for suffix in reversed(SUFFIXES):
            prefix.with_name(prefix.name + suffix).unlink(missing_ok=True)
        if output.row_bytes:
            beside(made, ".bytes").replace(beside(prefix, ".bytes"))
        for suffix in SUFFIXES:
            if output.nanogpt and suffix == ".idx":
                continue
            made.with_name(made.name + suffix).replace(prefix.with_name(prefix.name + suffix))
        sync_folder(prefix.parent)


def is_of_plan(prefix: Path, plan: str) -> bool:
    """Whether what lies there was named by just this plan, before a kill came."""
    try:
        sidecar = read_sidecar(prefix)
    except DataError:
        return False
    return sidecar is not None and sidecar.plan == plan


def read_row_bytes(prefix: Path) -> NDArray[np.uint32]:
    """The UTF-8 bytes of each text [num_sequences] of an output with `row_bytes`, mapped."""
    return np.memmap(beside(prefix, ".bytes"), _ROW_BYTES, mode="r")


def damage(prefix: Path, output: Output) -> list[str]:
    """What is wrong with files that a plan has made, from all of them and without reading them.

    Args:
        prefix: Of the files; one of `output.names`.
        output: What was made.

    Returns:
        A sentence; none where they are whole.
    """
    try:
        file = FlatTokenFile(beside(prefix, ".bin")) if output.nanogpt else TokenFile(prefix)
        sidecar = read_sidecar(prefix)
        sizes = beside(prefix, ".bytes").stat().st_size if output.row_bytes else None
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
