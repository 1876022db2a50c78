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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from llm.data.formats.megatron import add_suffix
from llm.data.formats.parts import find_parts
from llm.data.formats.sidecar import find_damage, read_sidecar
from llm.data.text_identity import SHARD_BYTES, Provenance, make_provenance, provenance_digest
from llm.errors import ConfigError, DataError, LLMError, one_line, os_error_remedy
from llm.prepare.encoder import Encoding
from llm.prepare.output_files import (
    Output,
    assemble_output,
    join_parts,
    publish,
    publish_parts,
    stale_validation_files,
)
from llm.prepare.shards import ShardStats, read_shard
from llm.prepare.shares import (
    Share,
    acquire_join,
    is_marked,
    mark_begun,
    mark_done,
    ranks_done,
    share_provenance,
    wait_for_starts,
)
from llm.prepare.text.blocks import BadRecordPolicy
from llm.prepare.text.sources import Source, check_unchanged
from llm.prepare.tokenize_shards import Cluster, Totals, tokenize_shards
from llm.runtime.claims import Claim
from llm.runtime.files import try_lock, write_whole
from llm.runtime.logging import counted

_OWN_NAMES = re.compile(
    r"\.?\d{6,}[.-]|out\.|\.out\.|\.?plan\.|\.?encoding-|reference-encoder$|(rank|begun)-\d+-of-\d+$"
    r"|join-\d+$"
)
_NAMES_BEFORE_PLAN = re.compile(r"\.plan\.")
_ALL = Share()
_MOST_SHARDS = 4096
"""Shards of a larger text are larger: each may become a part, and opening takes a ms for each."""
_MOST_PARTS = 10_000  # a process has two files open for each

logger = logging.getLogger("llm.data")


