import dataclasses
import json
import logging
import os

import numpy as np
import pytest
import xxhash

from llm.data.formats.sidecar import (
    Sidecar,
    check_prepend_bos,
    check_tokenizer,
    read_sidecar,
    write_sidecar,
)
from llm.errors import DataError
from llm.prepare.verification import compute_checksums, find_token_file_faults
from tests.support.token_files import TokenFileWriter, write_flat, write_pair

MIB = 2**20
DOCUMENTS = [[1, 2, 0], [3, 0]]


def sidecar_of(prefix, **changes):
    kinds = [kind for kind in ("bin", "idx") if prefix.with_suffix(f".{kind}").exists()]
    stats = {
        "tokenizer": "gpt2",
        "tokenizer_fingerprint": "0123456789abcdef",
        "vocab_size": 10,
        "eos_token_id": 0,
        "append_eos": True,
        "dtype": "uint16",
        "documents": 2,
        "tokens": 5,
        "text_bytes": 12,
        "empty_documents": 1,
        "skipped_documents": 0,
        "largest_token": 3,
        "sources": ["text/\u00e9.jsonl"],
        "plan": "0",
        "checksums": {kind: compute_checksums(prefix.with_suffix(f".{kind}")) for kind in kinds},
    }
    return Sidecar(**{**stats, **changes})


@pytest.fixture
def prefix(tmp_path):
    """A pair with its sidecar."""
    write_pair(tmp_path / "text", DOCUMENTS)
    write_sidecar(tmp_path / "text", sidecar_of(tmp_path / "text"))
    return tmp_path / "text"


def test_a_new_sidecar_of_the_same_size_and_time_is_read_anew(prefix):
    sidecar = sidecar_of(prefix)
    status = (prefix.parent / "text.json").stat()
    assert read_sidecar(prefix) == sidecar

    write_sidecar(prefix, dataclasses.replace(sidecar, plan="1"))
    os.utime(prefix.parent / "text.json", ns=(status.st_atime_ns, status.st_mtime_ns))

    assert read_sidecar(prefix).plan == "1"


def test_written_files_read_back_the_same(prefix):
    assert read_sidecar(prefix) == sidecar_of(prefix)
    without_end = sidecar_of(prefix, eos_token_id=None, append_eos=False)
    write_sidecar(prefix.parent / "other", without_end)
    assert read_sidecar(prefix.parent / "other") == without_end
    (prefix.parent / "other.json").unlink()
    content = json.loads((prefix.parent / "text.json").read_text())
    assert content["format"] == 1
    assert content["sources"] == ["text/\u00e9.jsonl"]
    assert sorted(path.name for path in prefix.parent.iterdir()) == [
        "text.bin",
        "text.idx",
        "text.json",
    ]


def test_files_made_elsewhere_have_no_sidecar(tmp_path):
    assert read_sidecar(write_pair(tmp_path / "text", DOCUMENTS)) is None


def test_a_failed_write_leaves_the_old_sidecar_and_nothing_else(prefix, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DataError, match=r"text\.json cannot be written: No space left on device"):
        write_sidecar(prefix, sidecar_of(prefix, tokens=7))

    assert read_sidecar(prefix).tokens == 5
    assert len(list(prefix.parent.iterdir())) == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is not JSON"),
        (b"\xff\xfe\x00", "it is not JSON"),
        (b"[" * 100_000, "it is not JSON"),
        (b'{"format": ' + b"9" * 5000 + b"}", "it is not JSON"),
        (b"[1]", "it is not a JSON object"),
        (b'{"text": "a document"}', "it lacks the key 'tokenizer'"),
        (b'{"format": 2}', "has the format 2, of a newer version of this package"),
    ],
)
def test_a_file_of_the_sidecars_name_with_other_content_is_refused(prefix, content, message):
    (prefix.parent / "text.json").write_bytes(content)

    with pytest.raises(DataError, match=rf"text\.json .*{message}"):
        read_sidecar(prefix)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("format", 0),
        ("format", "1"),
        ("tokenizer", 5),
        ("vocab_size", 3.5),
        ("vocab_size", True),
        ("tokens", -1),
        ("largest_token", -2),
        ("eos_token_id", "0"),
        ("append_eos", 1),
        ("sources", "a.txt"),
        ("sources", [1]),
        ("checksums", []),
        ("checksums", {"bin": "abc"}),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_name(prefix, name, value):
    content = dataclasses.asdict(sidecar_of(prefix)) | {name: value}
    (prefix.parent / "text.json").write_text(json.dumps(content))

    with pytest.raises(DataError, match=name):
        read_sidecar(prefix)


def test_a_missing_key_is_refused_by_name(prefix):
    for name in dataclasses.asdict(sidecar_of(prefix)).keys() - {"part_tokens", "prepend_bos"}:
        content = dataclasses.asdict(sidecar_of(prefix))
        del content[name]
        (prefix.parent / "text.json").write_text(json.dumps(content))
        with pytest.raises(DataError, match=f"lacks the key '{name}'"):
            read_sidecar(prefix)


@pytest.mark.parametrize("size", [0, 64 * MIB, 64 * MIB + 1])
def test_there_is_a_checksum_for_every_64_mib(tmp_path, size):
    with open(tmp_path / "file", "wb") as file:
        file.write(b"x"[:size])
        file.truncate(size)
    content = (tmp_path / "file").read_bytes()

    assert compute_checksums(tmp_path / "file") == [
        xxhash.xxh3_128_hexdigest(content[start : start + 64 * MIB])
        for start in range(0, size, 64 * MIB)
    ]


