"""Any causal language model trains, saves, resumes, exports and generates."""

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.models import FAMILIES
from tests.support.recovery import check_resume
from tests.support.training import Bench

MORE = pytest.mark.layouts


OPTIONS = {
    "max_train_steps": 3,
    "checkpointing_steps": 2,
    "weight_decay": 0.1,
    "pad_vocab_to_multiple_of": 64,
    "from_scratch": True,
    "sample_prompt": "The king",
}
RESUMED = ("mixtral", "mamba")
"""Those of the ordinary suite; `make test-layouts` resumes all."""


@pytest.mark.parametrize(
    "family",
    [name if name in RESUMED else pytest.param(name, marks=MORE) for name in FAMILIES],
)
def test_a_family_resumes_bit_for_bit(family, tmp_path):
    check_resume(Bench(tmp_path, family=family), "straight", **OPTIONS)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_exports_and_generates(family, tmp_path):
    straight = Bench(tmp_path, family=family).train_well("straight", **OPTIONS)

    assert len(straight.losses) == 3
    assert straight.losses[-1] < straight.losses[0]
    assert "a sample that the model wrote" in straight.output

    model, report = AutoModelForCausalLM.from_pretrained(straight.folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(straight.folder)
    inputs = tokenizer("The king", return_tensors="pt")
    output = model.generate(input_ids=inputs["input_ids"], max_new_tokens=5, do_sample=False)
    assert output.shape[1] >= inputs["input_ids"].shape[1] + 1
    assert tokenizer.decode(output[0]).startswith("The king")
