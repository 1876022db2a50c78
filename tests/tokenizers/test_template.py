"""Texts that a user encodes have the special tokens that training texts have, and no others."""

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from llm.tokenizers.template import match_training_template
from tests.support.tokenizers import tiny_tokenizer

TEXT = "the dog"
PLAIN = tiny_tokenizer().encode(TEXT)


def tokenizer_with_template(single: str) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokens = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "<|endoftext|>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=single, pair=f"{single} $B", special_tokens=tokens
    )
    return tokenizer


@pytest.mark.parametrize("single", ["<s> $A", "$A <|endoftext|>", "<s> $A <|endoftext|>", "$A"])
def test_no_token_of_a_template_is_left_after_saving(single, tmp_path, caplog):
    caplog.set_level("INFO", logger="llm")
    tokenizer = tokenizer_with_template(single)
    match_training_template(tokenizer, None)
    tokenizer.save_pretrained(tmp_path)

    assert tokenizer.encode(TEXT) == PLAIN
    assert tokenizer.encode("") == []
    assert AutoTokenizer.from_pretrained(tmp_path).encode(TEXT) == PLAIN
    assert ("The tokenizer's template adds" in caplog.text) == (single != "$A")


@pytest.mark.parametrize("single", ["<s> $A", "$A <|endoftext|>", "$A"])
def test_the_token_that_begins_each_document_begins_each_prompt(single, tmp_path):
    tokenizer = tokenizer_with_template(single)
    start = tokenizer.bos_token_id
    match_training_template(tokenizer, start)
    tokenizer.save_pretrained(tmp_path)

    for each in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        assert each.encode(TEXT) == [start, *PLAIN]
        assert each.encode("") == [start]


def test_a_tokenizer_in_python_adds_none_either():
    tokenizer = ByT5Tokenizer()
    assert tokenizer.encode("a") == [100, 1]

    match_training_template(tokenizer, None)

    assert tokenizer.encode("a") == [100]

    match_training_template(tokenizer, 7)

    assert tokenizer.encode("a") == [7, 100]
