import os
import struct
from pathlib import Path

import pytest

from llm.data.formats.flat import FlatTokenFile, open_token_file
from llm.data.formats.megatron import TokenFile
from llm.errors import DataError
from llm.prepare.verification import find_token_file_faults
from tests.support.token_files import write_flat, write_pair


def test_a_pair_is_opened_by_its_prefix_or_by_either_file(tmp_path):
    prefix = write_pair(tmp_path / "text-v1.2", [[1, 2, 3]])

    for name in ("text-v1.2", "text-v1.2.bin", "text-v1.2.idx"):
        file = open_token_file(tmp_path / name)
        assert isinstance(file, TokenFile)
        assert (file.prefix, file.num_tokens) == (prefix, 3)


def test_a_bin_without_an_index_is_a_flat_file_of_two_byte_ids(tmp_path):
    write_flat(tmp_path / "train.v1.bin", [1, 50256, 65535])

    file = open_token_file(tmp_path / "train.v1.bin")

    assert isinstance(file, FlatTokenFile)
    assert file.prefix == tmp_path / "train.v1"
    assert file.tokens.tolist() == [1, 50256, 65535]
    assert (file.num_tokens, file.num_documents) == (3, 0)
    assert find_token_file_faults(tmp_path / "train.v1.bin") == []


def test_a_bin_without_its_index_is_read_as_flat_only_by_its_full_name(tmp_path):
    write_pair(tmp_path / "text", [[1, 2, 3]])
    (tmp_path / "text.idx").unlink()

    with pytest.raises(DataError, match=r"text\.bin has no index"):
        open_token_file(tmp_path / "text")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"123", "train.bin is 3 bytes long, which cuts a uint16 in two"),
        (struct.pack("<3I", 20240520, 1, 10), "begins with the header of llm.c"),
    ],
)
def test_a_flat_file_of_another_kind_is_refused(tmp_path, content, message):
    (tmp_path / "train.bin").write_bytes(content)

    with pytest.raises(DataError, match=message):
        open_token_file(tmp_path / "train.bin")


def test_a_missing_file_is_named_with_the_five_closest_names(tmp_path):
    for name in ("wiki_a", "wiki_b", "wiki_c", "wiki_d", "wiki_text_document", "zzz"):
        write_pair(tmp_path / name, [[1, 2, 3]])

    with pytest.raises(DataError, match=r"looked for .*wiki_text.bin and .*wiki_text.idx") as error:
        open_token_file(tmp_path / "wiki_text")

    near = str(error.value).partition("near it there are ")[2]
    assert near.startswith(str(tmp_path / "wiki_text_document"))
    assert near.count(str(tmp_path)) == 5
    assert "zzz" not in near


@pytest.mark.parametrize("path", ["none/text", "text.idx", "text.bin", ".", "/", "a\0b", "x" * 999])
def test_an_impossible_file_name_is_refused_in_one_sentence(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(DataError, match=r"There is no token file .*\.$"):
        open_token_file(Path(path))


def test_a_pipe_or_a_folder_in_place_of_a_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "text.idx")
    (tmp_path / "more.bin").mkdir()

    for name in ("text", "more.bin"):
        with pytest.raises(DataError, match="is not a regular file"):
            open_token_file(tmp_path / name)
