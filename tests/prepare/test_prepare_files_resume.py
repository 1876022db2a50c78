import multiprocessing
from pathlib import Path

import numpy as np
import pytest

from llm.errors import DataError
from llm.prepare import prepare_files
from llm.prepare.output_files import Output
from llm.prepare.verification import find_token_file_faults
from tests.support.texts import (
    THREE,
    FailingSource,
    ListSource,
    ReadSource,
    byte_tokenizer,
    content,
    ids,
    names,
    prepare,
    prepare_all,
    tokens,
)

SPAWN = multiprocessing.get_context("spawn")


pytestmark = pytest.mark.usefixtures("fresh_reads")


class Killed(BaseException):
    """As SIGKILL, nobody catches it."""


def die_at(monkeypatch, function, number, *, counts=lambda *_: True):
    """Lets a method of `Path` die in the place of its `number`-th call that counts."""
    real = getattr(Path, function)
    calls = []

    def dying(self, *args, **options):
        if counts(self, *args):
            calls.append(self)
            if len(calls) == number:
                raise Killed
        return real(self, *args, **options)

    monkeypatch.setattr(Path, function, dying)


def is_publication(path, target=None):
    return path.name.startswith("out.") and target is not None and ".parts" not in str(target)


def is_tidying(path):
    return path.parent.name == "wiki.parts" and not path.name.endswith(".tmp")


@pytest.mark.parametrize(
    ("nanogpt", "number"),
    [*((False, number) for number in (1, 2, 3)), *((True, number) for number in (1, 2, 3, 4))],
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_run_killed_between_the_renames_is_finished_by_the_next(
    tmp_path, nanogpt, number, overwrite
):
    options = {"nanogpt": nanogpt, "validation_percentage": 50.0 if nanogpt else 0.0}
    prepare(tmp_path / "expected" / "wiki", [ReadSource(["a", "b"])], **options)
    prefix = tmp_path / "wiki"
    if overwrite:
        prepare(prefix, [ListSource(["old", "older"])], **options)
        options["overwrite"] = True
    with pytest.MonkeyPatch.context() as patch:
        die_at(patch, "replace", number, counts=is_publication)
        with pytest.raises(Killed):
            prepare(prefix, [ReadSource(["a", "b"])], **options)
    for made in Output(prefix=prefix, **options).names:
        if made.with_name(f"{made.name}.bin").exists():
            assert find_token_file_faults(made.with_name(f"{made.name}.bin")) == []

    prepare(prefix, [ReadSource(["a", "b"])], **options)

    assert len(ReadSource.reads) == 2  # of the expected files, and before the kill
    if nanogpt:
        assert content(prefix) == content(tmp_path / "expected" / "wiki")
        assert names(tmp_path) == ["expected", "wiki"]
    else:
        assert names(tmp_path) == ["expected", *THREE]
        assert content(tmp_path) == content(tmp_path / "expected")


@pytest.mark.parametrize("number", [1, 2, 3, 5, 8, 12])
def test_a_run_killed_while_it_removes_temporary_files_is_complete(tmp_path, number):
    with pytest.MonkeyPatch.context() as patch:
        die_at(patch, "unlink", number, counts=is_tidying)
        try:
            prepare(tmp_path / "wiki", [ReadSource(["a"]), ReadSource(["b"])])
        except Killed:
            assert (tmp_path / "wiki.bin").exists()

            prepare(tmp_path / "wiki", [ReadSource(["a"]), ReadSource(["b"])])

    assert names(tmp_path) == THREE
    assert len(ReadSource.reads) == 2


def begin(prefix, **encoding):
    """A run of which one part of two is done."""
    with pytest.raises(DataError, match="line 9"):
        prepare(
            prefix, [ReadSource(["a"], name="a"), FailingSource(["b"], name="b")], encoding=encoding
        )


def finish(prefix, *, encoding=None, **output):
    sources = [ReadSource(["a"], name="a"), ReadSource(["b"], name="b")]
    prepare(prefix, sources, encoding=encoding, **output)


def test_the_same_command_resumes_and_says_so(tmp_path, caplog):
    begin(tmp_path / "wiki")

    finish(tmp_path / "wiki")

    assert ReadSource.reads == ["a", "b"]
    assert f"resuming in {tmp_path}/wiki.parts: 1 of 2 shards are done" in caplog.messages
    assert caplog.messages[-2].endswith("since it resumed")


@pytest.mark.parametrize(
    "change",
    [
        {"encoding": {"end_token": None}},
        {"encoding": {"dtype": np.dtype("<i4")}},
        {"encoding": {"tokenizer": byte_tokenizer(fingerprint="other")}},
        {"encoding": {"on_error": "skip"}},
        {"shuffle_seed": 3},
        "input",
        "part_bytes",
        "plan",
    ],
    ids=["end", "dtype", "tokenizer", "on_error", "shuffle", "input", "part_bytes", "plan"],
)
def test_another_command_or_input_starts_over_and_says_so(tmp_path, caplog, monkeypatch, change):
    begin(tmp_path / "wiki")
    if change == "part_bytes":
        monkeypatch.setattr(prepare_files, "SHARD_BYTES", 17)
    if change == "input":
        identity = ReadSource.identity
        monkeypatch.setattr(ReadSource, "identity", lambda self: {**identity(self), "size": 9})
    if change == "plan":
        (tmp_path / "wiki.parts" / "plan.json").write_text("{")

    finish(tmp_path / "wiki", **(change if isinstance(change, dict) else {}))

    assert ReadSource.reads == ["a", "a", "b"]
    said = "/wiki.parts belongs to another command, or its input has changed: starting again"
    assert (f"{tmp_path}{said}" in caplog.messages) == (change != "plan")
    assert names(tmp_path) == THREE
    assert find_token_file_faults(tmp_path / "wiki") == []


@pytest.mark.parametrize("suffix", ["bin", "idx", "bytes", "json"])
def test_a_shard_damaged_before_the_resume_is_written_again(tmp_path, suffix):
    finish(tmp_path / "expected" / "wiki")
    begin(tmp_path / "wiki")
    path = tmp_path / "wiki.parts" / f"000000.{suffix}"
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])

    finish(tmp_path / "wiki")

    assert ReadSource.reads == ["a", "b", "a", "a", "b"]
    assert (tmp_path / "wiki.bin").read_bytes() == (tmp_path / "expected/wiki.bin").read_bytes()


