"""Make a corpus of source code from the files of any machine with Python, and cut inputs of it."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llm.errors import DataError

_SUFFIXES = frozenset((".py", ".pyi", ".md", ".rst", ".txt", ".c", ".h", ".hpp", ".cpp"))
_SMALLEST, _LARGEST = 200, 400_000  # bytes
# Most programs encode this text as the end-of-text token, some as text: left out of all inputs.
_SPECIAL = b"<|endoftext|>"


@dataclass(frozen=True, slots=True)
class Slice:
    """A JSONL file of about a given size.

    Attributes:
        path: The file.
        megabytes: Its size, in 10**6 bytes.
        documents: Number of lines.
        passes: Passes over the corpus that filled it.
        digest: The first 16 hex digits of its SHA-256.
    """

    path: Path
    megabytes: float
    documents: int
    passes: int
    digest: str

    def __str__(self) -> str:
        repeated = f", the corpus repeated {self.passes} times" if self.passes > 1 else ""
        return (
            f"{self.megabytes:,.1f} MB of JSONL, {self.documents:,} documents{repeated}, "
            f"SHA-256 {self.digest}"
        )


def make_corpus(path: Path, megabytes: int, roots: tuple[Path, ...] | None = None) -> int:
    """Write source files and documentation as JSONL, one file a line under the key `text`.

    The files are Python, C, Markdown and plain text from the folders of this Python and
    /usr/include, in an order that depends only on their names.

    Args:
        path: The JSONL file to write.
        megabytes: Size of the corpus, in 10**6 bytes.
        roots: Other folders to read files from.

    Returns:
        The number of documents.
    """
    roots = roots or tuple(map(Path, dict.fromkeys((sys.prefix, sys.base_prefix, "/usr/include"))))
    documents = size = 0
    with open(path, "wb") as out:
        for file in _in_hashed_order(roots):
            try:
                text = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            line = json.dumps({"text": text}).encode() + b"\n"
            size += out.write(line)
            documents += 1
            if size >= megabytes * 1_000_000:
                break
    return documents


def make_tokens(folder: Path, *, megabytes: int, vocab_size: int) -> None:
    """Turn source code into nanoGPT's token files, FOLDER/tokens, with a tokenizer of its own.

    Args:
        folder: Where the text, the tokenizer and the tokens are written.
        megabytes: Size of the text, in 10**6 bytes.
        vocab_size: Tokens of the tokenizer, which is trained on 2,000 documents.

    Raises:
        DataError: A program failed; it has said why.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text, tokenizer, tokens = (folder / name for name in ("code.jsonl", "tokenizer", "tokens"))
    make_corpus(text, megabytes)
    train = ["--input", text, "--max_sentences", 2000, "--vocab_size", vocab_size]
    encode = ["--input", text, "--tokenizer_name", tokenizer, "--append_eos", "--overwrite"]
    encode += ["--shuffle", "documents", "--validation_split_percentage", 1, "--format", "nanogpt"]
    for program, arguments in (
        ("tokenizer", [*train, "--output_dir", tokenizer, "--overwrite"]),
        ("prepare", [*encode, "--output_prefix", tokens]),
    ):
        command = [sys.executable, "-m", "llm", program, *map(str, arguments)]
        if subprocess.run(command).returncode:
            raise DataError(f"llm {program} could not make the tokens of the benchmark.")


def _in_hashed_order(roots: tuple[Path, ...]) -> Iterator[Path]:
    # Sorted by a hash of the name below its root, so that neighbours are unrelated.
    found: dict[bytes, Path] = {}
    for root in roots:
        for file in root.rglob("*"):
            if file.suffix not in _SUFFIXES or file.is_symlink() or not file.is_file():
                continue
            if _SMALLEST < file.stat().st_size < _LARGEST:
                name = str(file.relative_to(root)).encode()
                found.setdefault(hashlib.blake2b(name, digest_size=16).digest(), file)
    for key in sorted(found):
        yield found[key]


def cut(corpus: Path, out: Path, megabytes: float) -> Slice:
    """Write the first lines of a corpus, which is repeated if it is too short.

    Lines that spell out the end-of-text token are left out.

    Args:
        corpus: A JSONL file.
        out: The file to write.
        megabytes: Its size, in 10**6 bytes.

    Raises:
        DataError: The corpus cannot be read or holds no line.
    """
    hashed = hashlib.sha256()
    size = documents = passes = 0
    try:
        with open(out, "wb") as target:
            while size < megabytes * 1_000_000:
                passes += 1
                with open(corpus, "rb") as lines:
                    for line in lines:
                        if not line.strip() or _SPECIAL in line:
                            continue
                        hashed.update(line)
                        size += target.write(line if line.endswith(b"\n") else line + b"\n")
                        documents += 1
                        if size >= megabytes * 1_000_000:
                            break
                if not documents:
                    raise DataError(f"--corpus {corpus} holds no line of text; give another file.")
    except OSError as error:
        raise DataError(f"--corpus {corpus} cannot be cut: {error}.") from error
    return Slice(out, size / 1e6, documents, passes, hashed.hexdigest()[:16])
