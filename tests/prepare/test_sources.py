import gzip
import json
import logging
import os

import pytest

from llm.data.text_identity import compute_sampled_digest
from llm.errors import DataError
from llm.prepare.text.sources import check_sources_unchanged, find_text_sources, make_file_source
from tests.support.texts import PACK, ListSource, prepare, texts_of, write


def source(path, **options):
    return make_file_source(path, **{"text_column": None, **options})


def found(*inputs, text_unit="line"):
    return find_text_sources([str(name) for name in inputs], text_column=None, text_unit=text_unit)


def names(*inputs):
    return [source.name for source in found(*inputs)]


def test_unreadable_files_are_refused_before_any_is_read(tmp_path):
    for name in ("a.pdf", "a.py", "a.parquet.gz"):
        write(tmp_path / name, "x")
    (tmp_path / "empty.txt").touch()
    write(tmp_path / "big.txt", "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n")

    for path, message in {
        tmp_path / "none.txt": r"--train_file .*none\.txt does not exist",
        tmp_path / "*.txt": "is a pattern, and --train_file takes one file; name the folder with",
        tmp_path: "is a folder; name it with --dataset_name",
        tmp_path / "a.py": "Plain text such as source code has to be in files that end in .txt",
        "/dev/null": "--train_file /dev/null is not a regular file; write its text to a file",
        tmp_path / "a.pdf": r"unknown format; give one of \.txt, \.csv, .*, \.ndjson, \.parquet",
        tmp_path / "a.parquet.gz": r"all but the last may be compressed, as in \.jsonl\.gz \(\.gz",
        tmp_path / "empty.txt": r"empty\.txt is empty",
        tmp_path / "big.txt": r"big\.txt is a pointer of Git LFS, not the file itself; run `git l",
    }.items():
        with pytest.raises(DataError, match=message):
            source(path)
    with pytest.raises(DataError, match="--validation_file"):
        source(tmp_path / "none.txt", option="--validation_file")


@pytest.mark.parametrize("packing", PACK)
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '{"text": "one"}\n{"text": "two"}\n'),
        ("a.json", '[{"text": "one"}, {"text": "two"}]'),
        ("a.csv", "id,text\n1,one\n2,two\n"),
        ("a.txt", "one\ntwo\n"),
    ],
)
def test_every_kind_of_file_may_have_every_compression(tmp_path, packing, name, content):
    path = write(tmp_path / f"{name}{packing}", PACK[packing](content.encode()))

    (packed,) = source(path, text_unit="line").split(1)

    assert texts_of(packed) == ["one", "two"]


def test_the_identity_of_a_file_is_its_path_size_time_and_reader_options(tmp_path):
    path = write(tmp_path / "a.txt", "one\n")
    before = source(path).identity()

    assert source(path).identity() == before
    assert source(path, text_column="body").identity() == before  # a text file has no columns
    assert source(path, keep_linebreaks=False).identity() != before
    assert source(path, text_unit="line").identity() != before
    os.utime(path, ns=(0, 0))
    assert source(path).identity() != before
    assert source(path).num_bytes == 4


def test_the_identity_of_a_file_of_records_includes_the_text_column(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "one", "body": "two"}\n')

    assert source(path).identity() != source(path, text_column="body").identity()


def test_the_identity_of_a_relative_path_includes_its_folder(tmp_path, monkeypatch):
    identities = []
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        (tmp_path / name / "a.txt").write_text("one\n")
        os.utime("a.txt", ns=(0, 0))
        identities.append(source("a.txt").identity())

    assert identities[0] != identities[1]


def test_a_pattern_gives_its_files_in_the_order_of_their_names(tmp_path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    for name in ("b.txt", "a.txt", ".c.txt", "deep/er/d.txt", "other.csv"):
        write(tmp_path / name, "x")
    (tmp_path / "folder.txt").mkdir()

    assert names(tmp_path / "*.txt") == [f"{tmp_path}/a.txt", f"{tmp_path}/b.txt"]
    assert names(tmp_path / "**" / "*.txt") == [
        f"{tmp_path}/a.txt",
        f"{tmp_path}/b.txt",
        f"{tmp_path}/deep/er/d.txt",
    ]


def test_names_keep_their_order_and_one_like_a_pattern_is_that_file(tmp_path):
    paths = [write(tmp_path / name, "x") for name in ("b.txt", "a[1].txt")]
    write(tmp_path / "a1.txt", "y")

    assert names(*paths) == [str(path) for path in paths]


def test_a_folder_gives_its_text_but_no_hidden_files_or_documentation(tmp_path):
    others = ("b/.hidden.txt", ".git/c.txt", "notes.pdf", "b/LICENSE.txt", "README.txt")
    for name in ("b/z.txt.gz", "a.csv", "b/a.parquet", *others):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, "x")

    assert names(tmp_path) == [
        f"{tmp_path}/{name}" for name in ("a.csv", "b/a.parquet", "b/z.txt.gz")
    ]
    assert names(tmp_path / ".git") == [f"{tmp_path}/.git/c.txt"]


def test_token_files_and_unfinished_files_are_left_out_and_counted(tmp_path, caplog):
    caplog.set_level(logging.INFO, "llm.data")
    (tmp_path / "x.parts").mkdir()
    write(tmp_path / "x.parts" / "plan.json", "{}")
    write(tmp_path / "a.txt", "one\n")
    prepare(tmp_path / "wiki", [ListSource(["two"])])

    assert names(tmp_path) == [f"{tmp_path}/a.txt"]
    assert caplog.messages[-1] == (
        f"--input {tmp_path}: 4 of 5 files are left out: wiki.bin, wiki.idx (not a known kind of "
        "text), wiki.json (token files), x.parts/plan.json (an unfinished preparation)"
    )


