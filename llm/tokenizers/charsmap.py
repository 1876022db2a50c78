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
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers.normalizers import Normalizer

_COMPOSITION_BARRIER, _CHARACTER_BARRIER = "\ufff0", "\ufff1"
"""Characters that Unicode leaves unassigned; nothing composes with them."""
_MAX_TRIE_VISITS = 1 << 22
"""Ten times the nodes of SentencePiece's largest rules; the trie of a damaged file may loop."""
_EXTENDING_CHARACTERS = r"\p{M}\x{200c}\x{200d}\x{1f3fb}-\x{1f3ff}"
"""Characters that `Precompiled` would read together with the one in front."""


def make_charsmap_normalizers(charsmap: bytes) -> "list[Normalizer]":
    """Return normalizers that change a text as SentencePiece's rules do.

    Args:
        charsmap: The field `precompiled_charsmap` of a model.
    """
    from tokenizers import Regex, normalizers

    rules = _read_rules(charsmap)
    predecessors_by_character = _find_predecessors(rules)
    composing_characters = _find_composing_characters(rules, predecessors_by_character)
    joining_characters = {*predecessors_by_character, *composing_characters}
    joining_ranges = _format_class_ranges(joining_characters)
    joining_class = f"[{joining_ranges}\\p{{M}}]"
    joined_pairs = _make_joined_pairs_pattern(predecessors_by_character)
    not_joined = f"(?!{joined_pairs})" if joined_pairs else ""
    # Not at the beginning of a text, where the library cannot insert an empty match.
    after_any_character = r"(?<=[\s\S])"
    composition_boundary = f"{after_any_character}(?={joining_class}){not_joined}"
    extending_class = f"[{joining_ranges}{_EXTENDING_CHARACTERS}]"
    character_boundary = rf"{after_any_character}(?={extending_class})|(?<=\r)(?=\n)"
    return [
        normalizers.Replace(Regex(composition_boundary), _COMPOSITION_BARRIER),
        normalizers.Replace(Regex(character_boundary), _CHARACTER_BARRIER),
        normalizers.Precompiled(charsmap),
        normalizers.Replace(_CHARACTER_BARRIER, ""),
        normalizers.NFC(),
        normalizers.Replace(_COMPOSITION_BARRIER, ""),
    ]


def _find_predecessors(rules: Iterable[str]) -> Mapping[str, set[str]]:
    """Return the characters in front of each character in the sequences of the rules."""
    predecessors_by_character: defaultdict[str, set[str]] = defaultdict(set)
    for sequence in rules:
        for predecessor, character in itertools.pairwise(sequence):
            predecessors_by_character[character].add(predecessor)
    return predecessors_by_character


def _make_joined_pairs_pattern(predecessors_by_character: Mapping[str, set[str]]) -> str:
    """Return a pattern of the places between two neighbors of a rule; empty without rules."""
    characters_by_predecessors: defaultdict[frozenset[str], set[str]] = defaultdict(set)
    for character, predecessors in predecessors_by_character.items():
        characters_by_predecessors[frozenset(predecessors)].add(character)
    return "|".join(
        f"(?<=[{_format_class_ranges(predecessors)}])(?=[{_format_class_ranges(characters)}])"
        for predecessors, characters in characters_by_predecessors.items()
    )


def _read_rules(charsmap: bytes) -> dict[str, str]:
    """Return the replacement of each sequence of characters.

    The bytes are a Darts-clone double array, a trie of the sequences in UTF-8, and the replacements
    as strings that end with a zero byte.
    """
    (trie_bytes,) = struct.unpack_from("<I", charsmap)
    units = struct.unpack_from(f"<{trie_bytes // 4}I", charsmap, 4)
    replacements = charsmap[4 + trie_bytes :]
    children_by_base = _group_children(units)
    rules: dict[str, str] = {}
    pending_nodes = [(0, b"")]  # each with the bytes on the way to it
    num_visits = itertools.count()
    while pending_nodes:
        if next(num_visits) == _MAX_TRIE_VISITS:
            raise ValueError("its normalization rules are not a trie")
        node, prefix = pending_nodes.pop()
        for child, label in children_by_base[node ^ _child_offset(units[node])]:
            sequence = prefix + bytes([label])
            replacement_start = _find_replacement(units, child)
            if replacement_start is not None:
                replacement_end = replacements.index(b"\0", replacement_start)
                rules[sequence.decode()] = replacements[replacement_start:replacement_end].decode()
            pending_nodes.append((child, sequence))
    return rules


def _group_children(units: Sequence[int]) -> Mapping[int, list[tuple[int, int]]]:
    """Return the children of each base in a double array, with the byte that leads to each.

    Bits 0 to 7 of a unit are this byte; a unit with the highest bit set is a value, not a child.
    The index of a child is the base of its parent, XOR the byte.
    """
    children_by_base: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for child, unit in enumerate(units):
        label = unit & 0x800000FF
        if 0 < label < 256:
            children_by_base[child ^ label].append((child, label))
    return children_by_base


def _find_replacement(units: Sequence[int], node: int) -> int | None:
    """Return where the replacement of a node's sequence begins; None if no sequence ends there."""
    unit = units[node]
    is_end_of_sequence = unit >> 8 & 1
    return units[node ^ _child_offset(unit)] & 0x7FFFFFFF if is_end_of_sequence else None


def _child_offset(unit: int) -> int:
    """Return the offset from a node to its children that a unit of the double array encodes."""
    return unit >> 10 << ((unit & 0x200) >> 6)


def _find_composing_characters(
    rules: Mapping[str, str], joined_characters: Container[str]
) -> set[str]:
    """Return characters with a replacement that could compose with the character in front.

    Args:
        rules: The replacement of each sequence of characters.
        joined_characters: Characters that a rule joins with the one in front.
    """
    composing_characters = set()
    for sequence, replacement in rules.items():
        if len(sequence) == 1 and replacement:
            is_mark = unicodedata.category(replacement[0]).startswith("M")
            if is_mark or replacement[0] in joined_characters:
                composing_characters.add(sequence)
    return composing_characters


def _format_class_ranges(characters: Iterable[str]) -> str:
    """Return characters as ranges, the inside of a character class of a regular expression."""
    ranges: list[list[int]] = []
    for code in sorted(map(ord, characters)):
        if ranges and code == ranges[-1][1] + 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "".join(f"\\x{{{start:x}}}-\\x{{{stop:x}}}" for start, stop in ranges)
