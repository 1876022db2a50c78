import csv
import json
import logging

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llm.data.sources import file_source
from llm.errors import DataError


def rows(path, *, text_column=None, keep_linebreaks=True):
    source = file_source(path, text_column=text_column, keep_linebreaks=keep_linebreaks)
    return list(source.rows())


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_a_text_file_is_one_document_of_lines(tmp_path):
    path = write(tmp_path / "a.txt", "one\n\ntwo\r\nthr\u00e9e")

    assert rows(path) == [
        ("one\n", False),
        ("\n", False),
        ("two\r\n", False),
        ("thr\u00e9e", True),
    ]


def test_without_line_breaks_blank_lines_go_too(tmp_path):
    path = write(tmp_path / "a.txt", "one\n\ntwo\r\n  \n")

    assert rows(path, keep_linebreaks=False) == [("one", False), ("two", True)]


def test_a_byte_order_mark_is_no_text(tmp_path):
    assert rows(write(tmp_path / "a.txt", b"\xef\xbb\xbfone\n")) == [("one\n", True)]
    assert rows(write(tmp_path / "a.csv", b"\xef\xbb\xbftext\none\n")) == [("one", True)]


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
def test_each_record_is_a_row_and_a_document(tmp_path, name, content):
    path = write(tmp_path / name, content)

    assert rows(path) == [("one", True), ("two\n", True), ("", True)]


def test_parquet_records_are_rows_and_documents(tmp_path):
    table = pa.table({"id": [1, 2, 3], "text": ["one", "two\n", None]})
    pq.write_table(table, tmp_path / "a.parquet")

    assert rows(tmp_path / "a.parquet") == [("one", True), ("two\n", True), ("", True)]


def test_the_column_is_the_one_asked_for_else_text_else_the_first(tmp_path, caplog):
    caplog.set_level(logging.INFO, "llm.data")
    both = write(tmp_path / "a.csv", "body,text\nb,t\n")
    neither = write(tmp_path / "b.csv", "body,title\nb,t\n")

    assert rows(both, text_column="body") == [("b", True)]
    assert rows(both) == [("t", True)]
    assert not caplog.messages
    assert rows(neither) == [("b", True)]
    assert "taking the first one, 'body'" in caplog.text


def test_a_field_may_be_longer_than_the_csv_module_likes(tmp_path):
    with open(tmp_path / "a.csv", "w") as file:
        csv.writer(file).writerows([["text"], ["x" * 300_000]])

    assert rows(tmp_path / "a.csv") == [("x" * 300_000, True)]


def test_a_missing_column_is_refused_with_a_list_of_those_there_are(tmp_path):
    table = pa.table({"id": [1], "body": ["one"]})
    pq.write_table(table, tmp_path / "a.parquet")
    names = ["a.parquet"]
    for name, content in {
        "a.csv": "id,body\n1,one\n",
        "a.jsonl": '{"id": 1, "body": "one"}\n',
        "a.json": '[{"id": 1, "body": "one"}]',
    }.items():
        write(tmp_path / name, content)
        names.append(name)

    for name in names:
        with pytest.raises(DataError, match=r"no column 'story'.*--text_column from: id, body"):
            rows(tmp_path / name, text_column="story")


def test_a_key_that_goes_missing_later_is_refused_with_its_line(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "one"}\n{"body": "two"}\n')

    with pytest.raises(DataError, match=r"a\.jsonl, line 2 has no column 'text'.*from: body"):
        rows(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"fine\nnot \xff fine\n", r"a\.txt, line 2: byte 5 of the line is not UTF-8"),
        ("a.csv", b"text\nnot \xff fine\n", r"a\.csv, line 2: byte 5 of the line is not UTF-8"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"line 1: byte 11 of the line is not UTF-8"),
        ("a.jsonl", '{"text": "a"}\n{"text": "b"\n', "line 2: malformed JSON"),
        ("a.jsonl", '["a"]\n', "line 1: a record must be a JSON object"),
        ("a.json", '[{"text": "a"},\n{"text" "b"}]', "line 2: malformed JSON"),
        ("a.json", '["a"]', "record 1: a record must be a JSON object"),
        ("a.jsonl", "[" * 100_000 + "\n", "line 1: JSON out of bounds"),
        ("a.jsonl", '{"text": 1' + "0" * 5000 + "}\n", "line 1: JSON out of bounds"),
        ("a.jsonl", '{"text": "a"}\n{"text": 5}\n', "line 2: the text is a value of type int"),
        ("a.jsonl", '{"text": "\\ud800"}\n', "line 1: the text holds a lone surrogate"),
        ("a.csv", "id,text\n1,a\n2\n", "line 3: there are 1 fields, but the header names 2"),
        ("a.csv", 'text\n"never closed\n', "line 2: malformed CSV"),
        ("a.csv", "\n", r"a\.csv has no column 'text'.*none at all"),
        ("a.parquet", "not parquet", r"a\.parquet cannot be read as Parquet"),
    ],
)
def test_what_is_wrong_is_said_with_file_and_line(tmp_path, name, content, message):
    path = write(tmp_path / name, content)

    with pytest.raises(DataError, match=message):
        rows(path)


def test_parquet_values_that_are_no_strings_are_refused_with_their_row(tmp_path):
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "a.parquet")

    with pytest.raises(DataError, match="row 1: the text is a value of type int"):
        rows(tmp_path / "a.parquet")


def test_a_folder_that_may_not_be_read_is_one_sentence(tmp_path):
    source = file_source(write(tmp_path / "a.txt", "one\n"), text_column=None, keep_linebreaks=True)
    (tmp_path / "a.txt").unlink()

    with pytest.raises(DataError, match=r"a\.txt cannot be read: No such file"):
        list(source.rows())


def test_lines_are_streamed(tmp_path):
    path = tmp_path / "a.jsonl"
    with open(path, "w") as file:
        for _ in range(3):
            file.write(json.dumps({"text": "one"}) + "\n")
        file.write("broken\n")

    stream = file_source(path, text_column=None, keep_linebreaks=True).rows()

    assert [next(stream) for _ in range(3)] == [("one", True)] * 3
    with pytest.raises(DataError, match="line 4"):
        next(stream)
