"""Documents that are too large to read into memory, in each format; here they have 100 bytes."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llm.errors import DataError
from llm.prepare.text import blocks, readers
from llm.prepare.text.blocks import BadRecordPolicy, check_size
from llm.prepare.text.sources import make_file_source
from tests.support.texts import PACK, texts_of, write

LARGE = "x" * 101


def read(path, *, on_error="stop", **options):
    source = make_file_source(path, **{"text_column": None, **options})
    return texts_of(source, BadRecordPolicy(on_error))


@pytest.fixture
def limit(monkeypatch):
    for module in (blocks, readers):
        monkeypatch.setattr(module, "MAX_DOCUMENT_BYTES", 100)


def test_a_document_can_have_a_gibibyte():
    check_size(2**30)

    with pytest.raises(
        DataError,
        match=r"1,073,741,825 bytes, and a document can have 1,073,741,824 at most; cut it into",
    ):
        check_size(2**30 + 1)


@pytest.mark.parametrize("block", [3, 40])
@pytest.mark.parametrize("packing", ["", ".gz"])
def test_a_long_line_is_refused_or_skipped_before_it_is_read(
    tmp_path, monkeypatch, limit, packing, block
):
    monkeypatch.setattr(blocks, "_BLOCK_BYTES", block)
    monkeypatch.setattr(blocks, "_COMPRESSED_READ_BYTES", 1)
    texts = ["one", "x" * 88, "x" * 89, "two", LARGE * 9, "three"]  # 100 bytes, 101 bytes
    lines = "\n".join(json.dumps({"text": text}) for text in texts).encode()
    path = write(tmp_path / f"a.jsonl{packing}", PACK[packing](lines) if packing else lines)

    with pytest.raises(DataError, match=r"line 3: the line has more than 100 bytes, the limit of"):
        read(path, text_column="text")

    kept = read(path, on_error="skip", text_column="text")
    assert kept == ["one", "x" * 88, "two", "three"]


def test_a_large_paragraph_is_refused_or_skipped(tmp_path, limit):
    path = write(tmp_path / "a.txt", "one\n\n" + "a line\n" * 15 + "\ntwo\n")
    unit = {"text_unit": "paragraph"}

    with pytest.raises(DataError, match=r"a\.txt, paragraph 2: the text has 105 bytes, and a doc"):
        read(path, **unit)

    assert read(path, on_error="skip", **unit) == ["one", "two"]
    assert "".join(read(path)).count("a line") == 15  # a file is read by its lines


@pytest.mark.parametrize("name", ["a.parquet", "a.json"])
def test_a_large_record_is_refused_or_skipped(tmp_path, limit, name):
    texts = ["one", LARGE, "\u00e9" * 51, "two"]
    path = tmp_path / name
    if name == "a.json":
        write(path, json.dumps([{"text": text} for text in texts]))
    else:
        pq.write_table(pa.table({"text": texts}), path)

    with pytest.raises(DataError, match=r"2: the text has 101 bytes, and a document can have 100"):
        read(path)

    assert read(path, on_error="skip") == ["one", "two"]


def test_a_large_field_of_a_csv_file_is_refused(tmp_path, limit):
    for field in (LARGE, '"' + "a line\n" * 15 + '"'):
        path = write(tmp_path / "a.csv", f"text\none\n{field}\n")
        for on_error in ("stop", "skip"):
            with pytest.raises(
                DataError, match=r"malformed CSV, field larger than field limit \(1"
            ):
                read(path, on_error=on_error)


def test_a_long_line_of_a_csv_file_is_not_skipped_since_quotes_may_span_it(
    tmp_path, monkeypatch, limit
):
    monkeypatch.setattr(blocks, "_BLOCK_BYTES", 40)
    path = write(tmp_path / "a.csv", f"text\none\n{LARGE}\n")

    with pytest.raises(DataError, match=r"a\.csv, line 3: the line has more than 100 bytes"):
        read(path, on_error="skip")
