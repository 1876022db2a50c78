import json
import logging

import pytest

from llm.errors import DataError
from llm.prepare.text import blocks
from llm.prepare.text.blocks import BadRecordPolicy
from llm.prepare.text.sources import make_file_source
from tests.support.texts import texts_of, write


def source(path, **options):
    return make_file_source(path, **{"text_column": None, **options})


def texts_in_parts(path, num_bytes, faults=None, **options):
    parts = source(path, **options).split(num_bytes)
    return [text for part in parts for text in texts_of(part, faults)]


def test_every_spelling_of_a_string_is_read(tmp_path):
    spelled = ["", "caf\u00e9 \U0001f600", '"\\/\b\f\n\r\t', "\u2028\x00\x7f", "x" * 100_000]
    lines = [
        json.dumps({"text": text}, ensure_ascii=number % 2)
        for number, text in enumerate(spelled * 2)
    ]
    path = write(tmp_path / "a.jsonl", "\n".join(lines))

    assert texts_of(source(path)) == spelled * 2


def test_lines_may_end_as_on_windows_and_blank_ones_hold_no_record(tmp_path):
    path = write(tmp_path / "a.jsonl", '\r\n  {"text": "one"} \r\n\n \t\n{"text": "two"}\r\n')

    assert texts_of(source(path)) == ["one", "two"]


def test_json_that_only_pythons_parser_reads_is_read(tmp_path):
    lines = [
        '{"text": "one", "score": NaN}',
        '{"score": -Infinity, "text": "two"}',
        '{"text": "\\ud83d\\ude00", "id": "\\ud800"}',
        '{"text": "three", "id": 1' + "0" * 5000 + "}",
        '{"text": "none", "text": "the last of two keys"}',
    ]
    path = write(tmp_path / "a.jsonl", "\n".join(lines))

    assert texts_of(source(path)) == ["one", "two", "\U0001f600", "three", "the last of two keys"]


@pytest.mark.parametrize("num_bytes", [1, 3, 17, 1000])
@pytest.mark.parametrize("block", [3, 25])
def test_records_do_not_depend_on_chunk_and_block_sizes(tmp_path, monkeypatch, num_bytes, block):
    monkeypatch.setattr(blocks, "_BLOCK_BYTES", block)
    texts = ["one", "", "thr\u00e9e\n", "four" * 20]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    path = write(tmp_path / "a.jsonl", "\ufeff" + "\n\n".join(lines))

    assert texts_in_parts(path, num_bytes) == texts


@pytest.mark.parametrize("num_bytes", [1, 20, 1000])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "b"', "malformed JSON, .*--on_error skip"),
        (
            '{"body": "b", "id": 1}',
            "the record has no key 'text', only 'body', 'id'; mend the line",
        ),
        ("{}", "the record has no key 'text', only none at all"),
        (
            '{"text": 5}',
            "the text is a value of type int, not a string; mend it, or choose another "
            r"--text_column\. To skip it, prepare the text with --on_error skip\.",
        ),
        ('{"text": ["b"]}', "the text is a value of type list"),
        ('"text"', "a record must be a JSON object"),
        ('{"text": "\\udc00"}', "the text holds a lone surrogate"),
        (b'{"text": "\xe9"}', "byte 11 of the line is not UTF-8"),
    ],
)
def test_an_error_names_the_line_of_the_file(tmp_path, num_bytes, line, message):
    raw = line if isinstance(line, bytes) else line.encode()
    path = write(
        tmp_path / "a.jsonl", b'{"text": "a"}\n\n{"text": "b"}\n' + raw + b'\n{"text": "c"}'
    )

    with pytest.raises(DataError, match=rf"a\.jsonl, line 4: {message}"):
        texts_in_parts(path, num_bytes)

    faults = BadRecordPolicy("skip")
    assert texts_in_parts(path, num_bytes, faults) == ["a", "b", "c"]
    assert faults.skipped == 1


