"""The sentences about errors of the operating system and of other libraries."""

import errno
import json
import os
from pathlib import Path

import pytest

from llm.errors import explain_os_error, extract_os_error, one_line


def error_of(number: int, *paths: str) -> OSError:
    if not paths:
        return OSError(number, os.strerror(number))
    return OSError(number, os.strerror(number), paths[0], None, *paths[1:])


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            error_of(errno.ENOSPC, "run/log.txt"),
            "run/log.txt cannot be written: No space left on device; free some space.",
        ),
        (
            error_of(errno.EROFS, "run/log.txt"),
            "run/log.txt cannot be written: Read-only file system; name a path on another file "
            "system.",
        ),
        (
            error_of(errno.EACCES, "run/log.txt"),
            "run/log.txt cannot be used: Permission denied; ask for the permission, or name "
            "another path.",
        ),
        (
            error_of(errno.ESTALE, "run/log.txt"),
            "run/log.txt cannot be used: Stale file handle; the disk, or the server of the file "
            "system, has failed: start again when it works.",
        ),
        (
            error_of(errno.EIO, ".step_2.tmp", "step_2"),
            ".step_2.tmp cannot be renamed to step_2: Input/output error; the disk, or the server "
            "of the file system, has failed: start again when it works.",
        ),
        (
            error_of(errno.EMFILE),
            "A call of the system failed: Too many open files; raise the limit on open files "
            "(ulimit -n).",
        ),
        (error_of(errno.ENOENT, "text.txt"), "text.txt cannot be used: No such file or directory."),
        (OSError("gpt2 is no model.\nSee the hub."), "gpt2 is no model. See the hub."),
    ],
)
def test_an_error_of_the_system_becomes_a_sentence_with_a_remedy(error, sentence):
    assert explain_os_error(error) == sentence


def test_a_failed_write_names_its_file():
    with pytest.raises(OSError, match="No space left") as caught:
        write_to("/dev/full")
    assert explain_os_error(caught.value).startswith("/dev/full cannot be written: No space")


def write_to(path: str) -> None:
    with open(path, "w") as file:
        file.write("text")
        file.flush()


def test_a_call_without_a_path_is_named_by_its_function():
    with pytest.raises(OSError, match="Bad file descriptor") as caught:
        read_directory()
    place = f"A call of the system in read_directory ({__file__}:"
    assert explain_os_error(caught.value).startswith(place)


def read_directory() -> None:
    os.read(-1, 1)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("I/O error: No space left on device (os error 28)", errno.ENOSPC),
        ("unable to mmap 305904 bytes from file </x>: Cannot allocate memory (12)", errno.ENOMEM),
        ("the shapes (28) and (12) differ", None),
    ],
)
def test_the_systems_error_in_a_librarys_text_is_recognized(text, number):
    found = extract_os_error(RuntimeError(text), "model.safetensors")
    assert (found and found.errno) == number
    assert found is None or found.filename == "model.safetensors"


@pytest.mark.parametrize(
    ("read", "line"),
    [
        (lambda: json.loads('{\n"a" 1}'), "malformed JSON at line 2, column 5"),
        (lambda: json.loads(b'{"a": "\xff"}'), "byte 8 is not UTF-8 text"),
        (lambda: {}["a"], "the key 'a' is missing"),
        (lambda: Path("/nowhere").stat(), "No such file or directory"),
    ],
)
def test_an_error_of_a_library_is_a_clause_without_a_full_stop(read, line):
    with pytest.raises((ValueError, KeyError, OSError)) as raised:
        read()

    assert one_line(raised.value) == line
