"""What --context_parallel_size cannot divide is refused; test_layouts.py trains."""

import pytest

from llm.errors import ConfigError
from llm.trainers.gpt.config import check_config
from llm.trainers.gpt.extensions import GPTConfig
from tests.support.training import Bench, assert_refused


def test_a_sample_that_cannot_be_cut_into_equal_chunks_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--block_size 30 cannot be cut into 4 equal chunks"):
        Bench(tmp_path).read(ranks=2, context_parallel_size=2, block_size=30)


@pytest.mark.layouts
def test_a_model_whose_attention_cannot_be_divided_is_refused(tmp_path):
    assert_refused(
        Bench(tmp_path, family="bloom"),
        ranks=2,
        words=["cannot divide samples of 32 tokens of bloom"],
        context_parallel_size=2,
    )


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            {"kfac": True, "kfac_library": "kfac-pytorch"},
            "--kfac_library kfac-pytorch needs whole weights",
        ),
        ({"data_parallel": "gossip"}, "--data_parallel gossip does not"),
        ({"attention_implementation": "flash_attention_2"}, "not by flash_attention_2"),
    ],
)
def test_options_that_exclude_context_parallelism_are_refused(other, words):
    given = {"model_name_or_path": "gpt2", "train_file": "a.txt", "context_parallel_size": 2}
    with pytest.raises(ConfigError, match=words):
        check_config(GPTConfig(**given, **other))
