"""Through real checkpoints."""

import pytest
import torch

from llm.checkpoint.format import model_tensors
from llm.checkpoint.load import find_newest_checkpoint, load_model, load_state, read_tensors
from llm.checkpoint.options import CheckpointOptions
from llm.checkpoint.save import Saver
from tests.support.decentralized import (
    DILOCO,
    RING,
    Case,
    Model,
    finish,
    make_strategy,
    train,
    trained,
)
from tests.support.ranks import run_ranks, values

NODES = Case(topology="exp", optimizer="adamw", nodes=True, ranks_per_node=2, unused=False)


def trained_and_saved(case: Case, folder):
    strategy = make_strategy(case)
    saver = Saver(
        CheckpointOptions(),
        folder,
        parts={"strategy": strategy},
        metadata={},
        rank=strategy.rank,
        world_size=strategy.world_size,
        owner_ranks=strategy.owner_ranks,
    )
    train(strategy, case, range(4))
    saver.save(step=4, eval_loss=None)
    train(strategy, case, range(4, 6))
    saver.finish()
    finish(strategy)
    with strategy.averaged():
        mean = trained(strategy.model)
    return trained(strategy.model), mean


def resumed(case: Case, folder):
    strategy = make_strategy(case)
    found = find_newest_checkpoint(folder)
    if found.world_size == strategy.world_size:
        load_state(found, {"strategy": strategy})
    else:
        strategy.load_mean_state(
            lambda tensors: read_tensors(
                found,
                {f"strategy/{path}": tensor for path, tensor in tensors.items()},
                required_prefixes=(),
            ),
            num_replicas=found.world_size // (case.ranks_per_node if case.nodes else 1),
        )
    before = trained(strategy.model)
    train(strategy, case, range(4, 6))
    finish(strategy)
    return before, trained(strategy.model)


@pytest.mark.parametrize(
    "case",
    [
        RING,
        pytest.param(DILOCO, marks=pytest.mark.extended),
        pytest.param(NODES, marks=pytest.mark.layouts),
    ],
    ids=["ring", "diloco", "nodes"],
)
def test_a_decentralized_checkpoint_resumes_and_loads_as_the_mean(case, tmp_path):
    folder = tmp_path / "checkpoints"
    saved = values(run_ranks(trained_and_saved, 4, case, folder))
    for (_, after), (expected, _) in zip(
        values(run_ranks(resumed, 4, case, folder)), saved, strict=True
    ):
        assert torch.equal(after, expected)
    model = Model(unused=case.unused)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    load_model(find_newest_checkpoint(folder), model_tensors(model))
    for before, after in values(run_ranks(resumed, 2, case, folder)):
        assert torch.equal(before, trained(model))
        assert torch.isfinite(after).all()
