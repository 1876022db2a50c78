"""SentencePiece `.model` files as Hugging Face tokenizers that give the same ids.

The parts of a model file are set up as the `tokenizers` library knows them, and the result is
compared with SentencePiece itself before anybody uses it. The converters that come with
transformers and tokenizers leave rules of the file out (spaces, dummy prefix, names of special
tokens in a text), so none of them is used.

Three differences remain, in the library's own arithmetic. Of two cuts that a unigram model scores
the same, each takes the one that its rounding prefers. With a normalisation other than identity,
letters with marks that no single letter combines can come out otherwise. A text that is a
user-defined symbol and nothing else has no space put in front.
"""

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SPACE = "\u2581"
"""SentencePiece's visible space."""
_UNIGRAM, _BPE = 1, 2
_KINDS = {3: "word", 4: "char"}
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_NEVER = -1e6
"""A score that keeps the name of a special token in a text from becoming that token."""
_NUM_PROBED_PIECES = 4000
_PROBES = (
    "The quick brown fox jumps over the lazy dog, twice: 1 2 34 567 8,901.",
    "  two spaces   before, between and after  ",
    "\n\tline breaks\n\n\nand\ttabs\r\nin a text \n",
    "def f(x):\n    if x != 0x1F:\n        return x ** 2  # 'why' \"not\"\n",
    "na\u00efve caf\u00e9 \u00c5ngstr\u00f6m \u00dfu\u00df e\u0301 \u0130",
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
        backend: Gives SentencePiece's ids, without begin and end of text. The name of a control
            symbol in a text is text to it while `encode_special_tokens` is set, as it is here.
        special_tokens: `bos_token`, `eos_token`, `unk_token` and `pad_token`, those that there are.
    """

    backend: "Tokenizer"
    special_tokens: dict[str, str]


def convert_sentencepiece(
    path: Path, *, samples: Iterable[str] = (), subject: str | None = None
) -> ConvertedModel:
    """Turn a SentencePiece model into a Hugging Face tokenizer.

    Args:
        path: The `.model` file, BPE or unigram.
        samples: Texts on which both must agree, besides some that every model is tried on.
        subject: What messages call it; None for `--tokenizer_name` and the path.

    Raises:
        ConfigError: The file is no SentencePiece model, or one whose ids the `tokenizers` library
            cannot give; or a package is missing.
    """
    subject = subject or f"--tokenizer_name {path}"
    proto = _read(path, subject)
    _refuse_unknown_kinds(proto, subject)
    try:
        backend, special = _backend(proto), _special_tokens(proto)
    except Exception as error:
        raise ConfigError(
            f"{subject} holds what the tokenizers library refuses: {error}"
        ) from error
    _check_equal_ids(backend, proto, samples, subject)
    return ConvertedModel(backend=backend, special_tokens=special)


def import_sentencepiece() -> Any:
    """The `sentencepiece` package.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        import sentencepiece
    except ImportError as error:
        raise ConfigError(
            "SentencePiece models need the package sentencepiece: pip install sentencepiece"
        ) from error
    return sentencepiece


def model_proto(data: bytes) -> Any:
    """The protocol buffer that a `.model` file is.

    Raises:
        ConfigError: A package is missing.
        Exception: The bytes are no SentencePiece model; of a kind of the two libraries' own.
    """
    sentencepiece = import_sentencepiece()
    try:
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as error:
        raise ConfigError(
            "SentencePiece models need the package protobuf: pip install protobuf"
        ) from error
    generated: Any = sentencepiece_model_pb2
    # Finds mistakes that the parser does not.
    sentencepiece.SentencePieceProcessor(model_proto=data)
    proto = generated.ModelProto()
    proto.ParseFromString(data)
    if not proto.pieces:
        raise ValueError("a model without pieces")
    return proto


def _read(path: Path, subject: str) -> Any:
    try:
        return model_proto(path.read_bytes())
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"{subject} cannot be read: {error.strerror}.") from error
    except Exception as error:
        # Llama 3 and others give other files this name.
        raise ConfigError(
            f"{subject} is no SentencePiece model; name one, or a folder with a tokenizer.json."
        ) from error


