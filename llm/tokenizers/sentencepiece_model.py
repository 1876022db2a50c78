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
from llm.tokenizers.charsmap import charsmap_normalizers

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SPACE = "\u2581"
"""The visible character that SentencePiece writes for a space."""
# Numbers of sentencepiece_model.proto: types of models, types of pieces.
_UNIGRAM, _BPE = 1, 2
_KINDS = {3: "word", 4: "char"}
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_NEVER = -1e6
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
    try:
        proto = model_proto(path.read_bytes())
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"{subject} cannot be read: {error.strerror}.") from error
    except Exception as error:
        # Llama 3 and others use this name for different files.
        raise ConfigError(
            f"{subject} is not a SentencePiece model; name one, or a folder with a tokenizer.json."
        ) from error
    spec = proto.trainer_spec
    if spec.model_type not in (_UNIGRAM, _BPE):
        raise ConfigError(
            f"{subject} is a SentencePiece model of the type "
            f"{_KINDS.get(spec.model_type, spec.model_type)}; only bpe and unigram can be used "
            "here."
        )
    ids = {name: getattr(spec, f"{name}_id") for name in ("bos", "eos", "unk", "pad")}
    try:
        backend = _make_backend(proto)
        special = {f"{name}_token": proto.pieces[id].piece for name, id in ids.items() if id >= 0}
    except Exception as error:
        raise ConfigError(
            f"{subject} holds what the tokenizers library refuses: {error}"
        ) from error
    _check_equal_ids(backend, proto, samples, subject)
    return ConvertedModel(backend=backend, special_tokens=special)


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


def model_proto(data: bytes) -> Any:
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
    generated: Any = sentencepiece_model_pb2
    # SentencePiece refuses some files that the protocol buffer parser accepts.
    sentencepiece.SentencePieceProcessor(model_proto=data)
    proto = generated.ModelProto()
    proto.ParseFromString(data)
    if not proto.pieces:
        raise ValueError("a model without pieces")
    return proto


def _make_backend(proto: Any) -> "Tokenizer":
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    spec, pieces = proto.trainer_spec, proto.pieces
    splits: list[Any] = []
    if spec.model_type == _BPE:
        model: Any = models.BPE(
            vocab={piece.piece: id for id, piece in enumerate(pieces)},
            merges=_ranked_merges(proto),
            unk_token=spec.unk_piece,
            fuse_unk=True,
            byte_fallback=spec.byte_fallback,
        )
    else:
        # The library would take names such as <unk> or <0x0A> in a text for these pieces;
        # SentencePiece does not.
        scored = [(p.piece, p.score if p.type == _NORMAL else _NEVER) for p in pieces]
        model = models.Unigram(scored, unk_id=spec.unk_id, byte_fallback=spec.byte_fallback)
        if pattern := _letters_apart(proto):
            splits.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    backend = Tokenizer(model)
    backend.normalizer = _make_normalizer(proto)
    if proto.normalizer_spec.escape_whitespaces:
        # If no piece crosses a space, words are encoded separately, and the library caches them.
        apart = not any(_SPACE in piece.piece[1:] for piece in pieces if piece.type == _NORMAL)
        splits.append(pre_tokenizers.Metaspace(_SPACE, prepend_scheme="never", split=apart))
    if splits:
        backend.pre_tokenizer = splits[0] if len(splits) == 1 else pre_tokenizers.Sequence(splits)
    steps: list[Any] = [decoders.Replace(_SPACE, " ")]
    if spec.byte_fallback:
        steps.append(decoders.ByteFallback())
    steps.append(decoders.Fuse())
    if proto.normalizer_spec.add_dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    for piece in pieces:
        if piece.type in (_CONTROL, _UNKNOWN):
            backend.add_special_tokens([AddedToken(piece.piece, special=True, normalized=False)])
        elif piece.type == _USER_DEFINED and " " not in piece.piece:
            # Matched in the normalized text, so that the space in front of a text stays. A symbol
            # that contains a space never matches there.
            backend.add_tokens([AddedToken(piece.piece, special=False, normalized=True)])
    backend.encode_special_tokens = True
    return backend


def _ranked_merges(proto: Any) -> list[tuple[str, str]]:
    """Return every pair of pieces that joins to a piece, the best-scored piece first.

    SentencePiece joins the neighbors that make the best-scored piece, regardless of its halves; the
    library joins in the order of this list.
    """
    normal = {piece.piece: piece.score for piece in proto.pieces if piece.type == _NORMAL}
    ranked = sorted(normal, key=lambda piece: -normal[piece])
    return [
        (piece[:cut], piece[cut:])
        for piece in ranked
        for cut in range(1, len(piece))
        if piece[:cut] in normal and piece[cut:] in normal
    ]


