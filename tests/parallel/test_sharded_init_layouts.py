"""Ranks that hold some layers, or a part of each, draw what they hold and nothing else."""

from functools import partial
from pathlib import Path

import pytest
import torch

from llm.models.loss import LanguageModelLoss
from llm.optim.run_optimizer import OptimizerFactory
from llm.parallel.layout import Layout
from llm.parallel.sharded_init import fill_model
from llm.trainers.gpt.extensions import GPTConfig
from tests.support.layouts import MODEL_OPTIONS, cpu_accelerator, dims_of, make_optimizer, make_sgd
from tests.support.models import large_config, tiny_config, tiny_model
from tests.support.processes import memory
from tests.support.ranks import run_ranks, values

META = torch.device("meta")
FAMILIES = {
    "gpt2": {},
    "gpt_neo": {},
    "opt": {},
    "gpt_neox": {},
    "llama": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2},
    "mistral": {"num_key_value_heads": 2},
}


def start(config, sizes: dict[str, int], make_optimizer=make_optimizer, **options):
    """A strategy of the layout whose model has started on the meta device."""
    model = tiny_model(config, device=META, **options)
    run = GPTConfig(no_bias=options.get("no_bias", False))
    accelerator, dims = cpu_accelerator(), dims_of(**sizes)
    init_weights = partial(fill_model, run, seed=1, device=accelerator.device)
    strategy = Layout().make_strategy(run, dims, accelerator, init_weights=init_weights)
    strategy.prepare(LanguageModelLoss(model), OptimizerFactory(make_optimizer).make)
    return strategy


def differences(layouts: list[dict[str, int]]) -> list[str]:
    """What rank 0 gathers that is not, bit for bit, the weights of one rank."""
    found = []
    for family, changes in FAMILIES.items():
        for options in ({}, MODEL_OPTIONS):
            config = tiny_config(family, **changes)
            expected = tiny_model(config, **options).state_dict()
            for sizes in layouts:
                strategy = start(config, sizes, **options)
                whole = strategy.gather_full_state_dict()
                if strategy.rank > 0:
                    continue
                if whole.keys() != expected.keys():
                    found.append(f"{family} {sizes}: {whole.keys() ^ expected.keys()}")
                found += [
                    f"{family} {sizes}: {name}"
                    for name in whole.keys() & expected.keys()
                    if not torch.equal(whole[name], expected[name])
                ]
    return found


LAYOUTS = {
    2: [{"tensor": 2}, {"pipeline": 2}, {"context": 2}],
    4: [{"tensor": 2, "shard": 2}, {"pipeline": 2, "tensor": 2}, {"pipeline": 2, "shard": 2}],
}


@pytest.mark.layouts
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_layout_starts_with_the_weights_of_one_rank(ranks):
    found = values(run_ranks(differences, ranks, LAYOUTS[ranks], timeout=300))
    assert found == [[]] * ranks


def peak_of_start(sizes: dict[str, int]) -> tuple[int, int]:
    """Bytes of the whole model, and the most that this process took on to start its part."""
    start(tiny_config("llama", num_key_value_heads=2), sizes)  # what is imported on the way
    Path("/proc/self/clear_refs").write_text("5")  # let the peak begin anew
    before = memory("VmRSS")
    # Without AdamW's moments, which are twice as much as the part.
    start(large_config(), sizes, make_optimizer=make_sgd)
    whole = sum(4 * p.numel() for p in tiny_model(large_config(), device=META).parameters())
    return whole, memory("VmHWM") - before


@pytest.mark.layouts
@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"pipeline": 2}], ids=["TP2", "PP2"])
def test_no_rank_ever_holds_a_whole_model(sizes):
    for whole, peak in values(run_ranks(peak_of_start, 2, sizes)):
        assert whole > 200e6
        assert whole / 2 < peak < 0.75 * whole
