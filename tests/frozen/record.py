"""Records what the frozen tests compare with: `python -m tests.frozen.record`.

Run it only to freeze behaviour that has changed on purpose, with the code whose behaviour it is.
"""

import hashlib
import json
import shutil
import tempfile
from pathlib import Path

from tests.frozen.commands import FOLDER, PREPARED, RUNS, STEPS, losses, refusal, run, train

RECORDED = FOLDER / "recorded"


def main() -> None:
    """Record token files, refusals, and runs to go on from."""
    shutil.rmtree(RECORDED, ignore_errors=True)
    RECORDED.mkdir()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        digests = {key: prepared(folder / key, options) for key, options in PREPARED.items()}
        write("token_files.json", digests)
        commands = [line.split() for line in (FOLDER / "refused.txt").read_text().splitlines()]
        write("refusals.json", {" ".join(argv): refusal(argv, folder) for argv in commands})
        runs = {}
        for key in RUNS:
            train(folder, key, "--max_train_steps", str(STEPS))
            shutil.copytree(folder / "runs" / key, RECORDED / "runs" / key, ignore=_not_recorded)
            exported = run(folder, "llm.checkpoints", f"runs/{key}", "--export", "latest", "model")
            assert exported.code == 0, exported.output
            digest = digest_of(folder / "model" / "model.safetensors")
            shutil.rmtree(folder / "model")
            train(folder, key, "--max_train_steps", str(2 * STEPS), "--resume_from_checkpoint")
            runs[key] = {"model": digest, "losses": losses(folder / "runs" / key)}
        write("runs.json", runs)


def prepared(folder: Path, options: str) -> dict[str, str]:
    """Checksums of the token files that a preparation writes."""
    folder.mkdir()
    done = run(folder, "llm.data.prepare", *options.split(), "--tokenizer_name", "inputs/tokenizer")
    assert done.code == 0, done.output
    files = (path for path in (folder / "out").rglob("*") if path.suffix in (".bin", ".idx"))
    return {str(path.relative_to(folder / "out")): digest_of(path) for path in sorted(files)}


def digest_of(path: Path) -> str:
    """The checksum of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _not_recorded(folder: str, names: list[str]) -> set[str]:
    """A run's model and log; its checkpoint holds the weights."""
    wanted = ("config.toml", "status.json", "metrics.jsonl", "checkpoints")
    return set() if "checkpoints" in folder else set(names) - set(wanted)


def write(name: str, content: object) -> None:
    """Write a recording as JSON that a diff can show."""
    text = json.dumps(content, indent=1) + "\n"
    (RECORDED / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
