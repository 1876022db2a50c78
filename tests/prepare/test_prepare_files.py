import fcntl
import multiprocessing
import os
from dataclasses import replace

import pytest

from llm.data.formats.flat import FlatTokenFile
from llm.data.formats.megatron import TokenFile
from llm.data.formats.sidecar import read_sidecar
from llm.errors import ConfigError, DataError
from llm.prepare.output_files import Output
from llm.prepare.text.sources import make_file_source
from llm.prepare.verification import compute_checksums, find_token_file_faults
from tests.support.texts import (
    THREE,
    FailingSource,
    ListSource,
    ReadSource,
    byte_tokenizer,
    content,
    error_on_a_full_disk,
    ids,
    names,
    prepare,
    prepare_all,
    tokens,
    write,
)

SPAWN = multiprocessing.get_context("spawn")


pytestmark = pytest.mark.usefixtures("fresh_reads")


def test_preparation_leaves_three_files_and_records_the_text_statistics(tmp_path, caplog):
    sources = [ListSource(["ab", "", "\u00e9"], name="a"), ListSource(["", "cd"], name="b")]

    prepare(tmp_path / "deep" / "wiki", sources)

    prefix = tmp_path / "deep" / "wiki"
    assert names(prefix.parent) == THREE
    assert tokens(prefix) == [*ids("ab"), 0, *ids("\u00e9"), 0, *ids("cd"), 0]
    sidecar = read_sidecar(prefix)
    assert (sidecar.documents, sidecar.tokens, sidecar.text_bytes) == (3, 9, 6)
    assert (sidecar.empty_documents, sidecar.skipped_documents) == (2, 0)
    assert (sidecar.largest_token, sidecar.dtype) == (0xC3 + 1, "uint16")
    assert (sidecar.tokenizer, sidecar.tokenizer_fingerprint) == ("bytes", "bytes")
    assert (sidecar.vocab_size, sidecar.eos_token_id, sidecar.append_eos) == (257, 0, True)
    assert sidecar.sources == ["a", "b"]
    assert sidecar.checksums["bin"] == compute_checksums(prefix.parent / "wiki.bin")
    assert find_token_file_faults(prefix) == []
    assert caplog.messages[-2].startswith(
        "3 documents, 9 tokens, 6 bytes of text (0.667 per token); 2 empty and 0 skipped "
        "documents; 0:00:0"
    )
    assert caplog.messages[-1] == f"wrote {prefix}.bin"


@pytest.mark.parametrize("one_document", [False, True])
@pytest.mark.parametrize("prefix", ["", "_"])
def test_a_space_in_front_of_each_line_is_reported(tmp_path, caplog, prefix, one_document):
    tokenizer = replace(byte_tokenizer(), encode_slow=lambda text: ids(prefix + text))
    lines = ListSource(["ab\n", "c"], one_document=one_document)

    prepare(tmp_path / "wiki", [lines], encoding={"tokenizer": tokenizer, "end_token": None})

    assert tokens(tmp_path / "wiki") == ids(f"{prefix}ab\n{prefix}c")
    said = "this tokenizer treats each line as the start of a text, usually by adding a space"
    assert (said in caplog.text) == (one_document and bool(prefix))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_source_that_fails_leaves_nothing_under_the_final_name(tmp_path, workers, caplog):
    sources = [ReadSource(["a"]), ListSource(["b"]), FailingSource(["c"])]
    with pytest.raises(DataError, match="line 9 is broken"):
        prepare(tmp_path / "wiki", sources, workers=workers)
    assert names(tmp_path) == ["wiki.parts"]
    assert f"of 3 shards are kept in {tmp_path}/wiki.parts: the same command resumes" in caplog.text

    prepare(tmp_path / "wiki", [*sources[:2], ListSource(["c"])])

    assert names(tmp_path) == THREE
    assert tokens(tmp_path / "wiki") == [*ids("a"), 0, *ids("b"), 0, *ids("c"), 0]


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".json"])
def test_existing_files_are_not_replaced_without_overwrite(tmp_path, suffix):
    (tmp_path / f"wiki{suffix}").write_text("precious")

    with pytest.raises(DataError, match=rf"wiki\{suffix} exists already; choose another --output"):
        prepare(tmp_path / "wiki", [ReadSource(["a"])])
    assert names(tmp_path) == [f"wiki{suffix}"]
    assert ReadSource.reads == []

    prepare(tmp_path / "wiki", [ReadSource(["a"])], overwrite=True)
    assert tokens(tmp_path / "wiki") == [*ids("a"), 0]
    assert names(tmp_path) == THREE


