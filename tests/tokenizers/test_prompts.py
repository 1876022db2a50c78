"""Token ids of a prompt."""

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from llm.errors import DataError
from llm.tokenizers.prompts import encode_prompt


def test_a_prompt_on_which_the_tokenizer_panics_is_refused_in_one_sentence():
    backend = Tokenizer(models.WordLevel({"the": 7}, "the"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)

    assert encode_prompt(tokenizer, "the") == [7]
    with pytest.raises(DataError, match=r"^The tokenizer cannot encode .* with 'xxx"):
        encode_prompt(tokenizer, "x" * 40)
