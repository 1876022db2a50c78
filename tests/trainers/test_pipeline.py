"""The trainer on two stages writes what it writes on one rank."""

import gc
import weakref

import pytest
import torch
from safetensors.torch import load_file

from llm.errors import ConfigError
from tests.support.ranks import run_ranks, values
from tests.support.training import NO_DROPOUT, Bench

STAGES = {"gradient_accumulation_steps": 2, "max_train_steps": 4, "pipeline_parallel_size": 2}


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench(tmp_path_factory.mktemp("bench"), n_layer=4, **NO_DROPOUT)


def test_two_stages_log_evaluate_and_export_as_one_rank(bench):
    one = bench.train_well("one", **{**STAGES, "pipeline_parallel_size": 1})
    two = bench.train_well("two", ranks=2, **STAGES, sample_prompt="The")
    assert two.losses == pytest.approx(one.losses, rel=1e-6)
    results = [run.read_json("all_results.json") for run in (one, two)]
    assert results[1]["eval_loss"] == pytest.approx(results[0]["eval_loss"], rel=1e-6)
    expected, found = (load_file(run.folder / "model.safetensors") for run in (one, two))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)
    said = two.output
    assert "stage 0 on rank 0 of the pipeline: layers 0 to 1, 37,696 parameters" in said
    assert "stage 1 on rank 1 of the pipeline: layers 2 to 3, 35,712 parameters" in said
    assert "2 micro-batches per step through 2 stages on 2 ranks by 1f1b; bubble 33.3%" in said
    assert "model: gpt2, 63,168 parameters (12,288 embedding, 50,880 other, 0 frozen)" in said


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("qwen3_moe", marks=pytest.mark.extended),
        pytest.param("deepseek_v3", marks=pytest.mark.layouts),
        pytest.param("gpt_oss", marks=pytest.mark.layouts),
    ],
)
def test_two_stages_of_a_mixture_of_experts_train_as_one_rank(family, tmp_path):
    bench = Bench(tmp_path, family=family)
    one = bench.train_well("one", **{**STAGES, "pipeline_parallel_size": 1})
    two = bench.train_well("two", ranks=2, **STAGES)
    assert two.losses == pytest.approx(one.losses, rel=1e-6)
    expected, found = (load_file(run.folder / "model.safetensors") for run in (one, two))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)


def layers_while_training(argv: list[str]) -> tuple[int, list[list[bool]]]:
    """The exit code, and in each step which layers of the model that was built are alive."""
    from llm.models.sizes import find_blocks
    from llm.parallel.base import AcceleratedStrategy
    from llm.trainers.gpt import main, train

    layers, alive = [], []
    make_model, optimizer_step = train.make_model, AcceleratedStrategy.optimizer_step

    def make_watched_model(*args):
        model = make_model(*args)
        layers.extend(map(weakref.ref, find_blocks(model)))
        return model

    def look_and_step(self, max_grad_norm):
        gc.collect()
        alive.append([layer() is not None for layer in layers])
        return optimizer_step(self, max_grad_norm)

    train.make_model, AcceleratedStrategy.optimizer_step = make_watched_model, look_and_step
    return main.main(argv), alive


def test_the_trainer_keeps_no_reference_to_layers_of_other_stages(bench):
    argv = bench.command("freed", **{**STAGES, "max_train_steps": 1})
    first, last = values(run_ranks(layers_while_training, 2, argv))
    assert first == (0, [[True, True, False, False]])
    assert last == (0, [[False, False, True, True]])


def test_more_stages_than_layers_are_refused(bench):
    options = {**STAGES, "pipeline_schedule": "interleaved-1f1b", "virtual_stages": 3}
    with pytest.raises(ConfigError, match="is 6 stages, and the model has 4 layers"):
        bench.read(ranks=2, **options)
