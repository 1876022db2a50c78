"""Files that survive a kill and a power cut: atomic writes, fsync, locks, checksums."""

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import math
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from llm.errors import LLMError, extract_os_error

_POLL_SECONDS = 0.1  # between two attempts to lock a file
_FOLDER_SYNC_UNSUPPORTED = (
    *(errno.EINVAL, errno.EBADF),  # PostgreSQL ignores these two, LevelDB EINVAL, SQLite any error
    *(errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS),
)
_unsynced_devices: set[int] = set()  # devices that a warning has named

logger = logging.getLogger("llm")


def write_whole(path: Path, content: str | bytes, *, survives_power_cut: bool = True) -> None:
    """Write a file so that a kill leaves either the old content or the new one; text as UTF-8.

    Args:
        path: The file.
        content: Its content.
        survives_power_cut: Whether a power cut leaves one of both too, which takes a sync.

    Raises:
        OSError: The file cannot be written.
    """
    # Nobody can guess the name, and "x" follows no link that has it already.
    temporary_path = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary_path.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if survives_power_cut:  # otherwise it can leave the new name on an empty file
                sync(file)
        temporary_path.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary_path.unlink()
        if isinstance(error, OSError):
            # A message must not show the temporary name.
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


@contextlib.contextmanager
def undo_mkdir_on_error(folder: Path) -> Iterator[None]:
    """Make a folder and its parents; if the context raises, remove new ones that are empty.

    Raises:
        OSError: The folder cannot be made.
    """
    new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # another program has written there
            for path in new_folders:
                path.rmdir()
        raise


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a folder for temporary files, which exists for the context.

    Raises:
        OSError: A file in it cannot be written; the error names the folder and TMPDIR.
    """
    with contextlib.ExitStack() as stack:
        description = "The folder for temporary files (TMPDIR)"
        try:
            description = f"{tempfile.gettempdir()} (TMPDIR)"
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        except OSError as error:
            raise OSError(error.errno, error.strerror, description) from error
        try:
            yield folder
        except LLMError:
            raise
        except Exception as error:
            cause = extract_os_error(error, description)
            if cause is None or not str(cause.filename).startswith((str(folder), description)):
                raise
            raise OSError(cause.errno, cause.strerror, description) from error


def end_last_line(path: Path) -> None:
    """End the last line of a file that a kill or a full disk has cut short; call before you append.

    Raises:
        OSError: The file cannot be read or written.
    """
    with path.open("ab+") as file:
        file.seek(max(0, file.tell() - 1))
        if file.read(1) not in (b"", b"\n"):
            file.write(b"\n")


def read_json_lines(path: Path) -> list[dict[str, Any] | None]:
    """Return the JSON objects of a file, one per line; empty if the file does not exist.

    A line that is not a JSON object is None: a kill may cut the last line short.
    """
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", errors="replace") as file:
        return [_parse_json_object(line) for line in file]


def _parse_json_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object that a text holds; None if it holds something else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def json_safe(value: Any) -> Any:
    """Replace infinite numbers and NaN by None, because JSON cannot hold them."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def sync(file: IO[bytes] | IO[str]) -> None:
    """Return when everything written to an open file is on the disk.

    Raises:
        OSError: It cannot be written; the error names the file.
    """
    file.flush()
    _sync_descriptor(file.fileno(), file.name)


def sync_folder(folder: Path) -> None:
    """Make the renames and new files in a folder survive a power cut.

    Some file systems cannot sync a folder. As in databases, the first such folder causes a warning.

    Raises:
        OSError: The disk fails; the error names the folder.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _sync_descriptor(descriptor, folder)
    except OSError as error:
        if error.errno not in _FOLDER_SYNC_UNSUPPORTED:
            raise
        device = os.fstat(descriptor).st_dev
        if device not in _unsynced_devices:
            _unsynced_devices.add(device)
            logger.warning(
                f"The file system of {folder} cannot sync folders ({error.strerror}): after a "
                "power cut, the newest files may be missing."
            )
    finally:
        os.close(descriptor)


def _sync_descriptor(descriptor: int, path: str | Path) -> None:
    """Call fsync; an error names the path."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror} in fsync", str(path)) from error


def delete(path: Path) -> None:
    """Delete a file, a link, or a folder with its contents."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def sync_file(path: Path) -> tuple[int, str]:
    """Write a file through to the disk; return its size in bytes and its checksum."""
    with path.open("rb") as file:
        _sync_descriptor(file.fileno(), path)
    return path.stat().st_size, checksum(path)


def checksum(path: Path) -> str:
    """Return the xxh3_128 checksum of a file, computed as fast as a disk reads."""
    import xxhash  # imported here because --help runs without packages

    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def try_lock(descriptor: int, *, seconds: float = 0.0, shared: bool = False) -> bool:
    """Lock an open file for this process; the kernel releases it when the process ends.

    Args:
        descriptor: File descriptor.
        seconds: Seconds to wait while another process holds the lock.
        shared: Whether the lock is shared: other processes may hold shared locks at the same time.

    Returns:
        Whether the file system supports locks.

    Raises:
        BlockingIOError: Another process still holds the lock.
        OSError: The file system fails.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            operation = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_POLL_SECONDS)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP):
                raise
            return False
        else:
            return True
