"""Numbered parts open as one file, with the tokens, documents and samples of the joined file."""

import numpy as np
import pytest

from llm.data.corpus import CorpusSource, Samples, TokenStream, pin_in_memory
from llm.data.data_digest import compute_corpus_digests, data_has_changed
from llm.data.formats.flat import open_token_file
from llm.data.formats.parts import PartedTokens, TokenFileParts, part_prefix
from llm.data.formats.sidecar import describe_token_files, open_described_files, read_sidecar
from llm.data.splits import split_documents
from llm.errors import DataError
from llm.prepare.verification import compute_checksums, find_token_file_faults
from llm.tools.inspect import main as inspect
from llm.trainers.gpt.step_samples import split_into_passages
from tests.support.token_files import describe, write_pair, write_parts

DOCUMENTS = [[10 * number + i for i in range(number % 7)] for number in range(40)]
COUNTS = (3, 0, 20, 1, 16)  # a part may be empty, or shorter than a sample


@pytest.fixture
def both(tmp_path):
    """The joined file and its parts."""
    return (
        open_token_file(write_pair(tmp_path / "whole", DOCUMENTS)),
        open_token_file(write_parts(tmp_path / "parts", DOCUMENTS, COUNTS)),
    )


def describe_parts(prefix, counts=COUNTS):
    """A sidecar with the checksums and tokens of the parts."""
    parts = [part_prefix(prefix, number, len(counts)) for number in range(len(counts))]
    describe(
        prefix,
        fingerprint="",
        largest_token=393,
        tokens=sum(map(len, DOCUMENTS)),
        documents=len(DOCUMENTS),
        checksums={
            f"{number:05d}.{kind}": compute_checksums(part.with_name(f"{part.name}.{kind}"))
            for number, part in enumerate(parts)
            for kind in ("bin", "idx")
        },
        part_tokens=[open_token_file(part).num_tokens for part in parts],
    )


def test_parts_have_the_tokens_and_documents_of_the_joined_file(both):
    whole, parts = both

    assert isinstance(parts, TokenFileParts)
    for name in ("num_tokens", "num_sequences", "num_documents"):
        assert getattr(parts, name) == getattr(whole, name)
    assert np.asarray(parts.tokens).tolist() == whole.tokens.tolist()
    starts = whole.find_document_starts(0, 41)
    assert parts.find_document_starts(0, 41).tolist() == starts.tolist()
    for first in range(41):
        for stop in range(first, 42):
            assert parts.find_document_starts(first, stop).tolist() == starts[first:stop].tolist()
    with pytest.raises(IndexError, match="has no document 41 of 40"):
        parts.document_start(41)


def test_slices_and_positions_are_those_of_one_array():
    whole = np.arange(30, dtype="<u2")
    parts = PartedTokens(np.split(whole, [4, 4, 5, 17]))

    for start in range(-31, 32):
        for stop in range(-31, 32):
            assert np.asarray(parts[start:stop]).tolist() == whole[start:stop].tolist()
    assert np.asarray(parts[3:20][2:10][1:]).tolist() == [6, 7, 8, 9, 10, 11, 12]
    assert np.shares_memory(np.asarray(parts[6:9]), whole)
    positions = np.array([[29, 0, 4], [5, 16, 17]])
    assert parts.take(positions).tolist() == positions.tolist()


@pytest.mark.parametrize("length", [1, 8, 50, 300])
def test_windows_equal_those_of_the_joined_file(both, length):
    whole, parts = (TokenStream(file, start=5, stop=110, vocab_size=400) for file in both)
    starts = np.arange(-10, 250)

    assert (
        parts.read_windows(starts, length).tolist() == whole.read_windows(starts, length).tolist()
    )


def test_the_order_of_samples_is_bit_for_bit_the_same(both):
    def samples(file):
        stream, _ = split_documents(file, (0.9, 0.1, 0.0), text="9,1", vocab_size=400)
        return Samples([CorpusSource("a", 1.0, stream)], block_size=7, seed=3)

    numbers = np.arange(60)  # some epochs
    whole, parts = map(samples, both)

    assert whole.num_windows == parts.num_windows
    assert parts.read(numbers).tolist() == whole.read(numbers).tolist()


def test_passages_are_the_same(both):
    def found(file):
        passed = split_into_passages(TokenStream(file, start=3), 20, 100)
        return [(each.document, each.offset, each.length, each.tokens.tolist()) for each in passed]

    whole, parts = map(found, both)
    assert whole == parts


