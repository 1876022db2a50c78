"""Ranks that draw only their parts of the weights start, and train, as one rank does."""

import functools
import itertools
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from llm.data.loader import MicroBatch
from llm.models.loss import LanguageModelLoss
from llm.optim.run_optimizer import OptimizerFactory
from llm.parallel.base import AcceleratedStrategy
from llm.parallel.fsdp import ShardedStrategy
from llm.parallel.options import ParallelOptions
from llm.parallel.sharded_init import fill_model
from tests.support.layouts import MODEL_OPTIONS, cpu_accelerator, dims_of, make_optimizer, make_sgd
from tests.support.models import FAMILIES, large_config, model_options, tiny_config, tiny_model
from tests.support.processes import memory
from tests.support.ranks import run_ranks, values

CPU, META = torch.device("cpu"), torch.device("meta")


def start(
    accelerator, config, shard: int, make_optimizer=make_optimizer, **options
) -> ShardedStrategy:
    """A strategy over all ranks whose model has started on the meta device."""
    model = tiny_model(config, device=META, **options)
    init_weights = functools.partial(fill_model, model_options(options), seed=1, device=CPU)
    dims = dims_of(shard=shard)
    strategy = ShardedStrategy(ParallelOptions(), accelerator, dims, init_weights=init_weights)
    strategy.prepare(LanguageModelLoss(model), OptimizerFactory(make_optimizer).make)
    return strategy


def differences() -> list[str]:
    """What starts otherwise than on one rank, over all families."""
    accelerator = cpu_accelerator()
    found = []
    for family, options in itertools.product(FAMILIES, ({}, MODEL_OPTIONS)):
        whole = tiny_model(tiny_config(family), **options)
        ranks = accelerator.num_processes
        strategy = start(accelerator, tiny_config(family), shard=ranks, **options)
        divided = strategy.model
        expected = dict([*whole.named_parameters(), *whole.named_buffers()])
        own = dict([*divided.named_parameters(), *divided.named_buffers()])
        if list(own) != list(expected):
            found.append(f"{family}: names")
        for name, tensor in own.items():
            reference = expected[name]
            if isinstance(tensor, DTensor):
                parts = [*reference.chunk(ranks), *[reference[:0]] * 3]
                tensor, reference = tensor.to_local(), parts[strategy.rank]
            if not torch.equal(tensor, reference):
                found.append(f"{family}: {name}")
            if own[name].requires_grad != expected[name].requires_grad:
                found.append(f"{family}: {name} is trained or not")
        if strategy.loss.is_chunked != LanguageModelLoss(whole).is_chunked:
            found.append(f"{family}: chunked")
    return found


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.layouts
def test_every_family_starts_as_on_one_rank_with_and_without_changes(ranks):
    assert values(run_ranks(differences, ranks, timeout=300)) == [[]] * ranks


def train(shard: int, which: str):
    """Losses and norms of three steps; weights in uneven parts."""
    config = tiny_config("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    accelerator = cpu_accelerator()
    options = {**MODEL_OPTIONS, "no_bias": False, "activation_checkpointing": which}
    if shard > 1:
        strategy = start(accelerator, config, shard=shard, **options)
    else:
        strategy = AcceleratedStrategy(accelerator)
        strategy.prepare(
            LanguageModelLoss(tiny_model(config, **options)), OptimizerFactory(make_optimizer).make
        )
    seen = []
    for step in range(3):
        tokens = torch.randint(320, (8, 17), generator=torch.Generator().manual_seed(step))
        size = 8 // strategy.data_ranks
        own = slice(strategy.data_rank * size, (strategy.data_rank + 1) * size)
        batch = MicroBatch(tokens[own, :-1], tokens[own, 1:])
        loss = strategy.forward_backward([batch], num_tokens=8 * 16)
        norm, _ = strategy.optimizer_step(0.5)
        seen.append([strategy.reduce_sum(loss.clone()).item(), norm.item()])
    return seen


@pytest.mark.extended
def test_sharded_ranks_train_as_one_rank_with_any_recomputation():
    expected = values(run_ranks(train, 1, 1, "none"))[0]
    for ranks, shard, which in ((2, 2, "full"), (4, 2, "selective")):
        for seen in values(run_ranks(train, ranks, shard, which)):
            torch.testing.assert_close(
                torch.tensor(seen), torch.tensor(expected), rtol=1e-5, atol=1e-5
            )


def weights_without_updates() -> list[str]:
    """Weights of a Llama in uneven parts that the optimizer no longer reaches after a step."""
    strategy = start(cpu_accelerator(), tiny_config("llama", vocab_size=321), shard=2)
    tokens = torch.randint(321, (2, 17))
    strategy.forward_backward([MicroBatch(tokens[:, :-1], tokens[:, 1:])], num_tokens=64)
    names = {parameter: name for name, parameter in strategy.model.named_parameters()}
    return [
        names[parameter]
        for parameter, local in zip(strategy.parameters, strategy.local_parameters, strict=True)
        if parameter.to_local().data_ptr() != local.data_ptr()
    ]


def test_the_optimizer_updates_every_uneven_part_of_an_untied_model():
    assert values(run_ranks(weights_without_updates, 2)) == [[], []]


def peak_of_start() -> tuple[int, int]:
    """Bytes of the whole model, and the most that this process took on to start its part."""
    accelerator = cpu_accelerator()
    start(accelerator, tiny_config("llama"), shard=4)  # what is imported on the way
    Path("/proc/self/clear_refs").write_text("5")  # let the peak begin anew
    before = memory("VmRSS")
    # Without AdamW's moments, which are twice as much as the part.
    strategy = start(accelerator, large_config(), shard=4, make_optimizer=make_sgd)
    whole = sum(4 * parameter.numel() for parameter in strategy.model.parameters())
    return whole, memory("VmHWM") - before


def test_no_rank_ever_holds_a_whole_model():
    for whole, peak in values(run_ranks(peak_of_start, 4)):
        assert whole > 200e6
        assert whole / 4 < peak < whole / 2
