import json
import logging

import pytest
from transformers import ByT5Tokenizer

from llm.data import tokenizing
from llm.data.sources import file_source
from llm.errors import ConfigError, DataError
from llm.text_tokenizer import from_transformers
from tests.support.corpora import ListSource, byte_tokenizer, prepare_bytes, write
from tests.support.tokenizers import tiny_tokenizer


class UnreadableSource(ListSource):
    def batches(self, faults=None):
        raise AssertionError("the text was read")


class AbsentSource(ListSource):
    def exists(self):
        return False


def ids(text):
    return [byte + 1 for byte in text.encode()]


def test_rows_become_tokens_and_documents_end_with_the_end_token(tmp_path):
    train = ListSource(["ab", "\u00e9"])

    prepared = prepare_bytes(tmp_path, train=train)

    assert prepared.train.tokens.tolist() == [*ids("ab"), 0, *ids("\u00e9"), 0]
    assert prepared.train.lengths.tolist() == [3, 3]
    assert prepared.train.documents.tolist() == [0, 1, 2]
    assert prepared.validation is None
    assert prepared.info == {
        "format": 3,
        "tokenizer_fingerprint": "bytes",
        "append_eos": True,
        "dtype": "uint16",
        "written": {"launch": None, "time": prepared.info["written"]["time"]},
        "train": {
            "source": "list",
            "rows": 2,
            "empty_rows": 0,
            "documents": 2,
            "tokens": 6,
            "bytes": 4,
            "largest_token": 0xC3 + 1,
        },
        "validation": None,
    }


def test_without_the_end_token_only_the_index_knows_where_documents_end(tmp_path):
    train = ListSource(["abc", "d"])

    prepared = prepare_bytes(tmp_path, train=train, append_eos=False)

    assert prepared.train.tokens.tolist() == ids("abcd")
    assert prepared.train.documents.tolist() == [0, 1, 2]


def test_the_rows_of_one_document_are_sequences_of_which_the_last_ends_it(tmp_path):
    train = ListSource(["ab", "", "c", ""], one_document=True)

    prepared = prepare_bytes(tmp_path, train=train)

    assert prepared.train.tokens.tolist() == [*ids("ab"), *ids("c"), 0]
    assert prepared.train.lengths.tolist() == [2, 2]
    assert prepared.train.documents.tolist() == [0, 2]
    assert prepared.row_bytes.tolist() == [2, 1]


def test_empty_documents_are_dropped_and_counted(tmp_path):
    train = ListSource(["", "ab", ""])

    prepared = prepare_bytes(tmp_path, train=train)

    assert prepared.train.tokens.tolist() == [*ids("ab"), 0]
    assert prepared.train.num_documents == 1
    assert prepared.info["train"]["empty_rows"] == 2


def test_large_texts_are_encoded_in_batches_without_a_seam(tmp_path):
    train = ListSource(["x" * 300_000] * 9 + ["y"] * 20_000)

    prepared = prepare_bytes(tmp_path, train=train)

    assert prepared.info["train"]["rows"] == 20_009
    assert prepared.train.num_tokens == 9 * 300_001 + 20_000 * 2
    assert prepared.train.tokens[-2:].tolist() == [*ids("y"), 0]


