"""Any causal language model trains, saves, resumes, exports and generates."""

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, BartConfig

from tests.support.models import FAMILIES
from tests.support.recovery import check_resume
from tests.support.training import Bench

OPTIONS = {
    "max_train_steps": 3,
    "checkpointing_steps": 2,
    "weight_decay": 0.1,
    "pad_vocab_to_multiple_of": 64,
    "from_scratch": True,
    "sample_prompt": "The king",
}
IN_SHORT = ("llama", "mixtral")
"""Those that `make test` trains; `make test-extended` trains the others."""
RESUMED = dict.fromkeys(("mamba", "mixtral"), pytest.mark.extended)
"""Marks of those that are resumed; `make test-layouts` resumes the others."""


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=RESUMED.get(name, pytest.mark.layouts)) for name in FAMILIES],
)
def test_a_family_resumes_bit_for_bit(family, tmp_path):
    check_resume(Bench(tmp_path, family=family), "straight", **OPTIONS)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in IN_SHORT else pytest.mark.extended)
        for name in FAMILIES
    ],
)
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


def test_a_decoder_with_unused_cross_attention_trains_on_two_ranks(tmp_path):
    bench = Bench(tmp_path)
    layers = {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 64}
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "decoder_start_token_id"), 0)
    bart = BartConfig(vocab_size=320, d_model=32, dropout=0.0, **layers, **special)
    bart.save_pretrained(bench.model)

    alone = bench.train_well("alone", per_device_train_batch_size=8, max_train_steps=4)
    pair = bench.train_well("pair", ranks=2, max_train_steps=4, gradient_accumulation_steps=1)

    assert pair.losses == pytest.approx(alone.losses, rel=1e-5)
