"""Damages small token files in every way, and reads all that can still be read.

A read outside of a memory map would end the test's process; one in the rest of its last page is
found by the sizes of the arrays.
"""

import itertools
import struct
from pathlib import Path

import numpy as np
import pytest

from llm.data.formats.flat import open_token_file
from llm.data.formats.megatron import TokenFile
from llm.errors import DataError
from llm.prepare.verification import find_token_file_faults
from tests.support.token_files import write_sequences

EXTREMES = [0, 1, 2, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**61, 2**63 - 1, 2**63, 2**64 - 1]
DTYPES = ["<u2", "<i4", "<u2", "<u2", "<u2"]
# In 64 bits, tables of so many sequences or documents take as many bytes as those of one.
WRAPPING = [2**61 + 1, 2**62 + 1, 2**63 + 1]


def write(prefix, documents, dtype="<u2", modes=False):
    write_sequences(prefix, documents, dtype)
    if modes:
        with open(f"{prefix}.idx", "ab") as idx:
            idx.write(bytes(sum(map(len, documents))))
    return Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()


@pytest.fixture
def pairs(tmp_path):
    """Sound pairs, as (bytes of the .idx, bytes of the .bin); `DTYPES` are those of their ids."""
    return [
        write(tmp_path / "short", [[[1, 2, 3], [4]], [[5, 6]]]),
        write(tmp_path / "wide", [[[1, 70000]], [], [[3, 4, 5]], [[6]]], dtype="<i4"),
        write(tmp_path / "modes", [[[1], [2], [3]], [[4, 5], [6]]], modes=True),
        write(tmp_path / "gaps", [[], [[], [9] * 40], [[]], []]),
        write(tmp_path / "empty", []),
    ]


def flipped(random, data):
    damaged = np.frombuffer(data, np.uint8).copy()
    if damaged.size:
        places = random.integers(damaged.size, size=random.integers(1, 5))
        damaged[places] ^= (1 << random.integers(8, size=places.size)).astype(np.uint8)
    return damaged.tobytes()


def cut_short(random, data):
    return data[: random.integers(len(data) + 1)]


def prolonged(random, data):
    return data + random.bytes(int(random.choice([1, 2, 4, 8, 12, 100, 5000])))


def zeroed(random, data):
    start, stop = sorted(random.integers(len(data) + 1, size=2))
    return data[:start] + bytes(stop - start) + data[stop:]


def with_another_number(random, data):
    """One number of the header or of a table becomes an extreme one."""
    damaged = bytearray(data)
    place = int(random.choice([9, 17, 18, 26, random.integers(34, len(data) + 1)]))
    width = int(random.choice([1, 4, 8]))
    number = int((EXTREMES + WRAPPING)[random.integers(len(EXTREMES + WRAPPING))])
    damaged[place : place + width] = (number % 256**width).to_bytes(width, "little")
    return bytes(damaged[: len(data)])


def read_everything(path):
    """Opens a file and calls all that reads it; True where it was refused or found damaged."""
    try:
        file = open_token_file(path)
    except DataError:
        return True
    num_tokens = file.num_tokens
    assert file.tokens.nbytes == Path(f"{file.prefix}.bin").stat().st_size
    for start in range(num_tokens):
        assert len(file.tokens[start : start + 5].tolist()) == min(5, num_tokens - start)
    places = []
    if isinstance(file, TokenFile):
        tables = (file.lengths, file.offsets, file.documents)
        header_and_tables = 34 + sum(table.nbytes for table in tables)
        assert header_and_tables <= Path(f"{file.prefix}.idx").stat().st_size
        places += [file.document_start, file.sequence_end]
    refused = False
    for place_of in places:
        for number in range(file.num_documents + 1):
            try:
                assert 0 <= place_of(number) <= num_tokens
            except DataError:
                refused = True
    return refused or bool(isinstance(file, TokenFile) and file.find_index_faults(sample=False))


@pytest.mark.parametrize("times", [60, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("damage", [flipped, cut_short, prolonged, zeroed, with_another_number])
def test_each_damaged_pair_is_refused_or_gives_its_own_tokens(tmp_path, pairs, damage, times):
    """An id that was changed in place is found by its checksum alone: see test_sidecar.py."""
    random = np.random.default_rng(5)
    num_refused = 0
    for _ in range(times):
        number = random.integers(len(pairs))
        idx, data = pairs[number]
        size = len(data)
        if damage is with_another_number or random.random() < 0.7:
            idx = damage(random, idx)
        else:
            data = damage(random, data)
        (tmp_path / "damaged.idx").write_bytes(idx)
        (tmp_path / "damaged.bin").write_bytes(data)
        refused = read_everything(tmp_path / "damaged")
        assert all(fault.endswith(".") for fault in find_token_file_faults(tmp_path / "damaged"))
        if not refused:
            tokens = open_token_file(tmp_path / "damaged").tokens
            assert tokens.tolist() == np.frombuffer(data, DTYPES[number]).tolist()
            assert len(data) == size
        num_refused += refused

    assert num_refused > times / 2  # the rest changed ids, modes, where a document ends, or nothing


def test_the_bin_of_one_pair_beside_the_index_of_another_is_refused(tmp_path, pairs):
    for number, (idx, _) in enumerate(pairs):
        for other, (_, data) in enumerate(pairs):
            (tmp_path / "mixed.idx").write_bytes(idx)
            (tmp_path / "mixed.bin").write_bytes(data)
            same_size = len(data) == len(pairs[number][1])
            assert read_everything(tmp_path / "mixed") is not same_size, (number, other)


def test_bytes_of_any_other_file_are_refused_as_an_index(tmp_path):
    random = np.random.default_rng(6)
    (tmp_path / "noise.bin").write_bytes(bytes(12))
    for size in range(0, 300, 4):
        noise = random.bytes(size)
        for content in (noise, b"MMIDIDX\0\0" + noise, b"MMIDIDX\0\0\1" + bytes(7) + noise):
            (tmp_path / "noise.idx").write_bytes(content)
            with pytest.raises(DataError, match=r"noise\.idx"):
                open_token_file(tmp_path / "noise")


def test_absurd_numbers_in_the_header_are_refused_at_once(tmp_path):
    (tmp_path / "text.bin").write_bytes(bytes(4))
    for sequences, documents in itertools.product(EXTREMES + WRAPPING, repeat=2):
        header = struct.pack("<9sQBQQ", b"MMIDIDX", 1, 8, sequences, documents)
        (tmp_path / "text.idx").write_bytes(header + bytes(20))
        with pytest.raises(DataError, match=r"bytes long|no document table"):
            TokenFile(tmp_path / "text")


def test_every_changed_bit_of_a_length_or_an_offset_is_detected(tmp_path, pairs):
    for idx, data in pairs[:2]:
        (tmp_path / "damaged.bin").write_bytes(data)
        num_sequences = int.from_bytes(idx[18:26], "little")
        for bit in range(34 * 8, (34 + 12 * num_sequences) * 8):
            damaged = bytearray(idx)
            damaged[bit // 8] ^= 1 << bit % 8
            (tmp_path / "damaged.idx").write_bytes(damaged)
            assert read_everything(tmp_path / "damaged"), f"bit {bit}"


def test_a_flat_file_of_any_bytes_is_refused_or_read_within_its_bounds(tmp_path):
    random = np.random.default_rng(7)
    for size in range(60):
        (tmp_path / "train.bin").write_bytes(random.bytes(size))
        refused = read_everything(tmp_path / "train.bin")
        assert refused is (size % 2 == 1)
