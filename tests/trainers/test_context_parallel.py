"""--context_parallel_size: a run of two ranks is the run of one, and what cannot be is refused."""

import pytest

from llm.errors import ConfigError
from llm.trainers.gpt.extensions import GPTConfig
from llm.trainers.gpt.rules import check
from tests.support.training import Bench

pytestmark = pytest.mark.layouts


def test_two_context_parallel_ranks_repeat_the_run_of_one(tmp_path):
    bench = Bench(tmp_path, family="llama")
    options = {
        "max_train_steps": 4,
        "eval_steps": 2,
        "eval_metrics": "accuracy",
        "reset_position_ids": True,
        "reset_attention_mask": True,
    }
    one = bench.train_well("one", **options)
    two = bench.train_well("two", ranks=2, context_parallel_size=2, **options)
    assert "world: 2 ranks, context 2" in two.output
    for found, expected in zip(two.metrics, one.metrics, strict=True):
        for name in ("step", "samples", "tokens"):
            assert found[name] == expected[name]
        assert ("eval_loss" in found) == ("eval_loss" in expected) == (found["step"] % 2 == 0)
        for name in expected.keys() & {"loss", "grad_norm", "eval_loss", "eval_accuracy"}:
            assert found[name] == pytest.approx(expected[name], rel=1e-5)
    assert two.read_json("config.json") == one.read_json("config.json")


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
