import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm.data.text_identity import is_compressed, kind_of
from llm.errors import DataError
from llm.prepare.text import blocks
from llm.prepare.text.blocks import FileChunk
from tests.support.texts import PACK, write

TEXT = b"one\n\ntwo\r\n" + "thr\u00e9e\n".encode() * 5 + b"last, without a line feed"


def unpacked(path):
    return b"".join(FileChunk(path=path).read_blocks())


def lines_of(path, *, start=0, stop=None):
    return b"".join(FileChunk(path=path, start=start, stop=stop).read_line_blocks())


def zstd_frame(content, *, window_log):
    """A frame of one block that is stored as it is, laid out by hand (RFC 8878)."""
    last_block = (len(content) << 3 | 1).to_bytes(3, "little")
    return b"\x28\xb5\x2f\xfd\x00" + bytes([window_log - 10 << 3]) + last_block + content


def test_the_file_name_gives_compression_and_kind(tmp_path):
    assert kind_of(tmp_path / "wiki.jsonl.zst") == ".jsonl"
    assert kind_of(tmp_path / "WIKI.TXT.GZ") == ".txt"
    assert kind_of(tmp_path / "wiki.csv") == ".csv"
    assert is_compressed(tmp_path / "WIKI.TXT.GZ")
    assert not is_compressed(tmp_path / "wiki.gz.csv")


@pytest.mark.parametrize("suffix", PACK)
def test_a_compressed_file_gives_the_bytes_of_the_plain_one(tmp_path, suffix):
    assert unpacked(write(tmp_path / "a.txt", TEXT)) == TEXT
    assert unpacked(write(tmp_path / f"a.txt{suffix}", PACK[suffix](TEXT))) == TEXT
    assert unpacked(write(tmp_path / f"A.TXT{suffix.upper()}", PACK[suffix](TEXT))) == TEXT


@pytest.mark.parametrize("suffix", PACK)
def test_streams_that_begin_anywhere_in_a_read_block_are_read_as_one(tmp_path, monkeypatch, suffix):
    pack = PACK[suffix]
    path = write(tmp_path / f"a{suffix}", pack(TEXT) + pack(b"") + pack(b"x") * 3)

    for size in range(1, 40):
        monkeypatch.setattr(blocks, "_COMPRESSED_READ_BYTES", size)
        assert unpacked(path) == TEXT + b"xxx"


def test_zstd_frames_without_data_are_skipped(tmp_path):
    skippable = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"note"
    path = write(tmp_path / "a.zst", skippable + PACK[".zst"](TEXT) + skippable)

    assert unpacked(path) == TEXT


@pytest.mark.parametrize("window_log", [20, 27, 28, 31])
def test_zstd_windows_may_be_as_long_as_the_format_allows(tmp_path, window_log):
    path = write(tmp_path / "a.zst", zstd_frame(TEXT, window_log=window_log))

    assert unpacked(path) == TEXT


@pytest.mark.parametrize("suffix", PACK)
def test_a_compressed_file_truncated_anywhere_is_refused(tmp_path, suffix):
    packed = PACK[suffix](TEXT)
    path = tmp_path / f"a{suffix}"

    for size in range(1, len(packed)):
        write(path, packed[:size])
        with pytest.raises(DataError, match=rf"a\{suffix} (is cut short|cannot be unpacked)"):
            unpacked(path)
    write(path, packed[:-5])
    with pytest.raises(DataError, match="is cut short: its compressed data end too early"):
        unpacked(path)


@pytest.mark.parametrize("suffix", PACK)
def test_invalid_compressed_data_are_refused(tmp_path, suffix):
    packed = PACK[suffix](TEXT)
    broken = bytearray(packed)
    broken[len(broken) // 2] ^= 0x55
    for content in (b"no such format", packed + b"and something else", packed + broken + packed):
        path = write(tmp_path / f"a{suffix}", content)
        with pytest.raises(DataError, match=rf"a\{suffix} cannot be unpacked: "):
            unpacked(path)


@pytest.mark.parametrize("suffix", PACK)
def test_zeros_after_compressed_data_are_padding(tmp_path, suffix):
    packed = PACK[suffix](TEXT)

    assert unpacked(write(tmp_path / f"a{suffix}", packed + bytes(8) + packed + bytes(4))) == (
        TEXT + TEXT
    )


@pytest.mark.parametrize("suffix", PACK)
def test_a_flipped_byte_is_detected_or_harmless(tmp_path, suffix):
    packed = PACK[suffix](TEXT)
    path = tmp_path / f"a{suffix}"
    found = 0

    for position in range(len(packed)):
        damaged = bytearray(packed)
        damaged[position] ^= 0x55
        write(path, bytes(damaged))
        try:
            assert unpacked(path) == TEXT
        except DataError:
            found += 1

    assert found > len(packed) * 0.7


def test_a_missing_file_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(DataError, match=r"none\.txt cannot be read: No such file or directory\."):
        unpacked(tmp_path / "none.txt")


def test_bytes_read_are_counted_before_decompression(tmp_path):
    packed = PACK[".gz"](TEXT * 1000)
    chunk = FileChunk(path=write(tmp_path / "a.gz", packed))
    assert chunk.consumed == 0

    assert len(b"".join(chunk.read_blocks())) == len(TEXT) * 1000

    assert chunk.consumed == len(packed)


def test_a_chunk_has_the_lines_that_begin_in_it(tmp_path):
    path = write(tmp_path / "a.txt", b"aa\nbb\ncc\n")

    assert lines_of(path, start=0, stop=3) == b"aa\n"
    assert lines_of(path, start=0, stop=4) == b"aa\nbb\n"
    assert lines_of(path, start=3, stop=6) == b"bb\n"
    assert lines_of(path, start=4, stop=6) == b""
    assert lines_of(path, start=4, stop=9) == b"cc\n"


@settings(max_examples=80, deadline=None)
@given(
    mark=st.sampled_from([b"", b"\xef\xbb\xbf"]),
    content=st.text("a\n\r\u00e9", max_size=40).map(str.encode),
    num_bytes=st.integers(1, 50),
    block=st.integers(3, 50),
)
def test_lines_of_any_chunk_and_block_sizes_join_to_the_file(
    tmp_path_factory, mark, content, num_bytes, block
):
    path = write(tmp_path_factory.getbasetemp() / "any.txt", mark + content)
    starts = range(0, len(mark + content), num_bytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "_BLOCK_BYTES", block)
        parts = [lines_of(path, start=start, stop=start + num_bytes) for start in starts]

    assert b"".join(parts) == content
    filled = [part for part in parts if part]
    assert all(part.endswith(b"\n") for part in filled[:-1])
