"""Which code of the package runs: its commit, and a hash that wheels have too."""

import hashlib
import subprocess
from pathlib import Path

_GIT_SECONDS = 20.0
_HASHED_SUFFIXES = (".py", ".sh", ".toml")


def find_commit(package: Path) -> str | None:
    """Return the commit of a package in a clone, with `-dirty` after it if the clone has changes.

    Args:
        package: Folder of the package.

    Returns:
        None outside a clone, or if git does not answer. An environment in the clone of another
        project is outside.
    """
    if _ask_git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return _ask_git(package, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _ask_git(folder: Path, *arguments: str) -> str | None:
    """Return what git prints in a folder; None if it fails, is missing or is late."""
    try:
        result = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            timeout=_GIT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.decode(errors="replace").strip()


def hash_sources(package: Path) -> str:
    """Return the SHA-256 of the names and the content of a package's sources.

    Args:
        package: Folder of the package.
    """
    digest = hashlib.sha256()
    paths = [path for path in package.rglob("*") if path.suffix in _HASHED_SUFFIXES]
    examples = package / "examples"  # only wheels have them
    for path in sorted(path for path in paths if examples not in path.parents):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()
