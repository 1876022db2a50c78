import itertools
import os
import resource

import numpy as np
import pytest

from llm.data.formats.megatron import TokenFile
from llm.data.order import permute
from llm.prepare.encoder import Encoding
from llm.prepare.output_files import join_shards, join_shuffled
from llm.prepare.tokenize_shards import tokenize_shards
from tests.support.texts import ListSource, byte_tokenizer, ids, pair
from tests.support.token_files import write_pair


def make_shards(folder, sources, dtype="<u2"):
    folder.mkdir()
    encoding = Encoding(tokenizer=byte_tokenizer(), end_token=0, dtype=np.dtype(dtype))
    return tokenize_shards(sources, folder, encoding=encoding, workers=1)[0]


def documents_of(prefix):
    file = TokenFile(prefix)
    starts = [file.document_start(number) for number in range(file.num_documents + 1)]
    return [file.tokens[i:j].tolist() for i, j in itertools.pairwise(starts)]


def test_assembled_shards_equal_the_files_of_a_single_writer(tmp_path):
    texts = [["one", "", "two"], [""], ["three"], ["four"] * 5]
    stems = make_shards(tmp_path / "parts", [ListSource(part) for part in texts], "<i4")

    join_shards(stems, tmp_path / "out", dtype=np.dtype("<i4"))

    documents = [[*ids(text), 0] for text in ["one", "two", "three", *["four"] * 5]]
    assert pair(tmp_path / "out") == pair(write_pair(tmp_path / "expected", documents, "<i4"))


def test_a_document_of_several_texts_ends_with_its_shard(tmp_path):
    sources = [
        ListSource(["a", "b"], one_document=True),
        ListSource([""], one_document=True),
        ListSource(["c", "d"]),
        ListSource(["e", "", "f"], one_document=True),
    ]
    stems = make_shards(tmp_path / "parts", sources)

    join_shards(stems, tmp_path / "out", dtype=np.dtype("<u2"))

    file = TokenFile(tmp_path / "out")
    assert file.lengths.tolist() == [1, 2, 2, 2, 1, 2]
    assert file.documents.tolist() == [0, 2, 3, 4, 6]
    assert documents_of(tmp_path / "out")[0] == [*ids("ab"), 0]
    assert file.find_index_faults(sample=False) == []


def test_assembly_in_small_blocks_gives_the_same_files(tmp_path, monkeypatch):
    monkeypatch.setattr("llm.prepare.output_files._BLOCK_ENTRIES", 3)
    texts = [str(number) * (number % 5) for number in range(100)]
    sources = [ListSource(texts[:41]), ListSource(texts[41:])]
    stems = make_shards(tmp_path / "parts", sources)

    join_shards(stems, tmp_path / "out", dtype=np.dtype("<u2"))

    assert documents_of(tmp_path / "out") == [[*ids(text), 0] for text in texts if text]
    assert TokenFile(tmp_path / "out").find_index_faults(sample=False) == []


@pytest.mark.parametrize("works", [0, 1, 3])
def test_assembly_works_where_copy_file_range_copies_nothing_or_too_little(
    tmp_path, monkeypatch, works
):
    """As some do: an error from the first or a later call, or nothing copied at all."""
    stems = make_shards(tmp_path / "parts", [ListSource([name * 1000]) for name in "abcd"])
    copy = os.copy_file_range
    calls = []

    def limited(source, target, count):
        calls.append(count)
        if len(calls) > works:
            raise OSError(18, "Invalid cross-device link")
        return copy(source, target, 100)

    for replacement in (limited, lambda *_: 0):
        monkeypatch.setattr(os, "copy_file_range", replacement)
        join_shards(stems, tmp_path / "out", dtype=np.dtype("<u2"))

        assert documents_of(tmp_path / "out") == [[*ids(name * 1000), 0] for name in "abcd"]


def shuffled(folder, texts, *, seed, part_sizes):
    sources, first = [], 0
    for size in part_sizes:
        sources.append(ListSource(texts[first : first + size]))
        first += size
    stems = make_shards(folder, sources)
    join_shuffled(stems, folder / "out", dtype=np.dtype("<u2"), seed=seed)
    assert not list(folder.glob("*.joined"))
    assert TokenFile(folder / "out").find_index_faults(sample=False) == []
    return documents_of(folder / "out")


def test_shuffled_documents_are_in_the_order_of_the_keyed_permutation(tmp_path, monkeypatch):
    monkeypatch.setattr("llm.prepare.output_files._DOCUMENTS_PER_GATHER", 7)
    texts = [str(number) for number in range(100)]
    plain = [[*ids(text), 0] for text in texts]

    found = shuffled(tmp_path / "a", texts, seed=5, part_sizes=[100])

    assert found != plain
    assert sorted(found) == sorted(plain)
    order = permute(np.arange(100), size=100, key=5)
    assert found == [plain[number] for number in order]
    assert shuffled(tmp_path / "b", texts, seed=5, part_sizes=[1, 0, 60, 39]) == found
    assert shuffled(tmp_path / "c", texts, seed=6, part_sizes=[100]) != found


def test_a_single_document_can_be_shuffled(tmp_path):
    assert shuffled(tmp_path / "a", ["one"], seed=0, part_sizes=[0, 1]) == [[*ids("one"), 0]]


@pytest.mark.parametrize("shuffle", [False, True])
def test_there_may_be_more_shards_than_the_open_file_limit(tmp_path, shuffle):
    stems = make_shards(tmp_path / "parts", [ListSource([str(number)]) for number in range(100)])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 40, hard))
    try:
        if shuffle:
            join_shuffled(stems, tmp_path / "out", dtype=np.dtype("<u2"), seed=0)
        else:
            join_shards(stems, tmp_path / "out", dtype=np.dtype("<u2"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert TokenFile(tmp_path / "out").num_documents == 100
