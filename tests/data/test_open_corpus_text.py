import os
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from llm.data.open_corpus import open_corpus
from llm.data.options import DataOptions
from llm.errors import DataError
from tests.support.texts import write
from tests.support.tokenizers import tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two texts, and a cache of the token files that have been made of them."""
    folder = tmp_path_factory.mktemp("texts")
    write(folder / "a.txt", "a\nb\nc\ndef\n")
    write(folder / "b.csv", "text\nv\n")
    return folder


def opened(folder, *, tokenizer=None, **options):
    """The corpus of a run with these options."""
    paths = {name: str(value) for name, value in options.items() if isinstance(value, Path)}
    settings = {"data_cache_dir": str(folder / "cache"), "validation_split_percentage": 50.0}
    return open_corpus(
        DataOptions(**{**settings, **options, **paths}),
        tokenizer=tokenizer or tiny_tokenizer(),
        vocab_size=300,
        document_boundaries=None,
        trust_remote_code=False,
    )


def text(parts):
    """What a split holds, as text."""
    (part,) = parts
    assert part.weight == 1.0
    return tiny_tokenizer().decode(part.stream.tokens.tolist())


def test_a_training_file_is_split_by_its_lines(folder, caplog):
    corpus = opened(folder, train_file=folder / "a.txt", text_column="body")

    assert text(corpus.validation) == "a\nb\n"
    assert text(corpus.train) == "c\ndef\n<|endoftext|>"
    assert corpus.train[0].name == "a"
    assert [part[0].stream.num_bytes for part in (corpus.train, corpus.validation)] == [6, 4]
    assert "--text_column body has no effect on" in caplog.text


def test_documents_of_a_run_begin_with_bos_if_an_option_says_so(folder):
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = "<|endoftext|>"
    options = {"train_file": folder / "b.csv", "validation_split_percentage": 0.0}

    for prepend_bos, beginning in ((False, ""), (True, "<|endoftext|>")):
        corpus = opened(folder, tokenizer=tokenizer, prepend_bos=prepend_bos, **options)
        (part,) = corpus.train
        assert tokenizer.decode(part.stream.tokens.tolist()) == f"{beginning}v<|endoftext|>"


def test_without_a_percentage_there_is_no_validation_split(folder):
    corpus = opened(folder, train_file=folder / "a.txt", validation_split_percentage=0.0)

    assert text(corpus.train) == "a\nb\nc\ndef\n<|endoftext|>"
    assert corpus.validation == ()


def test_a_training_and_a_validation_file_are_both_used_in_full(folder):
    corpus = opened(folder, train_file=folder / "a.txt", validation_file=folder / "b.csv")

    assert text(corpus.train) == "a\nb\nc\ndef\n<|endoftext|>"
    assert text(corpus.validation) == "v<|endoftext|>"
    assert [part[0].stream.num_bytes for part in (corpus.train, corpus.validation)] == [10, 1]


def test_a_validation_file_alone_can_be_evaluated(folder):
    corpus = opened(folder, validation_file=folder / "b.csv")

    assert corpus.train == ()
    assert text(corpus.validation) == "v<|endoftext|>"


def test_a_missing_validation_file_is_named_by_its_option(folder):
    with pytest.raises(DataError, match=r"--validation_file .*c\.txt does not exist"):
        opened(folder, train_file=folder / "a.txt", validation_file=folder / "c.txt")


@pytest.mark.parametrize("with_validation", [True, False])
def test_a_data_set_gives_its_validation_split_or_is_split(tmp_path, monkeypatch, with_validation):
    monkeypatch.setitem(sys.modules, "datasets", None)  # importing it fails: it is not needed
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder / "train.jsonl", '{"text": "a"}\n{"text": "b"}\n')
    if with_validation:
        write(folder / "validation.jsonl", '{"text": "v"}\n')

    corpus = opened(tmp_path, dataset_name=folder)

    assert text(corpus.validation) == ("v" if with_validation else "a") + "<|endoftext|>"
    assert text(corpus.train) == ("a<|endoftext|>" if with_validation else "") + "b<|endoftext|>"


@pytest.mark.parametrize("with_validation", [True, pytest.param(False, marks=pytest.mark.extended)])
def test_a_saved_data_set_gives_its_validation_split_or_is_split(
    tmp_path, monkeypatch, with_validation
):
    import datasets

    texts = {"train": ["a", "b"]} | ({"validation": ["v"]} if with_validation else {})
    splits = {split: datasets.Dataset.from_dict({"text": texts[split]}) for split in texts}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "data")

    corpus = opened(tmp_path, dataset_name=tmp_path / "data")

    assert text(corpus.validation) == ("v" if with_validation else "a") + "<|endoftext|>"
    assert text(corpus.train) == ("a<|endoftext|>" if with_validation else "") + "b<|endoftext|>"
    # A warm start does not need the library.
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert text(opened(tmp_path, dataset_name=tmp_path / "data").validation) == text(
        corpus.validation
    )


def test_the_files_of_a_folder_are_read_as_a_training_file(tmp_path):
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "a.txt", "one\n\ntwo\n")
    write(tmp_path / "data" / "b.csv", "text\nNA\n")
    options = {"dataset_name": tmp_path / "data", "validation_split_percentage": 0.0}

    assert text(opened(tmp_path, **options).train) == "one\n\ntwo\n<|endoftext|>NA<|endoftext|>"
    assert text(opened(tmp_path, no_keep_linebreaks=True, **options).train) == (
        "onetwo<|endoftext|>NA<|endoftext|>"
    )


@pytest.mark.parametrize("option", ["train_file", "dataset_name"])
def test_a_text_that_changes_is_read_again_though_its_size_and_time_stay(tmp_path, option):
    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / "a.txt"

    for word in ("old", "new"):
        os.utime(write(file, f"{word}\n"), ns=(0, 0))
        name = file if option == "train_file" else file.parent
        corpus = opened(tmp_path, validation_split_percentage=0.0, **{option: name})
        assert text(corpus.train) == f"{word}\n<|endoftext|>"


def test_a_folder_without_training_text_is_refused(tmp_path):
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "valid.txt", "v\n")

    with pytest.raises(DataError, match=r"has no split 'train', only: validation\.$"):
        opened(tmp_path, dataset_name=tmp_path / "data")


def test_an_id_beyond_two_bytes_is_refused_instead_of_truncated(tmp_path):
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 65_537}))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)

    with pytest.raises(DataError, match="holds the token id 65537, and the vocabulary"):
        opened(
            tmp_path,
            tokenizer=tokenizer,
            train_file=write(tmp_path / "a.txt", "a b\n"),
            append_eos=False,
        )
