import json

import numpy as np
import pytest

from llm.data.formats.megatron import TokenFile
from llm.errors import DataError
from llm.prepare import shards
from llm.prepare.encoder import Encoding, make_encoder
from llm.prepare.shards import (
    read_array,
    read_shard,
    write_shard,
)
from tests.support.texts import FailingSource, ListSource, byte_tokenizer, ids

UINT16 = np.dtype("<u2")


class FaultySource(ListSource):
    def batches(self, faults=None):
        for text in self._texts:
            if text is None:
                faults(DataError("a record without text"))
            else:
                yield [text]


def write(source, stem, **changes):
    settings = {"tokenizer": byte_tokenizer(), "end_token": 0, "dtype": UINT16, **changes}
    encoding = Encoding(**settings)
    write_shard(source, stem, encoding, make_encoder(encoding), on_progress=lambda _: None)
    return read_shard(stem, verify=True)


def test_a_shard_stores_the_ids_and_the_lengths_of_its_texts(tmp_path):
    stem = tmp_path / "000007"

    stats = write(ListSource(["ab", "", "\u00e9", ""]), stem)

    assert read_array(stem, ".bin", UINT16).tolist() == [*ids("ab"), 0, *ids("\u00e9"), 0]
    assert TokenFile(stem).lengths.tolist() == [3, 3]
    assert read_array(stem, ".bytes", "<u4").tolist() == [2, 2]
    assert (stats.texts, stats.documents, stats.empty, stats.skipped) == (2, 2, 2, 0)
    assert (stats.tokens, stats.text_bytes, stats.largest_token) == (6, 4, 0xC3 + 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"000007.{suffix}" for suffix in ("bin", "bytes", "idx", "json")
    ]


def test_the_texts_of_one_document_have_one_end_token(tmp_path):
    stats = write(ListSource(["ab", "", "c", ""], one_document=True), tmp_path / "0")

    assert read_array(tmp_path / "0", ".bin", UINT16).tolist() == [*ids("abc"), 0]
    assert TokenFile(tmp_path / "0").lengths.tolist() == [2, 2]
    assert TokenFile(tmp_path / "0").documents.tolist() == [0, 2]
    assert (stats.texts, stats.documents, stats.tokens) == (2, 1, 4)


@pytest.mark.parametrize("one_document", [True, False])
def test_without_an_end_token_nothing_is_added_and_a_shard_may_be_empty(tmp_path, one_document):
    source = ListSource(["ab", "c"], one_document=one_document)
    assert write(source, tmp_path / "0", end_token=None).tokens == 3
    assert read_array(tmp_path / "0", ".bin", UINT16).tolist() == ids("abc")

    stats = write(ListSource(["", ""], one_document=one_document), tmp_path / "1")
    assert (stats.texts, stats.documents, stats.tokens, stats.empty) == (0, 0, 0, 2)
    assert read_array(tmp_path / "1", ".bin", UINT16).tolist() == []


@pytest.mark.parametrize(
    "source",
    [FailingSource(["ab"]), FaultySource(["ab", None])],
    ids=["source", "record"],
)
def test_an_unfinished_shard_is_not_used(tmp_path, source):
    with pytest.raises(DataError):
        write(source, tmp_path / "0")

    assert read_shard(tmp_path / "0", verify=False) is None
    assert not (tmp_path / "0.json").exists()


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".bytes", ".json"])
def test_a_shard_with_a_changed_byte_is_not_used(tmp_path, suffix):
    stem = tmp_path / "0"
    path = stem.with_suffix(suffix)

    for damage in (
        lambda content: content[:-1],
        lambda content: b"",
        lambda content: content + b"x",
        lambda content: bytes([content[0] ^ 1]) + content[1:],
        None,
    ):
        assert write(ListSource(["ab", "c"]), stem) is not None
        if damage is None:
            path.unlink()
        else:
            path.write_bytes(damage(path.read_bytes()))
        assert read_shard(stem, verify=True) is None


def test_a_shard_with_metadata_of_another_version_is_not_used(tmp_path):
    write(ListSource(["ab"]), tmp_path / "0")
    stats = json.loads((tmp_path / "0.json").read_text())

    for content in ([1], {**stats, "more": 1}, {"texts": 1}, {**stats, "checksums": {}}):
        (tmp_path / "0.json").write_text(json.dumps(content))
        assert read_shard(tmp_path / "0", verify=True) is None


def test_a_text_longer_than_the_index_can_store_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "_MAX_TOKENS", 3)

    with pytest.raises(DataError, match=r"list holds a text of 5 tokens, .* can take 3 at most"):
        write(ListSource(["ab", "abcd"]), tmp_path / "0")
