import contextlib
import csv
import logging

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llm.errors import DataError
from llm.prepare.text import blocks
from llm.prepare.text.blocks import BadRecordPolicy
from llm.prepare.text.sources import make_file_source
from tests.support.texts import texts_of, write


def texts(path, *, faults=None, **options):
    return texts_of(make_file_source(path, **{"text_column": None, **options}), faults)


def texts_in_parts(path, num_bytes, *, faults=None, **options):
    parts = make_file_source(path, **{"text_column": None, **options}).split(num_bytes)
    return [text for part in parts for text in texts_of(part, faults)]


def test_a_text_file_is_read_in_lines(tmp_path):
    path = write(tmp_path / "a.txt", "one\n\ntwo\r\n  \nthr\u00e9e")

    assert texts(path) == ["one\n", "\n", "two\r\n", "  \n", "thr\u00e9e"]
    assert texts(path, keep_linebreaks=False) == ["one", "", "two", "", "thr\u00e9e"]


def test_a_byte_order_mark_is_not_part_of_the_text(tmp_path):
    assert texts(write(tmp_path / "a.txt", b"\xef\xbb\xbfone\n")) == ["one\n"]
    assert texts(write(tmp_path / "a.csv", b"\xef\xbb\xbftext\none\n")) == ["one"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '{"id": 1, "text": "one"}\n\n{"text": "two\\n"}\n{"text": null}\n'),
        ("a.json", '{"id": 1, "text": "one"}\n{"text": "two\\n"}\n{"text": null}'),
        ("b.json", ' \n[{"id": 1, "text": "one"},\n {"text": "two\\n"}, {"text": null}]'),
        ("a.csv", 'id,text\n1,one\n2,"two\n"\n\n3,\n'),
        ("A.CSV", 'id,text\r\n1,one\r\n2,"two\n"\r\n3,\r\n'),
    ],
)
def test_each_record_is_a_text(tmp_path, name, content):
    path = write(tmp_path / name, content)

    assert texts(path) == ["one", "two\n", ""]


def test_the_column_is_the_named_one_or_text_or_the_only_one(tmp_path, caplog):
    caplog.set_level(logging.INFO, "llm.data")
    both = write(tmp_path / "a.csv", "body,text\nb,t\n")
    neither = write(tmp_path / "b.csv", "body\nb\n")
    unclear = write(tmp_path / "c.csv", "body,title\nb,t\n")

    assert texts(both, text_column="body") == ["b"]
    assert texts(both) == ["t"]
    assert not caplog.messages
    assert texts(neither) == ["b"]
    assert "taking 'body', the only column with text" in caplog.text
    with pytest.raises(DataError, match=r"no column 'text'; .* --text_column from: body, title"):
        texts(unclear)


def test_a_parquet_file_without_a_text_column_gives_its_only_string_column(tmp_path, caplog):
    caplog.set_level(logging.INFO, "llm.data")
    path = tmp_path / "a.parquet"
    columns = {"id": [1], "body": ["one"]}
    pq.write_table(pa.table(columns), path)
    assert texts(path) == ["one"]
    assert "taking 'body', the only column with text" in caplog.text

    pq.write_table(pa.table({**columns, "title": ["two"]}), path)
    with pytest.raises(DataError, match=r"--text_column from: body, title"):
        texts(path)
    pq.write_table(pa.table({**columns, "title": pa.nulls(1)}), path)
    with pytest.raises(DataError, match=r"only column with text, but 'title' is null there"):
        texts(path)


def test_columns_of_the_same_name_are_refused(tmp_path):
    twice = pa.table([["one"], ["two"]], names=["text", "text"])
    pq.write_table(twice, tmp_path / "a.parquet")
    for path in (write(tmp_path / "a.csv", "text,text\none,two\n"), tmp_path / "a.parquet"):
        with pytest.raises(DataError, match=rf"{path.name} has several columns 'text'; rename"):
            texts(path)


def test_a_field_may_be_longer_than_the_default_limit_of_the_csv_module(tmp_path):
    with open(tmp_path / "a.csv", "w") as file:
        csv.writer(file).writerows([["text"], ["x" * 300_000]])

    assert texts(tmp_path / "a.csv") == ["x" * 300_000]


