"""Megatron-LM's own reader and writer against ours; needs `pip install megatron-core`."""

import warnings
from pathlib import Path

import numpy as np
import pytest

from llm.data.formats.megatron import TokenFile, token_dtype
from tests.support.token_files import write_sequences

# Sequences of documents. Megatron's builder writes empty documents and empty sequences, too.
DOCUMENTS = [[[1, 2, 3], [4]], [], [[50256]], [[], [7, 8]], [[9] * 1000]]


@pytest.fixture(scope="module")
def megatron():
    """Megatron's module; imported here, so that only who runs these tests waits for it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that faster kernels are not installed
        return pytest.importorskip("megatron.core.datasets.indexed_dataset")


def write_theirs(megatron, prefix, documents, dtype, *, multimodal=False):
    import torch

    builder = megatron.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype, multimodal=multimodal)
    for document in documents:
        for sequence in document:
            builder.add_item(torch.tensor(sequence, dtype=torch.int64))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return prefix


def random_documents(seed, largest):
    random = np.random.default_rng(seed)
    return [
        [
            random.integers(largest + 1, size=random.integers(20)).tolist()
            for _ in range(random.integers(4))
        ]
        for _ in range(50)
    ]


@pytest.mark.parametrize(("dtype", "largest"), [(np.uint16, 65535), (np.int32, 2**31 - 1)])
def test_megatron_and_our_writer_write_the_same_bytes(megatron, tmp_path, dtype, largest):
    for documents in (DOCUMENTS, random_documents(1, largest), random_documents(2, largest)):
        write_sequences(tmp_path / "ours", documents, dtype)
        write_theirs(megatron, tmp_path / "theirs", documents, dtype)

        for kind in (".bin", ".idx"):
            ours = Path(f"{tmp_path}/ours{kind}").read_bytes()
            assert ours == Path(f"{tmp_path}/theirs{kind}").read_bytes()


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
@pytest.mark.parametrize("mmap", [True, False])
def test_megatron_reads_our_files(megatron, tmp_path, dtype, mmap):
    prefix = write_sequences(tmp_path / "text", DOCUMENTS, dtype)

    dataset = megatron.IndexedDataset(str(prefix), mmap=mmap)

    assert dataset.index.dtype == dtype
    assert dataset.sequence_lengths.tolist() == [3, 1, 1, 0, 2, 1000]
    assert dataset.document_indices.tolist() == [0, 2, 2, 3, 5, 6]
    sequences = [sequence for document in DOCUMENTS for sequence in document]
    assert [dataset.get(number).tolist() for number in range(6)] == sequences
    assert dataset.get(5, offset=990, length=5).tolist() == [9] * 5


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
@pytest.mark.parametrize("multimodal", [False, True])
def test_our_reader_reads_megatrons_files(megatron, tmp_path, dtype, multimodal):
    prefix = write_theirs(megatron, tmp_path / "text", DOCUMENTS, dtype, multimodal=multimodal)

    file = TokenFile(prefix)

    assert file.tokens.dtype == dtype
    assert file.tokens.tolist() == [1, 2, 3, 4, 50256, 7, 8, *[9] * 1000]
    assert [file.document_start(number) for number in range(6)] == [0, 4, 4, 5, 7, 1007]
    assert file.find_index_faults(sample=False) == []


def test_our_reader_reads_files_that_megatron_merged(megatron, tmp_path):
    for name in ("one", "two"):
        write_theirs(megatron, tmp_path / name, DOCUMENTS, np.uint16)
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "both.bin"), dtype=np.uint16)
    for name in ("one", "two"):
        builder.add_index(str(tmp_path / name))
    builder.finalize(str(tmp_path / "both.idx"))

    file = TokenFile(tmp_path / "both")

    assert (file.num_documents, file.num_sequences, file.num_tokens) == (10, 12, 2014)
    assert file.document_start(5) == 1007
    assert file.find_index_faults(sample=False) == []


@pytest.mark.parametrize("vocab_size", [256, 65499, 65500, 65536, 100_000])
def test_megatron_and_our_writer_choose_the_same_dtype(megatron, vocab_size):
    assert token_dtype(vocab_size) == megatron.DType.optimal_dtype(vocab_size)
