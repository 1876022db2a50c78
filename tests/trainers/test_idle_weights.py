"""Weights that are trained but get no gradient are in the log, and layers are never skipped."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from llm.errors import ConfigError
from tests.support.training import Bench

BART = (
    "d_model=32,decoder_layers=1,encoder_layers=1,decoder_attention_heads=2,decoder_ffn_dim=64,"
    "vocab_size=512"
)
FROM_TYPE = {"model_name_or_path": None, "max_train_steps": 2, "validation_split_percentage": 0}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"), lines=60)


def test_unused_cross_attention_is_in_the_log(bench: Bench) -> None:
    run = bench.train_well(
        "bart",
        model_type="bart",
        config_overrides=BART,
        tokenizer_name=str(bench.model),
        **FROM_TYPE,
    )

    assert run.output.count("got no gradient") == 1
    # Four projections and a norm, each a weight and a bias.
    assert "10 of 30 trained weights (4,288 parameters) got no gradient in the first" in run.output
    assert "model.decoder.layers.0.encoder_attn.k_proj.weight" in run.output


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("deepseek_v32", marks=pytest.mark.extended),
        pytest.param("glm_moe_dsa", marks=pytest.mark.layouts),
    ],
)
def test_an_indexer_without_gradients_trains_on_two_ranks(family: str, tmp_path: Path) -> None:
    bench = Bench(tmp_path, family=family)
    options = {"max_train_steps": 3, "checkpointing_steps": 2}
    one = bench.train_well("one", **options, per_device_train_batch_size=8)
    two = bench.train_well("two", ranks=2, **options, gradient_accumulation_steps=1)
    said = "10 of 43 trained weights (2,240 parameters) got no gradient in the first step"
    for run in (one, two):
        assert run.output.count("got no gradient") == 1
        assert said in run.output
    assert two.losses == pytest.approx(one.losses, rel=1e-5)
    weights = load_file(two.folder / "model.safetensors")
    assert weights.keys() == load_file(one.folder / "model.safetensors").keys()

    # Checkpoints do not depend on the layout.
    shutil.rmtree(sorted(two.folder.glob("checkpoints/step_*"))[-1])
    resumed = bench.train_well(
        "two", **options, per_device_train_batch_size=8, resume_from_checkpoint=True
    )
    assert resumed.losses == pytest.approx(one.losses, rel=1e-5)


def test_nothing_is_in_the_log_if_all_weights_got_a_gradient(bench: Bench) -> None:
    assert "got no gradient" not in bench.train_well("gpt2", max_train_steps=2).output


def test_a_model_that_skips_layers_is_refused_on_several_ranks(bench: Bench) -> None:
    skipping = {
        "model_type": "opt",
        "config_overrides": "layerdrop=0.5,hidden_size=32,num_hidden_layers=2,"
        "num_attention_heads=2,ffn_dim=64,word_embed_proj_dim=32,vocab_size=512",
        "tokenizer_name": str(bench.model),
        **FROM_TYPE,
    }
    with pytest.raises(ConfigError, match=r"The opt model skips layers .*layerdrop=0\.5"):
        bench.read(ranks=2, **skipping)
    bench.read(ranks=1, **skipping)