def test_a_missing_column_is_refused_with_a_list_of_those_with_text(tmp_path):
    table = pa.table({"id": [1], "body": ["one"]})
    pq.write_table(table, tmp_path / "a.parquet")
    write(tmp_path / "a.csv", "id,body\n1,one\n")

    for name, columns in {"a.parquet": "body", "a.csv": "id, body"}.items():
        with pytest.raises(DataError, match=f"no column 'story'.*--text_column from: {columns}"):
            texts(tmp_path / name, text_column="story")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"fine\nnot \xff fine\n", r"a\.txt, line 2: byte 5 of the line is not UTF-8"),
        ("a.csv", b"text\nnot \xff fine\n", r"a\.csv, line 2: byte 5 of the line is not UTF-8"),
        ("a.jsonl", "[" * 100_000 + "\n", "line 1: the brackets are nested too deep"),
        ("a.jsonl", '{"text": 1' + "0" * 5000 + "}\n", "line 1: the text is a value of type int"),
        ("a.csv", "id,text\n1,a\n2\n", "line 3: the row has 1 field, but the header names 2"),
        ("a.csv", 'text\n"never closed\n', "line 2: malformed CSV"),
        ("a.csv", "\n", r"a\.csv has no column 'text'.*none at all"),
        ("a.parquet", "not parquet", r"a\.parquet cannot be read as Parquet"),
    ],
)
def test_an_error_names_the_file_and_the_line(tmp_path, name, content, message):
    path = write(tmp_path / name, content)

    with pytest.raises(DataError, match=message):
        texts(path)


