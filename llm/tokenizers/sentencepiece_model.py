"""SentencePiece `.model` files as Hugging Face tokenizers that give the same ids.

A run that loads one starts `python -m llm.tokenizers.sentencepiece_model FILE`, which prints it as
JSON.

Normalizer, pre-tokenizer and model are built from classes of the `tokenizers` library, and the
result is compared with SentencePiece before it is used. The converters of transformers and
tokenizers are not used, because they ignore rules of the file (spaces, dummy prefix, names of
special tokens in a text).

Three differences remain. If a unigram model gives two segmentations of a text the same score, the
rounding of each library decides. With a normalization that also folds case (nfkc_cf), the rare
letters with marks that fold to several letters can get other ids if they are decomposed. A text
that consists of one user-defined symbol gets no space in front.
"""

import itertools
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm.config.program import program
from llm.errors import ConfigError
from llm.tokenizers.charsmap import make_charsmap_normalizers

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SPACE = "\u2581"
"""The visible character that SentencePiece writes for a space."""
# Numbers of sentencepiece_model.proto: types of models, types of pieces.
_UNIGRAM, _BPE = 1, 2
_MODEL_TYPE_NAMES = {3: "word", 4: "char"}
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_UNREACHABLE_SCORE = -1e6
"""A score so low that the name of a special token in a text does not become this token."""
_NUM_PROBED_PIECES = 4000
_PROBES = (
    "The quick brown fox jumps over the lazy dog, twice: 1 2 34 567 8,901.",
    "  two spaces   before, between and after  ",
    "\n\tline breaks\n\n\nand\ttabs\r\nin a text \n",
    "def f(x):\n    if x != 0x1F:\n        return x ** 2  # 'why' \"not\"\n",
    "na\u00efve caf\u00e9 \u00c5ngstr\u00f6m \u00dfu\u00df e\u0301 \u0130",
    "e\u0302\u0323 \u1100\u1161\u11a8 x\u0323\u0302 \u03b1\u0313 \u304b\u3099",
    "\uff26\uff55\uff4c\uff4c\u3000\uff11\uff12 \u2460 \ufb01 \u2026 \u00a0 \u00bd \u2122",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002 \u3053\u3093\u306b\u3061\u306f \uc548\ub155 "
    "\u041f\u0440\u0438\u0432\u0435\u0442 \u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd",
    "\U0001f98a\U0001f98a \U0001f468\u200d\U0001f469\u200d\U0001f467 \u2603\u2603 \u2581 \u2581x",
    "",
    " ",
)


@dataclass(frozen=True, kw_only=True)
class ConvertedModel:
    """A SentencePiece model as the `tokenizers` library runs it.

    Attributes:
        backend: Gives SentencePiece's ids, without begin and end of text. It treats the name of a
            control symbol in a text as text, unless its `encode_special_tokens` is set to False.
        special_tokens: `bos_token`, `eos_token`, `unk_token`, `pad_token`, if the model has them.
    """

    backend: "Tokenizer"
    special_tokens: dict[str, str]


@program
def main(argv: Sequence[str]) -> int:
    """Print the converted model as JSON: `backend` and `special_tokens`."""
    model = convert_sentencepiece(Path(argv[0]))
    converted = {"backend": model.backend.to_str(), "special_tokens": model.special_tokens}
    sys.stdout.write(json.dumps(converted))
    return 0


def convert_sentencepiece(
    path: Path, *, samples: Iterable[str] = (), subject: str | None = None
) -> ConvertedModel:
    """Turn a SentencePiece model into a Hugging Face tokenizer.

    Args:
        path: The `.model` file, BPE or unigram.
        samples: Further texts that both must encode alike.
        subject: Name of the model in messages; None for `--tokenizer_name` and the path.

    Raises:
        ConfigError: The file is not a SentencePiece model, the `tokenizers` library cannot give its
            ids, or a package is missing.
    """
    subject = subject or f"--tokenizer_name {path}"
    proto = _read_model_proto(path, subject)
    try:
        backend = _make_backend(proto)
        special_tokens = _name_special_tokens(proto)
    except Exception as error:
        raise ConfigError(
            f"{subject} holds what the tokenizers library refuses: {error}"
        ) from error
    _check_equal_ids(backend, proto, samples, subject)
    return ConvertedModel(backend=backend, special_tokens=special_tokens)


