import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, GPT2Config

from llm.models.sizes import flops_per_token
from tests.support.models import tiny_config

# Families whose every matrix product torch's counter sees.
COUNTED = ["gpt2", "gpt_neox", "gptj", "opt", "llama", "mistral", "qwen2", "qwen3", "phi", "olmo2"]


@pytest.mark.parametrize("family", COUNTED)
def test_a_tokens_operations_are_three_times_those_that_torch_counts_in_a_forward(family):
    # Torch does not count the fused attention of a CPU.
    model = AutoModelForCausalLM.from_config(
        tiny_config(family), attn_implementation="eager"
    ).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.ones(2, 16, dtype=torch.long), use_cache=False)
    counted = 3 * counter.get_total_flops() / (2 * 16)
    assert flops_per_token(model, block_size=16) == pytest.approx(counted, rel=0.02)


def test_gpt2_124m_needs_855_mflop_a_token_at_1024():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(GPT2Config())
    assert flops_per_token(model, block_size=1024) == pytest.approx(855e6, rel=0.005)


def test_of_a_mixture_only_the_chosen_experts_count():
    model = AutoModelForCausalLM.from_config(tiny_config("mixtral"))
    config = tiny_config("mixtral")
    config.num_experts_per_tok = config.num_local_experts
    dense = AutoModelForCausalLM.from_config(config)
    experts = sum(p.numel() for name, p in dense.named_parameters() if "experts" in name)
    chosen = tiny_config("mixtral").num_experts_per_tok / config.num_local_experts
    difference = flops_per_token(dense, block_size=8) - flops_per_token(model, block_size=8)
    assert difference == pytest.approx(6 * experts * (1 - chosen))
    assert difference > 0
