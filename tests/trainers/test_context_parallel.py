"""What --context_parallel_size cannot divide is refused; test_layouts.py trains."""

import pytest

from llm.errors import ConfigError
from llm.trainers.gpt.config import check
from llm.trainers.gpt.extensions import GPTConfig
from tests.support.training import Bench


@pytest.mark.layouts
@pytest.mark.parametrize(
    ("family", "options", "sentence"),
    [
        ("llama", {"block_size": 30}, "--block_size 30 cannot be cut into 4 equal chunks"),
        ("bloom", {}, "cannot divide samples of 32 tokens of bloom"),
    ],
)
def test_sequences_that_cannot_be_sharded_are_refused(tmp_path, family, options, sentence):
    run = Bench(tmp_path, family=family).train(ranks=2, context_parallel_size=2, **options)
    assert run.codes == [2, 2]
    assert sentence in run.output
    assert "Traceback" not in run.output
    assert not run.folder.exists()


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
        check(GPTConfig(**given, **other))
