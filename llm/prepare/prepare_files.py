"""One token file from many sources: resumable, and renamed only when it is complete.

PREFIX.parts/plan.json     input and options; if they change, work starts again
PREFIX.parts.lock          held by the program that prepares
PREFIX.parts/000000.bin .. the shards that are done
PREFIX.parts/out.*         the result, before it is renamed

Several ranks can work in one folder; `shares` describes how they agree.
"""

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from llm.data.formats.megatron import add_suffix
from llm.data.formats.parts import find_parts
from llm.data.formats.sidecar import Sidecar, find_damage, read_sidecar
from llm.data.text_identity import SHARD_BYTES, Provenance, make_provenance, provenance_digest
from llm.errors import ConfigError, DataError, LLMError, one_line, os_error_remedy
from llm.prepare.encoder import Encoding
from llm.prepare.output_files import (
    Output,
    assemble_output,
    find_stale_validation_files,
    join_parts,
    publish_output,
    publish_parts,
)
from llm.prepare.preparation_log import log_summary, make_progress_logger
from llm.prepare.shards import ShardStats, read_shard
from llm.prepare.shares import (
    Share,
    acquire_join,
    agree_on_provenance,
    is_finished,
    mark_finished,
    mark_started,
    num_ranks_finished,
    wait_for_starts,
)
from llm.prepare.text.blocks import BadRecordPolicy
from llm.prepare.text.sources import Source, check_sources_unchanged
from llm.prepare.tokenize_shards import Cluster, tokenize_shards
from llm.runtime.claims import Claim
from llm.runtime.files import try_lock, undo_mkdir_on_error, write_whole
from llm.runtime.logging import counted

_SHARD_FOLDER_NAMES = re.compile(
    r"\.?\d{6,}[.-]|out\.|\.out\.|\.?plan\.|\.?encoding-|reference-encoder$|(rank|begun)-\d+-of-\d+$"
    r"|join-\d+$"
)
_NAMES_BEFORE_PLAN = re.compile(r"\.plan\.")
_WHOLE_SHARE = Share()
_MAX_SHARDS = 4096
"""Shards of a larger text are larger: each may become a part, and opening takes a ms for each."""
_MAX_PARTS = 10_000  # a process has two files open for each

logger = logging.getLogger("llm.data")


def prepare_files(
    jobs: list[tuple[list[Source], Output]],
    *,
    encoding: Encoding,
    workers: int | Cluster,
    log_seconds: float = 10.0,
    share: Share = _WHOLE_SHARE,
) -> None:
    """Make the token files of several outputs, resuming a stopped run.

    Args:
        jobs: The texts of each output; workers take them chunk by chunk.
        encoding: How texts become ids.
        workers: Cores to use, or a cluster.
        log_seconds: Seconds between two lines on the progress.
        share: This rank's part of the work. Of several ranks, the last to finish joins the shards.

    Raises:
        DataError: A text is broken or empty or changes while it is read, or an output exists or
            cannot be written.
    """
    pending_outputs = _find_pending_outputs(
        jobs, encoding=encoding, workers=workers, log_seconds=log_seconds, share=share
    )
    # Each rank starts with a different output: otherwise the slowest rank would be last everywhere,
    # and join the shards of all outputs.
    first_output = len(pending_outputs) * share.rank // share.world_size
    for writer in pending_outputs[first_output:] + pending_outputs[:first_output]:
        try:
            if share.world_size == 1:
                writer.write_all()
            else:
                writer.write_share(share)
        except OSError as error:
            raise _write_failure(error, writer.output) from error
    if pending_outputs:
        wait_for_starts([writer.output.folder for writer in pending_outputs], share)


