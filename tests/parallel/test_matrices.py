"""Optimizers that need whole matrices, where weights are sharded or cut into stages."""

import pytest
import torch

from tests.support.matrix_runs import make_strategy, state_bytes, train, whole_weights
from tests.support.ranks import run_ranks, values

STEPS = 20
METHODS = ("muon", "soap", "ekfac", "eigen", "cholesky")


def run(sizes):
    """Losses, weights and bytes of state by method."""
    found = {}
    for kind in METHODS:
        strategy = make_strategy(kind, sizes)
        losses = train(strategy, range(STEPS))
        found[kind] = losses, whole_weights(strategy), state_bytes(strategy)
    strategy.close()
    return found


@pytest.fixture(scope="module")
def alone():
    return values(run_ranks(run, 1, {}))[0]


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [
        (2, {"shard": 2}),
        (4, {"shard": 2}),
        (4, {"shard": 2, "pipeline": 2}),
    ],
)
def test_twenty_steps_are_those_of_one_rank(alone, ranks, sizes):
    found = values(run_ranks(run, ranks, sizes, timeout=400))
    for kind in METHODS:
        losses, weights, _ = alone[kind]
        torch.testing.assert_close(found[0][kind][0], losses, rtol=1e-5, atol=0)
        for name, weight in found[0][kind][1].items():
            torch.testing.assert_close(weight, weights[name], rtol=0, atol=1e-5)
