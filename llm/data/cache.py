"""Token files of the text that a run is given, prepared once per file system by whichever rank.

    CACHE/KEY/tokens.*        the result: as `llm.data.prepare` writes it, and the bytes of each row
    CACHE/KEY/tokens.parts/   unfinished work; the next start resumes it
    CACHE/KEY/absent          instead of these: the data set has no such split
    CACHE/KEY.lock            held by the process that prepares
    CACHE/KEY.launch          a note for the other ranks of a launch: prepared, or the error

KEY is a digest of text, tokenizer and options. A result is read without a lock, since `tokens.bin`
gets its name last.
"""

import contextlib
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm import errors
from llm.data.formats.megatron import beside
from llm.data.formats.sidecar import damage
from llm.errors import DataError, LLMError
from llm.runtime.files import sync_folder, try_lock, write_whole

_OPTION = "--data_cache_dir"

log = logging.getLogger("llm.data")


def _process_start() -> float:
    """Return when this process started, in seconds of `time.time`; late rather than early."""
    now = time.time()
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):  # not on Linux: then when this file was imported
        return now
    return now - max(0.0, uptime - ticks / os.sysconf("SC_CLK_TCK"))


_STARTED = _process_start()


@dataclass(frozen=True, kw_only=True)
class TokenCache:
    """A folder of token files; one process prepares a text while all others wait.

    Attributes:
        folder: The folder.
        overwrite: Prepare existing token files again, once a launch.
        launch: Equal on all ranks of one launch; None for a single process. A rank that waited
            while another one failed raises the same error, marked as reported.
    """

    folder: Path
    overwrite: bool
    launch: str | None

    def token_files(self, key: str, prepare: Callable[[Path], None]) -> Path | None:
        """Return the token files of a text, after preparing them if need be.

        Args:
            key: The digest of the recipe.
            prepare: Makes the token files `tokens.*` in a folder, or `absent` if the text does not
                exist; called by one process at a time.

        Returns:
            Their path without suffix; None if the text does not exist.

        Raises:
            DataError: The text is missing, broken or empty, it changes while it is read, or the
                cache cannot be written.
            LLMError: The error of another rank that has tried to prepare them.
        """
        folder = self.folder / key
        try:
            if not self._is_done(folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                with _lock(beside(folder, ".lock")) as locked:
                    # Again: another process may have prepared it while this one waited.
                    if not self._is_done(folder):
                        self._prepare_once(folder, prepare, locked=locked)
        except OSError as error:
            raise DataError(
                f"The token cache in {self.folder} cannot be written ({error.strerror or error}); "
                f"free some space there, or choose another folder with {_OPTION}."
            ) from error
        if (folder / "absent").exists():
            return None
        return folder / "tokens"

    def _is_done(self, folder: Path) -> bool:
        """Return whether a folder holds what this launch may use."""
        prefix = folder / "tokens"
        if self.overwrite and self._note(folder) is None:
            return False
        if (folder / "absent").exists():
            return True
        if not beside(prefix, ".bin").exists():
            return False
        faults = damage(prefix, row_bytes=True)
        if faults:
            log.warning(f"the cached tokens in {folder} cannot be used: {' '.join(faults)}")
            return False
        log.info(f"using the cached tokens in {folder}")
        return True

    def _prepare_once(self, folder: Path, prepare: Callable[[Path], None], *, locked: bool) -> None:
        """Prepare a text and leave a note, or raise the error that another rank has noted."""
        failed = (self._note(folder) or {}).get("error")
        if failed is not None:
            raise getattr(errors, failed[0], DataError)(failed[1], reported=True)
        try:
            if locked:
                self._prepare(folder, prepare)
            else:
                self._prepare_without_locks(folder, prepare)
        except LLMError as error:
            self._write_note(folder, error)
            error.found_here = True  # the other ranks raise it as reported, so this one prints it
            raise
        self._write_note(folder, None)

    def _prepare(self, folder: Path, prepare: Callable[[Path], None]) -> None:
        if self.overwrite:
            # Processes that have the files mapped keep them: the kernel frees them after that.
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(exist_ok=True)
        try:
            prepare(folder)
        except BaseException:
            with contextlib.suppress(OSError):
                folder.rmdir()  # fails if unfinished work is kept
            raise
        sync_folder(self.folder)  # the name of the folder survives a power cut

    def _prepare_without_locks(self, folder: Path, prepare: Callable[[Path], None]) -> None:
        """Prepare in a folder of this process; others may do the same work, which is harmless."""
        own = beside(folder, f".{socket.gethostname()}.{os.getpid()}")
        try:
            self._prepare(own, prepare)
            if not self._is_done(folder):
                shutil.rmtree(folder, ignore_errors=True)
                with contextlib.suppress(OSError):  # another process was faster: equal files
                    own.rename(folder)
        finally:
            shutil.rmtree(own, ignore_errors=True)

    def _note(self, folder: Path) -> dict[str, Any] | None:
        """Return the note of a rank of this launch.

        Launchers reuse their ids: torchrun's is `none` by default. The ranks of one launch all
        start before the first of them writes anything, so an older note is of an earlier launch.
        """
        try:
            note: dict[str, Any] = json.loads(beside(folder, ".launch").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        is_ours = note["launch"] == self.launch is not None and note["time"] >= _STARTED
        return note if is_ours else None

    def _write_note(self, folder: Path, error: LLMError | None) -> None:
        if self.launch is None:
            return
        failed = None if error is None else (type(error).__name__, str(error))
        note = {"launch": self.launch, "time": time.time(), "error": failed}
        with contextlib.suppress(OSError):  # without the note, the other ranks try for themselves
            write_whole(beside(folder, ".launch"), json.dumps(note))


@contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Hold the lock of a file; yield whether the file system has locks at all."""
    # The kernel releases the lock when its holder ends, however it ends. The file stays: if it
    # were removed, a process that waits and one that comes later would lock different files.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            locked = try_lock(descriptor)
        except BlockingIOError:
            log.info("waiting for another process that tokenizes the same text")
            locked = try_lock(descriptor, wait=True)
        yield locked
    finally:
        os.close(descriptor)
