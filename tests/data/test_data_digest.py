"""A change of the training tokens is noticed, and nothing else is."""

import json

import numpy as np
import pytest

from llm.data.corpus import CorpusSource, TokenStream
from llm.data.data_digest import compute_corpus_digests, data_has_changed
from llm.data.formats.flat import FlatTokenFile
from llm.data.formats.sidecar import read_sidecar
from llm.prepare.verification import compute_checksums
from tests.support.token_files import describe, write_flat

NUM_TOKENS = 400_000  # three times as many as the two ends that are read whole


def tokens() -> np.ndarray:
    return np.arange(NUM_TOKENS) ** 2 % 50_021


def swapped() -> np.ndarray:
    """The same tokens, of which two pieces between the ends have changed places."""
    first, one, two, last = np.split(tokens(), [100_000, 200_000, 300_000])
    return np.concatenate([first, two, one, last])


def one_changed() -> np.ndarray:
    """The same tokens but for one, between the 64 places that are read."""
    changed = tokens()
    changed[70_000] += 1
    return changed


def digest(folder, ids, *, sidecar: bool = False, start: int = 0):
    path = write_flat(folder / "text.bin", ids)
    path.with_suffix(".json").unlink(missing_ok=True)
    if sidecar:
        describe(
            folder / "text",
            fingerprint="",
            largest_token=1,
            checksums={"bin": compute_checksums(path)},
        )
    stream = TokenStream(FlatTokenFile(path), start=start)
    found = compute_corpus_digests(
        [CorpusSource("text", 1.0, stream, read_sidecar(folder / "text"))]
    )
    return json.loads(json.dumps(found))  # as a checkpoint has it


@pytest.mark.parametrize("sidecar", [True, False], ids=["sidecar", "no sidecar"])
def test_the_same_tokens_have_not_changed(tmp_path, sidecar):
    before = digest(tmp_path, tokens(), sidecar=sidecar)

    assert not data_has_changed(before, digest(tmp_path, tokens(), sidecar=sidecar))


@pytest.mark.parametrize("sidecar", [True, False], ids=["sidecar", "no sidecar"])
def test_pieces_in_another_order_between_equal_ends_are_a_change(tmp_path, sidecar):
    before = digest(tmp_path, tokens(), sidecar=sidecar)

    assert data_has_changed(before, digest(tmp_path, swapped(), sidecar=sidecar))


def test_with_a_sidecar_every_changed_token_is_noticed(tmp_path):
    before = digest(tmp_path, tokens(), sidecar=True)

    assert data_has_changed(before, digest(tmp_path, one_changed(), sidecar=True))


@pytest.mark.parametrize("sidecar", [True, False], ids=["removed", "added"])
def test_a_sidecar_that_is_removed_or_added_is_not_a_change(tmp_path, sidecar):
    before = digest(tmp_path, tokens(), sidecar=sidecar)

    assert not data_has_changed(before, digest(tmp_path, tokens(), sidecar=not sidecar))


def test_another_split_of_the_same_file_is_a_change(tmp_path):
    before = digest(tmp_path, tokens(), sidecar=True)

    assert data_has_changed(before, digest(tmp_path, tokens(), sidecar=True, start=1))