def _read_model_proto(path: Path, subject: str) -> Any:
    """Return the SentencePiece model in a file; messages name it as `subject`."""
    try:
        proto = parse_model_proto(path.read_bytes())
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"{subject} cannot be read: {error.strerror}.") from error
    except Exception as error:
        # Llama 3 and others use this name for different files.
        raise ConfigError(
            f"{subject} is not a SentencePiece model; name one, or a folder with a tokenizer.json."
        ) from error
    model_type = proto.trainer_spec.model_type
    if model_type not in (_UNIGRAM, _BPE):
        raise ConfigError(
            f"{subject} is a SentencePiece model of the type "
            f"{_MODEL_TYPE_NAMES.get(model_type, model_type)}; only bpe and unigram can be used "
            "here."
        )
    return proto


def _name_special_tokens(proto: Any) -> dict[str, str]:
    """Return the special tokens of a model by transformers' names, such as `eos_token`."""
    special_tokens = {}
    for name in ("bos", "eos", "unk", "pad"):
        token_id = getattr(proto.trainer_spec, f"{name}_id")
        if token_id >= 0:  # -1 turns a token off
            special_tokens[f"{name}_token"] = proto.pieces[token_id].piece
    return special_tokens


def import_sentencepiece() -> Any:
    """Import the `sentencepiece` package.

    Raises:
        ConfigError: The package is not installed.
    """
    try:
        import sentencepiece
    except ImportError as error:
        raise ConfigError(
            "SentencePiece models need the package sentencepiece: pip install sentencepiece"
        ) from error
    return sentencepiece


def parse_model_proto(data: bytes) -> Any:
    """Parse a `.model` file, which is a protocol buffer.

    Raises:
        ConfigError: A package is missing.
        Exception: The bytes are not a SentencePiece model; the libraries raise various types.
    """
    sentencepiece = import_sentencepiece()
    try:
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as error:
        raise ConfigError(
            "SentencePiece models need the package protobuf: pip install protobuf"
        ) from error
    generated_module: Any = sentencepiece_model_pb2
    # SentencePiece refuses some files that the protocol buffer parser accepts.
    sentencepiece.SentencePieceProcessor(model_proto=data)
    proto = generated_module.ModelProto()
    proto.ParseFromString(data)
    if not proto.pieces:
        raise ValueError("a model without pieces")
    return proto


def _make_backend(proto: Any) -> "Tokenizer":
    """Return a tokenizer of the `tokenizers` library with the pieces and rules of a model."""
    from tokenizers import AddedToken, Tokenizer

    backend = Tokenizer(_make_piece_model(proto))
    backend.normalizer = _make_normalizer(proto)
    pre_tokenizer = _make_pre_tokenizer(proto)
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    backend.decoder = _make_decoder(proto)
    for piece in proto.pieces:
        if piece.type in (_CONTROL, _UNKNOWN):
            backend.add_special_tokens([AddedToken(piece.piece, special=True, normalized=False)])
        elif piece.type == _USER_DEFINED and " " not in piece.piece:
            # Matched in the normalized text, so that the space in front of a text stays. A symbol
            # that contains a space never matches there.
            backend.add_tokens([AddedToken(piece.piece, special=False, normalized=True)])
    backend.encode_special_tokens = True
    return backend


def _make_piece_model(proto: Any) -> Any:
    """Return the library's BPE or unigram model with the pieces of a model."""
    from tokenizers import models

    trainer_spec, pieces = proto.trainer_spec, proto.pieces
    if trainer_spec.model_type == _BPE:
        return models.BPE(
            vocab={piece.piece: piece_id for piece_id, piece in enumerate(pieces)},
            merges=_rank_merges(proto),
            unk_token=trainer_spec.unk_piece,
            fuse_unk=True,
            byte_fallback=trainer_spec.byte_fallback,
        )
    # The library would take names such as <unk> or <0x0A> in a text for these pieces;
    # SentencePiece does not.
    scored_pieces = [
        (piece.piece, piece.score if piece.type == _NORMAL else _UNREACHABLE_SCORE)
        for piece in pieces
    ]
    return models.Unigram(
        scored_pieces, unk_id=trainer_spec.unk_id, byte_fallback=trainer_spec.byte_fallback
    )