def _letters_apart(proto: Any) -> str:
    """Return a pattern of the letters in names of special tokens that no piece has; may be "".

    The library prefers even a piece with the lowest score to an unknown letter, so these letters
    are split off. Other ids do not change, because no piece contains the letters.
    """
    letters_with_piece = {p.piece for p in proto.pieces if p.type == _NORMAL and len(p.piece) == 1}
    patterns = []
    for name in sorted({p.piece for p in proto.pieces if p.type in (_UNKNOWN, _CONTROL)}):
        unknown = [letter not in letters_with_piece for letter in name]
        if any(unknown):
            begin = unknown.index(True)
            end = begin + len(list(itertools.takewhile(bool, unknown[begin:])))
            prefix, run, suffix = map(re.escape, (name[:begin], name[begin:end], name[end:]))
            patterns.append(_pattern_between(prefix, run, suffix))
    if any(piece.type == _BYTE for piece in proto.pieces):
        digits = "0123456789ABCDEF"
        patterns_of_byte = ["<", "0", "x", f"[{digits}]", f"[{digits}]", ">"]
        for at, letters in enumerate(("<", "0", "x", digits, digits, ">")):
            if unknown_letters := "".join(
                letter for letter in letters if letter not in letters_with_piece
            ):
                prefix, suffix = "".join(patterns_of_byte[:at]), "".join(patterns_of_byte[at + 1 :])
                patterns.append(_pattern_between(prefix, f"[{unknown_letters}]", suffix))
    return "|".join(patterns)


def _pattern_between(prefix: str, pattern: str, suffix: str) -> str:
    behind = f"(?<={prefix})" if prefix else ""
    ahead = f"(?={suffix})" if suffix else ""
    return f"{behind}{pattern}{ahead}"


def _make_normalizer(proto: Any) -> Any:
    """Return the normalizer that changes a text as SentencePiece does, in its order."""
    from tokenizers import Regex, normalizers

    spec = proto.normalizer_spec
    steps: list[Any] = []
    if spec.precompiled_charsmap:
        steps += charsmap_normalizers(spec.precompiled_charsmap)
    if spec.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if spec.add_dummy_prefix:
        symbols = [re.escape(p.piece) for p in proto.pieces if p.type == _USER_DEFINED]
        if symbols:
            # The library would normalize the symbols too, but they must not change.
            alone = rf"(?:{'|'.join(symbols)})\z"
            steps.append(normalizers.Replace(Regex(rf"\A(?!{alone})(?=[\s\S])"), _SPACE))
        else:
            steps.append(normalizers.Prepend(_SPACE))
    if spec.escape_whitespaces:
        steps.append(normalizers.Replace(" ", _SPACE))
    return normalizers.Sequence(steps)


def _check_equal_ids(
    backend: "Tokenizer", proto: Any, samples: Iterable[str], subject: str
) -> None:
    processor = import_sentencepiece().SentencePieceProcessor(model_proto=proto.SerializeToString())
    scores = [piece.score for piece in proto.pieces]
    ranked = proto.trainer_spec.model_type == _UNIGRAM
    for text in (*_probe_texts(proto), *samples):
        expected = processor.encode(text)
        actual = backend.encode(text, add_special_tokens=False).ids
        if actual == expected or (ranked and _score_the_same(actual, expected, scores)):
            continue
        pairs = zip(actual, expected, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(actual), len(expected)))
        decoded = processor.decode(expected[:at])[-20:]
        expected_pieces, actual_pieces = (
            [processor.id_to_piece(id) for id in ids[at : at + 3]] for ids in (expected, actual)
        )
        raise ConfigError(
            f"{subject} cannot be used: after {decoded!r} SentencePiece gives {expected_pieces}, "
            f"and the tokenizers library {actual_pieces}. A model of the type bpe that was trained "
            "with --normalization_rule_name identity works."
        )


def _score_the_same(actual: list[int], expected: list[int], scores: list[float]) -> bool:
    """Return whether a unigram model gives two segmentations of a text the same score.

    SentencePiece adds scores in single precision, the library in double: between segmentations of
    the same score, such as 99|9 and 9|99, the rounding of each decides.
    """
    best = sum(scores[id] for id in actual)
    return abs(best - sum(scores[id] for id in expected)) <= 1e-4 + 1e-6 * abs(best)


def _probe_texts(proto: Any) -> Iterator[str]:
    """Yield the texts that a converted model must encode like SentencePiece."""
    yield from _PROBES
    normal = [piece.piece for piece in proto.pieces if piece.type == _NORMAL]
    step = 1 + len(normal) // _NUM_PROBED_PIECES
    yield "".join(normal[::step]).replace(_SPACE, " ")
    for piece in proto.pieces:
        if piece.type in (_USER_DEFINED, _UNKNOWN, _CONTROL, _BYTE):
            yield f"{piece.piece}a {piece.piece} b{piece.piece}"


if __name__ == "__main__":
    sys.exit(main())
