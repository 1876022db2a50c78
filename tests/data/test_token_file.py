import struct
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm.data.token_file import TokenFile, TokenFileWriter, token_dtype
from llm.errors import DataError

DOCUMENTS = [[[1, 2, 3], [4]], [[5, 6]]]


def write(prefix, documents=DOCUMENTS, dtype="<u2"):
    with TokenFileWriter(prefix, np.dtype(dtype)) as writer:
        for document in documents:
            for number, sequence in enumerate(document, 1):
                last = number == len(document)
                writer.add(np.array(sequence, dtype=np.int64), ends_document=last)
    return prefix


def test_vocabularies_under_65500_are_stored_in_two_bytes():
    assert token_dtype(65499) == np.dtype("<u2")
    assert token_dtype(65500) == np.dtype("<i4")


def test_the_files_are_those_that_megatron_writes(tmp_path):
    prefix = write(tmp_path / "text-v1.2")

    assert (tmp_path / "text-v1.2.bin").read_bytes() == struct.pack("<6H", 1, 2, 3, 4, 5, 6)
    assert (tmp_path / "text-v1.2.idx").read_bytes() == (
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, 8, 3, 3)
        + struct.pack("<3i", 3, 1, 2)
        + struct.pack("<3q", 0, 6, 8)
        + struct.pack("<3q", 0, 2, 3)
    )
    assert TokenFile(prefix).num_tokens == 6


def test_int32_has_its_own_dtype_code(tmp_path):
    prefix = write(tmp_path / "big", [[[70000]]], "<i4")

    assert (tmp_path / "big.idx").read_bytes()[17] == 4
    assert TokenFile(prefix).tokens.tolist() == [70000]


def test_what_was_written_is_read(tmp_path):
    file = TokenFile(write(tmp_path / "text"))

    assert file.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert file.lengths.tolist() == [3, 1, 2]
    assert file.offsets.tolist() == [0, 6, 8]
    assert file.documents.tolist() == [0, 2, 3]
    assert (file.num_tokens, file.num_sequences, file.num_documents) == (6, 3, 2)
    assert [file.sequence_end(n) for n in range(5)] == [0, 3, 4, 6, 6]


@settings(max_examples=30, deadline=None)
@given(documents=st.lists(st.lists(st.lists(st.integers(0, 65535)), min_size=1)))
def test_any_documents_survive_writing_and_reading(tmp_path_factory, documents):
    file = TokenFile(write(tmp_path_factory.mktemp("any") / "text", documents))

    sequences = [sequence for document in documents for sequence in document]
    assert file.tokens.tolist() == [token for sequence in sequences for token in sequence]
    assert file.lengths.tolist() == [len(sequence) for sequence in sequences]
    assert np.diff(file.documents).tolist() == [len(document) for document in documents]
    assert file.sequence_end(len(sequences)) == file.num_tokens


def test_an_unfinished_document_is_closed_with_the_file(tmp_path):
    with TokenFileWriter(tmp_path / "text", np.dtype("<u2")) as writer:
        writer.add(np.array([1]), ends_document=True)
        assert not writer.in_document
        writer.add(np.array([2]), ends_document=False)
        assert writer.in_document

    assert TokenFile(tmp_path / "text").documents.tolist() == [0, 1, 2]


def test_an_interrupted_writer_leaves_no_readable_pair(tmp_path):
    with suppress(KeyboardInterrupt), TokenFileWriter(tmp_path / "text", np.dtype("<u2")) as writer:
        writer.add(np.array([1]), ends_document=True)
        raise KeyboardInterrupt

    with pytest.raises(DataError, match="cannot be read"):
        TokenFile(tmp_path / "text")


def test_an_id_that_does_not_fit_is_refused_rather_than_wrapped(tmp_path):
    with (
        TokenFileWriter(tmp_path / "text", np.dtype("<u2")) as writer,
        pytest.raises(DataError, match="70000 do not fit the dtype uint16"),
    ):
        writer.add(np.array([70000]), ends_document=True)


