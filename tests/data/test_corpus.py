import numpy as np
import pytest

from llm.data.corpus import TokenStream, open_corpus, split_by_percentage, whole
from llm.data.token_file import TokenFile, TokenFileWriter
from llm.errors import DataError
from tests.support.corpora import byte_tokenizer


def token_file(folder, *, rows, tokens_per_row=1, rows_per_document=1):
    with TokenFileWriter(folder / "text", np.dtype("<u2")) as writer:
        for row in range(rows):
            tokens = np.arange(row * tokens_per_row, (row + 1) * tokens_per_row)
            writer.add(tokens, ends_document=(row + 1) % rows_per_document == 0)
    return TokenFile(folder / "text")


def stream(folder, *, start, stop, num_tokens=20):
    return TokenStream(
        token_file(folder, rows=num_tokens),
        start=start,
        stop=stop,
        num_documents=1,
        num_bytes=None,
    )


def corpus(cache_dir, **changes):
    settings = {
        "dataset_name": None,
        "dataset_config_name": None,
        "train_file": None,
        "validation_file": None,
        "validation_split_percentage": 50,
        "text_column": None,
        "keep_linebreaks": True,
        "trust_remote_code": False,
        "tokenizer": byte_tokenizer(),
        "vocab_size": 257,
        "append_eos": True,
        "preprocessing_num_workers": None,
        "cache_dir": cache_dir,
        "overwrite_cache": False,
        "launch": None,
        "progress": None,
    }
    return open_corpus(**{**settings, **changes})


def all_tokens(stream):
    return stream.windows(np.array([0]), stream.num_tokens)[0].tolist()


def test_windows_are_read_from_a_ring(tmp_path):
    ring = stream(tmp_path, start=10, stop=15)

    windows = ring.windows(np.array([0, 3, 2, 4, 8]), 3)

    assert windows.tolist() == [
        [10, 11, 12],
        [13, 14, 10],
        [12, 13, 14],
        [14, 10, 11],
        [13, 14, 10],
    ]
    assert windows.dtype == np.uint16


def test_windows_may_go_around_more_than_once(tmp_path):
    ring = stream(tmp_path, start=10, stop=13)

    assert ring.windows(np.array([1]), 7).tolist() == [[11, 12, 10, 11, 12, 10, 11]]


def test_windows_equal_positions_modulo_the_length(tmp_path):
    ring = stream(tmp_path, start=3, stop=20)
    starts = np.random.default_rng(0).integers(0, 17, 100)

    for length in (1, 5, 17, 18, 40):
        expected = 3 + (starts[:, None] + np.arange(length)) % 17
        assert (ring.windows(starts, length) == expected).all()


def test_no_windows_are_an_empty_array(tmp_path):
    assert stream(tmp_path, start=0, stop=5).windows(np.array([], dtype=int), 3).shape == (0, 3)


@pytest.mark.parametrize(
    ("rows", "percentage", "validation_rows"),
    [(100, 5, 5), (10, 5, None), (30, 5, 2), (31, 5, 2), (50, 5, 2), (70, 5, 4), (200, 0.5, 1)],
)
def test_the_first_rows_validate_rounded_as_the_datasets_library_does(
    tmp_path, rows, percentage, validation_rows
):
    file = token_file(tmp_path, rows=rows, tokens_per_row=2)
    if validation_rows is None:
        with pytest.raises(DataError, match="5 of 10 rows of text leaves none for validation"):
            split_by_percentage(file, None, percentage)
        return

    train, validation = split_by_percentage(
        file, np.arange(1, rows + 1, dtype=np.uint32), percentage
    )

    assert all_tokens(validation) == list(range(validation_rows * 2))
    assert all_tokens(train) == list(range(validation_rows * 2, rows * 2))
    assert (train.num_documents, validation.num_documents) == (
        rows - validation_rows,
        validation_rows,
    )
    assert validation.num_bytes == sum(range(1, validation_rows + 1))
    assert train.num_bytes == sum(range(validation_rows + 1, rows + 1))


def test_a_document_that_is_cut_in_two_counts_on_both_sides(tmp_path):
    file = token_file(tmp_path, rows=10, rows_per_document=4)

    train, validation = split_by_percentage(file, None, 50)

    assert (train.num_documents, validation.num_documents) == (2, 2)
    assert train.num_bytes is None


