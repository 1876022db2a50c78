import struct
import time

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llm.data.formats.megatron import TokenFile, token_dtype
from llm.errors import DataError
from llm.prepare.verification import find_token_file_faults
from tests.support.token_files import describe, write_sequences

DOCUMENTS = [[[1, 2, 3], [4]], [[5, 6]]]


def test_vocabularies_under_65500_are_stored_in_two_bytes():
    assert token_dtype(65499) == np.dtype("<u2")
    assert token_dtype(65500) == np.dtype("<i4")


def test_the_files_are_those_that_megatron_writes(tmp_path):
    prefix = write_sequences(tmp_path / "text-v1.2", DOCUMENTS)

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
    prefix = write_sequences(tmp_path / "big", [[[70000]]], "<i4")

    assert (tmp_path / "big.idx").read_bytes()[17] == 4
    assert TokenFile(prefix).tokens.tolist() == [70000]


@settings(max_examples=25, deadline=None)
@example(documents=[[], [[1, 2]], [], [[], [3]], []], dtype="<u2")
@given(
    documents=st.lists(st.lists(st.lists(st.integers(0, 65535)))),
    dtype=st.sampled_from(["<u2", "<i4"]),
)
def test_any_documents_read_back_as_written(tmp_path_factory, documents, dtype):
    prefix = write_sequences(tmp_path_factory.mktemp("any") / "text", documents, dtype)
    file = TokenFile(prefix)

    sequences = [sequence for document in documents for sequence in document]
    assert file.tokens.dtype == np.dtype(dtype)
    assert file.tokens.tolist() == [token for sequence in sequences for token in sequence]
    assert file.lengths.tolist() == [len(sequence) for sequence in sequences]
    assert np.diff(file.documents).tolist() == [len(document) for document in documents]
    assert file.sequence_end(len(sequences)) == file.num_tokens
    for number, document in enumerate(documents):
        tokens = file.tokens[file.document_start(number) : file.document_start(number + 1)]
        assert tokens.tolist() == [token for sequence in document for token in sequence]
    assert file.find_index_faults(sample=False) == []


def test_the_last_document_start_is_the_end_of_all_tokens(tmp_path):
    file = TokenFile(write_sequences(tmp_path / "text", DOCUMENTS))

    assert [file.document_start(n) for n in range(3)] == [0, 4, 6]
    assert file.find_document_starts(1, 3).tolist() == [4, 6]
    for number in (-1, 3):
        with pytest.raises(IndexError, match=f"no document {number} of 2"):
            file.document_start(number)


def test_a_modes_table_at_the_end_of_the_index_is_accepted(tmp_path):
    prefix = write_sequences(tmp_path / "text", DOCUMENTS)
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
        (
            lambda idx, data: (idx[:38] + struct.pack("<i", 2**31 - 1) + idx[42:], data),
            r"idx has 1 sequences that do not end where the next one starts; .* number 1; it is",
        ),
        (
            lambda idx, data: (idx[:37] + b"\xff" + idx[38:], data),
            "has 1 sequences of negative length",
        ),
        (
            lambda idx, data: (idx[:54] + b"\x07" + idx[55:], data),
            "has 2 sequences that do not end",
        ),
        (
            lambda idx, data: (idx[:78] + b"\x04" + idx[79:], data),
            "has 1 documents that end before",
        ),
    ],
)
def test_a_damaged_pair_is_refused_with_its_name_and_fault(tmp_path, damage, message):
    prefix = write_sequences(tmp_path / "text", DOCUMENTS)
    idx, data = damage((tmp_path / "text.idx").read_bytes(), (tmp_path / "text.bin").read_bytes())
    (tmp_path / "text.idx").write_bytes(idx)
    (tmp_path / "text.bin").write_bytes(data)

    with pytest.raises(DataError, match=message):
        TokenFile(prefix)


@pytest.fixture
def unchecked_index(monkeypatch):
    """An index of which opening looks at nothing, as between the samples of a large one."""
    monkeypatch.setattr(TokenFile, "find_index_faults", lambda *_, **__: [])


@pytest.mark.usefixtures("unchecked_index")
@pytest.mark.parametrize("offset", [7, 14, -2])
def test_a_pointer_outside_the_file_is_refused_when_read(tmp_path, offset):
    prefix = write_sequences(tmp_path / "text", [[[1, 2, 3]], [[4]], [[5, 6]]])
    idx = bytearray((tmp_path / "text.idx").read_bytes())
    idx[54:62] = struct.pack("<q", offset)
    (tmp_path / "text.idx").write_bytes(idx)

    for follow in (TokenFile(prefix).sequence_end, TokenFile(prefix).document_start):
        with pytest.raises(DataError, match="wrong pointer at sequence 1"):
            follow(1)


