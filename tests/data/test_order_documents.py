import numpy as np
import pytest

from llm.data.formats.flat import open_token_file
from llm.data.open_corpus import check_document_ends
from llm.data.options import DataOptions
from llm.data.order import DocumentBoundaries, choose_document_boundaries
from llm.errors import ConfigError, DataError
from tests.support.token_files import write_flat, write_pair

BOTH = DocumentBoundaries(0, positions=True, attention=True)


def test_a_document_ends_with_its_end_of_text_token():
    positions, documents = BOTH.split(np.array([[5, 6, 0, 7, 8, 9], [0, 5, 5, 5, 5, 0]]))

    assert positions.tolist() == [[0, 1, 2, 0, 1, 2], [0, 0, 1, 2, 3, 4]]
    assert documents.tolist() == [[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1]]


def test_random_windows_agree_with_a_loop_over_their_tokens():
    windows = np.random.default_rng(0).integers(4, size=(50, 33))
    positions, documents = BOTH.split(windows)

    for row, window in enumerate(windows):
        position = document = 0
        for column, token in enumerate(window):
            assert (positions[row, column], documents[row, column]) == (position, document)
            position += 1
            if token == 0:
                position, document = 0, document + 1


def test_only_the_requested_positions_or_document_numbers_are_computed():
    windows = np.array([[5, 0, 6]])

    assert DocumentBoundaries(0, positions=True, attention=False).split(windows)[1] is None
    assert DocumentBoundaries(0, positions=False, attention=True).split(windows)[0] is None


def test_documents_that_end_with_another_token_are_refused(tmp_path):
    file = open_token_file(write_pair(tmp_path / "text", [[1, 2, 9], [0, 3, 9], [5, 9]]))

    check_document_ends(file, 9)
    with pytest.raises(DataError, match="none of its first 3 documents ends with the id 0"):
        check_document_ends(file, 0)


def test_a_flat_file_must_hold_the_token_somewhere(tmp_path):
    file = open_token_file(write_flat(tmp_path / "train.bin", [1, 2, 9, 3]))

    check_document_ends(file, 9)
    with pytest.raises(DataError, match="the id 0 is not among its first 4 tokens"):
        check_document_ends(file, 0)


def test_document_ends_are_used_only_if_an_option_asks_for_them():
    assert choose_document_boundaries(DataOptions(), eos_token_id=None) is None
    ends = choose_document_boundaries(DataOptions(reset_attention_mask=True), eos_token_id=0)
    assert ends == DocumentBoundaries(0, positions=False, attention=True)
    with pytest.raises(ConfigError, match="the tokenizer has none"):
        choose_document_boundaries(DataOptions(reset_position_ids=True), eos_token_id=None)
