from pathlib import Path

import numpy as np
import pytest

from llm.data.blend import parse_blend, parse_split
from llm.data.formats.flat import open_token_file
from llm.data.formats.megatron import TokenFile
from llm.data.splits import split_documents, split_rows
from llm.errors import ConfigError, DataError
from tests.support.token_files import TokenFileWriter, write_flat, write_pair


def all_tokens(stream):
    return stream.read_windows(np.array([0]), stream.num_tokens)[0].tolist()


def numbered(folder, num_documents):
    """Documents of two tokens, both the number of the document."""
    return open_token_file(write_pair(folder / "text", [[n, n] for n in range(num_documents)]))


def parts(file, text):
    return split_documents(file, parse_split(text), text=text, vocab_size=None)


def test_prefixes_stand_alone_or_each_follows_its_weight():
    assert parse_blend(["a", "b/c"], option="--data_path") == ([Path("a"), Path("b/c")], None)
    assert parse_blend([0.7, "a", 3.0, "b"], option="--data_path") == (
        [Path("a"), Path("b")],
        [0.7, 3.0],
    )


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([0.7, "a", 0.3], "ends with the weight 0.3; a prefix must follow it"),
        ([0.7], "ends with the weight 0.7"),
        ([0.7, "a", "b"], "gives b without a weight before it"),
        ([0.7, 7.0], r"has the number 7 where a prefix belongs.*as \./7"),
        (["a", 0.3, "b"], r"has the number 0\.3 where a prefix belongs; give a weight before each"),
        ([-1.0, "a", 2.0, "b"], "gives the weight -1; weights must be finite and not negative"),
        ([float("nan"), "a"], "gives the weight nan"),
        ([float("inf"), "a"], "gives the weight inf"),
        ([0.0, "a", 0.0, "b"], "gives every source the weight 0"),
        ([1e308, "a", 1e308, "b"], "has weights with a sum that is not finite; give smaller ones"),
    ],
)
def test_an_invalid_blend_is_refused(words, complaint):
    with pytest.raises(ConfigError, match=f"--data_path {complaint}"):
        parse_blend(words, option="--data_path")


def test_a_split_is_normalised_and_padded_with_zeros():
    assert parse_split("980,10,10") == (0.98, 0.01, 0.01)
    assert parse_split("3,1") == (0.75, 0.25, 0.0)
    assert parse_split("7") == (1.0, 0.0, 0.0)


@pytest.mark.parametrize(
    "text", ["", "a,b", "1,2,3,4", "0,0,0", "-1,2", "nan,1", "inf", "9;1", "1e308,1e308"]
)
def test_an_invalid_split_is_refused(text):
    with pytest.raises(ConfigError, match=r"is not a split; give up to three numbers.*980,10,10"):
        parse_split(text)


def test_a_file_is_split_by_documents_and_the_test_split_is_not_used(tmp_path):
    train, validation = parts(numbered(tmp_path, 10), "7,2,1")

    assert all_tokens(train) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    assert all_tokens(validation) == [7, 7, 8, 8]
    assert (train.num_documents, validation.num_documents) == (7, 2)


@pytest.mark.parametrize(
    ("num_documents", "text", "bounds"),
    [
        # round(0.969 n), round(0.999 n): Megatron-LM's default.
        (100, "969,30,1", (97, 100)),
        (1279, "969,30,1", (1239, 1278)),
        # Halves go to the even neighbour: 2.5 to 2, 7.5 to 8.
        (5, "50,50,0", (2, 5)),
        (15, "50,50,0", (8, 15)),
        (1000, "980,10,10", (980, 990)),
    ],
)
def test_bounds_are_rounded_as_megatron_rounds_them(tmp_path, num_documents, text, bounds):
    train, validation = parts(numbered(tmp_path, num_documents), text)

    assert train.num_documents == bounds[0]
    assert validation.num_documents == bounds[1] - bounds[0]
    assert all_tokens(validation)[0] == bounds[0]


def test_a_split_may_train_only_or_evaluate_only(tmp_path):
    file = numbered(tmp_path, 10)

    train, validation = parts(file, "100,0,0")
    assert (train.num_tokens, validation) == (20, None)
    train, validation = parts(file, "0,1,0")
    assert (train, validation.num_tokens) == (None, 20)


@pytest.mark.parametrize(
    ("num_documents", "text", "part"),
    [(10, "969,30,1", "validation"), (3, "1,99,0", "training"), (1, "1,1", "training")],
)
def test_an_empty_split_is_refused_by_name(tmp_path, num_documents, text, part):
    with pytest.raises(
        DataError,
        match=f"--split {text} leaves no documents for {part} of .*, which has {num_documents} ",
    ):
        parts(numbered(tmp_path, num_documents), text)


def test_a_flat_file_is_split_by_tokens_with_a_note(tmp_path, caplog):
    file = open_token_file(write_flat(tmp_path / "train.bin", list(range(10))))

    with caplog.at_level("INFO", logger="llm.data"):
        train, validation = parts(file, "7,2,1")

    assert all_tokens(train) == [0, 1, 2, 3, 4, 5, 6]
    assert all_tokens(validation) == [7, 8]
    assert train.num_documents == 0
    assert "does not say where documents end: --split 7,2,1 cuts its tokens" in caplog.text


def rows_file(folder, *, rows, rows_per_document=1):
    """A file of rows of two tokens, numbered from 0."""
    with TokenFileWriter(folder / "text", np.dtype("<u2")) as writer:
        for row in range(rows):
            tokens = np.array([2 * row, 2 * row + 1])
            writer.add(tokens, ends_document=(row + 1) % rows_per_document == 0)
    return TokenFile(folder / "text")


def cut_by(percentage, file):
    sizes = np.arange(1, file.num_sequences + 1, dtype=np.uint32)
    return split_rows(file, sizes, percentage, vocab_size=None)


@pytest.mark.parametrize(
    ("rows", "percentage", "validation_rows"),
    [(100, 5, 5), (30, 5, 2), (31, 5, 2), (50, 5, 2), (70, 5, 4), (200, 0.5, 1)],
)
def test_the_first_rows_validate_with_the_rounding_of_datasets(
    tmp_path, rows, percentage, validation_rows
):
    train, validation = cut_by(percentage, rows_file(tmp_path, rows=rows))

    assert validation.tokens.tolist() == list(range(validation_rows * 2))
    assert train.tokens.tolist() == list(range(validation_rows * 2, rows * 2))
    assert validation.num_documents == validation_rows
    assert train.num_documents == rows - validation_rows
    assert validation.num_bytes == sum(range(1, validation_rows + 1))
    assert train.num_bytes == sum(range(validation_rows + 1, rows + 1))


def test_a_document_with_rows_in_both_splits_counts_in_both(tmp_path):
    train, validation = cut_by(50, rows_file(tmp_path, rows=10, rows_per_document=4))

    assert (train.num_documents, validation.num_documents) == (2, 2)


@pytest.mark.parametrize(("percentage", "part"), [(5, "validation"), (99, "training")])
def test_a_split_of_rows_that_leaves_one_side_empty_is_refused(tmp_path, percentage, part):
    said = f"_percentage {percentage} of 10 rows of text leaves none for {part}; change the percent"
    with pytest.raises(DataError, match=said):
        cut_by(percentage, rows_file(tmp_path, rows=10))
