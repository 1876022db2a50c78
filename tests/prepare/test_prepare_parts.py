"""`--parts` leaves the shards as numbered parts, which open as the joined file."""

import os

import numpy as np
import pytest

from llm.data.formats.flat import open_token_file
from llm.data.formats.megatron import TokenFile
from llm.data.formats.sidecar import read_sidecar
from llm.errors import DataError
from llm.prepare import prepare_files
from llm.prepare.prepare import main
from llm.prepare.shares import Share
from llm.prepare.verification import find_token_file_faults
from tests.support.texts import THREE, ListSource, ReadSource, content, names, prepare

PARTS = [f"wiki-{number:05d}-of-00003.{kind}" for number in range(3) for kind in ("bin", "idx")]

pytestmark = pytest.mark.usefixtures("fresh_reads")


def sources():
    """Four shards: one has no text, and one is a single document."""
    return [
        ReadSource(["a", "bc"], name="0"),
        ReadSource(["", ""], name="1"),
        ReadSource(["d", "e"], name="2"),
        ReadSource(["f"], name="3"),
    ]


def prepare_on(ranks, prefix, **options):
    for rank in range(ranks):
        prepare(prefix, sources(), share=Share(rank=rank, world_size=ranks), **options)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_parts_are_the_same_for_any_number_of_ranks(tmp_path, ranks):
    prepare(tmp_path / "whole" / "wiki", sources())
    prepare_on(1, tmp_path / "alone" / "wiki", parts=True)

    prepare_on(ranks, tmp_path / "ranks" / "wiki", parts=True)

    assert names(tmp_path / "ranks") == [*PARTS, "wiki.json"]
    assert content(tmp_path / "ranks") == content(tmp_path / "alone")
    assert find_token_file_faults(tmp_path / "ranks" / "wiki") == []
    whole = TokenFile(tmp_path / "whole" / "wiki")
    parts = open_token_file(tmp_path / "ranks" / "wiki")
    assert np.asarray(parts.tokens).tolist() == whole.tokens.tolist()
    assert parts.find_document_starts(0, 6).tolist() == whole.find_document_starts(0, 6).tolist()
    one, three = (read_sidecar(tmp_path / name / "wiki") for name in ("whole", "ranks"))
    assert three.part_tokens == [5, 4, 2]
    for name in ("documents", "tokens", "text_bytes", "largest_token", "empty_documents", "plan"):
        assert getattr(one, name) == getattr(three, name)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_command_without_parts_joins_them_without_reading_text(tmp_path, ranks):
    prepare(tmp_path / "whole" / "wiki", sources())
    prepare_on(ranks, tmp_path / "made" / "wiki", parts=True)
    ReadSource.reads.clear()

    prepare_on(ranks, tmp_path / "made" / "wiki")

    assert ReadSource.reads == []
    assert names(tmp_path / "made") == THREE
    assert content(tmp_path / "made") == content(tmp_path / "whole")


@pytest.mark.parametrize("parts", [True, False])
def test_a_finished_output_of_either_form_is_kept(tmp_path, parts):
    prepare(tmp_path / "wiki", sources(), parts=parts)
    before = content(tmp_path)

    prepare(tmp_path / "wiki", sources(), parts=True)

    assert content(tmp_path) == before
    assert len(ReadSource.reads) == 4


def test_parts_of_another_text_are_replaced_only_if_you_ask(tmp_path):
    prepare(tmp_path / "wiki", sources(), parts=True)
    other = [ListSource(["x"]), ListSource(["y"])]
    for parts in (True, False):
        with pytest.raises(DataError, match=r"wiki\.json exists already; choose another"):
            prepare(tmp_path / "wiki", other, parts=parts)

    prepare(tmp_path / "wiki", other, parts=True, overwrite=True)
    assert [name for name in names(tmp_path) if name.endswith("bin")] == [
        "wiki-00000-of-00002.bin",
        "wiki-00001-of-00002.bin",
    ]
    prepare(tmp_path / "wiki", other, overwrite=True)
    assert names(tmp_path) == THREE


@pytest.mark.parametrize("links", [True, False])
def test_a_kill_between_two_names_loses_nothing(tmp_path, monkeypatch, links):
    prepare(tmp_path / "expected" / "wiki", sources(), parts=True)

    class KilledError(BaseException):
        pass

    link, calls = os.link, []

    def die(source, target):
        calls.append(target)
        if len(calls) == 4:
            raise KilledError
        if not links:
            raise OSError(95, "Operation not supported")
        link(source, target)

    with monkeypatch.context() as patch:
        patch.setattr("llm.prepare.output_files.os.link", die)
        with pytest.raises(KilledError):
            prepare(tmp_path / "made" / "wiki", sources(), parts=True)
    with pytest.raises(DataError, match=r"lacks wiki-0000\d-of-00003\.\w+ of its 3 parts"):
        open_token_file(tmp_path / "made" / "wiki")
    ReadSource.reads.clear()

    prepare(tmp_path / "made" / "wiki", sources(), parts=True)

    assert ReadSource.reads == ([] if links else ["0", "2"])
    assert content(tmp_path / "made") == content(tmp_path / "expected")


def test_a_larger_text_has_larger_shards_and_too_many_parts_are_refused(tmp_path, monkeypatch):
    sizes = []

    class Splitting(ListSource):
        num_bytes = 1000

        def split(self, num_bytes):
            sizes.append(num_bytes)
            return [ListSource([f"{number}"]) for number in range(4)]

    monkeypatch.setattr(prepare_files, "SHARD_BYTES", 10)
    monkeypatch.setattr(prepare_files, "_MAX_SHARDS", 30)
    prepare(tmp_path / "wiki", [Splitting([])])
    assert sizes == [40]

    monkeypatch.setattr(prepare_files, "_MAX_PARTS", 3)
    with pytest.raises(DataError, match="--parts would leave 4 parts, and a run can open 3; join"):
        prepare(tmp_path / "web", [Splitting([])], parts=True)


def test_parts_go_with_neither_nanogpt_nor_shuffling(capsys):
    words = ["--input", "a.jsonl", "--tokenizer_name", "t", "--output_prefix", "o", "--parts"]

    for more in (["--format", "nanogpt"], ["--shuffle", "documents"]):
        assert main([*words, *more]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "--parts goes with --format megatron and --shuffle none only." in line