def _make_pre_tokenizer(proto: Any) -> Any:
    """Return the steps that split a text before it is encoded; None without steps."""
    from tokenizers import Regex, pre_tokenizers

    steps: list[Any] = []
    if proto.trainer_spec.model_type != _BPE and (pattern := _make_unknown_letters_pattern(proto)):
        steps.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    if proto.normalizer_spec.escape_whitespaces:
        # If no piece crosses a space, words are encoded separately, and the library caches them.
        normal_pieces = [piece.piece for piece in proto.pieces if piece.type == _NORMAL]
        split_at_spaces = not any(_SPACE in piece[1:] for piece in normal_pieces)
        steps.append(
            pre_tokenizers.Metaspace(_SPACE, prepend_scheme="never", split=split_at_spaces)
        )
    if not steps:
        return None
    return steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)


def _make_decoder(proto: Any) -> Any:
    """Return the steps that turn pieces into a text."""
    from tokenizers import decoders

    steps: list[Any] = [decoders.Replace(_SPACE, " ")]
    if proto.trainer_spec.byte_fallback:
        steps.append(decoders.ByteFallback())
    steps.append(decoders.Fuse())
    if proto.normalizer_spec.add_dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)


def _rank_merges(proto: Any) -> list[tuple[str, str]]:
    """Return every pair of pieces that joins to a piece, the best-scored piece first.

    SentencePiece joins the neighbors that make the best-scored piece, regardless of its halves; the
    library joins in the order of this list.
    """
    score_by_piece = {piece.piece: piece.score for piece in proto.pieces if piece.type == _NORMAL}
    ranked_pieces = sorted(score_by_piece, key=lambda piece: -score_by_piece[piece])
    return [
        (piece[:cut], piece[cut:])
        for piece in ranked_pieces
        for cut in range(1, len(piece))
        if piece[:cut] in score_by_piece and piece[cut:] in score_by_piece
    ]


def _make_unknown_letters_pattern(proto: Any) -> str:
    """Return a pattern of the letters in special tokens' names without a piece; may be empty.

    The library prefers even a piece with the lowest score to an unknown letter, so these letters
    are split off. Other ids do not change, because no piece contains the letters.
    """
    letters_with_piece = {
        piece.piece for piece in proto.pieces if piece.type == _NORMAL and len(piece.piece) == 1
    }
    names = {piece.piece for piece in proto.pieces if piece.type in (_UNKNOWN, _CONTROL)}
    patterns = [
        _make_unknown_run_pattern(name, letters_with_piece)
        for name in sorted(names)
        if not letters_with_piece.issuperset(name)
    ]
    if any(piece.type == _BYTE for piece in proto.pieces):
        patterns += _make_unknown_byte_patterns(letters_with_piece)
    return "|".join(patterns)


def _make_unknown_run_pattern(name: str, letters_with_piece: set[str]) -> str:
    """Return a pattern of the first run of letters without a piece in a name, which has one."""
    is_unknown = [letter not in letters_with_piece for letter in name]
    run_start = is_unknown.index(True)
    run_length = len(list(itertools.takewhile(bool, is_unknown[run_start:])))
    run_end = run_start + run_length
    prefix, unknown_run, suffix = map(
        re.escape, (name[:run_start], name[run_start:run_end], name[run_end:])
    )
    return _make_pattern_between(prefix, unknown_run, suffix)


def _make_unknown_byte_patterns(letters_with_piece: set[str]) -> list[str]:
    """Return patterns of the letters in names such as <0x0A> without a piece."""
    digits = "0123456789ABCDEF"
    name_patterns = ["<", "0", "x", f"[{digits}]", f"[{digits}]", ">"]
    patterns = []
    for letter_index, letters in enumerate(("<", "0", "x", digits, digits, ">")):
        unknown_letters = [letter for letter in letters if letter not in letters_with_piece]
        if unknown_letters:
            prefix = "".join(name_patterns[:letter_index])
            suffix = "".join(name_patterns[letter_index + 1 :])
            patterns.append(_make_pattern_between(prefix, f"[{''.join(unknown_letters)}]", suffix))
    return patterns


def _make_pattern_between(prefix: str, pattern: str, suffix: str) -> str:
    """Return a pattern that matches between two other patterns; either of them may be empty."""
    lookbehind = f"(?<={prefix})" if prefix else ""
    lookahead = f"(?={suffix})" if suffix else ""
    return f"{lookbehind}{pattern}{lookahead}"