def _find_pending_outputs(
    jobs: list[tuple[list[Source], Output]],
    *,
    encoding: Encoding,
    workers: int | Cluster,
    log_seconds: float,
    share: Share,
) -> "list[_OutputWriter]":
    """Return what writes each output that does not exist; refuse files that other options made.

    For the arguments see `prepare_files`.
    """
    pending_outputs = []
    num_preceding_shards = 0
    for texts, output in jobs:
        shard_bytes = _choose_shard_bytes(texts)
        sources = _split_texts(texts, output, shard_bytes)
        provenance = _make_file_provenance(sources, output, encoding, shard_bytes)
        if not output.overwrite and _is_output_done(output, provenance_digest(provenance)):
            _remove_leftovers(output, provenance)
            logger.info(f"{output.names[0]}.bin already exists, made with the same options")
        else:
            find_stale_validation_files(output)  # refused now, rather than after the work
            shard_indices = share.shard_indices(len(sources), num_preceding=num_preceding_shards)
            writer = _OutputWriter(
                sources, output, encoding, workers, log_seconds, provenance, shard_indices
            )
            pending_outputs.append(writer)
        num_preceding_shards += len(sources)
    return pending_outputs


def _choose_shard_bytes(texts: list[Source]) -> int:
    """Return the bytes of text in a shard, so that an output has at most `_MAX_SHARDS` shards."""
    shard_bytes = SHARD_BYTES
    while sum(text.num_bytes or 0 for text in texts) > shard_bytes * _MAX_SHARDS:
        shard_bytes *= 2
    return shard_bytes


def _split_texts(texts: list[Source], output: Output, shard_bytes: int) -> list[Source]:
    """Split texts into one source for each shard; refuse more parts than a run can open."""
    sources = [chunk for text in texts for chunk in text.split(shard_bytes)]
    if output.parts and len(sources) > _MAX_PARTS:
        raise DataError(
            f"--parts would leave {len(sources):,} parts, and a run can open "
            f"{_MAX_PARTS:,}; join small files of text, or leave --parts out."
        )
    return sources


def _write_failure(error: OSError, output: Output) -> DataError:
    """Return the error for a file of an output that cannot be written."""
    return DataError(
        f"{error.filename or output.prefix} cannot be written ({one_line(error)}); "
        f"{os_error_remedy(error)}, or choose another {output.option}."
    )


