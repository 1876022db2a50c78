"""Token files made from a run's text, prepared once per file system by any rank.

    CACHE/KEY/tokens.*        the result: as `prepare` writes it, and the bytes of each row
    CACHE/KEY/tokens.parts/   unfinished work; the next start resumes it
    CACHE/KEY/absent          instead of these: the data set has no such split
    CACHE/KEY.lock            held by the process that prepares

KEY is a digest of text, tokenizer and options. Reading a result needs no lock because `tokens.bin`
is renamed last.
"""

import contextlib
import logging
import math
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

from llm.data.formats.megatron import add_suffix
from llm.data.formats.sidecar import find_damage
from llm.errors import DataError, one_line, os_error_remedy
from llm.runtime.agreement import gather, on_all_ranks
from llm.runtime.files import sync_folder, try_lock
from llm.runtime.world import world_from_environment

_OPTION = "--data_cache_dir"
_POLL_SECONDS = 1.0  # between two checks whether another launch has finished

logger = logging.getLogger("llm.data")


class _Role(StrEnum):
    """What a rank does for the token files of a text."""

    DONE = "done"  # nothing: they exist
    WAITS = "waits"  # wait for another process that prepares them
    PREPARES = "elected"  # prepare them while it holds their lock
    PREPARES_WITHOUT_LOCKS = "elected, no locks"  # the file system has no locks


_PREPARING_ROLES = (_Role.PREPARES, _Role.PREPARES_WITHOUT_LOCKS)


