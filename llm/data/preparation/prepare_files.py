"""One token file from many sources: resumable, and renamed only when it is complete.

PREFIX.parts/plan.json     input and options; if they change, work starts again
PREFIX.parts.lock          held by the program that prepares
PREFIX.parts/000000.ids .. the shards that are done
PREFIX.parts/out.*         the result, before it is renamed
"""

import errno
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from llm.data.formats.megatron import beside
from llm.data.formats.sidecar import damage, read_sidecar
from llm.data.preparation.encoder import Encoding
from llm.data.preparation.output_files import (
    Output,
    assemble_output,
    former_validation,
    publish,
)
from llm.data.preparation.shards import ShardStats
from llm.data.preparation.tokenize_shards import Totals, tokenize_shards
from llm.data.text.blocks import BadRecordPolicy
from llm.data.text.sources import Source, check_unchanged
from llm.data.text_identity import SHARD_BYTES, Recipe, recipe, recipe_digest
from llm.errors import ConfigError, DataError, LLMError
from llm.runtime.counts import counted
from llm.runtime.files import try_lock, write_whole

_OWN_NAMES = re.compile(r"\d{6,}\.|out\.|\.out\.|\.?plan\.|reference-encoder$")
_NAMES_BEFORE_PLAN = re.compile(r"\.plan\.")

log = logging.getLogger("llm.data")


def prepare_files(
    jobs: list[tuple[list[Source], Output]],
    *,
    encoding: Encoding,
    workers: int,
    log_seconds: float = 10.0,
) -> None:
    """Make the token files of several outputs, resuming a stopped run.

    Args:
        jobs: The texts of each output; workers take them chunk by chunk.
        encoding: How texts become ids.
        workers: Cores to use.
        log_seconds: Seconds between two lines on the progress.

    Raises:
        DataError: A text is broken or empty or changes while it is read, or an output exists or
            cannot be written.
    """
    todo = []
    for texts, output in jobs:
        sources = [chunk for text in texts for chunk in text.split(SHARD_BYTES)]
        if not output.overwrite and _is_done(
            output, recipe_digest(_recipe(sources, output, encoding))
        ):
            log.info(f"{output.names[0]}.bin already exists, made with the same options")
        else:
            former_validation(output)  # refused now, rather than after the work
            todo.append((sources, output))
    for sources, output in todo:
        try:
            _prepare_file(sources, output, encoding, workers, log_seconds)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            remedy = (
                f"free some space or choose another {output.option}."
                if full
                else f"check the path and its permissions, or choose another {output.option}."
            )
            raise DataError(
                f"{error.filename or output.prefix} cannot be written "
                f"({error.strerror or error}); {remedy}"
            ) from error


def _prepare_file(
    sources: list[Source],
    output: Output,
    encoding: Encoding,
    workers: int,
    log_seconds: float,
) -> None:
    began = time.monotonic()
    folder = output.folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    made_of = _recipe(sources, output, encoding)
    names = list(dict.fromkeys(source.name for source in sources))
    with _locked(output):
        done = _begin(output, made_of, len(sources))
        try:
            stems, stats = tokenize_shards(
                sources,
                folder,
                encoding=encoding,
                workers=workers,
                report=progress_log(log_seconds),
            )
            try:
                check_unchanged(sources)
                _check_shards(sources, stats, output, encoding)
            except LLMError:  # the same command would fail on these shards again
                shutil.rmtree(folder)
                raise
            assemble_output(
                stems,
                stats,
                output,
                encoding=encoding,
                sources=names,
                digest=recipe_digest(made_of),
            )
            publish(output)
        except BaseException:
            if kept := len(list(folder.glob("[0-9]*.json"))):
                log.info(
                    f"{kept:,} of {len(sources):,} shards are kept in {folder}: the same command "
                    "resumes from them"
                )
            else:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)  # the result is whole even if this fails
    _log_summary(stats, seconds=time.monotonic() - began, resumed=done > 0)
    for prefix in output.names:
        log.info(f"wrote {prefix}.bin")


def _check_shards(
    sources: list[Source], stats: list[ShardStats], output: Output, encoding: Encoding
) -> None:
    """Refuse shards without tokens, or a split that moves all of them to nanoGPT's `val.bin`."""
    documents = sum(shard.documents for shard in stats)
    if not documents:
        names = list(dict.fromkeys(source.name for source in sources))
        held = f"{names[0]} and {len(names) - 1:,} more hold" if names[1:] else f"{names[0]} holds"
        policy = BadRecordPolicy("skip")
        if any(text for source in sources for batch in source.batches(policy) for text in batch):
            raise ConfigError(
                f"{held} text, but the tokenizer {encoding.tokenizer.name} makes no token of it; "
                f"check its vocabulary, which has {encoding.tokenizer.size:,} tokens."
            )
        empty = sum(shard.empty for shard in stats)
        reason = f": {empty:,} documents are empty" if empty else ""
        raise DataError(f"{held} no text{reason}.")
    if output.nanogpt and output.num_validation(documents) == documents:
        raise DataError(
            f"--validation_split_percentage {output.validation_percentage:g} of {documents:,} "
            "documents leaves none for training; change it, or pass 0."
        )


