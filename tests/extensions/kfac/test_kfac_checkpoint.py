"""Checkpoints of K-FAC, whose factors and moments are spread over ranks."""

import json

import pytest
import torch
from safetensors.torch import load_file

from llm.checkpoint import snapshot
from llm.checkpoint.format import STATE_FILE, split_state
from llm.checkpoint.load import find_newest_checkpoint
from llm.checkpoint.snapshot import assign_writers
from llm.extensions.kfac.make_kfac import KFACFactory
from llm.models.attention import disable_packing_detection
from llm.models.loss import LanguageModelLoss
from llm.parallel.base import AcceleratedStrategy
from llm.trainers.gpt.extensions import GPTConfig
from tests.support import layouts
from tests.support.checkpoints import load_strategy, parts_of, save_strategy
from tests.support.layouts import share
from tests.support.models import still_model
from tests.support.ranks import run_ranks, values

EKFAC: dict[str, str] = {}
EIGEN = {"kfac_method": "eigen"}


def make_strategy(options):
    strategy = AcceleratedStrategy(layouts.cpu_accelerator())
    disable_packing_detection()
    every = {"kfac_factor_update_steps": 2, "kfac_inv_update_steps": 4}
    given = GPTConfig(kfac=True, learning_rate=1e-2, **every, **options)
    strategy.prepare(LanguageModelLoss(still_model()), KFACFactory(given).make)
    return strategy


def train(strategy, steps):
    for step in steps:
        micro_batches, num_tokens = share(step, strategy, 1)
        strategy.forward_backward(micro_batches, num_tokens=num_tokens)
        strategy.set_learning_rate(1e-2)
        strategy.optimizer_step(1.0)
    return torch.cat([p.detach().flatten() for p in strategy.model.parameters()])


def saved_and_trained_on(options, folder):
    strategy = make_strategy(options)
    train(strategy, range(6))
    save_strategy(strategy, folder, 6)
    return train(strategy, range(6, 9))


def loaded_and_saved(options, folder, copy):
    strategy = make_strategy(options)
    load_strategy(strategy, folder)
    save_strategy(strategy, copy, 6)
    return train(strategy, range(6, 9))


def content(folder):
    """The tensors and the plain values of a checkpoint."""
    path = find_newest_checkpoint(folder).path
    files = [load_file(name) for name in path.glob("*.safetensors")]
    tensors = {name: tensor for file in files for name, tensor in file.items()}
    assert len(tensors) == sum(len(file) for file in files)  # each is written once
    return tensors, json.loads((path / STATE_FILE).read_text())


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, EKFAC),
        pytest.param(4, EKFAC, marks=pytest.mark.layouts),
        pytest.param(4, EIGEN, marks=pytest.mark.layouts),
    ],
)
def test_kfac_resumes_bit_for_bit_and_loads_on_other_ranks(ranks, options, tmp_path):
    folder = tmp_path / "run"
    straight = values(run_ranks(saved_and_trained_on, ranks, options, folder))

    resumed = values(run_ranks(loaded_and_saved, ranks, options, folder, tmp_path / "again"))
    values(run_ranks(loaded_and_saved, 6 - ranks, options, folder, tmp_path / "other"))

    assert all(torch.equal(one, other) for one, other in zip(resumed, straight, strict=True))
    tensors, plain = content(folder)
    for copy in ("again", "other"):
        found, found_plain = content(tmp_path / copy)
        assert found_plain == plain
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def copied_for_a_save(options):
    """Bytes of new tensors in the state, of those that this rank writes, and of the whole state."""
    strategy = make_strategy(options)
    train(strategy, range(2))
    live = [*strategy.model.parameters(), *strategy.model.buffers()]
    live += [t for state in strategy.optimizer.state.values() for t in state.values()]
    for factor in strategy.run_optimizer.recorder.factors:
        live += factor.tensors().values()
    addresses = {tensor.data_ptr() for tensor in live}
    state, _ = split_state({name: part.state_dict() for name, part in parts_of(strategy).items()})
    new = sum(t.nbytes for t in state.values() if t.data_ptr() not in addresses)
    world = {"rank": strategy.rank, "world_size": strategy.world_size}
    snapshot._MIN_SHARE_BYTES = 1000  # so that all ranks write
    own, _ = assign_writers(state, **world, owner_ranks=strategy.owner_ranks)
    return new, sum(t.nbytes for t in own.values()), sum(t.nbytes for t in state.values())


@pytest.mark.parametrize("options", [EKFAC, pytest.param(EIGEN, marks=pytest.mark.extended)])
def test_all_ranks_together_copy_the_state_once_for_a_save(options):
    [(_, _, whole)] = values(run_ranks(copied_for_a_save, 1, options))
    found = values(run_ranks(copied_for_a_save, 4, options))

    # Only the counts of failures and of clipped steps are not the tensors that training uses.
    assert all(new <= 8 for new, _, _ in found)
    assert sum(own for _, own, _ in found) == whole
    assert max(own for _, own, _ in found) < 1.3 * whole / 4
