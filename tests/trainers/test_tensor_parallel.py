"""Layers computed by several ranks together, through the trainer."""

import re

import pytest
import torch
from safetensors.torch import load_file

from tests.support.training import NO_DROPOUT, Bench

pytestmark = pytest.mark.layouts


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"), **NO_DROPOUT)


def test_two_ranks_train_and_export_the_model_that_one_does(bench):
    options = {"max_train_steps": 4, "validation_split_percentage": 20}
    one = bench.train_well("one", **options)
    two = bench.train_well("two", ranks=2, tensor_parallel_size=2, **options)
    assert "world: 2 ranks, tensor 2" in two.output
    assert "trained parameters per rank: " not in one.output
    # Of two ranks, each holds half of the matrices, and the norms and some biases whole.
    whole, half = (
        int(re.search(pattern, run.output)[1].replace(",", ""))
        for pattern, run in (
            (r"model: gpt2, ([\d,]+) parameters", one),
            (r"trained parameters per rank: ([\d,]+)\n", two),
        )
    )
    assert whole / 2 < half < 0.6 * whole
    assert "4 samples per device x 1 rank" in two.output
    assert two.losses == pytest.approx(one.losses, rel=1e-5)
    norms = [[r["grad_norm"] for r in run.metrics if "grad_norm" in r] for run in (one, two)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    evaluated = [run.read_json("all_results.json")["eval_loss"] for run in (one, two)]
    assert evaluated[1] == pytest.approx(evaluated[0], rel=1e-5)
    expected = load_file(one.folder / "model.safetensors")
    exported = load_file(two.folder / "model.safetensors")
    assert exported.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(exported[name], tensor, rtol=1e-3, atol=1e-4)
