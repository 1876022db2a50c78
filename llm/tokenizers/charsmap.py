"""SentencePiece's rules for characters, as normalizers of the `tokenizers` library.

A rule replaces one character, or several: a letter and its marks, or the parts of a Korean
syllable. SentencePiece applies the longest rule at each place of a text. The library's
`Precompiled` does so for one character at a time only, and not if marks follow it. So single
characters are replaced alone, and then composed by NFC. Two characters that no rule joins are kept
apart meanwhile.
"""

import itertools
import struct
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers.normalizers import Normalizer

_NO_COMPOSITION, _ALONE = "\ufff0", "\ufff1"
"""Characters that Unicode leaves unassigned; nothing composes with them."""
_MOST_VISITS = 1 << 22
"""Ten times what the largest rules of SentencePiece need; a damaged file could be a circle."""
_EXTENDING = r"\p{M}\x{200c}\x{200d}\x{1f3fb}-\x{1f3ff}"
"""Characters that `Precompiled` would read together with the one in front."""


def charsmap_normalizers(charsmap: bytes) -> "list[Normalizer]":
    """Return normalizers that change a text as SentencePiece's rules do.

    Args:
        charsmap: The field `precompiled_charsmap` of a model.
    """
    from tokenizers import Regex, normalizers

    rules = _read_rules(charsmap)
    joined: defaultdict[str, set[str]] = defaultdict(set)  # second character: first ones
    for source in rules:
        for first, second in itertools.pairwise(source):
            joined[second].add(first)
    joining = {*joined, *_find_combining(rules, joined)}
    class_of_joining = f"[{_class_ranges(joining)}\\p{{M}}]"
    by_firsts: defaultdict[frozenset[str], set[str]] = defaultdict(set)
    for second, firsts in joined.items():
        by_firsts[frozenset(firsts)].add(second)
    pairs = "|".join(
        f"(?<=[{_class_ranges(firsts)}])(?=[{_class_ranges(seconds)}])"
        for firsts, seconds in by_firsts.items()
    )
    unless_joined = f"(?!{pairs})" if pairs else ""
    # Not at the beginning of a text, where the library cannot insert an empty match.
    after_any = r"(?<=[\s\S])"
    apart = f"{after_any}(?={class_of_joining}){unless_joined}"
    alone = rf"{after_any}(?=[{_class_ranges(joining)}{_EXTENDING}])|(?<=\r)(?=\n)"
    return [
        normalizers.Replace(Regex(apart), _NO_COMPOSITION),
        normalizers.Replace(Regex(alone), _ALONE),
        normalizers.Precompiled(charsmap),
        normalizers.Replace(_ALONE, ""),
        normalizers.NFC(),
        normalizers.Replace(_NO_COMPOSITION, ""),
    ]


def _read_rules(charsmap: bytes) -> dict[str, str]:
    """Return what each sequence of characters becomes.

    The bytes are a Darts-clone double array, a trie of the sequences in UTF-8, and the replacements
    as strings that end with a zero byte.
    """
    (size,) = struct.unpack_from("<I", charsmap)
    units = struct.unpack_from(f"<{size // 4}I", charsmap, 4)
    replacements = charsmap[4 + size :]
    children: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)  # by their common base
    for child, unit in enumerate(units):
        label = unit & 0x800000FF
        if 0 < label < 256:
            children[child ^ label].append((child, label))
    rules: dict[str, str] = {}
    nodes = [(0, b"")]
    visits = itertools.count()
    while nodes:
        if next(visits) == _MOST_VISITS:
            raise ValueError("its normalization rules are not a trie")
        node, path = nodes.pop()
        for child, label in children[node ^ _child_offset(units[node])]:
            unit, source = units[child], path + bytes([label])
            if unit >> 8 & 1:  # a sequence ends here
                start = units[child ^ _child_offset(unit)] & 0x7FFFFFFF
                end = replacements.index(b"\0", start)
                rules[source.decode()] = replacements[start:end].decode()
            nodes.append((child, source))
    return rules


def _child_offset(unit: int) -> int:
    return unit >> 10 << ((unit & 0x200) >> 6)


def _find_combining(rules: Mapping[str, str], joined: Iterable[str]) -> set[str]:
    """Return characters with a replacement that could compose with the one in front."""
    seconds = set(joined)
    return {
        source
        for source, target in rules.items()
        if len(source) == 1
        and target
        and (target[0] in seconds or unicodedata.category(target[0]).startswith("M"))
    }


def _class_ranges(characters: Iterable[str]) -> str:
    """Return the inside of a regular expression's character class."""
    ranges: list[list[int]] = []
    for code in sorted(map(ord, characters)):
        if ranges and code == ranges[-1][1] + 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "".join(f"\\x{{{start:x}}}-\\x{{{stop:x}}}" for start, stop in ranges)
