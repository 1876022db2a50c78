"""What a tokenizer.json says holds, whatever class or model type is named next to it."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, GPT2Tokenizer

from llm.prepare.text_tokenizer import load_text_tokenizer
from llm.tokenizers.load_tokenizer import load_tokenizer
from llm.tokenizers.options import TokenizerOptions
from tests.support.tokenizers import save_tiny_tokenizer, tiny_tokenizer

TEXT = "cafe\u0301 In 1789 and 12345 the dog doesn't"


def folder_of(folder: Path, *, tokenizer_class: str, model_type: str | None = None) -> Path:
    """A folder with the tiny tokenizer's rules, and names that mean other ones."""
    save_tiny_tokenizer(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = tokenizer_class
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if model_type is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


@pytest.mark.parametrize(
    ("tokenizer_class", "model_type"),
    [
        ("GPTNeoXTokenizerFast", None),
        ("Qwen2Tokenizer", None),
        ("CohereTokenizerFast", None),
        ("CLIPTokenizer", None),
        ("LlamaTokenizerFast", "qwen2"),
        ("PreTrainedTokenizerFast", "qwen2"),
        ("PreTrainedTokenizerFast", "qwen3_5"),
    ],
)
def test_a_class_or_a_model_type_does_not_change_the_ids(
    tokenizer_class, model_type, tmp_path, caplog
):
    caplog.set_level("INFO", logger="llm")
    folder = folder_of(tmp_path, tokenizer_class=tokenizer_class, model_type=model_type)
    options = TokenizerOptions(tokenizer_name=str(folder))
    expected = tiny_tokenizer().backend_tokenizer.encode(TEXT).ids
    other = AutoTokenizer.from_pretrained(folder)

    assert other.encode(TEXT, add_special_tokens=False) != expected
    assert load_tokenizer(options).encode(TEXT, add_special_tokens=False) == expected
    assert f"The tokenizer {folder} has the rules of its tokenizer.json" in caplog.text
    assert type(other).__name__ in caplog.text
    prepared = load_text_tokenizer(options)
    assert prepared.backend is not None
    assert prepared.backend.encode(TEXT).ids == expected
    assert prepared.eos_token_id == 0


def test_tokens_that_only_the_class_names_stay(tmp_path):
    """As in the files of GPT-2 on the Hub, which name no end of text."""
    folder = folder_of(tmp_path, tokenizer_class="Qwen2Tokenizer")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    tokenizer = load_tokenizer(TokenizerOptions(tokenizer_name=str(folder)))

    assert tokenizer.eos_token == tokenizer.pad_token == "<|endoftext|>"
    assert tokenizer.bos_token is None
    assert len(tokenizer) == 300


def test_a_class_with_the_rules_of_the_file_is_kept(tmp_path, caplog):
    """Its fingerprint is in the sidecars of token files that were made with it."""
    caplog.set_level("INFO", logger="llm")
    folder = folder_of(tmp_path, tokenizer_class="GPT2Tokenizer")
    tokenizer = load_tokenizer(TokenizerOptions(tokenizer_name=str(folder)))

    assert type(tokenizer) is GPT2Tokenizer
    assert not caplog.text


def test_a_class_with_the_rules_of_the_file_takes_no_second_load(tmp_path, monkeypatch):
    folder = folder_of(tmp_path, tokenizer_class="GPT2Tokenizer")
    opened: list[str] = []
    builtin_open = open

    def open_file(file, *args, **kwargs):
        opened.append(str(file))
        return builtin_open(file, *args, **kwargs)

    monkeypatch.setattr("builtins.open", open_file)
    AutoTokenizer.from_pretrained(folder)
    by_library, opened[:] = opened[:], []
    load_tokenizer(TokenizerOptions(tokenizer_name=str(folder)))

    assert opened == by_library
    assert str(folder / "tokenizer.json") in opened