def _refuse_unknown_kinds(proto: Any, subject: str) -> None:
    kind = proto.trainer_spec.model_type
    if kind not in (_UNIGRAM, _BPE):
        raise ConfigError(
            f"{subject} is a SentencePiece model of the type {_KINDS.get(kind, kind)}; only "
            "bpe and unigram can be used here."
        )


def _backend(proto: Any) -> "Tokenizer":
    from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers

    backend = Tokenizer(_bpe(proto) if proto.trainer_spec.model_type == _BPE else _unigram(proto))
    backend.normalizer = _normalizer(proto)
    splits: list[Any] = []
    if proto.trainer_spec.model_type == _UNIGRAM and (pattern := _letters_apart(proto)):
        splits.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    if proto.normalizer_spec.escape_whitespaces:
        # Where no piece reaches over a space, words can be encoded one by one, and remembered.
        apart = not any(
            _SPACE in piece.piece[1:] for piece in proto.pieces if piece.type == _NORMAL
        )
        splits.append(pre_tokenizers.Metaspace(_SPACE, prepend_scheme="never", split=apart))
    if splits:
        backend.pre_tokenizer = splits[0] if len(splits) == 1 else pre_tokenizers.Sequence(splits)
    backend.decoder = _decoder(proto)
    for piece in proto.pieces:
        if piece.type in (_CONTROL, _UNKNOWN):
            backend.add_special_tokens([AddedToken(piece.piece, special=True, normalized=False)])
        elif piece.type == _USER_DEFINED and " " not in piece.piece:
            # Found in the normalised text, so that the space in front of a text stays; one with a
            # space in it is never found.
            backend.add_tokens([AddedToken(piece.piece, special=False, normalized=True)])
    backend.encode_special_tokens = True
    return backend


def _bpe(proto: Any) -> Any:
    from tokenizers.models import BPE

    spec = proto.trainer_spec
    return BPE(
        vocab={piece.piece: id for id, piece in enumerate(proto.pieces)},
        merges=_merges(proto),
        unk_token=spec.unk_piece,
        fuse_unk=True,
        byte_fallback=spec.byte_fallback,
    )


def _merges(proto: Any) -> list[tuple[str, str]]:
    """Every pair of pieces that makes a piece, the best piece first.

    SentencePiece joins the neighbours that make the best-scored piece, whatever its halves.
    """
    normal = {piece.piece: piece.score for piece in proto.pieces if piece.type == _NORMAL}
    ranked = sorted(normal, key=lambda piece: -normal[piece])
    return [
        (piece[:cut], piece[cut:])
        for piece in ranked
        for cut in range(1, len(piece))
        if piece[:cut] in normal and piece[cut:] in normal
    ]


def _unigram(proto: Any) -> Any:
    from tokenizers.models import Unigram

    # The library would find names such as <unk> or <0x0A> in a text, which SentencePiece does not.
    pieces = [
        (piece.piece, piece.score if piece.type == _NORMAL else _NEVER) for piece in proto.pieces
    ]
    spec = proto.trainer_spec
    return Unigram(pieces, unk_id=spec.unk_id, byte_fallback=spec.byte_fallback)


def _letters_apart(proto: Any) -> str:
    """A pattern of letters in the names of special tokens that no piece holds; empty for none.

    A low score does not keep the library from such a name if the alternative is an unknown letter,
    so those letters are cut out. Nothing else changes: no piece would have held them.
    """
    known = {p.piece for p in proto.pieces if p.type == _NORMAL and len(p.piece) == 1}
    patterns = []
    for name in sorted({p.piece for p in proto.pieces if p.type in (_UNKNOWN, _CONTROL)}):
        unknown = [letter not in known for letter in name]
        if any(unknown):
            begin = unknown.index(True)
            end = begin + len(list(itertools.takewhile(bool, unknown[begin:])))
            before, run, after = map(re.escape, (name[:begin], name[begin:end], name[end:]))
            patterns.append(_between(before, run, after))
    if any(piece.type == _BYTE for piece in proto.pieces):
        digits = "0123456789ABCDEF"
        parts = ["<", "0", "x", f"[{digits}]", f"[{digits}]", ">"]
        for at, letters in enumerate(("<", "0", "x", digits, digits, ">")):
            if unknown_letters := "".join(letter for letter in letters if letter not in known):
                before, after = "".join(parts[:at]), "".join(parts[at + 1 :])
                patterns.append(_between(before, f"[{unknown_letters}]", after))
    return "|".join(patterns)


