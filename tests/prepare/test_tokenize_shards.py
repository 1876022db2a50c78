import multiprocessing

import numpy as np
import pytest

from llm.errors import DataError
from llm.prepare.encoder import Encoding, WrongIdsError, make_encoder
from llm.prepare.shards import read_array
from llm.prepare.tokenize_shards import tokenize_shards
from tests.support.texts import FailingSource, ListSource, byte_tokenizer, ids

UINT16 = np.dtype("<u2")
SPAWN = multiprocessing.get_context("spawn")


def encoding(**changes):
    return Encoding(**{"tokenizer": byte_tokenizer(), "end_token": 0, "dtype": UINT16, **changes})


def tokens_of(sources, folder, *, workers=1, **options):
    folder.mkdir(exist_ok=True)
    stems, stats = tokenize_shards(sources, folder, encoding=encoding(), workers=workers, **options)
    assert [stem.name for stem in stems] == [f"{number:06d}" for number in range(len(sources))]
    assert len(stats) == len(sources)
    return [read_array(stem, ".bin", UINT16).tolist() for stem in stems]


class WrongLater:
    """An encoder that is found out at a certain text."""

    def __init__(self, real, text):
        self._real = real
        self._text = text

    def encode(self, texts, **how):
        if self._text in texts:
            raise WrongIdsError("the fast one gives other ids for 'c'")
        ids, counts = self._real.encode(texts, **how)
        return np.where(ids == 0, 0, 7).astype(UINT16), counts  # wrong, and not yet noticed


@pytest.fixture
def wrong_encoder(monkeypatch):
    made = []

    def make(*args, allow_fast=True, **options):
        made.append(allow_fast)
        reference = make_encoder(*args, **options)
        return WrongLater(reference, "c") if allow_fast else reference

    monkeypatch.setattr("llm.prepare.tokenize_shards.make_encoder", make)
    return made


@pytest.mark.parametrize("workers", [1, 2])
def test_a_wrong_encoder_is_replaced_and_finished_shards_are_rewritten(
    tmp_path, wrong_encoder, caplog, workers
):
    sources = [ListSource([name]) for name in "abcd"]

    found = tokens_of(sources, tmp_path / "parts", workers=workers)

    assert found == [[*ids(name), 0] for name in "abcd"]
    assert "gives other ids for 'c'; encoding everything again with the tokenizers" in caplog.text
    assert wrong_encoder == [True, False]


def test_a_wrong_encoder_is_remembered_after_a_restart(tmp_path, wrong_encoder):
    parts = tmp_path / "parts"
    with pytest.raises(DataError):
        tokens_of([ListSource(["a"]), ListSource(["c"]), FailingSource(["fine"])], parts)

    found = tokens_of([ListSource(["a"]), ListSource(["c"]), ListSource(["d"])], parts)

    assert found == [[*ids(name), 0] for name in "acd"]
    assert wrong_encoder == [True, False, False]


@pytest.mark.parametrize("workers", [1, 2])
def test_progress_adds_up_over_all_shards(tmp_path, workers):
    sources = [ListSource(["ab", "c"]), ListSource(["de"]), ListSource([""])]
    for source in sources:
        source.num_bytes = 100
    told = []
    tokens_of(sources[:1], tmp_path / "parts")

    tokens_of(sources, tmp_path / "parts", workers=workers, on_progress=told.append)

    last = told[-1]
    assert (last.texts, last.tokens, last.text_bytes) == (1, 3, 2)  # what an earlier try did is not
    assert (last.consumed, last.num_bytes) == (200, 200)
    assert (last.shards_done, last.num_shards) == (3, 3)
    done = [totals.shards_done for totals in told]
    assert done == sorted(done)


def test_a_source_of_unknown_size_makes_the_total_size_unknown(tmp_path):
    known = ListSource(["a"])
    known.num_bytes = 100
    told = []

    tokens_of([known, ListSource(["b"])], tmp_path / "parts", on_progress=told.append)

    assert {totals.num_bytes for totals in told} == {None}