def test_sound_files_have_no_faults(prefix, tmp_path):
    assert find_token_file_faults(prefix) == []
    assert find_token_file_faults(tmp_path / "text.bin") == []
    assert find_token_file_faults(write_pair(tmp_path / "foreign", DOCUMENTS, "<i4")) == []


def test_every_changed_bit_is_detected_and_located(prefix, monkeypatch):
    monkeypatch.setattr("llm.prepare.verification.CHUNK_BYTES", 16)
    write_sidecar(prefix, sidecar_of(prefix))
    for kind in ("bin", "idx"):
        path = prefix.with_suffix(f".{kind}")
        sound = path.read_bytes()
        for bit in range(len(sound) * 8):
            damaged = bytearray(sound)
            damaged[bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            start = bit // 8 // 16 * 16
            stop = min(start + 16, len(sound)) - 1
            assert find_token_file_faults(prefix)[0] == (
                f"{path}: somewhere in the bytes {start} to {stop} it has changed since it was "
                "written."
            )
        path.write_bytes(sound)


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda data: data[:-2], "in the bytes 0 to 7 it has changed since it was written"),
        (lambda data: b"", "text.bin ends after 0 bytes; it was longer when it was written"),
        (lambda data: data + b"12", "in the bytes 0 to 11 it has changed since it was written"),
    ],
)
def test_a_wrong_length_is_reported_even_if_the_file_cannot_be_opened(prefix, damage, fault):
    path = prefix.parent / "text.bin"
    path.write_bytes(damage(path.read_bytes()))

    faults = find_token_file_faults(prefix)

    assert fault in faults[0]
    assert "bytes long, not 10 as" in faults[1]


def test_a_damaged_sidecar_is_reported_along_with_the_faults_of_the_files(prefix):
    (prefix.parent / "text.json").write_text("{")
    (prefix.parent / "text.bin").write_bytes(bytes(3))

    faults = find_token_file_faults(prefix)

    assert ["text.json" in faults[0], "text.bin is 3 bytes" in faults[1]] == [True, True]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"tokens": 6}, "says tokens 6, but it is 5."),
        ({"documents": 1}, "says documents 1, but it is 2."),
        ({"dtype": "int32"}, "says dtype int32, but it is uint16."),
        ({"largest_token": 4}, "says largest_token 4, but it is 3."),
        ({"vocab_size": 3}, "has ids up to 3, which a vocabulary of 3 does not reach."),
        ({"checksums": {}}, "text.json has no checksums of"),
    ],
)
def test_numbers_that_disagree_with_the_files_are_faults(prefix, changes, fault):
    write_sidecar(prefix, sidecar_of(prefix, **changes))

    assert fault in find_token_file_faults(prefix)[0]


def test_a_pair_without_its_index_is_not_read_as_a_flat_file(prefix):
    (prefix.parent / "text.idx").unlink()

    assert "text.idx cannot be read" in find_token_file_faults(prefix.parent / "text.bin")[0]


def test_a_flat_file_is_verified_as_well(tmp_path):
    write_flat(tmp_path / "train.bin", [1, 2, 3, 4, 0])
    path = tmp_path / "train"
    write_sidecar(path, sidecar_of(path, largest_token=4, documents=1))
    assert find_token_file_faults(tmp_path / "train.bin") == []

    write_flat(tmp_path / "train.bin", [1, 2, 3, 5, 0])
    assert len(find_token_file_faults(tmp_path / "train.bin")) == 2


def test_files_without_tokens_are_reported_as_faulty(tmp_path):
    with TokenFileWriter(tmp_path / "text", np.dtype("<u2")) as writer:
        writer.end_document()
    (tmp_path / "train.bin").touch()

    for name in ("text", "train"):
        path = tmp_path / (name if name == "text" else "train.bin")
        assert find_token_file_faults(path) == [
            f"{tmp_path}/{name}.bin is empty: it contains no tokens."
        ]


def test_verifying_missing_files_is_refused(tmp_path):
    with pytest.raises(DataError, match="There is no token file"):
        find_token_file_faults(tmp_path / "text")


@pytest.mark.parametrize(
    ("prepared", "remedy"),
    [
        (True, "with --prepend_bos; pass --prepend_bos"),
        (False, "without --prepend_bos; leave --prepend_bos out"),
    ],
)
def test_a_file_with_other_beginnings_is_refused(prefix, prepared, remedy):
    sidecar = sidecar_of(prefix, prepend_bos=prepared)

    check_prepend_bos(prefix, sidecar, prepared)
    with pytest.raises(DataError, match=f"was made {remedy}, or prepare it again"):
        check_prepend_bos(prefix, sidecar, not prepared)


def test_a_file_of_another_tokenizer_is_refused_unless_ignored(prefix, caplog):
    sidecar = sidecar_of(prefix)

    check_tokenizer(prefix, sidecar, "0123456789abcdef", ignore_mismatch=False)
    assert caplog.messages == []
    with pytest.raises(
        DataError,
        match=r"tokenizer gpt2 .*; train with that one, or pass --ignore_tokenizer_mismatch",
    ):
        check_tokenizer(prefix, sidecar, "another", ignore_mismatch=False)
    with caplog.at_level(logging.WARNING, "llm.data"):
        check_tokenizer(prefix, sidecar, "another", ignore_mismatch=True)
    assert "not with the one of this run (fingerprint another)" in caplog.text