def _make_normalizer(proto: Any) -> Any:
    """Return the normalizer that changes a text as SentencePiece does, in its order."""
    from tokenizers import Regex, normalizers

    normalizer_spec = proto.normalizer_spec
    normalizer_steps: list[Any] = []
    if normalizer_spec.precompiled_charsmap:
        normalizer_steps += make_charsmap_normalizers(normalizer_spec.precompiled_charsmap)
    if normalizer_spec.remove_extra_whitespaces:
        normalizer_steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        normalizer_steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if normalizer_spec.add_dummy_prefix:
        normalizer_steps.append(_make_dummy_prefix(proto))
    if normalizer_spec.escape_whitespaces:
        normalizer_steps.append(normalizers.Replace(" ", _SPACE))
    return normalizers.Sequence(normalizer_steps)


def _make_dummy_prefix(proto: Any) -> Any:
    """Return the normalizer that puts a space in front of a text, unless it is one symbol."""
    from tokenizers import Regex, normalizers

    symbols = [re.escape(piece.piece) for piece in proto.pieces if piece.type == _USER_DEFINED]
    if not symbols:
        return normalizers.Prepend(_SPACE)
    # The library would normalize the symbols too, but they must not change.
    symbol_alone = rf"(?:{'|'.join(symbols)})\z"
    return normalizers.Replace(Regex(rf"\A(?!{symbol_alone})(?=[\s\S])"), _SPACE)


def _check_equal_ids(
    backend: "Tokenizer", proto: Any, samples: Iterable[str], subject: str
) -> None:
    """Refuse a converted model that gives a probe or a sample other ids than SentencePiece."""
    processor = import_sentencepiece().SentencePieceProcessor(model_proto=proto.SerializeToString())
    scores = [piece.score for piece in proto.pieces]
    is_unigram = proto.trainer_spec.model_type == _UNIGRAM
    for text in (*_make_probe_texts(proto), *samples):
        expected = processor.encode(text)
        actual = backend.encode(text, add_special_tokens=False).ids
        if actual == expected or (is_unigram and _have_equal_scores(actual, expected, scores)):
            continue
        difference = _describe_difference(processor, actual, expected)
        raise ConfigError(
            f"{subject} cannot be used: {difference}. A model of the type bpe that was trained "
            "with --normalization_rule_name identity works."
        )


def _describe_difference(processor: Any, actual: list[int], expected: list[int]) -> str:
    """Return the first pieces that differ between two encodings of a text."""
    first_difference = min(len(actual), len(expected))
    for position, (actual_id, expected_id) in enumerate(zip(actual, expected, strict=False)):
        if actual_id != expected_id:
            first_difference = position
            break
    shown_positions = slice(first_difference, first_difference + 3)
    equal_text = processor.decode(expected[:first_difference])[-20:]
    expected_pieces = [processor.id_to_piece(piece_id) for piece_id in expected[shown_positions]]
    actual_pieces = [processor.id_to_piece(piece_id) for piece_id in actual[shown_positions]]
    return (
        f"after {equal_text!r} SentencePiece gives {expected_pieces}, "
        f"and the tokenizers library {actual_pieces}"
    )


def _have_equal_scores(actual: list[int], expected: list[int], scores: list[float]) -> bool:
    """Return whether a unigram model gives two segmentations of a text the same score.

    SentencePiece adds scores in single precision, the library in double: between segmentations of
    the same score, such as 99|9 and 9|99, the rounding of each decides.
    """
    actual_score = sum(scores[piece_id] for piece_id in actual)
    expected_score = sum(scores[piece_id] for piece_id in expected)
    return abs(actual_score - expected_score) <= 1e-4 + 1e-6 * abs(actual_score)


def _make_probe_texts(proto: Any) -> Iterator[str]:
    """Yield the texts that a converted model must encode like SentencePiece."""
    yield from _PROBES
    normal_pieces = [piece.piece for piece in proto.pieces if piece.type == _NORMAL]
    stride = 1 + len(normal_pieces) // _NUM_PROBED_PIECES
    yield "".join(normal_pieces[::stride]).replace(_SPACE, " ")
    for piece in proto.pieces:
        if piece.type in (_USER_DEFINED, _UNKNOWN, _CONTROL, _BYTE):
            yield f"{piece.piece}a {piece.piece} b{piece.piece}"


if __name__ == "__main__":
    sys.exit(main())
