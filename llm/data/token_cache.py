"""A folder that is written once per file system, by whichever process comes first.

    CACHE/KEY/                  the result
    CACHE/KEY.lock              held by the process that writes it
    CACHE/KEY.failed            why it could not, for the other ranks of the same launch
    CACHE/KEY.tmp.HOST.PID/     what it has written so far

The folder is written under its temporary name, synced and renamed. What has the final name is
therefore whole, however its writer ended, and is read without a lock.
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
from pathlib import Path
from typing import Any, TypeVar

from llm import errors
from llm.errors import DataError, LLMError
from llm.files import sync_folder, try_lock, write_whole

T = TypeVar("T")

log = logging.getLogger("llm.data")


def _process_start() -> float:
    """When this process started, in seconds of `time.time`; rather too late than too early."""
    now = time.time()
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):  # not on Linux: then when this file was imported
        return now
    return now - max(0.0, uptime - ticks / os.sysconf("SC_CLK_TCK"))


_STARTED = _process_start()


def launch_mark(launch: str | None) -> dict[str, Any]:
    """What is written into a file to tell the other ranks of a launch who wrote it."""
    return {"launch": launch, "time": time.time()}


def is_marked(mark: dict[str, Any], launch: str | None) -> bool:
    """Whether a mark is of this launch.

    Launchers reuse their ids: torchrun's is `none` by default. The ranks of one launch all start
    before the first of them writes anything, so an older mark is of an earlier launch.
    """
    return launch is not None and mark["launch"] == launch and mark["time"] >= _STARTED


def open_or_build(
    folder: Path,
    *,
    open_folder: Callable[[Path], T | None],
    accept: Callable[[T], bool],
    build: Callable[[Path], None],
    launch: str | None,
) -> T:
    """Opens a cached folder, or builds it while all others wait.

    Args:
        folder: The final name.
        open_folder: Opens it; None where it is absent or broken.
        accept: Whether what was opened may be used; if not, it is built anew.
        build: Writes the content into an empty folder, each file synced.
        launch: Equal on all ranks of one launch. A rank that waited while another one failed
            raises the same error, marked as reported. None tells of no other ranks.

    Raises:
        DataError: The cache cannot be written.
        LLMError: What `build` raises.
    """

    def accepted() -> T | None:
        found = open_folder(folder)
        if found is None or not accept(found):
            return None
        log.info(f"using the cached tokens in {folder}")
        return found

    found = accepted()
    if found is None:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _lock(_beside(folder, ".lock")):
                found = accepted()
                if found is None:
                    _build_or_note(folder, build, launch)
                    found = open_folder(folder)
        except OSError as error:
            raise _unwritable(folder, error) from error
    if found is None:
        raise DataError(
            f"The token cache {folder} cannot be read back; choose another folder with "
            "--data_cache_dir."
        )
    return found


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    # The kernel releases the lock when its holder ends, however it ends. The file stays: whoever
    # deleted it would split those who wait from those who come.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        # On a file system without locks the work may be done twice, each time in a folder of its
        # own, and the rename decides: slower, but as right.
        try:
            try_lock(descriptor)
        except BlockingIOError:
            log.info("waiting for another process that tokenises the same text")
            try_lock(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)


def _build_or_note(folder: Path, build: Callable[[Path], None], launch: str | None) -> None:
    note = _beside(folder, ".failed")
    _raise_noted(note, launch)
    _remove_stale(folder)
    try:
        _build(folder, build)
    except LLMError as error:
        if launch is not None:
            _write_note(note, launch, error)
            error.found_here = True  # the others stay silent, so this rank speaks
        raise
    note.unlink(missing_ok=True)


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    temporary = _temporary(folder, os.getpid())
    try:
        temporary.mkdir()
        build(temporary)
        sync_folder(temporary)
        replaced = _beside(temporary, ".old")
        if folder.exists():
            folder.rename(replaced)  # who has it mapped keeps it
        try:
            temporary.rename(folder)
        except OSError:
            # Without locks, somebody else may have been faster; theirs is as good.
            if not folder.exists():
                raise
        sync_folder(folder.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _remove_stale(folder: Path) -> None:
    """Removes what dead processes of this host have left; called with the lock held."""
    prefix = f"{folder.name}.tmp.{socket.gethostname()}."
    for path in folder.parent.glob(f"{folder.name}.tmp.*"):
        pid = path.name.removeprefix(prefix).removesuffix(".old")
        if pid.isdigit() and (int(pid) == os.getpid() or not _is_alive(int(pid))):
            log.info(f"removing {path}, which an interrupted run has left")
            shutil.rmtree(path, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


def _write_note(note: Path, launch: str, error: LLMError) -> None:
    content = {**launch_mark(launch), "class": type(error).__name__, "message": str(error)}
    with contextlib.suppress(OSError):  # then the others find out for themselves
        write_whole(note, json.dumps(content))


def _raise_noted(note: Path, launch: str | None) -> None:
    try:
        content = json.loads(note.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    if is_marked(content, launch):
        raise getattr(errors, content["class"], DataError)(content["message"], reported=True)


def _unwritable(folder: Path, error: OSError) -> DataError:
    return DataError(
        f"The token cache in {folder.parent} cannot be written ({error.strerror or error}); free "
        "some space there, or choose another folder with --data_cache_dir."
    )


def _temporary(folder: Path, pid: int) -> Path:
    return _beside(folder, f".tmp.{socket.gethostname()}.{pid}")


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)
