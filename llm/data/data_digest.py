"""Digests of the training tokens: a resume compares them to notice changed data."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from llm.data.corpus import CorpusSource
from llm.data.formats.megatron import set_read_ahead
from llm.data.formats.parts import Tokens, arrays_of

_NUM_BOUNDARY_TOKENS = 1 << 16
"""Tokens that are read at each end of a source."""
_PARTS_PREFIX = "parts-"
"""Marks the digest of a sidecar that describes numbered parts."""
_NUM_SAMPLED_POSITIONS, _TOKENS_PER_POSITION = 64, 1 << 10


def compute_corpus_digests(sources: Sequence[CorpusSource]) -> dict[str, Any]:
    """Return digests that identify the tokens of a split; only small ranges are read.

    Args:
        sources: The sources of the split, in the order of the blend.

    Returns:
        JSON values: `ends`, a digest of the number of tokens and of the first and last 65,536
            tokens of each source; `places`, a digest of 1,024 tokens at each of 64 positions of
            each source; `sidecars`, for each source the digest of the checksums in its sidecar, or
            None without a sidecar. The first two are equal for parts and for their joined file.
    """
    boundary_digest, sampled_digest = xxhash.xxh3_128(), xxhash.xxh3_128()
    for source in sources:
        tokens = source.stream.tokens
        boundary_digest.update(str(source.stream.num_tokens).encode())
        for boundary_tokens in (tokens[:_NUM_BOUNDARY_TOKENS], tokens[-_NUM_BOUNDARY_TOKENS:]):
            boundary_digest.update(np.ascontiguousarray(boundary_tokens).tobytes())
        sampled_digest.update(_read_sampled_tokens(tokens))
    return {
        "ends": boundary_digest.hexdigest(),
        "places": sampled_digest.hexdigest(),
        "sidecars": [_sidecar_digest(source) for source in sources],
    }


def _read_sampled_tokens(tokens: Tokens) -> bytes:
    """Return the bytes of 1,024 tokens at each of 64 equally spaced positions of a stream."""
    last_start = max(0, tokens.size - _TOKENS_PER_POSITION)
    start_positions = [
        last_start * sample_index // (_NUM_SAMPLED_POSITIONS - 1)
        for sample_index in range(_NUM_SAMPLED_POSITIONS)
    ]
    for array in arrays_of(tokens):
        set_read_ahead(array, on=False)
    sampled_bytes = [
        np.asarray(tokens[start : start + _TOKENS_PER_POSITION]).tobytes()
        for start in start_positions
    ]
    for array in arrays_of(tokens):
        set_read_ahead(array, on=True)
    return b"".join(sampled_bytes)


def _sidecar_digest(source: CorpusSource) -> str | None:
    """Return a digest of the checksums in a source's sidecar; None without a sidecar."""
    if source.sidecar is None:
        return None
    text = json.dumps(source.sidecar.checksums, sort_keys=True)
    digest = str(xxhash.xxh3_128_hexdigest(text.encode()))
    return f"{_PARTS_PREFIX}{digest}" if source.sidecar.part_tokens else digest


def _is_complete_record(record: dict[str, Any]) -> bool:
    """Return whether a record has the keys of corpus digests, with values of their types."""
    if not (isinstance(record.get("ends"), str) and isinstance(record.get("places"), str)):
        return False
    sidecar_digests = record.get("sidecars")
    if not isinstance(sidecar_digests, list):
        return False
    return all(isinstance(digest, str | None) for digest in sidecar_digests)


def data_has_changed(recorded_digests: dict[str, Any], present_digests: dict[str, Any]) -> bool:
    """Return whether the data have changed since a checkpoint or a start recorded their digests.

    Args:
        recorded_digests: The digests in the checkpoint or in the record of the start.
        present_digests: The digests of the data on the disk, from `compute_corpus_digests`.
    """
    if not _is_complete_record(recorded_digests):
        return True
    sidecar_pairs = zip(recorded_digests["sidecars"], present_digests["sidecars"], strict=False)
    sidecars_differ = any(
        recorded_digest != present_digest
        for recorded_digest, present_digest in sidecar_pairs
        if _are_comparable(recorded_digest, present_digest)
    )
    return sidecars_differ or any(
        recorded_digests[name] != present_digests[name] for name in ("ends", "places")
    )


def _are_comparable(first_digest: str | None, second_digest: str | None) -> bool:
    """Return whether different digests of two sidecars mean different tokens.

    A sidecar that was added or removed says nothing about the tokens, nor do parts that were
    joined: they have other checksums.
    """
    if first_digest is None or second_digest is None:
        return False
    return first_digest.startswith(_PARTS_PREFIX) == second_digest.startswith(_PARTS_PREFIX)