def test_unknown_files_are_not_deleted(tmp_path):
    (tmp_path / "wiki.parts").mkdir()
    (tmp_path / "wiki.parts" / "thesis.txt").write_text("precious")

    with pytest.raises(
        DataError, match=r"thesis\.txt is in a folder for unfinished work but does not"
    ):
        prepare(tmp_path / "wiki", [ListSource(["a"])])

    assert (tmp_path / "wiki.parts" / "thesis.txt").read_text() == "precious"


def test_preparation_resumes_after_the_outputs_that_are_complete(tmp_path, caplog):
    def jobs(last):
        sources = [ReadSource(["a"], name="a"), ReadSource(["b"], name="b"), last]
        return [
            ([source], Output(prefix=tmp_path / name))
            for source, name in zip(sources, "abc", strict=True)
        ]

    with pytest.raises(DataError, match="line 9"):
        prepare_all(jobs(FailingSource(["c"], name="c")))
    assert tokens(tmp_path / "a") == [*ids("a"), 0]

    prepare_all(jobs(ReadSource(["c"], name="c")))

    assert ReadSource.reads == ["a", "b", "c"]
    assert f"{tmp_path}/b.bin already exists, made with the same options" in caplog.messages
    assert tokens(tmp_path / "c") == [*ids("c"), 0]
    assert names(tmp_path) == sorted(
        f"{name}.{kind}" for name in "abc" for kind in ("bin", "idx", "json")
    )