def test_a_modes_table_at_the_end_is_tolerated(tmp_path):
    prefix = write(tmp_path / "text")
    with open(f"{prefix}.idx", "ab") as file:
        file.write(b"\x00\x00\x00")

    assert TokenFile(prefix).num_documents == 2


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda idx, data: (b"", data), "text.idx does not start with a token file's header"),
        (lambda idx, data: (idx[:20], data), "text.idx does not start"),
        (lambda idx, data: (b"X" + idx[1:], data), "text.idx does not start"),
        (lambda idx, data: (idx[:9] + b"\x02" + idx[10:], data), "has version 2, not 1"),
        (lambda idx, data: (idx[:17] + b"\x06" + idx[18:], data), "dtype code 6"),
        (lambda idx, data: (idx[:17] + b"\x63" + idx[18:], data), "dtype code 99"),
        (lambda idx, data: (idx[:-1], data), "text.idx is 93 bytes long, not 94"),
        (lambda idx, data: (idx + b"12", data), "text.idx is 96 bytes long, not 94"),
        (lambda idx, data: (idx[:25] + b"\xff" + idx[26:], data), "bytes long, not"),
        (lambda idx, data: (idx[:26] + bytes(8) + idx[34:], data), "no document table"),
        (lambda idx, data: (idx, data[:-1]), "text.bin is 11 bytes long, which cuts a uint16"),
        (lambda idx, data: (idx, data[:-2]), "text.bin is 10 bytes long, not 12"),
        (lambda idx, data: (idx, data + b"12"), "text.bin is 14 bytes long, not 12"),
        (lambda idx, data: (idx, b""), "text.bin is 0 bytes long, not 12"),
        (lambda idx, data: (idx[:46] + b"\x02" + idx[47:], data), "starts its sequences at 2"),
        (lambda idx, data: (idx[:70] + b"\x01" + idx[71:], data), "documents from sequence 1 to 3"),
        (lambda idx, data: (idx[:86] + b"\x02" + idx[87:], data), "documents from sequence 0 to 2"),
    ],
)
def test_a_damaged_pair_is_refused_with_its_name_and_fault(tmp_path, damage, message):
    prefix = write(tmp_path / "text")
    idx, data = damage((tmp_path / "text.idx").read_bytes(), (tmp_path / "text.bin").read_bytes())
    (tmp_path / "text.idx").write_bytes(idx)
    (tmp_path / "text.bin").write_bytes(data)

    with pytest.raises(DataError, match=message):
        TokenFile(prefix)


@pytest.mark.parametrize("offset", [7, 14, -2])
def test_a_pointer_out_of_the_file_is_refused_when_followed(tmp_path, offset):
    prefix = write(tmp_path / "text")
    idx = bytearray((tmp_path / "text.idx").read_bytes())
    idx[54:62] = struct.pack("<q", offset)
    (tmp_path / "text.idx").write_bytes(idx)

    with pytest.raises(DataError, match="wrong pointer at sequence 1"):
        TokenFile(prefix).sequence_end(1)


def test_a_file_of_a_trillion_tokens_opens_at_once(tmp_path):
    with open(tmp_path / "text.bin", "wb") as file:
        file.truncate(2 * 10**12)
    num_sequences = 10**12 // 2**30
    lengths = np.full(num_sequences, 2**30, dtype="<i4")
    lengths[-1] += 10**12 % 2**30
    offsets = np.arange(num_sequences, dtype="<i8") * 2**31
    documents = np.arange(num_sequences + 1, dtype="<i8")
    header = struct.pack("<9sQBQQ", b"MMIDIDX", 1, 8, num_sequences, num_sequences + 1)
    tables = lengths.tobytes() + offsets.tobytes() + documents.tobytes()
    (tmp_path / "text.idx").write_bytes(header + tables)

    file = TokenFile(tmp_path / "text")

    assert file.num_tokens == 10**12
    assert file.tokens[10**12 - 1] == 0