def test_records_are_streamed(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", '{"text": "one"}\n' * 3 + "broken, in the next block\n")
    monkeypatch.setattr(blocks, "_BLOCK_BYTES", 20)

    stream = make_file_source(path, text_column=None).batches()

    assert [next(stream) for _ in range(3)] == [["one"]] * 3
    with pytest.raises(DataError, match="line 4"):
        next(stream)


def test_a_document_of_a_text_file_is_a_line_a_paragraph_or_the_file(tmp_path):
    path = write(tmp_path / "a.txt", "one\ntwo\n\n\n \t\nthree\r\n\r\nfour")

    assert texts(path, text_unit="line") == ["one", "two", "", "", "", "three", "", "four"]
    assert texts(path, text_unit="paragraph") == ["one\ntwo", "three", "four"]
    assert "".join(texts(path, text_unit="file")) == path.read_bytes().decode()
    assert make_file_source(path, text_column=None, text_unit="file").one_document
    assert not make_file_source(path, text_column=None, text_unit="paragraph").one_document


def test_a_paragraph_may_be_longer_than_a_block(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "_BLOCK_BYTES", 10)
    path = write(tmp_path / "a.txt", "some line\n" * 9 + "\n" + "other\n")

    assert texts(path, text_unit="paragraph") == [("some line\n" * 9)[:-1], "other"]


def test_lines_that_are_not_utf8_can_be_skipped_and_are_counted(tmp_path, caplog):
    path = write(tmp_path / "a.txt", b"one\n\xff\n\ntwo\nthr\xe9e")

    faults = BadRecordPolicy("skip")

    assert texts(path, faults=faults) == ["one\n", "\n", "two\n"]
    assert faults.skipped == 2
    assert f"skipped: {path}, line 2: byte 1 of the line is not UTF-8" in caplog.messages[0]
    assert "line 5: byte 4" in caplog.messages[1]


def test_only_the_first_three_skipped_records_are_shown(tmp_path, caplog):
    path = write(tmp_path / "a.txt", b"\xff\n" * 10)

    faults = BadRecordPolicy("skip")

    assert texts(path, faults=faults) == []
    assert faults.skipped == 10
    assert len(caplog.messages) == 3


def test_csv_records_with_too_many_or_too_few_fields_can_be_skipped(tmp_path):
    path = write(tmp_path / "a.csv", "id,text\n1,a\n2\n3,b,c\n\n4,d\n")

    faults = BadRecordPolicy("skip")

    assert texts(path, faults=faults) == ["a", "d"]
    assert faults.skipped == 2


@pytest.mark.parametrize("content", [b'text\n"never closed\n', b"text\nnot \xff fine\n"])
def test_a_csv_file_that_may_lack_a_quote_is_refused_even_when_skipping(tmp_path, content):
    with pytest.raises(DataError, match="line 2"):
        texts(write(tmp_path / "a.csv", content), faults=BadRecordPolicy("skip"))


def test_parquet_values_that_are_no_strings_can_be_skipped(tmp_path):
    pq.write_table(pa.table({"text": [b"bytes", None]}), tmp_path / "a.parquet")

    faults = BadRecordPolicy("skip")

    assert texts(tmp_path / "a.parquet", faults=faults) == [""]
    assert faults.skipped == 1


@pytest.mark.parametrize("kind", ["string", "large_string", "dictionary"])
def test_parquet_strings_may_have_any_encoding(tmp_path, kind):
    types = {
        "string": pa.string(),
        "large_string": pa.large_string(),
        "dictionary": pa.dictionary(pa.int32(), pa.string()),
    }
    column = pa.array(["one", "two", "one", None]).cast(types[kind])
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")

    assert texts(tmp_path / "a.parquet") == ["one", "two", "one", ""]


def test_the_chunks_of_a_parquet_file_are_its_row_groups(tmp_path, caplog):
    caplog.set_level(logging.INFO, "llm.data")
    rows = [str(number) for number in range(10)]
    pq.write_table(pa.table({"body": rows}), tmp_path / "a.parquet", row_group_size=3)

    for num_bytes in (1, 100, 200, 10**9):
        assert texts_in_parts(tmp_path / "a.parquet", num_bytes) == rows
    assert len(make_file_source(tmp_path / "a.parquet", text_column=None).split(1)) == 4
    assert caplog.text.count("taking 'body', the only column with text") == 4  # once each time


def test_an_error_in_a_later_chunk_names_the_row_of_the_file(tmp_path):
    pq.write_table(pa.table({"text": [b"x"] * 9}), tmp_path / "a.parquet", row_group_size=4)
    last = make_file_source(tmp_path / "a.parquet", text_column=None).split(1)[-1]

    with pytest.raises(DataError, match=r"a\.parquet, row 9: the text is a value of type bytes"):
        texts_of(last)


@pytest.mark.parametrize("rows", [[], [None]])
def test_a_parquet_file_may_hold_no_text(tmp_path, rows):
    table = pa.table({"text": pa.array(rows, pa.string())})
    pq.write_table(table, tmp_path / "a.parquet")

    assert texts_in_parts(tmp_path / "a.parquet", 1) == [""] * len(rows)


def test_a_damaged_parquet_file_is_refused_in_one_sentence(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["some text"] * 1000}), path, compression="zstd")
    whole = path.read_bytes()

    for position in (0, 20, len(whole) // 2, len(whole) - 20, len(whole) - 1):
        damaged = bytearray(whole)
        damaged[position] ^= 0xFF
        write(path, bytes(damaged))
        with contextlib.suppress(DataError):
            assert len(texts_in_parts(path, 1)) == 1000
    write(path, whole[:-30])
    with pytest.raises(DataError, match=r"a\.parquet cannot be read as Parquet: .*[^.]\.$"):
        texts_in_parts(path, 1)


@pytest.mark.parametrize("num_bytes", [2, 1000])
def test_an_error_in_a_later_chunk_names_the_line_of_the_file(tmp_path, num_bytes):
    path = write(tmp_path / "a.txt", b"one\n\ntwo\nthree and \xff\nfour\n")

    with pytest.raises(DataError, match=r"a\.txt, line 4: byte 11 of the line"):
        texts_in_parts(path, num_bytes, text_unit="line")


def test_a_record_skipped_in_a_later_chunk_is_shown_without_rereading(
    tmp_path, monkeypatch, caplog
):
    path = write(tmp_path / "a.txt", b"one\ntwo\n\xff\nfour\n")
    last = make_file_source(path, text_column=None, text_unit="line").split(6)[1]

    texts_of(last, BadRecordPolicy("skip"))

    assert f"skipped: {path}, line 1 of those from byte 6 on: byte 1" in caplog.text


def test_texts_come_in_batches_of_a_bounded_size(tmp_path):
    with open(tmp_path / "a.csv", "w") as file:
        csv.writer(file).writerows([["text"], *[["x" * 999]] * 10_000, *[["y"]] * 40_000])

    batches = list(make_file_source(tmp_path / "a.csv", text_column=None).batches())

    assert sum(map(len, batches)) == 50_000
    assert max(map(len, batches)) == 1 << 14
    assert max(sum(map(len, batch)) for batch in batches) < 5_000_000
