import os

import numpy as np
import pytest

from llm.data.corpus import TokenStream
from llm.data.formats.megatron import TokenFile
from llm.errors import DataError
from tests.support.token_files import TokenFileWriter


def token_file(folder, *, rows):
    with TokenFileWriter(folder / "text", np.dtype("<u2")) as writer:
        for row in range(rows):
            writer.add(np.array([row]), ends_document=True)
    return TokenFile(folder / "text")


def stream(folder, *, start, stop, num_tokens=20):
    return TokenStream(token_file(folder, rows=num_tokens), start=start, stop=stop)


def test_windows_equal_positions_modulo_the_length(tmp_path):
    ring = stream(tmp_path, start=3, stop=20)
    starts = np.random.default_rng(0).integers(0, 17, 100)

    for length in (1, 5, 17, 18, 40):
        expected = 3 + (starts[:, None] + np.arange(length)) % 17
        assert (ring.read_windows(starts, length) == expected).all()
        assert ring.read_windows(starts, length).dtype == np.uint16
    assert ring.read_windows(starts[:0], 3).shape == (0, 3)


def test_a_token_beyond_the_vocabulary_is_named_with_its_file(tmp_path):
    known = TokenStream(token_file(tmp_path, rows=20), vocab_size=12)

    assert known.read_windows(np.array([0, 8]), 4).max() == 11
    with pytest.raises(DataError, match=r"text\.bin holds the token id 12, and the vocabulary"):
        known.read_windows(np.array([0, 9]), 4)


def test_a_negative_token_is_refused(tmp_path):
    with TokenFileWriter(tmp_path / "text", np.dtype("<i4")) as writer:
        writer.add(np.array([1, -5, 2]), ends_document=True)
    known = TokenStream(TokenFile(tmp_path / "text"), vocab_size=12)

    with pytest.raises(DataError, match="holds the token id -5"):
        known.read_windows(np.array([0]), 3)


def test_a_file_that_is_cut_while_it_is_in_use_is_named(tmp_path):
    ring = stream(tmp_path, start=0, stop=10)
    assert ring.read_windows(np.array([0]), 3).tolist() == [[0, 1, 2]]

    os.truncate(tmp_path / "text.bin", 10)

    with pytest.raises(DataError, match=r"text\.bin was cut while it was in use: 10 of its 40 "):
        ring.read_windows(np.array([0]), 3)


def test_a_file_that_is_replaced_by_another_is_read_as_it_was(tmp_path):
    ring = stream(tmp_path, start=0, stop=10)

    (tmp_path / "other.bin").write_bytes(b"")
    (tmp_path / "other.bin").replace(tmp_path / "text.bin")

    assert ring.read_windows(np.array([0]), 3).tolist() == [[0, 1, 2]]