def test_no_percentage_leaves_no_validation(tmp_path):
    train, validation = split_by_percentage(token_file(tmp_path, rows=10), None, 0)

    assert train.num_tokens == 10
    assert validation is None


def test_a_split_that_leaves_no_training_text_is_refused(tmp_path):
    with pytest.raises(
        DataError, match="--validation_split_percentage 99 of 10 rows of text leaves none for train"
    ):
        split_by_percentage(token_file(tmp_path, rows=10), None, 99)


def test_a_training_file_is_split_by_its_lines(tmp_path):
    (tmp_path / "a.txt").write_text("a\nb\nc\nd\n")

    opened = corpus(tmp_path / "cache", train_file=tmp_path / "a.txt")

    assert all_tokens(opened.validation[0].stream) == [byte + 1 for byte in b"a\nb\n"]
    assert all_tokens(opened.train[0].stream) == [*(byte + 1 for byte in b"c\nd\n"), 0]
    assert [part.weight for part in (*opened.train, *opened.validation)] == [1.0, 1.0]


def test_a_validation_file_is_taken_whole_and_the_training_file_too(tmp_path):
    (tmp_path / "a.txt").write_text("a\nb\n")
    (tmp_path / "b.csv").write_text("text\nv\n")

    opened = corpus(
        tmp_path / "cache",
        train_file=tmp_path / "a.txt",
        validation_file=tmp_path / "b.csv",
    )

    assert (opened.train[0].stream.num_tokens, opened.validation[0].stream.num_tokens) == (5, 2)
    assert (opened.train[0].stream.num_bytes, opened.validation[0].stream.num_bytes) == (4, 1)


def test_a_validation_file_alone_can_be_evaluated(tmp_path):
    (tmp_path / "b.txt").write_text("v\n")

    opened = corpus(tmp_path / "cache", validation_file=tmp_path / "b.txt")

    assert opened.train == ()
    assert opened.validation[0].stream.num_tokens == 3


def test_a_text_column_for_a_text_file_is_said_to_have_no_effect(tmp_path, caplog):
    (tmp_path / "a.txt").write_text("a\nb\n")

    corpus(tmp_path / "cache", train_file=tmp_path / "a.txt", text_column="body")

    assert "--text_column body has no effect on" in caplog.text


def test_a_token_beyond_the_vocabulary_is_named_with_its_file(tmp_path):
    known = TokenStream(
        token_file(tmp_path, rows=20),
        start=0,
        stop=20,
        num_documents=20,
        num_bytes=None,
        vocab_size=12,
    )

    assert known.windows(np.array([0, 8]), 4).max() == 11
    with pytest.raises(DataError, match=r"text\.bin holds the token id 12, and the vocabulary"):
        known.windows(np.array([0, 9]), 4)


def test_a_negative_token_is_refused(tmp_path):
    with TokenFileWriter(tmp_path / "text", np.dtype("<i4")) as writer:
        writer.add(np.array([1, -5, 2]), ends_document=True)
    known = whole(TokenFile(tmp_path / "text"), None, vocab_size=12)

    with pytest.raises(DataError, match="holds the token id -5"):
        known.windows(np.array([0]), 3)


def test_a_missing_validation_file_is_named_by_its_option(tmp_path):
    with pytest.raises(DataError, match=r"--validation_file .*b\.txt does not exist"):
        corpus(tmp_path / "cache", validation_file=tmp_path / "b.txt")


@pytest.mark.parametrize("with_validation", [True, False])
def test_a_data_set_brings_its_validation_split_or_is_split(
    tmp_path, monkeypatch, tmp_path_factory, with_validation
):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("hf"))
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    if with_validation:
        (folder / "validation.jsonl").write_text('{"text": "v"}\n')

    opened = corpus(tmp_path / "cache", dataset_name=str(folder))

    expected = "v" if with_validation else "a"
    assert all_tokens(opened.validation[0].stream) == [ord(expected) + 1, 0]
    assert opened.train[0].stream.num_tokens == (4 if with_validation else 2)
    # A warm start does not need the library.
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    again = corpus(tmp_path / "cache", dataset_name=str(folder))
    assert all_tokens(again.validation[0].stream) == all_tokens(opened.validation[0].stream)
