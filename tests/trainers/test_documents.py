"""From tokens of a sample to the documents that they belong to."""

from types import SimpleNamespace

import numpy as np
import pytest

from llm.data.corpus import TokenStream
from llm.data.formats.flat import FlatTokenFile
from llm.data.formats.megatron import TokenFile
from llm.errors import DataError
from llm.trainers.gpt.step_samples import split_into_passages
from tests.support.token_files import random_documents, write_flat, write_pair


def shown(stream, start, length):
    return [
        (passage.document, passage.offset, passage.length, passage.tokens.tolist())
        for passage in split_into_passages(stream, start, length)
    ]


def test_documents_without_tokens_are_passed_over(tmp_path):
    write_pair(tmp_path / "text", [[], [1, 2], [], [], [3], []])
    stream = TokenStream(TokenFile(tmp_path / "text"))

    assert shown(stream, 0, 3) == [(1, 0, 2, [1, 2]), (4, 0, 1, [3])]
    assert shown(stream, 2, 1) == [(4, 0, 1, [3])]


def test_a_sample_continues_at_the_beginning_of_its_split(tmp_path):
    write_pair(tmp_path / "text", [[1, 2], [3, 4, 5], [6, 7], [8]])
    # Documents 1 and 2, as --split cuts them.
    stream = TokenStream(TokenFile(tmp_path / "text"), start=2, stop=7)

    assert shown(stream, 4, 7) == [
        (2, 1, 2, [7]),
        (1, 0, 3, [3, 4, 5]),
        (2, 0, 2, [6, 7]),
        (1, 0, 3, [3]),
    ]


def test_passages_hold_the_tokens_of_the_sample_in_their_order(tmp_path):
    documents = random_documents(50, seed=1)
    write_pair(tmp_path / "text", documents)
    stream = TokenStream(TokenFile(tmp_path / "text"), start=20)
    for start in range(0, stream.num_tokens, 7):
        found = list(split_into_passages(stream, start, 100))
        window = stream.read_windows(np.array([start]), 100)[0]
        assert np.concatenate([passage.tokens for passage in found]).tolist() == window.tolist()
        for passage in found:
            stop = passage.offset + passage.tokens.size
            assert passage.tokens.tolist() == documents[passage.document][passage.offset : stop]
            assert passage.length == len(documents[passage.document])


def test_a_flat_file_has_places_in_place_of_documents(tmp_path):
    stream = TokenStream(FlatTokenFile(write_flat(tmp_path / "train.bin", [*range(10)])), start=4)

    assert shown(stream, 3, 5) == [(None, 7, 10, [7, 8, 9]), (None, 4, 10, [4, 5])]


def test_a_billion_documents_take_as_many_looks_as_a_binary_search():
    looks = []

    def document_start(number):
        looks.append(number)
        return 100 * number

    file = SimpleNamespace(
        num_documents=10**9, document_start=document_start, tokens=np.zeros(0), prefix="text"
    )
    tokens = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint16), (10**11,), (0,))
    stream = SimpleNamespace(file=file, tokens=tokens, first_byte=0, num_tokens=10**11)

    found = [passage[:2] for passage in split_into_passages(stream, 71_234_567_890, 1025)]

    assert found[0] == (712_345_678, 90)
    assert len(found) == 12
    assert len(looks) <= 30 + 2 * len(found)


def test_an_index_that_goes_backward_is_refused_without_going_round():
    starts = [0, 8, 2, 3, 9, 9]
    file = SimpleNamespace(
        num_documents=5, document_start=starts.__getitem__, tokens=np.zeros(9), prefix="text"
    )
    stream = SimpleNamespace(file=file, tokens=np.zeros(9), first_byte=0, num_tokens=9)

    with pytest.raises(DataError, match=r"text\.idx has documents out of order near number \d"):
        list(split_into_passages(stream, 0, 9))