def prepare_files(
    jobs: list[tuple[list[Source], Output]],
    *,
    encoding: Encoding,
    workers: int | Cluster,
    log_seconds: float = 10.0,
    share: Share = _ALL,
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
    todo = []
    num_chunks = 0
    for texts, output in jobs:
        shard_bytes = SHARD_BYTES
        while sum(text.num_bytes or 0 for text in texts) > shard_bytes * _MOST_SHARDS:
            shard_bytes *= 2
        sources = [chunk for text in texts for chunk in text.split(shard_bytes)]
        if output.parts and len(sources) > _MOST_PARTS:
            raise DataError(
                f"--parts would leave {len(sources):,} parts, and a run can open "
                f"{_MOST_PARTS:,}; join small files of text, or leave --parts out."
            )
        provenance = _file_provenance(sources, output, encoding, shard_bytes)
        if not output.overwrite and _is_done(output, provenance_digest(provenance)):
            _remove_leftovers(output, provenance)
            logger.info(f"{output.names[0]}.bin already exists, made with the same options")
        else:
            stale_validation_files(output)  # refused now, rather than after the work
            work = _Work(sources, output, encoding, workers, log_seconds, provenance)
            todo.append((work, share.numbers(len(sources), first=num_chunks)))
        num_chunks += len(sources)
    # Each rank begins with another output: otherwise the slowest would be last everywhere, and join
    # the shards of all outputs.
    begin = len(todo) * share.rank // share.world_size
    for work, numbers in todo[begin:] + todo[:begin]:
        try:
            if share.world_size == 1:
                work.do_all()
            else:
                work.do_share(share, numbers)
        except OSError as error:
            raise _write_error(error, work.output) from error
    if todo:
        wait_for_starts([work.output.folder for work, _ in todo], share)


def _write_error(error: OSError, output: Output) -> DataError:
    """Return the error for a file of an output that cannot be written."""
    return DataError(
        f"{error.filename or output.prefix} cannot be written ({one_line(error)}); "
        f"{os_error_remedy(error)}, or choose another {output.option}."
    )


class _Work:
    """One output: its shards, and the files that are made of them."""

    def __init__(
        self,
        sources: list[Source],
        output: Output,
        encoding: Encoding,
        workers: int | Cluster,
        log_seconds: float,
        provenance: Provenance,
    ) -> None:
        self._sources = sources
        self.output = output
        self._folder = output.folder
        self._encoding = encoding
        self._workers = workers
        self._log_seconds = log_seconds
        self._provenance = provenance
        self._digest = provenance_digest(provenance)
        self._began = time.monotonic()

    def do_all(self) -> None:
        """Write all shards, and join them."""
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock_output(self.output):
            done = _begin_folder(self.output, self._provenance, len(self._sources))
            try:
                self._join_shards(is_resumed=done > 0)
            except BaseException:
                if not self._log_finished():
                    shutil.rmtree(self._folder, ignore_errors=True)
                raise

    def do_share(self, share: Share, numbers: Sequence[int]) -> None:
        """Write the shards of a rank; the last of the ranks joins all.

        Args:
            share: The rank.
            numbers: Its shards.
        """
        folder = self._folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock_output(self.output, shared=True):
            _check_own_names(self.output)
            share_provenance(folder, self._provenance)
            mark_begun(folder, share)
            if not is_marked(folder, share):
                if _is_done(self.output, self._digest):  # since this rank looked
                    shutil.rmtree(folder)
                    return
                try:
                    if not self._finished_parts():
                        self._write_shards(numbers)
                        check_unchanged([self._sources[number] for number in numbers])
                except BaseException:
                    self._log_finished()
                    raise
                mark_done(folder, share)
            done = ranks_done(folder, share)
            logger.info(
                f"{share} has written its {counted(len(numbers), 'shard')}; {done} of "
                f"{share.world_size} ranks have, and the last one "
                f"{'names the parts' if self.output.parts else 'joins all shards'}"
            )
            if done == share.world_size:
                self._join_once(share)

    def _join_once(self, share: Share) -> None:
        """Join the shards, unless another rank does."""
        claim = Claim(self._folder, "join")
        try:
            if acquire_join(claim, self._folder):
                logger.info(
                    f"{share} {'names the parts' if self.output.parts else 'joins the shards'}"
                )
                self._join_shards(claim=claim)
                add_suffix(self._folder, ".lock").unlink(missing_ok=True)
                return
        except BaseException:
            self._log_finished()
            raise
        finally:
            claim.release()
        if not _is_done(self.output, self._digest):
            raise DataError(
                f"Another rank could not join the shards in {self._folder}, and removed them; its "
                "own message says why."
            )
        logger.info("another rank has joined the shards")

    def _finished_parts(self) -> list[Path]:
        """Return the parts of an earlier preparation if they are to be joined now."""
        if self.output.parts or self.output.nanogpt or self.output.overwrite:
            return []
        sidecar = None if find_damage(self.output.prefix) else read_sidecar(self.output.prefix)
        if sidecar is None or sidecar.plan != self._digest or not sidecar.part_tokens:
            return []
        return find_parts(self.output.prefix)

    def _write_shards(
        self, numbers: Sequence[int] | None = None
    ) -> tuple[list[Path], list[ShardStats]]:
        return tokenize_shards(
            self._sources,
            self._folder,
            encoding=self._encoding,
            workers=self._workers,
            report=progress_log(self._log_seconds),
            numbers=numbers,
        )

    def _shards_of_ranks(self) -> tuple[list[Path], list[ShardStats]]:
        """Return the shards that the ranks have written and synced; write those that are missing.

        Shards are missing if another rank has found wrong ids, for example.
        """
        while True:
            stems = [self._folder / f"{number:06d}" for number in range(len(self._sources))]
            stats = [read_shard(stem, verify=False) for stem in stems]
            finished = [shard for shard in stats if shard is not None]
            if len(finished) == len(stems):
                return stems, finished
            self._write_shards([number for number, shard in enumerate(stats) if shard is None])

    def _join_shards(self, *, is_resumed: bool = False, claim: Claim | None = None) -> None:
        """Write the shards that are missing, and make the output of all."""
        stems: list[Path] = []
        stats: list[ShardStats] = []
        if parts := self._finished_parts():
            logger.info(f"joining {counted(len(parts), 'part')} of an earlier preparation")
            join_parts(parts, self.output)
        else:
            stems, stats = self._write_shards() if claim is None else self._shards_of_ranks()
            self._assemble_shards(stems, stats)
        if claim is not None and not claim.is_held():
            raise DataError(
                f"Another rank joins the shards in {self._folder}, since this one did not answer "
                "for a while."
            )
        if self.output.parts:
            if isinstance(self._workers, int):
                os.sync()
            else:
                self._workers.sync()
            publish_parts(stems, stats, self.output)
        else:
            publish(self.output)
        _remove_shards(self._folder)
        if stats:
            _log_summary(stats, seconds=time.monotonic() - self._began, resumed=is_resumed)
        for prefix in self.output.names:
            logger.info(f"wrote {prefix}.bin{' in parts' * self.output.parts}")

    def _assemble_shards(self, stems: list[Path], stats: list[ShardStats]) -> None:
        """Check all shards, and write the files to be renamed."""
        try:
            check_unchanged(self._sources)
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

    def _log_finished(self) -> int:
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
    documents = sum(shard.documents for shard in stats)
    if not documents:
        names = list(dict.fromkeys(source.name for source in sources))
        subject = (
            f"{names[0]} and {len(names) - 1:,} more hold" if names[1:] else f"{names[0]} holds"
        )
        policy = BadRecordPolicy("skip")
        if any(text for source in sources for batch in source.batches(policy) for text in batch):
            raise ConfigError(
                f"{subject} text, but the tokenizer {encoding.tokenizer.name} makes no token of "
                f"it; check its vocabulary, which has {encoding.tokenizer.size:,} tokens."
            )
        empty = sum(shard.empty for shard in stats)
        reason = f": {empty:,} documents are empty" if empty else ""
        raise DataError(f"{subject} no text{reason}.")
    if output.nanogpt and output.num_validation(documents) == documents:
        raise DataError(
            f"--validation_split_percentage {output.validation_percentage:g} of {documents:,} "
            "documents leaves none for training; change it, or pass 0."
        )


def _file_provenance(
    sources: list[Source], output: Output, encoding: Encoding, shard_bytes: int
) -> Provenance:
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


def _is_done(output: Output, digest: str) -> bool:
    """Return whether all files exist with this provenance; refuse files with another one.

    Parts that are to be joined are not done.
    """
    num_complete, faults, to_join = 0, [], False
    for prefix in output.names:
        try:
            sidecar = read_sidecar(prefix)
        except DataError:
            sidecar = None
        if sidecar is not None and sidecar.plan == digest:
            num_complete += 1
            to_join = bool(sidecar.part_tokens) and not output.parts
            faults += find_damage(prefix, nanogpt=output.nanogpt, row_bytes=output.row_bytes)
            continue
        faults.append(f"{prefix}.bin is missing.")
        for path in output.existing(prefix):
            raise DataError(
                f"{path} exists already; choose another --output_prefix, or pass --overwrite "
                "to replace it."
            )
    if num_complete and faults:
        logger.warning(f"{' '.join(faults)} The same options made it, so it is made again.")
    return not faults and not to_join


@contextmanager
def _lock_output(output: Output, *, shared: bool = False) -> Iterator[None]:
    """Make the folder of the shards, and hold its lock, which ranks share."""
    folder = output.folder
    # Next to the folder: any file system can then remove the folder while it is locked.
    lock = add_suffix(folder, ".lock")
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            locked = try_lock(descriptor, seconds=output.lock_seconds, shared=shared)
        except BlockingIOError as error:
            os.close(descriptor)
            raise DataError(
                f"Another program is writing to {folder}; wait for it, or choose another "
                f"{output.option}."
            ) from error
        if not locked and not shared:
            logger.warning(
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
        if not shared:
            lock.unlink(missing_ok=True)  # before it is released, so that nobody else holds it
        os.close(descriptor)


def _check_own_names(output: Output) -> None:
    """Refuse a folder of shards with other files, which would be removed with it."""
    paths = list(output.folder.iterdir())
    # After the listing: other ranks write the plan before any shard.
    has_plan = (output.folder / "plan.json").exists()
    for path in paths:
        if not (_OWN_NAMES if has_plan else _NAMES_BEFORE_PLAN).match(path.name):
            raise DataError(
                f"{path} is in a folder for unfinished work but does not belong to it; move it "
                f"away, or choose another {output.option}."
            )


def _begin_folder(output: Output, provenance: Provenance, num_shards: int) -> int:
    """Prepare the folder for a provenance; return how many shards are done."""
    folder = output.folder
    _check_own_names(output)
    earlier = _read_provenance(folder)
    if earlier == provenance:
        for path in folder.glob(".[0-9]*"):  # which a kill has left
            path.unlink()
        done = len(list(folder.glob("[0-9]*.json")))
        logger.info(f"resuming in {folder}: {done:,} of {num_shards:,} shards are done")
        return done
    if earlier is not None:
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
    removed = _removed_folder(folder)
    shutil.rmtree(removed, ignore_errors=True)
    try:
        # Without its plan, a part of the folder could not be attributed to this program.
        folder.rename(removed)
    except OSError:
        removed = folder
    shutil.rmtree(removed, ignore_errors=True)


def _remove_leftovers(output: Output, provenance: Provenance) -> None:
    """Remove the shards of a finished output, which a start has left that was killed at its end."""
    leftovers = (output.folder, _removed_folder(output.folder), add_suffix(output.folder, ".lock"))
    if not any(path.exists() for path in leftovers):
        return
    # Another rank may still be at work, or nobody can write there.
    with suppress(DataError, OSError), _lock_output(replace(output, lock_seconds=0.0)):
        if _read_provenance(output.folder) in (provenance, None):
            _check_own_names(output)
            _remove_shards(output.folder)


def progress_log(log_seconds: float) -> Callable[[Totals], None]:
    """Return a function that logs the progress, with at least this many seconds between lines."""
    began = last_report = time.monotonic()

    def report(totals: Totals) -> None:
        nonlocal last_report
        reported_at = time.monotonic()
        if reported_at - last_report < log_seconds:
            return
        last_report = reported_at
        seconds = reported_at - began
        line = (
            f"{totals.texts:,} documents | {totals.text_bytes / 1e6:,.1f} MB | "
            f"{totals.texts / seconds:,.0f} documents/s | "
            f"{totals.text_bytes / 1e6 / seconds:,.1f} MB/s | "
            f"{totals.tokens / seconds:,.0f} tokens/s"
        )
        if totals.num_bytes:
            # At most 1: chunks are read a little beyond their end.
            fraction = min(1.0, totals.consumed / totals.num_bytes)
            line += f" | {fraction:.1%} done"
            if fraction:
                line += f" | {_format_duration(seconds / fraction - seconds)} left"
        else:
            line += f" | {totals.shards_done:,} of {totals.num_shards:,} shards done"
        logger.info(line)

    return report


def _log_summary(stats: list[ShardStats], *, seconds: float, resumed: bool) -> None:
    """Log the contents of the shards, and the speed unless an earlier run made some of them."""
    tokens = sum(shard.tokens for shard in stats)
    text_bytes = sum(shard.text_bytes for shard in stats)
    speed = "since it resumed" if resumed else f"{text_bytes / 1e6 / seconds:,.1f} MB/s"
    logger.info(
        f"{counted(sum(shard.documents for shard in stats), 'document')}, {tokens:,} tokens, "
        f"{text_bytes:,} bytes of text ({text_bytes / tokens:.3f} per token); "
        f"{sum(shard.empty for shard in stats if not shard.one_document):,} empty and "
        f"{sum(shard.skipped for shard in stats):,} skipped documents; "
        f"{_format_duration(seconds)}, {speed}"
    )


def _format_duration(seconds: float) -> str:
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02}"
