"""Experts divided over ranks train as the whole model does on one rank."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from llm.models.attention import disable_packing_detection
from llm.models.loss import LanguageModelLoss
from llm.models.patches.recomputation import recompute_activations
from llm.optim.run_optimizer import Recipe
from tests.support.layouts import make_optimizer, make_strategy
from tests.support.matrix_runs import train, whole_weights
from tests.support.models import still_model
from tests.support.ranks import run_ranks, values

MORE = pytest.mark.layouts
EXPERTS2 = {"shard": 2, "expert": 2}
EXPERTS4 = {"shard": 4, "expert": 4}


def run(family, sizes, recompute="none", precision="no"):
    """Return losses, weights, and a rank's elements of the experts of a few steps."""
    disable_packing_detection()
    model = still_model(family)
    recompute_activations(model, recompute)
    strategy = make_strategy(sizes, precision)
    strategy.prepare(LanguageModelLoss(model), Recipe(make_optimizer).make)
    losses = train(strategy, range(3))
    local = sum(
        p.to_local().untyped_storage().nbytes() // 4
        for p in model.parameters()
        if p.ndim == 3 and isinstance(p, DTensor)
    )
    weights = whole_weights(strategy)
    strategy.close()
    return losses, weights, local


@pytest.mark.parametrize(
    ("family", "ranks", "sizes", "recompute"),
    [
        ("mixtral", 2, EXPERTS2, "none"),
        ("gpt_oss", 2, EXPERTS2, "full"),
        pytest.param("mixtral", 2, EXPERTS2, "selective", marks=MORE),
        pytest.param("mixtral", 4, EXPERTS4, "none", marks=MORE),
        pytest.param("mixtral", 4, EXPERTS2, "none", marks=MORE),
        pytest.param("qwen3_moe", 4, EXPERTS2 | {"pipeline": 2}, "none", marks=MORE),
    ],
)
def test_divided_experts_train_as_on_one_rank(family, ranks, sizes, recompute):
    losses, weights, _ = values(run_ranks(run, 1, family, {}, recompute))[0]
    for found, divided, local in values(run_ranks(run, ranks, family, sizes, recompute)):
        assert found == pytest.approx(losses, rel=1e-5)
        for name, weight in divided.items():
            torch.testing.assert_close(weight, weights[name], rtol=1e-5, atol=1e-5)
        stacks = sum(weight.numel() for weight in weights.values() if weight.ndim == 3)
        assert local <= stacks // sizes["expert"]
