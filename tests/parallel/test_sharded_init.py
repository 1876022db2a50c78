import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, PreTrainedConfig, PreTrainedModel

from llm.models.init import materialize
from llm.parallel.sharded_init import init_shards
from tests.support.families import every_family
from tests.support.models import tiny_config

CPU = torch.device("cpu")


def meta_model(config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def both_starts(make: Callable[[], PreTrainedModel]) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model drawn as a whole, and one drawn one parameter at a time."""
    whole, piecewise = make(), make()
    materialize(whole, seed=1, device=CPU)
    init_shards(piecewise, make, seed=1, device=CPU)
    return whole, piecewise


def assert_same_start(whole: PreTrainedModel, piecewise: PreTrainedModel) -> None:
    expected = dict([*whole.named_parameters(), *whole.named_buffers()])
    found = dict([*piecewise.named_parameters(), *piecewise.named_buffers()])
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@every_family
def test_weights_drawn_one_by_one_are_those_drawn_together(
    family: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_config(family)
    with caplog.at_level(logging.WARNING, logger="llm"):
        assert_same_start(*both_starts(lambda: meta_model(config)))

    assert not caplog.records  # none needs the memory of a whole model


def test_weights_that_are_scaled_after_their_draw_come_out_equal() -> None:
    config = tiny_config("mamba", rescale_prenorm_residual=True)
    assert_same_start(*both_starts(lambda: meta_model(config)))


def test_a_padded_vocabulary_ends_in_rows_of_zeros() -> None:
    small, large = tiny_config("llama"), tiny_config("llama", vocab_size=384)
    whole, padded = meta_model(small), meta_model(large)
    materialize(whole, seed=1, device=CPU)
    init_shards(padded, lambda: meta_model(small), seed=1, device=CPU)

    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(padded.get_parameter(name)[:320], whole.get_parameter(name))
        assert not padded.get_parameter(name)[320:].any()


class _Experts(GPT2LMHeadModel):
    """Fills two parameters in turns, slice by slice, and changes a third one afterwards."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.up = nn.Parameter(torch.empty(4, 8))
        self.down = nn.Parameter(torch.empty(4, 8))

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self and hasattr(self, "down"):
            for number in range(4):
                self.up[number].normal_()
                self.down[number].uniform_()
            self.transformer.wpe.weight[3] = 7.0


def make_experts() -> PreTrainedModel:
    with torch.device("meta"):
        return _Experts(tiny_config("gpt2"))


def test_parameters_initialised_alternately_keep_all_their_slices() -> None:
    whole, piecewise = both_starts(make_experts)

    assert_same_start(whole, piecewise)
    assert len(torch.unique(piecewise.up, dim=0)) == 4
    assert piecewise.transformer.wpe.weight[3].tolist() == [7.0] * 32


class _Normalised(GPT2LMHeadModel):
    """Divides a weight by its own norm, and leaves another one to its constructor."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.gate = nn.Parameter(torch.full((3,), 7.0))

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        weight = self.transformer.wpe.weight
        if module is self and self.config.n_layer == 1:
            weight /= weight.norm()
        if module is self and self.config.n_layer == 3:
            weight /= weight.norm().item()


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        (1, "transformer.wpe.weight depends on other weights"),
        (2, "the constructor fills gate"),
        (3, "cannot be called on meta tensors"),
    ],
)
def test_weights_that_cannot_be_drawn_by_shard_are_drawn_whole_and_logged(
    layers: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> PreTrainedModel:
        with torch.device("meta"):
            return _Normalised(tiny_config("gpt2", n_layer=layers))

    with caplog.at_level(logging.WARNING, logger="llm"):
        assert_same_start(*both_starts(make))

    (message,) = caplog.messages
    assert message.startswith(
        "Each rank initializes the whole _Normalised and then keeps its shards"
    )
    assert reason in message


SHARD_OF_64 = """
import resource, sys, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig
from llm.models.sizes import find_blocks
from llm.models.loss import LanguageModelLoss
from llm.models.options import ModelOptions
from llm.parallel.sharded_init import fill_model
from tests.support.models import tiny_model

dist.init_process_group("fake", store=FakeStore(), rank=63, world_size=64)
config = LlamaConfig(vocab_size=32000)  # 7B: 32 layers, width 4096
model = tiny_model(config, vocab_size=32000, device=torch.device("meta"))
mesh = init_device_mesh("cpu", (64,))
for block in find_blocks(model):
    fully_shard(block, mesh=mesh)
fully_shard(LanguageModelLoss(model), mesh=mesh)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
fill_model(ModelOptions(), model, seed=1, device=torch.device("cpu"))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
own = [parameter.to_local() for parameter in model.parameters()]
print(sum(p.numel() for p in model.parameters()), sum(p.numel() for p in own))
print(peak * 1024, own[1].std().item())
"""


@pytest.mark.slow
def test_one_of_64_ranks_initialises_its_shard_of_7b_parameters_in_1_gb() -> None:
    output = subprocess.run(
        [sys.executable, "-c", SHARD_OF_64],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    parameters, own, peak, deviation = (float(word) for word in output.split()[-4:])

    assert parameters == 6_738_415_616
    assert own == pytest.approx(parameters / 64, rel=0.001)
    assert peak < 4 * own + 4 * 32000 * 4096 + 200e6  # its part, the largest weight and a little
    assert deviation == pytest.approx(0.02, rel=0.01)