def test_a_tokenizer_next_to_its_text_is_left_out(tmp_path, caplog):
    caplog.set_level(logging.INFO, "llm.data")
    for name in ("a.jsonl", "vocab.txt", "tok/tokenizer.json", "tok/vocab.json", "tok/merges.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, "x")

    assert names(tmp_path) == [f"{tmp_path}/a.jsonl", f"{tmp_path}/vocab.txt"]
    assert "tok/merges.txt, tok/tokenizer.json, tok/vocab.json (a tokenizer)" in caplog.text


def test_a_folder_with_the_names_of_splits_is_read_whole_with_a_warning(tmp_path, caplog):
    for name in ("train", "books", "test"):
        write(tmp_path / f"{name}.jsonl", "x")

    assert len(names(tmp_path)) == 3
    assert caplog.messages == [
        f"--input {tmp_path}: all its files are read, and their names tell the splits test, train; "
        "name the files of one split to read it alone"
    ]


def test_a_json_file_next_to_an_unrelated_bin_is_text(tmp_path):
    write(tmp_path / "a.json", '{"text": "one"}')
    write(tmp_path / "a.bin", "firmware")

    assert names(tmp_path) == [f"{tmp_path}/a.json"]


def test_a_file_that_is_named_twice_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.txt", "x")
    (tmp_path / "link.txt").symlink_to("a.txt")

    for inputs in (
        ["a.txt", "a.txt"],
        ["a.txt", "*.txt"],
        [tmp_path, "./a.txt"],
        ["link.txt", "a.txt"],
    ):
        with pytest.raises(
            DataError, match=r"--input names .*(a|link)\.txt twice; give each file once"
        ):
            found(*inputs)


def test_broken_and_circular_links_are_refused_by_path_pattern_and_folder(tmp_path):
    write(tmp_path / "a.txt", "x")
    for target in ("nothing.txt", "link.txt"):
        (tmp_path / "link.txt").symlink_to(target)
        for name in ("link.txt", "*.txt", "", "*/*.txt"):
            with pytest.raises(DataError, match=r"--input .*/link\.txt is a broken link; re"):
                found(tmp_path / name)
        (tmp_path / "link.txt").unlink()


def test_a_file_that_changes_later_is_detected_by_its_size_or_time(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "one"}\n' * 9)

    for change in (
        lambda: write(path, path.read_bytes() + b"{}\n"),
        lambda: os.utime(path, ns=(0, 0)),
        path.unlink,
    ):
        parts = source(path).split(50)
        before = parts[-1].identity()
        check_sources_unchanged(parts)
        change()
        with pytest.raises(DataError, match=r"a\.jsonl has changed while the text was prepared"):
            check_sources_unchanged(parts)
        assert parts[-1].identity() == before  # a plan of what was found, not of what it is now


@pytest.mark.parametrize("size", [3, 1 << 20, 5 << 20])
def test_a_sample_has_the_ends_of_a_file_and_all_of_a_small_one(tmp_path, size):
    content = bytearray(size)
    path = write(tmp_path / "a.txt", bytes(content))
    digests = {compute_sampled_digest(path)}
    places = [0, size // 2, size - 1] if size <= 1 << 20 else [0, size - 1]

    for place in places:
        content[place] = 1
        digests.add(compute_sampled_digest(write(path, bytes(content))))

    assert len(digests) == 1 + len(places)


def test_a_path_pattern_or_folder_without_files_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty" / "a.pdf", "x")

    for name, message in {
        "": "--input has an empty name; name files, patterns and folders",
        tmp_path / "none.txt": r"--input .*none\.txt does not exist, or its folder",
        tmp_path / "*.jsonl": r"--input .*\*\.jsonl matches no file that can be read; check",
        tmp_path / "empty": r"is a folder without any file of a known kind: \.txt, \.csv",
    }.items():
        with pytest.raises(DataError, match=message):
            found(name)


def test_only_plain_files_of_lines_are_split_into_chunks(tmp_path):
    line = json.dumps({"text": "x" * 80}) + "\n"
    plain = source(write(tmp_path / "a.jsonl", line * 10))

    assert [part.num_bytes for part in plain.split(400)] == [400, 400, 130]
    assert [len(texts_of(part)) for part in plain.split(400)] == [5, 4, 1]
    assert plain.split(930) == [plain]
    for name, content in {
        "a.jsonl.gz": gzip.compress(line.encode()),
        "a.json": line,
        "a.csv": "text\n" + line,
    }.items():
        whole = source(write(tmp_path / name, content))
        assert whole.split(10) == [whole]
    for unit, count in {"line": 25, "paragraph": 1, "file": 1}.items():
        assert len(source(write(tmp_path / "a.txt", "x\n" * 50), text_unit=unit).split(4)) == count


def test_the_bytes_read_by_all_chunks_add_up_to_about_the_file_size(tmp_path):
    plain = source(write(tmp_path / "a.jsonl", '{"text": "x"}\n' * 1000))
    parts = plain.split(5000)

    for part in parts:
        texts_of(part)

    assert [part.consumed for part in parts] == [5_012, 4_998, 3_990]  # whole lines