@pytest.mark.usefixtures("unchecked_index")
@pytest.mark.parametrize("sequence", [4, -1])
def test_a_document_outside_the_file_is_refused_when_read(tmp_path, sequence):
    prefix = write_sequences(tmp_path / "text", DOCUMENTS)
    idx = bytearray((tmp_path / "text.idx").read_bytes())
    idx[78:86] = struct.pack("<q", sequence)
    (tmp_path / "text.idx").write_bytes(idx)

    with pytest.raises(DataError, match=r"text\.idx has a wrong pointer at document 1"):
        TokenFile(prefix).document_start(1)


def test_opening_and_reading_take_no_longer_for_a_trillion_tokens(tmp_path):
    """Both files are sparse: of 10^9 sequences all but the last 1000 are empty."""
    num_sequences = 10**9
    offsets = 34 + 4 * num_sequences
    documents = offsets + 8 * num_sequences
    try:
        with open(tmp_path / "text.bin", "wb") as file:
            file.truncate(2 * 10**12)
            file.seek(2 * 1024 * 10**8)
            file.write(struct.pack("<2H", 7, 8))
        with open(tmp_path / "text.idx", "wb") as file:
            head = struct.pack("<9sQBQQ", b"MMIDIDX", 1, 8, num_sequences, num_sequences + 1)
            file.write(head)
            for place, table in (
                (offsets - 4 * 1000, np.full(1000, 10**9, "<i4")),
                (documents - 8 * 1000, np.arange(1000, dtype="<i8") * 2 * 10**9),
                (documents + 8 * num_sequences, np.full(1, num_sequences, "<i8")),
            ):
                file.seek(place)
                file.write(table.tobytes())
    except OSError as error:
        pytest.skip(f"the file system holds no sparse file of 2 TB: {error}")
    seconds = []
    for _ in range(2):
        began = time.perf_counter()
        opened = TokenFile(tmp_path / "text")
        window = opened.tokens[1024 * 10**8 : 1024 * 10**8 + 1025].tolist()
        end = opened.document_start(10**9)
        seconds.append(time.perf_counter() - began)

    assert opened.num_tokens == end == 10**12
    assert window == [7, 8, *[0] * 1023]
    assert min(seconds) < 2  # to look at all of the index takes ten times as long


def test_the_check_reports_ids_beyond_the_vocabulary_and_below_zero(tmp_path):
    prefix = write_sequences(tmp_path / "text", [[[5, -3, 70000]]], "<i4")
    assert find_token_file_faults(prefix) == []

    describe(prefix, fingerprint="0", largest_token=69999)
    faults = find_token_file_faults(prefix)

    assert f"{prefix}.bin has negative ids, down to -3." in faults
    assert f"{prefix}.json says largest_token 69999, but it is 70000." in faults
    assert (
        f"{prefix}.bin has ids up to 70000, which a vocabulary of 70000 does not reach." in faults
    )


def test_opening_samples_a_large_index_and_the_check_reads_all_of_it(tmp_path, monkeypatch):
    limits = {"_BLOCK_ENTRIES": 2, "_MAX_FULLY_CHECKED_ENTRIES": 9, "_NUM_SAMPLED_BLOCKS": 2}
    for name, number in limits.items():
        monkeypatch.setattr(f"llm.data.formats.megatron.{name}", number)
    prefix = write_sequences(tmp_path / "text", [[[1, 2]]] * 10)
    assert find_token_file_faults(prefix) == []
    idx = bytearray((tmp_path / "text.idx").read_bytes())
    struct.pack_into("<i", idx, 34 + 4 * 4, -2)
    struct.pack_into("<q", idx, 34 + 40 + 8 * 6, 30)
    struct.pack_into("<q", idx, 34 + 40 + 80 + 8 * 6, 9)
    (tmp_path / "text.idx").write_bytes(idx)

    assert find_token_file_faults(prefix) == [
        f"{prefix}.idx has 1 sequences of negative length; the first one is number 4.",
        f"{prefix}.idx has 3 sequences that do not end where the next one starts; the first one is "
        "number 4.",
        f"{prefix}.idx has 1 documents that end before they start; the first one is number 6.",
    ]
    struct.pack_into("<i", idx, 34 + 4 * 9, 1)
    (tmp_path / "text.idx").write_bytes(idx)
    with pytest.raises(DataError, match=r"text\.bin is 40 bytes long, not 38"):
        TokenFile(prefix)
    struct.pack_into("<2i", idx, 34 + 4 * 8, 1, 2)
    (tmp_path / "text.idx").write_bytes(idx)
    with pytest.raises(DataError, match=r"do not end where the next one starts; .* number 8;"):
        TokenFile(prefix)