def test_a_second_preparation_has_nothing_to_do(tmp_path, caplog):
    prepare(tmp_path / "wiki", [ReadSource(["a"])])
    first = (tmp_path / "wiki.bin").stat()

    prepare(tmp_path / "wiki", [ReadSource(["a"])])

    assert ReadSource.reads == ["list"]
    assert caplog.messages[-1] == f"{tmp_path}/wiki.bin already exists, made with the same options"
    again = (tmp_path / "wiki.bin").stat()
    assert (again.st_ino, again.st_mtime_ns) == (first.st_ino, first.st_mtime_ns)


@pytest.mark.parametrize("function", ["_remove_shards", "shutil.rmtree"])
def test_a_second_preparation_removes_what_a_kill_at_the_end_has_left(
    tmp_path, monkeypatch, function
):
    with monkeypatch.context() as killed:
        module = "llm.prepare.prepare_files"
        killed.setattr(f"{module}.{function}", lambda *args, **options: None)
        prepare(tmp_path / "wiki", [ReadSource(["a"])])
    (tmp_path / "wiki.parts.lock").touch()
    assert len(names(tmp_path)) == 5

    prepare(tmp_path / "wiki", [ReadSource(["a"])])

    assert names(tmp_path) == ["wiki.bin", "wiki.idx", "wiki.json"]


def test_a_second_preparation_keeps_the_shards_of_another_text(tmp_path):
    prepare(tmp_path / "wiki", [ReadSource(["a"])])
    (tmp_path / "wiki.parts").mkdir()
    (tmp_path / "wiki.parts" / "plan.json").write_text('{"sources": "others"}')

    prepare(tmp_path / "wiki", [ReadSource(["a"])])

    assert (tmp_path / "wiki.parts" / "plan.json").exists()


@pytest.mark.parametrize(
    ("name", "size", "fault"),
    [
        ("wiki.idx", None, "wiki.idx cannot be read: No such file or directory."),
        ("wiki.idx", 70, "wiki.idx is 70 bytes long, not 82 as its header says; it is damaged"),
        ("wiki.bin", None, "wiki.bin cannot be read: No such file or directory."),
        ("wiki.bin", 4, "wiki.bin is 4 bytes long, not 8 as "),
        ("wiki/val.bin", None, "wiki/val.bin cannot be read: No such file or directory."),
        ("wiki/train.bin", 2, "wiki/train.bin holds 1 tokens, not 2 as "),
    ],
)
def test_a_second_preparation_rewrites_missing_or_truncated_files(
    tmp_path, caplog, name, size, fault
):
    nanogpt = "/" in name
    options = {"nanogpt": nanogpt, "validation_percentage": 50.0 if nanogpt else 0.0}
    prepare(tmp_path / "wiki", [ListSource(["a", "b"])], **options)
    path = tmp_path / name
    before = content(path.parent)
    if size is None:
        path.unlink()
    else:
        os.truncate(path, size)

    prepare(tmp_path / "wiki", [ListSource(["a", "b"])], **options)

    assert content(path.parent) == before
    (said,) = [line for line in caplog.messages if line.endswith("made it, so it is made again.")]
    assert fault in said


def test_one_removed_file_of_two_is_prepared_again_with_a_message(tmp_path, caplog):
    options = {"nanogpt": True, "validation_percentage": 50.0}
    prepare(tmp_path / "wiki", [ListSource(["a", "b"])], **options)
    for kind in ("bin", "json"):
        (tmp_path / "wiki" / f"val.{kind}").unlink()

    prepare(tmp_path / "wiki", [ListSource(["a", "b"])], **options)

    assert f"{tmp_path}/wiki/val.bin is missing. The same options made it" in caplog.text
    assert find_token_file_faults(tmp_path / "wiki" / "val.bin") == []