def test_a_text_that_changes_while_it_is_read_is_not_kept(tmp_path):
    path = write(tmp_path / "a.txt", "old")

    class ChangingSource(ListSource):
        def batches(self, faults=None):
            yield from super().batches(faults)
            write(path, "newer")

    with pytest.raises(DataError, match=r"a\.txt has changed while the text was prepared, and no"):
        prepare_bytes(
            tmp_path / "cache",
            train=file_source(path, text_column=None),
            validation=ChangingSource(["b"]),
        )
    assert [entry.suffix for entry in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_large_vocabulary_is_stored_in_four_bytes(tmp_path):
    prepared = prepare_bytes(tmp_path, vocab_size=70_000)

    assert prepared.train.tokens.dtype == "int32"


def test_a_fast_tokenizer_gives_the_ids_that_transformers_gives(tmp_path):
    tokenizer = tiny_tokenizer()
    texts = ["the quick brown fox", "caf\u00e9 \U0001f600", "  spaces\n"]
    train = ListSource(texts)

    prepared = prepare_bytes(
        tmp_path, train=train, tokenizer=from_transformers(tokenizer, "tiny"), vocab_size=300
    )

    expected = [[*tokenizer.encode(text, add_special_tokens=False), 0] for text in texts]
    assert prepared.train.tokens.tolist() == [id for ids in expected for id in ids]


@pytest.mark.parametrize("slow", [False, True])
def test_an_end_token_spelled_out_in_the_text_is_text(tmp_path, slow):
    tokenizer = ByT5Tokenizer() if slow else tiny_tokenizer()
    text = f"a{tokenizer.eos_token}b"

    prepared = prepare_bytes(
        tmp_path,
        train=ListSource([text]),
        tokenizer=from_transformers(tokenizer, "any"),
        vocab_size=len(tokenizer),
    )

    tokens = prepared.train.tokens.tolist()
    assert tokens.count(tokenizer.eos_token_id) == 1
    assert tokens[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(tokens[:-1]) == text


def test_an_end_token_that_the_tokenizer_lacks_is_refused(tmp_path):
    tokenizer = byte_tokenizer(eos_token_id=None)

    with pytest.raises(ConfigError, match=r"no end-of-text token.*--no_append_eos"):
        prepare_bytes(tmp_path, tokenizer=tokenizer)
    assert prepare_bytes(tmp_path, tokenizer=tokenizer, append_eos=False).train.num_tokens == 3


@pytest.mark.parametrize("shift", [100, 70_000])
def test_an_id_beyond_the_vocabulary_is_refused(tmp_path, shift):
    with pytest.raises(DataError, match=r"gives the id .* beyond the model's vocabulary of 180"):
        prepare_bytes(tmp_path, tokenizer=byte_tokenizer(shift=shift), vocab_size=180)
    assert not list(tmp_path.glob("*/"))


def test_an_id_beyond_the_vocabulary_is_refused_from_the_cache_too(tmp_path):
    prepare_bytes(tmp_path, vocab_size=257)

    with pytest.raises(DataError, match="gives the id 100, beyond the model's vocabulary of 50"):
        prepare_bytes(tmp_path, vocab_size=50)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], r"list holds no text\.$"),
        ([""] * 3, r"list holds no text: 3 rows, all of them empty\.$"),
    ],
)
def test_a_text_without_text_is_refused(tmp_path, rows, message):
    with pytest.raises(DataError, match=message):
        prepare_bytes(tmp_path, train=ListSource(rows))
    assert not list(tmp_path.glob("*/"))


def test_the_second_time_no_text_is_read(tmp_path, caplog):
    caplog.set_level(logging.INFO, "llm.data")
    first = prepare_bytes(tmp_path, validation=ListSource(["v"], name="valid"))

    second = prepare_bytes(
        tmp_path,
        train=UnreadableSource([]),
        validation=UnreadableSource([], name="valid"),
    )

    assert second.train.tokens.tolist() == first.train.tokens.tolist()
    assert second.validation.tokens.tolist() == [*ids("v"), 0]
    assert second.info == first.info
    assert caplog.messages[-1].startswith("using the cached tokens")


def test_the_absence_of_a_validation_split_is_remembered(tmp_path):
    prepare_bytes(tmp_path, validation=AbsentSource(["v"], name="valid"))

    second = prepare_bytes(tmp_path, validation=UnreadableSource([], name="valid"))

    assert second.validation is None


def test_a_validation_text_alone_is_enough(tmp_path):
    prepared = prepare_bytes(tmp_path, train=None, validation=ListSource(["v"]))

    assert prepared.train is None
    assert prepared.validation.num_tokens == 2


def test_whatever_changes_the_bytes_has_its_own_cache(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("one\n")
    cache = tmp_path / "cache"

    def folders(**changes):
        prepare_bytes(cache, **changes)
        return len(list(cache.glob("*/info.json")))

    assert folders() == 1
    assert folders(vocab_size=300) == 1  # of the same dtype
    assert folders(vocab_size=70_000) == 2
    assert folders(append_eos=False) == 3
    assert folders(tokenizer=byte_tokenizer(fingerprint="other")) == 4
    for number, keep_linebreaks in enumerate([True, False], 5):
        source = file_source(text, text_column=None, keep_linebreaks=keep_linebreaks)
        assert folders(train=source) == number
    text.write_text("two more\n")
    assert folders(train=file_source(text, text_column=None, keep_linebreaks=True)) == 7


@pytest.mark.parametrize("damage", ["train.bin", "train.idx", "info.json"])
def test_a_damaged_cache_is_made_anew(tmp_path, damage):
    first = prepare_bytes(tmp_path)
    path = next(tmp_path.glob(f"*/{damage}"))
    path.write_bytes(path.read_bytes()[:-3])

    assert prepare_bytes(tmp_path).train.tokens.tolist() == first.train.tokens.tolist()


def test_progress_is_told_as_rows_tokens_and_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizing, "_REPORT_SECONDS", 0.0)
    told = []

    prepare_bytes(
        tmp_path,
        train=ListSource(["xy", "z"]),
        progress=lambda *counts: told.append(counts),
    )

    assert told[:2] == [(1, 3, 2), (2, 5, 3)]
    assert told[-1] == (2, 5, 3)


def test_the_information_lies_beside_the_tokens_as_json(tmp_path):
    prepared = prepare_bytes(tmp_path)

    assert json.loads(next(tmp_path.glob("*/info.json")).read_text()) == prepared.info