def _between(before: str, pattern: str, after: str) -> str:
    behind = f"(?<={before})" if before else ""
    ahead = f"(?={after})" if after else ""
    return f"{behind}{pattern}{ahead}"


def _normalizer(proto: Any) -> Any:
    """What SentencePiece does to a text first, in its order."""
    from tokenizers import Regex, normalizers

    spec = proto.normalizer_spec
    steps: list[Any] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if spec.add_dummy_prefix:
        symbols = [re.escape(p.piece) for p in proto.pieces if p.type == _USER_DEFINED]
        if symbols:
            # The library normalises the symbols as well; they must come out as they are.
            alone = rf"(?:{'|'.join(symbols)})\z"
            steps.append(normalizers.Replace(Regex(rf"\A(?!{alone})(?=[\s\S])"), _SPACE))
        else:
            steps.append(normalizers.Prepend(_SPACE))
    if spec.escape_whitespaces:
        steps.append(normalizers.Replace(" ", _SPACE))
    return normalizers.Sequence(steps)


def _decoder(proto: Any) -> Any:
    from tokenizers import decoders

    steps: list[Any] = [decoders.Replace(_SPACE, " ")]
    if proto.trainer_spec.byte_fallback:
        steps.append(decoders.ByteFallback())
    steps.append(decoders.Fuse())
    if proto.normalizer_spec.add_dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)


def _special_tokens(proto: Any) -> dict[str, str]:
    spec = proto.trainer_spec
    ids = {
        "bos_token": spec.bos_id,
        "eos_token": spec.eos_id,
        "unk_token": spec.unk_id,
        "pad_token": spec.pad_id,
    }
    return {name: proto.pieces[id].piece for name, id in ids.items() if id >= 0}


def _check_equal_ids(
    backend: "Tokenizer", proto: Any, samples: Iterable[str], subject: str
) -> None:
    processor = import_sentencepiece().SentencePieceProcessor(model_proto=proto.SerializeToString())
    scores = [piece.score for piece in proto.pieces]
    ranked = proto.trainer_spec.model_type == _UNIGRAM
    for text in (*_probes(proto), *samples):
        expected = processor.encode(text)
        found = backend.encode(text, add_special_tokens=False).ids
        if found == expected or (ranked and _score_the_same(found, expected, scores)):
            continue
        pairs = zip(found, expected, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(found), len(expected)))
        begun = processor.decode(expected[:at])[-20:]
        theirs, ours = (
            [processor.id_to_piece(id) for id in ids[at : at + 3]] for ids in (expected, found)
        )
        raise ConfigError(
            f"{subject} cannot be used: after {begun!r} SentencePiece gives {theirs}, and the "
            f"tokenizers library {ours}. A model of the type bpe that was trained with "
            "--normalization_rule_name identity works."
        )


def _score_the_same(found: list[int], expected: list[int], scores: list[float]) -> bool:
    """Whether two cuts of a text are equally good to a unigram model.

    SentencePiece adds scores in single precision, the library in double: of two cuts with the same
    score, such as 99|9 and 9|99, each takes the one that its rounding prefers.
    """
    best = sum(scores[id] for id in found)
    return abs(best - sum(scores[id] for id in expected)) <= 1e-4 + 1e-6 * abs(best)


def _probes(proto: Any) -> Iterator[str]:
    """Texts on which a converted model must agree with SentencePiece."""
    yield from _PROBES
    normal = [piece.piece for piece in proto.pieces if piece.type == _NORMAL]
    step = 1 + len(normal) // _NUM_PROBED_PIECES
    yield "".join(normal[::step]).replace(_SPACE, " ")
    for piece in proto.pieces:
        if piece.type in (_USER_DEFINED, _UNKNOWN, _CONTROL, _BYTE):
            yield f"{piece.piece}a {piece.piece} b{piece.piece}"
