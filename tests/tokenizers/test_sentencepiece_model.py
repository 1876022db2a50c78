import argparse
import csv
import functools
import io
import random
import sys
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from llm.errors import ConfigError
from llm.tokenizers.sentencepiece_model import ConvertedModel, _rank_merges, convert_sentencepiece

spm = pytest.importorskip("sentencepiece")
pb2 = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")

TRAINED_ON = [
    line for line in Path(argparse.__file__).read_text(encoding="utf-8").split("\n") if line
] + ["naïve café, déjà vu: über 12 345 --------- 99999"] * 5
HELD_OUT = Path(csv.__file__).read_text(encoding="utf-8")

IDENTITY = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
MODELS: dict[str, dict[str, Any]] = {
    "bpe as Llama's": {
        "model_type": "bpe",
        "byte_fallback": True,
        "split_digits": True,
        "pad_id": 0,
        "unk_id": 1,
        "bos_id": 2,
        "eos_id": 3,
        **IDENTITY,
    },
    "bpe by SentencePiece's defaults": {"model_type": "bpe"},
    "bpe without dummy prefix": {"model_type": "bpe", "add_dummy_prefix": False, **IDENTITY},
    "bpe with symbols": {
        "model_type": "bpe",
        "user_defined_symbols": ["<sep>", "arg", "a space"],
        "control_symbols": ["<mask>"],
        "byte_fallback": True,
        **IDENTITY,
    },
    "bpe with pieces of spaces": {
        "model_type": "bpe",
        "allow_whitespace_only_pieces": True,
        **IDENTITY,
    },
    "bpe over words": {"model_type": "bpe", "split_by_whitespace": False},
    "bpe in lower case": {"model_type": "bpe", "normalization_rule_name": "nmt_nfkc_cf"},
    "unigram by SentencePiece's defaults": {"model_type": "unigram"},
    "unigram with bytes": {"model_type": "unigram", "byte_fallback": True, **IDENTITY},
    "unigram with symbols": {
        "model_type": "unigram",
        "user_defined_symbols": ["<sep>"],
        "bos_id": -1,
        "eos_id": -1,
        **IDENTITY,
    },
}


@functools.cache
def model_bytes(name: str) -> bytes:
    return train_model(**MODELS[name])


def train_model(lines: Sequence[str] = TRAINED_ON, **options: Any) -> bytes:
    """A small SentencePiece model."""
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        num_threads=1,
        minloglevel=2,
        **{"vocab_size": 700, **options},
    )
    return model.getvalue()


def convert(folder: Path, data: bytes, **options: Any) -> ConvertedModel:
    (folder / "x.model").write_bytes(data)
    return convert_sentencepiece(folder / "x.model", **options)


def ids(model: ConvertedModel, text: str) -> list[int]:
    found: list[int] = model.backend.encode(text, add_special_tokens=False).ids
    return found