def test_the_digest_of_parts_is_that_of_the_joined_file(both, tmp_path):
    describe_parts(tmp_path / "parts")
    describe(tmp_path / "whole", fingerprint="", largest_token=395, checksums={"bin": ["1"]})
    whole, parts = (
        compute_corpus_digests(
            [CorpusSource("a", 1.0, TokenStream(file), read_sidecar(file.prefix))]
        )
        for file in both
    )

    assert not data_has_changed(whole, parts)
    assert not data_has_changed(parts, whole)
    assert data_has_changed(parts, {**parts, "places": "other"})
    assert data_has_changed(parts, {**parts, "sidecars": ["parts-other"]})


def test_parts_are_held_in_memory(both, caplog, monkeypatch):
    pinned = []
    monkeypatch.setattr("llm.data.corpus._lock_pages", lambda address, size: pinned.append(size))
    caplog.set_level("INFO")

    pin_in_memory([CorpusSource("a", 1.0, TokenStream(both[1], start=5, stop=100))])

    assert sum(pinned) == 190
    assert "parts.bin, pinned" in caplog.text


def test_a_part_cut_while_it_is_in_use_is_named(both, tmp_path):
    stream = TokenStream(both[1])
    part = tmp_path / "parts-00004-of-00005.bin"
    with part.open("r+b") as file:
        file.truncate(20)

    assert stream.read_windows(np.array([0]), 8).size == 8
    with pytest.raises(
        DataError, match=r"parts-00004-of-00005\.bin was cut while it was in use: 20"
    ):
        stream.read_windows(np.array([100]), 8)


def test_parts_are_inspected_and_verified_as_one(both, tmp_path, capsys):
    describe_parts(tmp_path / "parts")

    assert inspect([str(tmp_path / "parts"), "--documents", "2"]) == 0
    shown = capsys.readouterr().out
    assert "5 parts, parts-00000-of-00005 to parts-00004-of-00005" in shown
    assert "document 1, 1 tokens" in shown
    assert find_token_file_faults(tmp_path / "parts") == []

    part = tmp_path / "parts-00002-of-00005.bin"
    part.write_bytes(bytes([part.read_bytes()[0] ^ 1]) + part.read_bytes()[1:])
    (fault,) = find_token_file_faults(tmp_path / "parts")
    assert "parts-00002-of-00005.bin: somewhere in the bytes 0 to " in fault


def remove(name):
    return lambda folder: (folder / name).unlink()


def copy(name, other):
    return lambda folder: (folder / other).write_bytes((folder / name).read_bytes())


def of_other_dtype(folder):
    write_pair(folder / "parts-00002-of-00005", DOCUMENTS[3:23], "<i4")


def of_other_text(folder):
    describe_parts(folder / "parts")
    write_pair(folder / "parts-00002-of-00005", DOCUMENTS[4:24])


def of_another_count(folder):
    describe_parts(folder / "parts")
    for number in range(5):
        for kind in ("bin", "idx"):
            path = folder / f"parts-{number:05d}-of-00005.{kind}"
            path.rename(folder / f"parts-{number:05d}-of-00006.{kind}")
    write_pair(folder / "parts-00005-of-00006", [[1]])


def of_a_whole(folder):
    describe(folder / "parts", fingerprint="", largest_token=395)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (remove("parts-00003-of-00005.bin"), r"lacks parts-00003-of-00005\.bin of its 5 parts \(1"),
        (remove("parts-00004-of-00005.idx"), r"lacks parts-00004-of-00005\.idx of its 5 parts \(1"),
        (
            copy("parts-00000-of-00005.idx", "parts-00000-of-00009.idx"),
            "has parts of several preparations, -of-00005 and -of-00009; keep one set",
        ),
        (
            copy("parts-00000-of-00005.bin", "parts-00005-of-00005.bin"),
            r"parts-00005-of-00005\.bin has a number beyond its count; move it away\.",
        ),
        (
            copy("parts-00000-of-00005.idx", "parts.idx"),
            r"There are a whole token file \S+/parts\.idx and parts of it, \S+; move one of them",
        ),
        (of_other_dtype, r"parts-00002-of-00005\.idx holds int32, and part 0 uint16; prepare all"),
        (of_other_text, r"parts-00002-of-00005\.bin is of another preparation: it has 60 tokens"),
        (of_another_count, "describes 5 parts, not 6; restore the files that were prepared"),
        (of_a_whole, "describes a whole file, but it belongs to parts; restore the files"),
    ],
    ids=["bin", "idx", "counts", "number", "whole", "dtype", "other", "count", "sidecar"],
)
def test_parts_that_do_not_belong_together_are_refused_in_one_sentence(tmp_path, change, fault):
    write_parts(tmp_path / "parts", DOCUMENTS, COUNTS)
    change(tmp_path)

    with pytest.raises(DataError, match=fault) as error:
        open_described_files(tmp_path, describe_token_files(tmp_path / "parts"))

    assert str(error.value).endswith(".")
    assert find_token_file_faults(tmp_path / "parts") != []