@pytest.mark.parametrize("error", [DataError, KeyboardInterrupt, OSError])
def test_a_failure_before_the_first_shard_leaves_nothing_behind(tmp_path, error, caplog):
    class Failing(ListSource):
        def batches(self, faults=None):
            raise error("line 9 is broken")

    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else DataError, match="9"):
        prepare(tmp_path / "wiki", [Failing(["a"])])

    assert names(tmp_path) == []
    assert "kept" not in caplog.text


@pytest.mark.parametrize("workers", [1, 2])
def test_a_file_that_changes_while_it_is_read_gives_no_result(tmp_path, workers):
    path = write(tmp_path / "a.txt", "old")

    class ChangingSource(ListSource):
        def batches(self, faults=None):
            yield from super().batches(faults)
            write(path, "newer")

    sources = [make_file_source(path, text_column=None), ChangingSource(["b"])]
    with pytest.raises(DataError, match=r"a\.txt has changed while the text was prepared, and no"):
        prepare(tmp_path / "wiki", sources, workers=workers)
    assert names(tmp_path) == ["a.txt"]

    prepare(tmp_path / "wiki", [make_file_source(path, text_column=None), ListSource(["b"])])
    assert tokens(tmp_path / "wiki") == [*ids("newer"), 0, *ids("b"), 0]


def test_two_processes_cannot_prepare_into_one_folder(tmp_path):
    folder = tmp_path / "wiki.parts"
    folder.mkdir()
    with open(tmp_path / "wiki.parts.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        with pytest.raises(DataError, match=r"Another program is writing to .*wiki\.parts; wait"):
            prepare(tmp_path / "wiki", [ReadSource(["a"])])
        assert ReadSource.reads == []

    prepare(tmp_path / "wiki", [ReadSource(["a"])])
    assert names(tmp_path) == THREE


def test_a_file_system_without_locks_gets_a_warning(tmp_path, monkeypatch, caplog):
    def no_locks(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", no_locks)

    prepare(tmp_path / "wiki", [ListSource(["a"])])

    assert (
        f"{tmp_path}/wiki.parts.lock cannot be locked on this file system: start no second "
        f"program that writes {tmp_path}/wiki"
    ) in caplog.messages
    assert names(tmp_path) == THREE


def test_an_existing_last_output_is_refused_before_the_first_is_written(tmp_path):
    (tmp_path / "b.idx").touch()

    with pytest.raises(DataError, match=r"b\.idx exists already"):
        prepare_all([([ReadSource(["x"])], Output(prefix=tmp_path / name)) for name in "ab"])

    assert ReadSource.reads == []


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([ListSource(["", ""], name="a")], "a holds no text: 2 empty and 0 skipped documents"),
        ([ListSource([], name="a")], r"a holds no text\.$"),
        (
            [ListSource([""], name="a"), ListSource([""], name="a"), ListSource([""], name="b")],
            "a and 1 more hold no text: 3 empty and 0 skipped documents",
        ),
    ],
)
def test_an_empty_text_is_refused(tmp_path, sources, message):
    with pytest.raises(DataError, match=message):
        prepare(tmp_path / "wiki", sources)
    assert names(tmp_path) == []


def test_a_refused_text_leaves_no_new_folder_for_the_output(tmp_path):
    (tmp_path / "data").mkdir()

    with pytest.raises(DataError, match="a holds no text"):
        prepare(tmp_path / "data" / "new" / "deep" / "wiki", [ListSource([""], name="a")])

    assert names(tmp_path) == ["data"]
    assert names(tmp_path / "data") == []


def test_a_tokenizer_without_tokens_is_not_reported_as_empty_documents(tmp_path):
    tokenizer = replace(byte_tokenizer(), encode_slow=lambda text: [], name="none.json", size=0)

    with pytest.raises(
        ConfigError,
        match=r"a holds text, but the tokenizer none\.json makes no token of it; check its voc",
    ):
        prepare(
            tmp_path / "wiki",
            [ListSource(["", "some text"], name="a")],
            encoding={"tokenizer": tokenizer, "end_token": None},
        )

    assert names(tmp_path) == []


def prepare_much(prefix):
    prepare(prefix, [ListSource(["x" * 1000] * 20)] * 5)