def is_tie(name: str, data: bytes, found: list[int], expected: list[int]) -> bool:
    """Two cuts that a unigram model finds equally good; single precision chooses between them."""
    score = spm.SentencePieceProcessor(model_proto=data).get_score
    totals = [sum(map(score, cut)) for cut in (found, expected)]
    return name.startswith("unigram") and totals[0] == pytest.approx(totals[1], abs=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_unseen_text_has_sentencepieces_ids(name, tmp_path):
    model = convert(tmp_path, model_bytes(name))
    processor = spm.SentencePieceProcessor(model_proto=model_bytes(name))

    lines = HELD_OUT.split("\n")
    assert len(lines) > 400
    found = [ids(model, line) for line in lines]
    expected = processor.encode(lines)
    different = [
        pair
        for pair in zip(found, expected, strict=True)
        if pair[0] != pair[1] and not is_tie(name, model_bytes(name), *pair)
    ]
    assert different == []


FRAGMENTS = [
    *("a", "aa", "aaa", "-", "--", "----", " ", "  ", "\n", "\t", "\r\n", "the", " the", "arg"),
    *("<unk>", "<s>", "</s>", "<pad>", "<mask>", "<0x0A>", "<sep>", "a space", "<", ">", "unk"),
    *("\u2581", "\u2603", "é", "e\u0301", "ß", "\U0001f98a", "9", "99", "000", "ab", "ba"),
]


@pytest.mark.extended
@pytest.mark.parametrize("name", MODELS)
def test_random_texts_have_sentencepieces_ids(name, tmp_path):
    model = convert(tmp_path, model_bytes(name))
    processor = spm.SentencePieceProcessor(model_proto=model_bytes(name))
    generator = random.Random(0)

    for _ in range(500):
        text = "".join(generator.choices(FRAGMENTS, k=generator.randrange(2, 14)))
        found, expected = ids(model, text), processor.encode(text)
        assert found == expected or is_tie(name, model_bytes(name), found, expected), text


SENTENCES = {
    "Vietnamese": "Ti\u1ebfng Vi\u1ec7t xin ch\u00e0o th\u1ebf gi\u1edbi \u0111\u1eb9p qu\u00e1",
    "Korean": "\uc548\ub155\ud558\uc138\uc694 \uc138\uacc4 \ud55c\uad6d\uc5b4 \ubb38\uc7a5",
    "Greek": "\u03ba\u1f00\u03b3\u1f7c \u1f24\u03bc\u03b7\u03bd \u1fa7 \u0386\u03bd\u03b1\u03be",
}


@pytest.mark.parametrize("language", SENTENCES)
def test_decomposed_text_has_sentencepieces_ids(language, tmp_path):
    text = SENTENCES[language]
    letters = len({*text, *unicodedata.normalize("NFKC", text)})
    options = {"vocab_size": 30 + letters, "hard_vocab_limit": False}
    lines = [text] * 20
    data = train_model(lines, model_type="bpe", normalization_rule_name="nmt_nfkc", **options)
    model, processor = convert(tmp_path, data), spm.SentencePieceProcessor(model_proto=data)
    decomposed = unicodedata.normalize("NFD", text)

    assert decomposed != text
    assert ids(model, decomposed) == processor.encode(decomposed)
    assert processor.unk_id() not in ids(model, decomposed)


MARKS = ["\u0301", "\u0302", "\u0323", "\u031b", "\u0308", "\u0345", "\u093c", "\u3099", "\uff9e"]
LETTERS = [*"aeEiuoxy", "\u00ea", "\uff25", "\ufb01", "\u03b1", "\u30ab", "\uff76", "\u0915"]
JAMO = [
    "\u1100",
    "\u1112",
    "\u1161",
    "\u1175",
    "\u11a8",
    "\uac00",
    "\u3131",
    "\uffc2",
    "\U0001f469",
]


@pytest.mark.parametrize("rule", ["nmt_nfkc", pytest.param("nfkc", marks=pytest.mark.extended)])
def test_marks_in_any_order_are_normalized_as_sentencepiece_does(rule, tmp_path):
    data = train_model(model_type="bpe", normalization_rule_name=rule)
    normalizer = convert(tmp_path, data).backend.normalizer
    processor = spm.SentencePieceProcessor(model_proto=data)
    generator = random.Random(0)

    for _ in range(500):
        text = "".join(generator.choices([*LETTERS, *MARKS, *JAMO, " ", "\r", "\n"], k=8))
        assert normalizer.normalize_str(text) == processor.normalize(text), ascii(text)


@pytest.mark.parametrize("unknown", ["<", ">", "u", "<>"])
@pytest.mark.parametrize("byte_fallback", [False, True])
def test_names_of_special_tokens_are_text_even_with_unknown_letters(
    unknown, byte_fallback, tmp_path
):
    data = train_model(
        ["".join(letter for letter in line if letter not in unknown) for line in TRAINED_ON],
        model_type="unigram",
        byte_fallback=byte_fallback,
        **IDENTITY,
    )
    processor = spm.SentencePieceProcessor(model_proto=data)
    model = convert(tmp_path, data)

    for text in ["<unk>", "a <unk> <s> </s> b <0x0A>", "if a < b > c: <u> <s> </s>"]:
        assert ids(model, text) == processor.encode(text)


def test_the_tokens_keep_their_ids_and_names(tmp_path):
    name = "bpe with symbols"
    model = convert(tmp_path, model_bytes(name))
    processor = spm.SentencePieceProcessor(model_proto=model_bytes(name))

    assert model.backend.get_vocab_size() == len(processor) == 700
    tokens = [model.backend.id_to_token(id) for id in range(700)]
    assert tokens == [processor.id_to_piece(id) for id in range(700)]
    assert tokens[:5] == ["<unk>", "<s>", "</s>", "<mask>", "<sep>"]


def test_special_tokens_are_those_of_the_model(tmp_path):
    assert convert(tmp_path, model_bytes("bpe as Llama's")).special_tokens == {
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    without = convert(tmp_path, model_bytes("unigram with symbols"))
    assert without.special_tokens == {"unk_token": "<unk>"}


@pytest.mark.parametrize("name", ["bpe as Llama's", "unigram with bytes", "bpe with symbols"])
def test_text_comes_back_from_its_ids(name, tmp_path):
    backend = convert(tmp_path, model_bytes(name)).backend
    text = " The <sep> caf\u00e9\n\n\t\u2603 \U0001f98a  end "

    assert backend.decode(backend.encode(text).ids, skip_special_tokens=False) == text


def test_names_of_special_tokens_become_tokens_where_they_are_allowed(tmp_path):
    backend = convert(tmp_path, model_bytes("bpe as Llama's")).backend
    assert 3 not in backend.encode("to </s>").ids

    backend.encode_special_tokens = False
    assert backend.encode("to </s>").ids[-1] == 3


def test_another_text_is_compared_on_demand(tmp_path):
    # SentencePiece does not fold the case of an I and a dot that it composes.
    data = model_bytes("bpe in lower case")
    convert(tmp_path, data, samples=["one half"])

    with pytest.raises(
        ConfigError, match=r"The model cannot be used: after 'one.*SentencePiece give"
    ):
        convert(tmp_path, data, samples=["one half", "one I\u0307"], subject="The model")


def test_a_model_with_other_rules_is_refused(tmp_path):
    data = train_model(model_type="bpe", treat_whitespace_as_suffix=True)

    with pytest.raises(ConfigError, match=r"--tokenizer_name .*x\.model cannot be used: after ''"):
        convert(tmp_path, data)


def test_changed_merges_are_detected(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "llm.tokenizers.sentencepiece_model._rank_merges", lambda p: _rank_merges(p)[:-40]
    )

    with pytest.raises(ConfigError, match="cannot be used"):
        convert(tmp_path, model_bytes("bpe as Llama's"))


@pytest.mark.parametrize("kind", ["word", "char"])
def test_other_types_of_model_are_refused_by_name(kind, tmp_path):
    data = train_model(model_type=kind, vocab_size=60, hard_vocab_limit=False)

    with pytest.raises(ConfigError, match=f"is a SentencePiece model of the type {kind}"):
        convert(tmp_path, data)


@pytest.mark.parametrize("data", [b"", b"IQ== 0\nIg== 1\n", b"\0" * 100, b"{}"])
def test_other_files_are_refused(data, tmp_path):
    with pytest.raises(ConfigError, match=r"x\.model is not a SentencePiece model"):
        convert(tmp_path, data)


def test_a_file_cut_short_is_refused(tmp_path):
    data = model_bytes("bpe as Llama's")

    for size in (1, 10, 1000, len(data) - 1):
        with pytest.raises(ConfigError, match="is not a SentencePiece model"):
            convert(tmp_path, data[:size])


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("sentencepiece", "pip install sentencepiece"),
        ("sentencepiece.sentencepiece_model_pb2", "pip install protobuf"),
    ],
)
def test_a_missing_package_is_named_with_its_pip_line(module, line, tmp_path, monkeypatch):
    data = model_bytes("bpe as Llama's")
    monkeypatch.setitem(sys.modules, module, None)
    if module != "sentencepiece":
        monkeypatch.delattr(spm, "sentencepiece_model_pb2", raising=False)

    with pytest.raises(ConfigError, match=line):
        convert(tmp_path, data)