@dataclass(frozen=True, kw_only=True)
class TokenCache:
    """A folder of token files; one process prepares a text while all others wait.

    Attributes:
        folder: The folder.
        overwrite: Prepare existing token files again.
    """

    folder: Path
    overwrite: bool

    def get_or_prepare(self, key: str, prepare: Callable[[Path], None]) -> Path | None:
        """Return the token files of a text, prepared first if needed; every rank calls it.

        Args:
            key: The digest of the provenance.
            prepare: Writes the token files `tokens.*` to a folder, or `absent` if the text does not
                exist; called by one process at a time.

        Returns:
            Their path without suffix; None if the text does not exist.

        Raises:
            DataError: The text is missing, broken or empty, it changes while it is read, or the
                cache cannot be written.
        """
        folder = self.folder / key
        has_prepared = self._ensure_prepared(folder, prepare)
        if (folder / "absent").exists():
            return None
        if not has_prepared:
            logger.info(f"using the cached tokens in {folder}")
        return folder / "tokens"

    def _ensure_prepared(self, folder: Path, prepare: Callable[[Path], None]) -> bool:
        """Prepare a folder, or wait for another process that does, until every rank sees its files.

        Returns:
            Whether this rank prepared it.
        """
        has_prepared = has_waited = False
        while True:
            with contextlib.ExitStack() as lock_stack:
                rebuild = self.overwrite and not has_waited
                role = self._choose_role(folder, lock_stack, is_done=has_prepared, rebuild=rebuild)
                roles = gather(role)
                # Locks are held until all ranks are done: one rank prepares for each file system.
                prepare_if_elected = partial(self._prepare_if_elected, role, folder, prepare)
                on_all_ranks(prepare_if_elected, timeout=math.inf)
                has_prepared = has_prepared or role in _PREPARING_ROLES
            if all(role == _Role.DONE for role in roles):
                return has_prepared
            if not any(role in _PREPARING_ROLES for role in roles):
                if not has_waited:
                    logger.info("waiting for another process that tokenizes the same text")
                time.sleep(_POLL_SECONDS)
            has_waited = True

    def _choose_role(
        self, folder: Path, lock_stack: contextlib.ExitStack, *, is_done: bool, rebuild: bool
    ) -> _Role:
        """Return this rank's role for a text: rank 0 tries the lock first; every rank calls it.

        Args:
            folder: The folder of the token files.
            lock_stack: Takes the lock, and releases it later.
            is_done: Whether this rank has prepared the files already.
            rebuild: Whether to prepare the files although they exist.
        """
        is_main = world_from_environment().is_main
        role = _Role.DONE if is_done else None
        # Rank 0 comes first because it writes the run's log.
        for has_turn in (is_main, not is_main):
            if has_turn and role is None:
                try_lock_folder = partial(self._try_lock_folder, folder, lock_stack)
                role = on_all_ranks(partial(try_lock_folder, rebuild=rebuild))
            else:
                on_all_ranks(lambda: None)
        assert role is not None
        return role

    def _try_lock_folder(
        self, folder: Path, lock_stack: contextlib.ExitStack, *, rebuild: bool
    ) -> _Role:
        """Try to lock the folder of a text; return what this rank does for the text."""
        with self._explain_errors():
            if not rebuild and self._has_usable_files(folder):
                return _Role.DONE
            self.folder.mkdir(parents=True, exist_ok=True)
            # The kernel releases the lock when its holder ends, even after a crash. The file stays:
            # if it were removed, a waiting process and a later one would lock different files.
            descriptor = os.open(add_suffix(folder, ".lock"), os.O_RDWR | os.O_CREAT, 0o666)
            lock_stack.callback(os.close, descriptor)
            try:
                has_locks = try_lock(descriptor)
            except BlockingIOError:
                return _Role.WAITS
            # Check again: another process may have prepared it before this one got the lock.
            if not rebuild:
                if self._has_usable_files(folder):
                    return _Role.DONE
                # Logged here, so only once: the other ranks only wait.
                if faults := self._find_faults(folder):
                    logger.warning(
                        f"the cached tokens in {folder} cannot be used: {' '.join(faults)}"
                    )
            return _Role.PREPARES if has_locks else _Role.PREPARES_WITHOUT_LOCKS

    @contextlib.contextmanager
    def _explain_errors(self) -> Iterator[None]:
        """Turn an OSError into a DataError that names the option of the cache."""
        try:
            yield
        except OSError as error:
            raise DataError(
                f"The token cache in {self.folder} cannot be written ({one_line(error)}); "
                f"{os_error_remedy(error)}, or choose another folder with {_OPTION}."
            ) from error

    def _has_usable_files(self, folder: Path) -> bool:
        """Return whether this launch may use the contents of a folder."""
        return (folder / "absent").exists() or self._find_faults(folder) == []

    def _find_faults(self, folder: Path) -> list[str] | None:
        """Return the faults of token files; None if the files do not exist."""
        prefix = folder / "tokens"
        if not add_suffix(prefix, ".bin").exists():
            return None
        return find_damage(prefix, has_row_bytes=True)

    def _prepare_if_elected(
        self, role: _Role, folder: Path, prepare: Callable[[Path], None]
    ) -> None:
        """Prepare the token files if this is the role of this rank."""
        if role == _Role.PREPARES:
            self._prepare_files(folder, prepare)
        elif role == _Role.PREPARES_WITHOUT_LOCKS:
            self._prepare_without_locks(folder, prepare)

    def _prepare_files(self, folder: Path, prepare: Callable[[Path], None]) -> None:
        """Create the folder of token files, and let `prepare` write them to it."""
        with self._explain_errors():
            if self.overwrite:
                # Processes that have mapped the files can still use them; the kernel frees them
                # afterwards.
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
        """Prepare in a folder of this process. It is harmless if others do the same work."""
        private_folder = add_suffix(folder, f".{socket.gethostname()}.{os.getpid()}")
        try:
            self._prepare_files(private_folder, prepare)
            if self.overwrite or not self._has_usable_files(folder):
                shutil.rmtree(folder, ignore_errors=True)
                with contextlib.suppress(OSError):  # another process was faster, with equal files
                    private_folder.rename(folder)
        finally:
            shutil.rmtree(private_folder, ignore_errors=True)