class _OutputWriter:
    """Writes the shards of one output, and joins them to its files."""

    def __init__(
        self,
        sources: list[Source],
        output: Output,
        encoding: Encoding,
        workers: int | Cluster,
        log_seconds: float,
        provenance: Provenance,
        shard_indices: Sequence[int],
    ) -> None:
        self._sources = sources
        self.output = output
        self._folder = output.folder
        self._encoding = encoding
        self._workers = workers
        self._log_seconds = log_seconds
        self._provenance = provenance
        self._digest = provenance_digest(provenance)
        self._shard_indices = shard_indices  # of this rank
        self._start_time = time.monotonic()

    def write_all(self) -> None:
        """Write all shards, and join them."""
        with undo_mkdir_on_error(self._folder.parent), _lock_output(self.output):
            num_done = _prepare_folder(self.output, self._provenance, len(self._sources))
            try:
                self._finish_output(is_resumed=num_done > 0)
            except BaseException:
                if not self._log_finished_shards():
                    shutil.rmtree(self._folder, ignore_errors=True)
                raise

    def write_share(self, share: Share) -> None:
        """Write the shards of this rank; the last of the ranks joins all."""
        folder = self._folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock_output(self.output, is_shared=True):
            _check_folder_names(self.output)
            agree_on_provenance(folder, self._provenance)
            mark_started(folder, share)
            if not is_finished(folder, share):
                if _is_output_done(self.output, self._digest):  # since this rank looked
                    shutil.rmtree(folder)
                    return
                self._write_checked_shards()
                mark_finished(folder, share)
            num_finished = num_ranks_finished(folder, share)
            logger.info(
                f"{share} has written its {counted(len(self._shard_indices), 'shard')}; "
                f"{num_finished} of {share.world_size} ranks have, and the last one "
                f"{'names the parts' if self.output.parts else 'joins all shards'}"
            )
            if num_finished == share.world_size:
                self._join_once(share)

    def _write_checked_shards(self) -> None:
        """Write this rank's shards, unless earlier parts are joined; refuse changed sources."""
        try:
            if not self._parts_to_join():
                self._write_shards(self._shard_indices)
                check_sources_unchanged([self._sources[index] for index in self._shard_indices])
        except BaseException:
            self._log_finished_shards()
            raise

    def _join_once(self, share: Share) -> None:
        """Join the shards, unless another rank does."""
        claim = Claim(self._folder, "join")
        try:
            if acquire_join(claim, self._folder):
                logger.info(
                    f"{share} {'names the parts' if self.output.parts else 'joins the shards'}"
                )
                self._finish_output(claim=claim)
                add_suffix(self._folder, ".lock").unlink(missing_ok=True)
                return
        except BaseException:
            self._log_finished_shards()
            raise
        finally:
            claim.release()
        if not _is_output_done(self.output, self._digest):
            raise DataError(
                f"Another rank could not join the shards in {self._folder}, and removed them; its "
                "own message says why."
            )
        logger.info("another rank has joined the shards")

    def _parts_to_join(self) -> list[Path]:
        """Return the parts of an earlier preparation if they are to be joined now."""
        if self.output.parts or self.output.nanogpt or self.output.overwrite:
            return []
        sidecar = None if find_damage(self.output.prefix) else read_sidecar(self.output.prefix)
        if sidecar is None or sidecar.plan != self._digest or not sidecar.part_tokens:
            return []
        return find_parts(self.output.prefix)

    def _write_shards(self, shard_indices: Sequence[int]) -> tuple[list[Path], list[ShardStats]]:
        """Write the shards that the folder lacks; return paths and contents of all these shards."""
        return tokenize_shards(
            self._sources,
            self._folder,
            encoding=self._encoding,
            workers=self._workers,
            on_progress=make_progress_logger(self._log_seconds),
            shard_indices=shard_indices,
        )

    def _complete_shards(self) -> tuple[list[Path], list[ShardStats]]:
        """Return the shards that the ranks have written and synced; write those that are missing.

        Shards are missing if another rank has found wrong ids, for example.
        """
        while True:
            stems = [self._folder / f"{index:06d}" for index in range(len(self._sources))]
            shards = [read_shard(stem, verify=False) for stem in stems]
            stats = [shard for shard in shards if shard is not None]
            if len(stats) == len(stems):
                return stems, stats
            self._write_shards([index for index, shard in enumerate(shards) if shard is None])

    def _finish_output(self, *, is_resumed: bool = False, claim: Claim | None = None) -> None:
        """Write the missing shards, join them or name them as parts, and publish the output.

        Args:
            is_resumed: Whether an earlier start has written some of the shards.
            claim: The claim of a rank that joins the shards of several; None with one process.
        """
        stems: list[Path] = []
        stats: list[ShardStats] = []
        if parts := self._parts_to_join():
            logger.info(f"joining {counted(len(parts), 'part')} of an earlier preparation")
            join_parts(parts, self.output)
        else:
            if claim is None:
                stems, stats = self._write_shards(self._shard_indices)  # all of them
            else:
                stems, stats = self._complete_shards()
            self._assemble_shards(stems, stats)
        if claim is not None and not claim.is_held():
            raise DataError(
                f"Another rank joins the shards in {self._folder}, since this one did not answer "
                "for a while."
            )
        self._publish_output(stems, stats)
        _remove_shards(self._folder)
        if stats:
            log_summary(stats, seconds=time.monotonic() - self._start_time, is_resumed=is_resumed)
        for prefix in self.output.names:
            logger.info(f"wrote {prefix}.bin{' in parts' * self.output.parts}")

    def _publish_output(self, stems: list[Path], stats: list[ShardStats]) -> None:
        """Rename the files of the output, or the shards to its parts, which are synced first."""
        if not self.output.parts:
            publish_output(self.output)
            return
        if isinstance(self._workers, int):
            os.sync()
        else:
            self._workers.sync()
        publish_parts(stems, stats, self.output)

    def _assemble_shards(self, stems: list[Path], stats: list[ShardStats]) -> None:
        """Check all shards, and write the files to be renamed."""
        try:
            check_sources_unchanged(self._sources)
            _check_shards(self._sources, stats, self.output, self._encoding)
        except LLMError:  # the same command would fail on these shards again
            shutil.rmtree(self._folder)
            raise
        assemble_output(
            stems,
            stats,
            self.output,
            encoding=self._encoding,
            sources=list(dict.fromkeys(source.name for source in self._sources)),
            digest=self._digest,
        )

    def _log_finished_shards(self) -> int:
        """Log how many shards are kept; return their number."""
        num_finished = len(list(self._folder.glob("[0-9]*.json")))
        if num_finished:
            logger.info(
                f"{num_finished:,} of {len(self._sources):,} shards are kept in {self._folder}: "
                "the same command resumes from them"
            )
        return num_finished


