"""Records what the frozen tests compare with: `python -m tests.frozen.record`.

Run it only to freeze behaviour that has changed on purpose, with the code whose behaviour it is.
"""

import hashlib
import json
import shutil
import tempfile
from pathlib import Path

from tests.frozen.commands import FOLDER, PREPARED, refusals, run

RECORDED = FOLDER / "recorded"


def main() -> None:
    """Record token files and refusals."""
    shutil.rmtree(RECORDED, ignore_errors=True)
    RECORDED.mkdir()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        digests = {key: prepared(folder / key, options) for key, options in PREPARED.items()}
        write("token_files.json", digests)
        commands = (FOLDER / "refused.txt").read_text().splitlines()
        write("refusals.json", refusals(commands, folder))


def prepared(folder: Path, options: str) -> dict[str, str]:
    """Checksums of the token files that a preparation writes."""
    folder.mkdir()
    done = run(
        folder, "llm.prepare.prepare", *options.split(), "--tokenizer_name", "inputs/tokenizer"
    )
    assert done.code == 0, done.output
    files = (path for path in (folder / "out").rglob("*") if path.suffix in (".bin", ".idx"))
    return {str(path.relative_to(folder / "out")): digest_of(path) for path in sorted(files)}


def digest_of(path: Path) -> str:
    """The checksum of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write(name: str, content: object) -> None:
    """Write a recording as JSON that a diff can show."""
    text = json.dumps(content, indent=1) + "\n"
    (RECORDED / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
