"""Any causal language model trains, saves, resumes, exports and generates."""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.models import FAMILIES
from tests.support.training import Bench


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_saves_resumes_exports_and_generates(family, tmp_path):
    bench = Bench(tmp_path, family=family)
    options = {
        "max_train_steps": 3,
        "checkpointing_steps": 2,
        "weight_decay": 0.1,
        "pad_vocab_to_multiple_of": 64,
        "low_cpu_mem_usage": True,
        "sample_prompt": "The king",
    }
    straight = bench.train_well("straight", **options)
    shutil.copytree(straight.folder, tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "step_00000003")
    (tmp_path / "resumed" / "model.safetensors").unlink()
    resumed = bench.train_well("resumed", resume_from_checkpoint=True, **options)

    assert len(straight.losses) == 3
    assert resumed.losses == straight.losses
    assert straight.losses[-1] < straight.losses[0]
    assert "a sample that the model wrote" in straight.output
    first, second = (load_file(run.folder / "model.safetensors") for run in (straight, resumed))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)

    model, report = AutoModelForCausalLM.from_pretrained(straight.folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(straight.folder)
    inputs = tokenizer("The king", return_tensors="pt")
    output = model.generate(input_ids=inputs["input_ids"], max_new_tokens=5, do_sample=False)
    assert output.shape[1] >= inputs["input_ids"].shape[1] + 1
    assert tokenizer.decode(output[0]).startswith("The king")
