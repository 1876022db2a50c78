"""Files that survive a kill and a power cut: written whole, synced, locked, and told apart."""

import errno
import fcntl
import os
from pathlib import Path
from typing import IO

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)
"""What a file system without locks answers."""

_CHUNK = 1 << 22


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a kill leaves the old one or the new one.

    Raises:
        OSError: The file system refuses it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            sync(file)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def sync(file: IO[bytes] | IO[str]) -> None:
    """Return when what was written to an open file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make renames and new names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: Path) -> str:
    """The xxh3_128 of a file: as fast as the disk, and no two states of it share one by chance."""
    import xxhash  # not a part of Python: --help does without

    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            state.update(chunk)
    return str(state.hexdigest())


def try_lock(descriptor: int, *, wait: bool = False) -> bool:
    """Lock an open file for this process; the kernel releases it when the process ends.

    Args:
        descriptor: Of the file.
        wait: Wait for whoever holds it.

    Returns:
        Whether the file system has locks at all.

    Raises:
        BlockingIOError: Another process holds it.
        OSError: The file system fails.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return False
    return True
