"""The trainer on two stages writes what it writes on one rank."""

import pytest
import torch
from safetensors.torch import load_file

from tests.support.training import Bench

STAGES = {"gradient_accumulation_steps": 2, "max_train_steps": 4, "pipeline_parallel_size": 2}


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return Bench(tmp_path_factory.mktemp("bench"), n_layer=4, **no_dropout)


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
    assert "2 micro-batches a step through 2 stages on 2 ranks by 1f1b; bubble 33.3%" in said
    assert "model: gpt2, 63,168 parameters (12,288 embedding, 50,880 other, 0 frozen)" in said


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"gradient_accumulation_steps": 1}, "needs at least 2 micro-batches a step for 2 stages"),
        (
            {"pipeline_schedule": "interleaved-1f1b", "virtual_stages": 3},
            "is 6 stages, and the model has 4 layers",
        ),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused_by_a_sentence(bench, options, sentence):
    run = bench.train("refused", ranks=2, **{**STAGES, **options})
    assert run.codes == [2, 2]
    assert sentence in run.output
    assert "Traceback" not in run.output