def _recipe(sources: list[Source], output: Output, encoding: Encoding) -> Recipe:
    return recipe(
        [source.identity() for source in sources],
        tokenizer_fingerprint=encoding.tokenizer.fingerprint,
        end_token=encoding.end_token,
        dtype=encoding.dtype.name,
        allow_special_tokens=encoding.allow_special_tokens,
        on_error=encoding.on_error,
        shuffle_seed=output.shuffle_seed,
        validation_percentage=output.validation_percentage,
        part_bytes=SHARD_BYTES,
    )


def _is_done(output: Output, digest: str) -> bool:
    """Return whether all files exist and have this recipe; refuse files with another recipe."""
    made, faults = 0, []
    for prefix in output.names:
        try:
            sidecar = read_sidecar(prefix)
        except DataError:
            sidecar = None
        if sidecar is not None and sidecar.plan == digest:
            made += 1
            faults += damage(prefix, nanogpt=output.nanogpt, row_bytes=output.row_bytes)
            continue
        faults.append(f"{prefix}.bin is missing.")
        for suffix in output.suffixes:
            path = beside(prefix, suffix)
            if os.path.exists(path):  # false, too, for a name that is too long
                raise DataError(
                    f"{path} exists already; choose another --output_prefix, or pass --overwrite "
                    "to replace it."
                )
    if made and faults:
        log.warning(f"{' '.join(faults)} The same options made it, so it is made again.")
    return not faults


@contextmanager
def _locked(output: Output) -> Iterator[None]:
    """Make the folder of the shards, and hold its lock."""
    folder = output.folder
    # Next to the folder: any file system can then remove the folder while it is locked.
    lock = beside(folder, ".lock")
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            locked = try_lock(descriptor, seconds=output.lock_seconds)
        except BlockingIOError as error:
            os.close(descriptor)
            raise DataError(
                f"Another program is writing to {folder}; wait for it, or choose another "
                f"{output.option}."
            ) from error
        if not locked:
            log.warning(
                f"{lock} cannot be locked on this file system: start no second program that writes "
                f"{output.prefix}"
            )
        # Another process may have removed the file between open and lock; a lock on a removed
        # file keeps nobody out.
        if lock.exists() and os.path.samestat(os.fstat(descriptor), os.stat(lock)):
            break
        os.close(descriptor)
    try:
        folder.mkdir(exist_ok=True)
        yield
    finally:
        lock.unlink(missing_ok=True)  # before it is released, so that nobody else holds it
        os.close(descriptor)


def _begin(output: Output, made_of: Recipe, num_shards: int) -> int:
    """Prepare the folder for a recipe; return how many shards are done."""
    folder = output.folder
    has_plan = (folder / "plan.json").exists()
    for path in folder.iterdir():
        if not (_OWN_NAMES if has_plan else _NAMES_BEFORE_PLAN).match(path.name):
            raise DataError(
                f"{path} is in a folder for unfinished work but does not belong to it; move it "
                f"away, or choose another {output.option}."
            )
    try:
        earlier = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        earlier = None
    if earlier == made_of:
        done = len(list(folder.glob("[0-9]*.json")))
        log.info(f"resuming in {folder}: {done:,} of {num_shards:,} shards are done")
        return done
    if earlier is not None:
        log.info(f"{folder} belongs to another command, or its input has changed: starting again")
    # Remove the plan last: without it, the folder cannot be attributed to this program.
    for path in sorted(folder.iterdir(), key=lambda path: path.name == "plan.json"):
        path.unlink()
    write_whole(folder / "plan.json", json.dumps(made_of))
    return 0


def progress_log(log_seconds: float) -> Callable[[Totals], None]:
    """Return a function that logs the progress, with at least this many seconds between lines."""
    began = last_report = time.monotonic()

    def report(totals: Totals) -> None:
        nonlocal last_report
        now = time.monotonic()
        if now - last_report < log_seconds:
            return
        last_report = now
        seconds = now - began
        line = (
            f"{totals.texts:,} documents | {totals.text_bytes / 1e6:,.1f} MB | "
            f"{totals.texts / seconds:,.0f} documents/s | "
            f"{totals.text_bytes / 1e6 / seconds:,.1f} MB/s | "
            f"{totals.tokens / seconds:,.0f} tokens/s"
        )
        if totals.num_bytes:
            # At most 1: chunks are read a little beyond their end.
            fraction = min(1.0, totals.consumed / totals.num_bytes)
            left = seconds / fraction - seconds if fraction else 0.0
            line += f" | {fraction:.1%} done | {_clock(left)} left"
        else:
            line += f" | {totals.shards_done:,} of {totals.num_shards:,} shards done"
        log.info(line)

    return report


def _log_summary(stats: list[ShardStats], *, seconds: float, resumed: bool) -> None:
    """Log the contents of the shards, and the speed unless an earlier run made some of them."""
    tokens = sum(shard.tokens for shard in stats)
    text_bytes = sum(shard.text_bytes for shard in stats)
    speed = "since it resumed" if resumed else f"{text_bytes / 1e6 / seconds:,.1f} MB/s"
    log.info(
        f"{counted(sum(shard.documents for shard in stats), 'document')}, {tokens:,} tokens, "
        f"{text_bytes:,} bytes of text ({text_bytes / tokens:.3f} per token); "
        f"{sum(shard.empty for shard in stats if not shard.one_document):,} empty and "
        f"{sum(shard.skipped for shard in stats):,} skipped documents; {_clock(seconds)}, {speed}"
    )


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02}"
