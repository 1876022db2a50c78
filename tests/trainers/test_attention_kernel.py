"""An attention kernel that refuses float32, as flash attention's do, in whole runs."""

import pytest
import torch

from tests.support.ranks import run_ranks, values
from tests.support.training import Bench


def half_precision_attention(module, query, key, value, attention_mask, **kwargs):
    """SDPA in half precision; casts under autocast only, as transformers does for flash kernels."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if torch.is_autocast_enabled("cpu"):
        query, key, value = (t.to(torch.get_autocast_dtype("cpu")) for t in (query, key, value))
    assert query.dtype != torch.float32, "this kernel has no float32"
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def train(argv: list[str]) -> int:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from llm.trainers.gpt import main

    ALL_ATTENTION_FUNCTIONS.register("half_precision", half_precision_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register("half_precision", sdpa_mask)
    return main.main(argv)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("family", "kfac"), [("gpt2", True), pytest.param("llama", False, marks=pytest.mark.extended)]
)
def test_a_kernel_without_float32_trains_evaluates_samples_and_exports(tmp_path, family, kfac):
    bench = Bench(tmp_path, lines=60, family=family)
    command = bench.command(
        "run",
        attention_implementation="half_precision",
        mixed_precision="bf16",
        kfac=kfac,
        max_train_steps=2,
        validation_split_percentage=20,
        eval_steps=1,
        sample_prompt="the king",
        sample_steps=1,
    )

    (outcome,) = run_ranks(train, 1, command)

    assert values([outcome]) == [0], outcome.output
    assert "a sample at step 1:\n\nthe king" in outcome.output
    assert (tmp_path / "run" / "model.safetensors").is_file()
