import logging
from pathlib import Path
from typing import Any

import pytest
from tokenizers import decoders, processors
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase

from llm.errors import ConfigError
from llm.tokenizers.load_tokenizer import choose_end_token, compute_fingerprint, load_tokenizer
from llm.tokenizers.options import TokenizerOptions
from tests.support.ranks import run_ranks, values
from tests.support.tokenizers import tiny_tokenizer

TEXT = "The king said: to be, or not to be.\n\tnaïve café"


def load(name: str | Path | None = None, **options: Any) -> PreTrainedTokenizerBase:
    named = {"tokenizer_name": name, **options}
    return load_tokenizer(TokenizerOptions(**{k: str(v) for k, v in named.items() if v}))


@pytest.fixture
def folder(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.fixture
def pair(tmp_path):
    (tmp_path / "pair").mkdir()
    tiny_tokenizer().backend_tokenizer.model.save(str(tmp_path / "pair"))
    return tmp_path / "pair"


def test_a_folder_a_file_and_a_lone_file_give_the_same_ids(folder, tmp_path):
    lone = tmp_path / "lone.json"
    tiny_tokenizer().backend_tokenizer.save(str(lone))
    loaded = [load(folder), load(folder / "tokenizer.json"), load(lone)]

    expected = tiny_tokenizer()(TEXT)["input_ids"]
    assert [tokenizer(TEXT)["input_ids"] for tokenizer in loaded] == [expected] * 3
    assert {tokenizer.eos_token for tokenizer in loaded} == {"<|endoftext|>"}
    assert len({compute_fingerprint(tokenizer) for tokenizer in loaded}) == 1


def test_gpt2s_two_files_give_the_ids_of_their_byte_level_bpe(pair):
    expected = tiny_tokenizer().backend_tokenizer.encode(TEXT).ids
    named = load(vocab_file=pair / "vocab.json", merges_file=str(pair / "merges.txt"))

    assert named(TEXT)["input_ids"] == expected
    assert load(pair)(TEXT)["input_ids"] == expected
    assert named.decode(expected) == TEXT
    assert named.eos_token == "<|endoftext|>"


def test_long_texts_are_encoded_whole_and_without_a_warning(folder, monkeypatch, caplog):
    limited = tiny_tokenizer()
    limited.model_max_length = 8
    limited.backend_tokenizer.enable_truncation(5)
    limited.save_pretrained(folder)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    tokenizer = load(folder)

    assert len(tokenizer("the dog " * 100)["input_ids"]) >= 200
    assert len(tokenizer.backend_tokenizer.encode("the dog " * 100).ids) >= 200
    assert tokenizer.model_max_length == 8
    assert not caplog.records


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "No tokenizer is named"),
        ({"vocab_file": "vocab.json"}, "--vocab_file is given without --merges_file"),
        ({"merges_file": "merges.txt"}, "--merges_file is given without --vocab_file"),
        ({"vocab_file": "a.json", "merges_file": "b.txt"}, "--vocab_file a.json does not exist"),
    ],
)
def test_an_incomplete_choice_is_named(options, words):
    with pytest.raises(ConfigError, match=words):
        load(**options)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no tokenizer"):
        load(tmp_path)


def test_a_model_file_that_is_none_of_sentencepiece_is_refused(tmp_path):
    pytest.importorskip("sentencepiece")
    (tmp_path / "tokenizer.model").write_text("IQ== 0\n")

    with pytest.raises(ConfigError, match=r"tokenizer\.model is not a SentencePiece model"):
        load(tmp_path)


def test_an_unreachable_hub_is_reported_with_the_name_and_a_remedy(monkeypatch, caplog):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    caplog.set_level("INFO")

    with pytest.raises(ConfigError, match=r"nobody/nothing .* to a local folder"):
        load("nobody/nothing")
    assert "asking the Hugging Face Hub for the tokenizer nobody/nothing" in caplog.text


def test_the_fingerprint_survives_saving_truncation_and_padding(tmp_path):
    tokenizer = tiny_tokenizer()
    before = compute_fingerprint(tokenizer)
    tokenizer.backend_tokenizer.enable_truncation(5)
    tokenizer.backend_tokenizer.enable_padding(length=9, pad_token="<|endoftext|>")
    assert compute_fingerprint(tokenizer) == before

    tokenizer.save_pretrained(tmp_path)
    assert compute_fingerprint(load(tmp_path)) == before


def fingerprint_of(folder: Path) -> str:
    return compute_fingerprint(load(folder))


def test_another_process_finds_the_same_fingerprint(folder):
    """One of the fork server, whose hashes of strings are others."""
    assert values(run_ranks(fingerprint_of, 1, folder)) == [fingerprint_of(folder)]


def test_the_fingerprint_ignores_postprocessing():
    tokenizer = tiny_tokenizer()
    before = compute_fingerprint(tokenizer)
    backend = tokenizer.backend_tokenizer
    backend.decoder = decoders.WordPiece()
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )

    assert compute_fingerprint(tokenizer) == before


def test_python_tokenizers_that_treat_text_differently_differ():
    class Shouting(ByT5Tokenizer):
        def tokenize(self, text: str, **options: Any) -> list[str]:
            return list(super().tokenize(text.upper(), **options))

    Shouting.__name__ = "ByT5Tokenizer"
    assert compute_fingerprint(ByT5Tokenizer()) == compute_fingerprint(ByT5Tokenizer())
    assert compute_fingerprint(Shouting()) != compute_fingerprint(ByT5Tokenizer())


def test_an_end_token_that_the_tokenizer_lacks_is_refused():
    assert choose_end_token(5, append_eos=True) == 5
    assert choose_end_token(None, append_eos=False) is None
    with pytest.raises(ConfigError, match=r"no end-of-text token.*--no_append_eos"):
        choose_end_token(None, append_eos=True)