def _check_shards(
    sources: list[Source], stats: list[ShardStats], output: Output, encoding: Encoding
) -> None:
    """Refuse shards without tokens, or a split that moves all of them to nanoGPT's `val.bin`."""
    num_documents = sum(shard.documents for shard in stats)
    if not num_documents:
        raise _no_tokens_error(sources, stats, encoding)
    if output.nanogpt and output.num_validation(num_documents) == num_documents:
        raise DataError(
            f"--validation_split_percentage {output.validation_percentage:g} of {num_documents:,} "
            "documents leaves none for training; change it, or pass 0."
        )


def _no_tokens_error(
    sources: list[Source], stats: list[ShardStats], encoding: Encoding
) -> LLMError:
    """Return the error for sources without tokens; reads again whether they have any text."""
    names = list(dict.fromkeys(source.name for source in sources))
    subject = f"{names[0]} and {len(names) - 1:,} more hold" if names[1:] else f"{names[0]} holds"
    bad_record_policy = BadRecordPolicy("skip", max_warnings=0)  # the first reading has warned
    has_text = any(
        text for source in sources for batch in source.batches(bad_record_policy) for text in batch
    )
    if has_text:
        return ConfigError(
            f"{subject} text, but the tokenizer {encoding.tokenizer.name} makes no token of "
            f"it; check its vocabulary, which has {encoding.tokenizer.size:,} tokens."
        )
    num_empty = sum(shard.empty for shard in stats)
    num_skipped = sum(shard.skipped for shard in stats)
    reason = f": {num_empty:,} empty and {num_skipped:,} skipped documents"
    return DataError(f"{subject} no text{reason if num_empty or num_skipped else ''}.")


def _make_file_provenance(
    sources: list[Source], output: Output, encoding: Encoding, shard_bytes: int
) -> Provenance:
    """Return the provenance of an output: its texts, and the options that decide its bytes."""
    return make_provenance(
        [source.identity() for source in sources],
        tokenizer_fingerprint=encoding.tokenizer.fingerprint,
        end_token=encoding.end_token,
        begin_token=encoding.begin_token,
        dtype=encoding.dtype.name,
        allow_special_tokens=encoding.allow_special_tokens,
        on_error=encoding.on_error,
        shuffle_seed=output.shuffle_seed,
        validation_percentage=output.validation_percentage,
        part_bytes=shard_bytes,
    )


def _is_output_done(output: Output, digest: str) -> bool:
    """Return whether all files exist with this provenance; refuse files with another one.

    Parts that are to be joined are not done.
    """
    complete_sidecars, faults = [], []
    for prefix in output.names:
        sidecar = _read_sidecar_with_digest(prefix, digest)
        if sidecar is not None:
            complete_sidecars.append(sidecar)
            faults += find_damage(prefix, is_flat=output.nanogpt, has_row_bytes=output.row_bytes)
        elif existing_paths := output.existing(prefix):
            raise DataError(
                f"{existing_paths[0]} exists already; choose another --output_prefix, or pass "
                "--overwrite to replace it."
            )
        else:
            faults.append(f"{prefix}.bin is missing.")
    if complete_sidecars and faults:
        logger.warning(f"{' '.join(faults)} The same options made it, so it is made again.")
    has_parts = any(sidecar.part_tokens for sidecar in complete_sidecars)
    has_parts_to_join = has_parts and not output.parts
    return not faults and not has_parts_to_join


def _read_sidecar_with_digest(prefix: Path, digest: str) -> Sidecar | None:
    """Return a file's sidecar; None if it is missing, damaged or of another provenance."""
    try:
        sidecar = read_sidecar(prefix)
    except DataError:
        return None
    has_same_provenance = sidecar is not None and sidecar.plan == digest
    return sidecar if has_same_provenance else None