@pytest.mark.parametrize("limit", [10_000, 100_000], ids=["in a part", "in the whole"])
def test_a_full_disk_is_one_sentence_and_finished_shards_are_kept(tmp_path, limit, caplog):
    with SPAWN.Pool(1) as pool:
        message = pool.apply(error_on_a_full_disk, (limit, prepare_much, tmp_path / "wiki"))

    assert "wiki cannot be written (File too large); raise the limit on the size of" in message
    done = len(list((tmp_path / "wiki.parts").glob("[0-9]*.json")))
    assert done == (0 if limit == 10_000 else 5)
    assert names(tmp_path) == (["wiki.parts"] if done else [])

    prepare_much(tmp_path / "wiki")

    assert TokenFile(tmp_path / "wiki").num_documents == 100
    assert ("5 of 5 shards are done" in caplog.text) == bool(done)
    assert names(tmp_path) == THREE


@pytest.mark.parametrize(
    ("name", "reason"),
    [("file/wiki", "(Not a directory|File exists)"), ("x" * 300, "File name too long")],
    ids=["below a file", "too long"],
)
def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path, name, reason):
    (tmp_path / "file").touch()

    with pytest.raises(DataError, match=rf"cannot be written \({reason}\)"):
        prepare(tmp_path / name, [ListSource(["a"])])


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_folder_without_write_permission_is_one_sentence(tmp_path):
    tmp_path.chmod(0o500)

    with pytest.raises(DataError, match=r"cannot be written \(Permission denied\)"):
        prepare(tmp_path / "wiki", [ListSource(["a"])])


def test_nanogpt_files_are_split_at_a_document_end(tmp_path):
    sources = [ListSource(["a", "", "bcd"]), ListSource(["\u00e9", "f"])]

    prepare(tmp_path / "wiki", sources, nanogpt=True, validation_percentage=50.0)

    assert names(tmp_path) == ["wiki"]
    assert names(tmp_path / "wiki") == ["train.bin", "train.json", "val.bin", "val.json"]
    found = {name: FlatTokenFile(tmp_path / "wiki" / f"{name}.bin") for name in ("train", "val")}
    assert found["val"].tokens.tolist() == [*ids("a"), 0, *ids("bcd"), 0]
    assert found["train"].tokens.tolist() == [*ids("\u00e9"), 0, *ids("f"), 0]
    train, val = (read_sidecar(tmp_path / "wiki" / name) for name in ("train", "val"))
    assert (val.documents, val.tokens, val.text_bytes) == (2, 6, 4)
    assert (train.documents, train.tokens, train.text_bytes) == (2, 5, 3)
    assert (val.largest_token, train.largest_token) == (ord("d") + 1, 0xC3 + 1)
    assert (
        find_token_file_faults(tmp_path / "wiki" / "train.bin")
        == find_token_file_faults(tmp_path / "wiki" / "val.bin")
        == []
    )


def test_the_bytes_of_a_nanogpt_file_count_documents_of_many_texts(tmp_path):
    sources = [ListSource(["ab", "c"], one_document=True), ListSource(["defg"], one_document=True)]

    prepare(tmp_path / "wiki", sources, nanogpt=True, validation_percentage=50.0)

    assert read_sidecar(tmp_path / "wiki" / "val").text_bytes == 3
    assert read_sidecar(tmp_path / "wiki" / "train").text_bytes == 4


@pytest.mark.parametrize(("percentage", "documents"), [(0.0, 0), (0.05, 1), (50.0, 5)])
def test_a_small_percentage_takes_one_document_and_none_writes_one_file(
    tmp_path, percentage, documents
):
    source = ListSource(["a"] * 10)

    prepare(tmp_path / "wiki", [source], nanogpt=True, validation_percentage=percentage)

    sizes = {name: len(data) for name, data in content(tmp_path / "wiki").items() if ".bin" in name}
    made = {"train.bin": 4 * (10 - documents), "val.bin": 4 * documents}
    assert sizes == {name: size for name, size in made.items() if size}


def test_a_split_that_leaves_no_document_is_refused_with_their_number(tmp_path):
    with pytest.raises(DataError, match="percentage 99 of 10 documents leaves none for training"):
        prepare(
            tmp_path / "wiki",
            [ListSource(["a"] * 10)],
            nanogpt=True,
            validation_percentage=99.0,
        )
    assert names(tmp_path) == []