@pytest.mark.parametrize("num_bytes", [1, 60, 1000])
def test_all_chunks_of_a_file_use_the_same_only_text_column(tmp_path, num_bytes, caplog):
    caplog.set_level(logging.INFO, "llm.data")
    lines = ['{"id": 1, "body": "one"}', '{"body": "two", "id": 2}'] * 5
    path = write(tmp_path / "a.jsonl", "\n".join(lines))

    assert texts_in_parts(path, num_bytes) == ["one", "two"] * 5
    assert (
        caplog.text.count("no column is named 'text'; taking 'body', the only column with text")
        == 1
    )


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
@pytest.mark.parametrize("num_bytes", [10, 1000])
def test_a_file_with_two_columns_of_text_is_refused_with_its_keys(tmp_path, name, num_bytes):
    records = ['{"id": 1, "title": "one", "body": "two"}'] * 3
    content = "\n".join(records) if name == "a.jsonl" else f"[{','.join(records)}]"
    path = write(tmp_path / name, content)

    message = rf"{name} has no column 'text'; choose one with --text_column from: title, body\."
    for on_error in ("stop", "skip"):
        with pytest.raises(DataError, match=message):
            texts_in_parts(path, num_bytes, BadRecordPolicy(on_error))
    assert texts_in_parts(path, num_bytes, text_column="body") == ["two"] * 3


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_column_that_is_null_at_first_does_not_lose_to_another_one(tmp_path, name):
    records = ['{"title": "one", "body": null}'] * 100 + ['{"title": "two", "body": "text"}']
    content = "\n".join(records) if name == "a.jsonl" else f"[{','.join(records)}]"
    path = write(tmp_path / name, content)

    with pytest.raises(
        DataError,
        match=r"'title' is the only column with text in the first 100 records, but 'body' is null "
        r"there .* choose with --text_column from: title, body\.",
    ):
        texts_of(source(path))
    assert texts_of(source(path, text_column="body")) == [""] * 100 + ["text"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_first_record_without_text_does_not_choose_the_column(tmp_path, name):
    records = ['{"id": "x1"}', '{"id": "x2", "text": "one"}']
    content = "\n".join(records) if name == "a.jsonl" else f"[{','.join(records)}]"
    path = write(tmp_path / name, content)

    with pytest.raises(DataError, match="1: the record has no key 'text', only 'id'"):
        texts_of(source(path))
    assert texts_of(source(path), BadRecordPolicy("skip")) == ["one"]


def test_a_chunk_that_begins_with_another_kind_of_record_keeps_the_column(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "one"}\n{"body": "two"}\n')

    for num_bytes in (16, 1000):
        with pytest.raises(DataError, match="line 2: the record has no key 'text', only 'body'"):
            texts_in_parts(path, num_bytes)


@pytest.mark.parametrize("column", ["text", None])
def test_a_file_with_many_odd_lines_is_read_once(tmp_path, monkeypatch, column):
    """Their place in the file, which takes a look at all of it, is not asked for."""
    path = write(
        tmp_path / "a.jsonl", '{"text": null}\n{"text": "b", "score": NaN}\nbroken\n' * 100
    )
    opened = []
    read = blocks.FileChunk.read_blocks
    monkeypatch.setattr(
        blocks.FileChunk, "read_blocks", lambda self: opened.append(1) or read(self)
    )
    last = source(path, text_column=column).split(2000)[-1]
    faults = BadRecordPolicy("skip")

    assert set(texts_of(last, faults)) == {"", "b"}
    assert faults.skipped > 3
    assert len(opened) <= 2  # for the lines, and for the column of the first record


def test_an_array_is_read_in_any_whitespace_layout(tmp_path):
    records = [{"text": "one", "id": 1}, {"id": 2, "text": "two\n"}, {"text": None}]

    for name, indent in (("a.json", None), ("b.json", 2)):
        path = write(tmp_path / name, "\ufeff \n" + json.dumps(records, indent=indent))
        assert texts_of(source(path)) == ["one", "two\n", ""]
        assert len(source(path).split(1)) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"text": "a"}, {"body": "b"}]', "record 2: the record has no key 'text', only 'body'"),
        ('[{"text": "a"}, 5]', "record 2: a record must be a JSON object"),
        ('[{"text": "a"}, {"text": {}}]', "record 2: the text is a value of type dict"),
    ],
)
def test_a_wrong_record_of_an_array_is_named_or_skipped(tmp_path, content, message):
    path = write(tmp_path / "a.json", content)

    with pytest.raises(DataError, match=rf"a\.json, {message}"):
        texts_of(source(path))
    faults = BadRecordPolicy("skip")
    assert texts_of(source(path), faults) == ["a"]
    assert faults.skipped == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[{"text": "a"}', r"line 1: malformed JSON, .*; mend the array, or write each of its"),
        (b'[{"text":\n "a"},\n]', "line 3: malformed JSON"),
        (b'[{"text": "a"}] [', "line 1: malformed JSON"),
        (b'[{"text": "\xff"}]', "byte 12 is not UTF-8"),
    ],
)
def test_a_broken_array_is_refused_even_when_skipping(tmp_path, content, message):
    path = write(tmp_path / "a.json", content)

    with pytest.raises(DataError, match=message) as raised:
        texts_of(source(path), BadRecordPolicy("skip"))
    assert "--on_error skip" not in str(raised.value)


def test_an_empty_array_holds_no_text(tmp_path):
    assert texts_of(source(write(tmp_path / "a.json", "[]"))) == []
    assert texts_of(source(write(tmp_path / "b.json", " \n\n"))) == []