@contextmanager
def _lock_output(output: Output, *, is_shared: bool = False) -> Iterator[None]:
    """Make the folder of the shards, and hold its lock until the context ends.

    Raises:
        DataError: Another program holds the lock.
    """
    # Next to the folder: any file system can then remove the folder while it is locked.
    lock_path = add_suffix(output.folder, ".lock")
    descriptor = _acquire_lock(lock_path, output, is_shared=is_shared)
    try:
        output.folder.mkdir(exist_ok=True)
        yield
    finally:
        if not is_shared:
            # Removed before it is released, so that no other program holds it.
            lock_path.unlink(missing_ok=True)
        os.close(descriptor)


def _acquire_lock(lock_path: Path, output: Output, *, is_shared: bool) -> int:
    """Lock the file of an output; return its descriptor, which holds the lock until it is closed.

    Raises:
        DataError: Another program holds the lock.
    """
    while True:
        descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            is_locked = try_lock(descriptor, seconds=output.lock_seconds, shared=is_shared)
        except BlockingIOError as error:
            os.close(descriptor)
            raise DataError(
                f"Another program is writing to {output.folder}; wait for it, or choose another "
                f"{output.option}."
            ) from error
        if not is_locked and not is_shared:
            logger.warning(
                f"{lock_path} cannot be locked on this file system: start no second program that "
                f"writes {output.prefix}"
            )
        # Another process may have removed the file between open and lock; a lock on a removed
        # file keeps nobody out.
        if lock_path.exists() and os.path.samestat(os.fstat(descriptor), os.stat(lock_path)):
            return descriptor
        os.close(descriptor)


def _check_folder_names(output: Output) -> None:
    """Refuse a folder of shards with other files, which would be removed with it."""
    paths = list(output.folder.iterdir())
    # After the listing: other ranks write the plan before any shard.
    has_plan = (output.folder / "plan.json").exists()
    for path in paths:
        if not (_SHARD_FOLDER_NAMES if has_plan else _NAMES_BEFORE_PLAN).match(path.name):
            raise DataError(
                f"{path} is in a folder for unfinished work but does not belong to it; move it "
                f"away, or choose another {output.option}."
            )


def _prepare_folder(output: Output, provenance: Provenance, num_shards: int) -> int:
    """Prepare the folder for shards of this provenance; return how many of them are done."""
    folder = output.folder
    _check_folder_names(output)
    recorded_provenance = _read_provenance(folder)
    if recorded_provenance == provenance:
        for path in folder.glob(".[0-9]*"):  # temporary files of a killed process
            path.unlink()
        num_done = len(list(folder.glob("[0-9]*.json")))
        logger.info(f"resuming in {folder}: {num_done:,} of {num_shards:,} shards are done")
        return num_done
    if recorded_provenance is not None:
        logger.info(
            f"{folder} belongs to another command, or its input has changed: starting again"
        )
    # Remove the plan last: without it, the folder cannot be attributed to this program.
    for path in sorted(folder.iterdir(), key=lambda path: path.name == "plan.json"):
        path.unlink()
    write_whole(folder / "plan.json", json.dumps(provenance))
    return 0


def _read_provenance(folder: Path) -> object:
    try:
        return json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _removed_folder(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.removed")


def _remove_shards(folder: Path) -> None:
    """Remove the folder of the shards; the result is whole even if this fails."""
    removed_folder = _removed_folder(folder)
    shutil.rmtree(removed_folder, ignore_errors=True)
    try:
        # Without its plan, a part of the folder could not be attributed to this program.
        folder.rename(removed_folder)
    except OSError:
        removed_folder = folder
    shutil.rmtree(removed_folder, ignore_errors=True)


def _remove_leftovers(output: Output, provenance: Provenance) -> None:
    """Remove the shards of a finished output, if a process was killed before it removed them."""
    leftovers = (output.folder, _removed_folder(output.folder), add_suffix(output.folder, ".lock"))
    if not any(path.exists() for path in leftovers):
        return
    # Another rank may still be at work, or nobody can write there.
    with suppress(DataError, OSError), _lock_output(replace(output, lock_seconds=0.0)):
        if _read_provenance(output.folder) in (provenance, None):
            _check_folder_names(output)
            _remove_shards(output.folder)
