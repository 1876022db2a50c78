"""One token file from many sources: resumable, and under its name only when it is whole.

PREFIX.parts/plan.json     what is made; another plan begins anew
PREFIX.parts.lock          held by the program at work
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
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import xxhash

from llm.data.preparation.encoder import Encoding
from llm.data.preparation.output_files import (
    SUFFIXES,
    Output,
    assemble_output,
    check_nanogpt_split,
    damage,
    is_of_plan,
    publish,
)
from llm.data.preparation.progress import log_summary, progress_log
from llm.data.preparation.shards import ShardStats
from llm.data.preparation.tokenize_shards import tokenize_shards
from llm.data.text.sources import Source, check_unchanged
from llm.errors import DataError
from llm.runtime.files import try_lock, write_whole

SHARD_BYTES = 1 << 26
"""Of a file on the disk that one worker takes at once; a killed run repeats at most so many."""

_FORMAT = 1  # of the shards
_OWN_NAMES = re.compile(r"\d{6,}\.|out\.|\.out\.|\.?plan\.|reference-encoder$")

log = logging.getLogger("llm.data")


def prepare_files(
    jobs: list[tuple[list[Source], Output]],
    *,
    encoding: Encoding,
    workers: int,
    log_seconds: float,
    fork: bool = True,
) -> None:
    """Make the token files of several outputs, going on where an earlier try was stopped.

    Args:
        jobs: The texts of each output, which workers take chunk by chunk.
        encoding: How texts become ids.
        workers: Cores to use.
        log_seconds: Between two lines on the progress.
        fork: As for `tokenize_shards`.

    Raises:
        DataError: A text is broken or empty or changes while it is read, or an output exists or
            cannot be written.
    """
    todo = []
    for texts, output in jobs:
        sources = [chunk for text in texts for chunk in text.split(SHARD_BYTES)]
        if not output.overwrite and _is_done(output, plan_digest(sources, output, encoding)):
            log.info(f"{output.names[0]}.bin is there already, made by the same options")
        else:
            todo.append((sources, output))
    for sources, output in todo:
        _prepare_file(sources, output, encoding, workers, log_seconds, fork)


def _prepare_file(
    sources: list[Source],
    output: Output,
    encoding: Encoding,
    workers: int,
    log_seconds: float,
    fork: bool,
) -> None:
    began = time.monotonic()
    folder = output.folder
    plan = _plan(sources, output, encoding)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(output):
            done = _begin(output, plan, len(sources))
            report = progress_log(log_seconds)
            try:
                stems, stats = tokenize_shards(
                    sources, folder, encoding=encoding, workers=workers, report=report, fork=fork
                )
            except BaseException:
                if not any(folder.glob("[0-9]*.json")):  # nothing is worth keeping
                    shutil.rmtree(folder, ignore_errors=True)
                raise
            try:
                check_unchanged(sources)
                _check_text(sources, stats)
                check_nanogpt_split(output, sum(shard.documents for shard in stats))
            except DataError:  # these shards will never do
                shutil.rmtree(folder)
                raise
            assemble_output(
                stems,
                stats,
                output,
                encoding=encoding,
                sources=_names(sources),
                plan=_digest(plan),
            )
            publish(output)
            shutil.rmtree(folder, ignore_errors=True)  # the files are there, whatever is left
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = (
            f"free some space or choose another {output.option}. What is done is kept: the same "
            "command goes on from there."
            if full
            else f"check the path and its permissions, or choose another {output.option}."
        )
        raise DataError(
            f"{error.filename or output.prefix} cannot be written ({error.strerror or error}); "
            f"{remedy}"
        ) from error
    log_summary(stats, seconds=time.monotonic() - began, resumed=done > 0)
    for prefix in output.names:
        log.info(f"wrote {prefix}.bin")


def _check_text(sources: list[Source], stats: list[ShardStats]) -> None:
    if not sum(shard.documents for shard in stats):
        names = _names(sources)
        held = f"{names[0]} and {len(names) - 1:,} more hold" if names[1:] else f"{names[0]} holds"
        empty = sum(shard.empty for shard in stats)
        reason = f": {empty:,} documents are empty" if empty else ""
        raise DataError(f"{held} no text{reason}.")


def _names(sources: list[Source]) -> list[str]:
    return list(dict.fromkeys(source.name for source in sources))


def _plan(sources: list[Source], output: Output, encoding: Encoding) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "part_bytes": SHARD_BYTES,
        "sources": [source.identity() for source in sources],
        "tokenizer_fingerprint": encoding.tokenizer.fingerprint,
        "end_token": encoding.end_token,
        "dtype": encoding.dtype.name,
        "allow_special_tokens": encoding.allow_special_tokens,
        "on_error": encoding.on_error,
        "shuffle_seed": output.shuffle_seed,
        "validation_percentage": output.validation_percentage,
    }


def plan_digest(sources: list[Source], output: Output, encoding: Encoding) -> str:
    """Tells what is made of which text: equal digests, equal bytes."""
    return _digest(_plan(sources, output, encoding))


def _is_done(output: Output, plan: str) -> bool:
    """Whether all files lie there, whole and made by this plan; those of another are refused."""
    made, faults = 0, []
    for prefix in output.names:
        if is_of_plan(prefix, plan):
            made += 1
            faults += damage(prefix, output)
            continue
        faults.append(f"{prefix}.bin is missing.")
        for suffix in SUFFIXES:
            path = prefix.with_name(prefix.name + suffix)
            if os.path.exists(path):  # false, too, for a name that is too long
                raise DataError(
                    f"{path} exists already; choose another --output_prefix, or pass --overwrite "
                    "to replace it."
                )
    if made and faults:
        log.warning(f"{' '.join(faults)} The same options made it, so it is made anew.")
    return not faults


@contextmanager
def _locked(output: Output) -> Iterator[None]:
    folder = output.folder
    # Beside the folder, which can then be removed while it is locked, on any file system.
    lock = folder.with_name(f"{folder.name}.lock")
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            locked = try_lock(descriptor)
        except BlockingIOError as error:
            os.close(descriptor)
            raise DataError(
                f"Another program is at work in {folder}; wait for it, or choose another "
                f"{output.option}."
            ) from error
        if not locked:
            log.warning(
                f"{lock} cannot be locked on this file system: start no second program that writes "
                f"{output.prefix}"
            )
        # Another process may have removed it in between.
        if lock.exists() and os.path.samestat(os.fstat(descriptor), os.stat(lock)):
            break
        os.close(descriptor)
    try:
        folder.mkdir(exist_ok=True)
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _digest(plan: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(plan, sort_keys=True).encode())


def _begin(output: Output, plan: dict[str, Any], num_shards: int) -> int:
    """Make the folder ready for a plan; return how many shards are there."""
    folder = output.folder
    for path in folder.iterdir():
        if not _OWN_NAMES.match(path.name):
            raise DataError(
                f"{path} is in a folder for unfinished work, and not of it; move it away, or "
                f"choose another {output.option}."
            )
    try:
        earlier_plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        earlier_plan = None
    if earlier_plan == plan:
        done = len(list(folder.glob("[0-9]*.json")))
        log.info(f"going on in {folder}: {done:,} of {num_shards:,} parts are there")
        return done
    if earlier_plan is not None:
        log.info(f"{folder} is of another command, or its input has changed: beginning anew")
    for path in folder.iterdir():
        path.unlink()
    write_whole(folder / "plan.json", json.dumps(plan))
    return 0
