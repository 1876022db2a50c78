"""Digests of the training tokens: a resume compares them to notice changed data."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from llm.data.corpus import CorpusSource
from llm.data.formats.megatron import set_read_ahead
from llm.data.formats.parts import Tokens, arrays_of
from llm.data.formats.sidecar import read_sidecar

_END_TOKENS = 1 << 16
_PARTS = "parts-"
_PLACES, _PLACE_TOKENS = 64, 1 << 10


def digest_of(sources: Sequence[CorpusSource]) -> dict[str, Any]:
    """Return digests of a split; reads only parts of its token files.

    Returns:
        JSON values: `ends`, a digest of the sizes and the tokens at both ends of each source;
            `places`, a digest of the tokens at 64 places of each; `sidecars`, for each source the
            digest of the checksums in its sidecar, or None without a sidecar. The first two are
            equal for parts and for their joined file.

    Raises:
        DataError: A sidecar is damaged.
    """
    ends, places = xxhash.xxh3_128(), xxhash.xxh3_128()
    for source in sources:
        tokens = source.stream.tokens
        ends.update(str(source.stream.num_tokens).encode())
        for end in (tokens[:_END_TOKENS], tokens[-_END_TOKENS:]):
            ends.update(np.ascontiguousarray(end).tobytes())
        places.update(_read_places(tokens))
    return {
        "ends": ends.hexdigest(),
        "places": places.hexdigest(),
        "sidecars": [_sidecar_digest(source) for source in sources],
    }


def _read_places(tokens: Tokens) -> bytes:
    """Return the bytes of a stream at equally spaced places."""
    last_start = max(0, tokens.size - _PLACE_TOKENS)
    starts = [last_start * number // (_PLACES - 1) for number in range(_PLACES)]
    for array in arrays_of(tokens):
        set_read_ahead(array, on=False)
    places = [np.asarray(tokens[start : start + _PLACE_TOKENS]).tobytes() for start in starts]
    for array in arrays_of(tokens):
        set_read_ahead(array, on=True)
    return b"".join(places)


def _sidecar_digest(source: CorpusSource) -> str | None:
    sidecar = read_sidecar(source.stream.file.prefix)
    if sidecar is None:
        return None
    text = json.dumps(sidecar.checksums, sort_keys=True)
    digest = str(xxhash.xxh3_128_hexdigest(text.encode()))
    return f"{_PARTS}{digest}" if sidecar.part_tokens else digest


def _is_digest(record: dict[str, Any]) -> bool:
    """Return whether a record has the fields of `digest_of`, with their types."""
    digests = (record.get("ends"), record.get("places"))
    sidecars = record.get("sidecars")
    return (
        all(isinstance(digest, str) for digest in digests)
        and isinstance(sidecars, list)
        and all(isinstance(digest, str | None) for digest in sidecars)
    )


def has_changed(saved: dict[str, Any], digest: dict[str, Any]) -> bool:
    """Return whether the data have changed since a checkpoint or a start recorded them.

    Args:
        saved: Recorded result of `digest_of`.
        digest: Present result of `digest_of`.
    """
    if not _is_digest(saved):
        return True
    # A sidecar that was added or removed says nothing about the tokens, nor do parts that were
    # joined: they have other checksums.
    pairs = zip(saved["sidecars"], digest["sidecars"], strict=False)
    sidecars_differ = any(
        saved_sidecar != sidecar
        for saved_sidecar, sidecar in pairs
        if None not in (saved_sidecar, sidecar)
        and saved_sidecar.startswith(_PARTS) == sidecar.startswith(_PARTS)
    )
    return sidecars_differ or any(saved[name] != digest[name] for name in ("ends", "places"))
