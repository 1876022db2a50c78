"""Launches of an optimizer step on the made-up device: they bound the speed of small models."""

import functools

import pytest

from tests.support.made_up_run import Case, launches_of_updates
from tests.support.ranks import run_ranks, values

more = pytest.mark.layouts
OPTIMIZERS = {
    "adamw": {},
    "sgd": {"optimizer": "sgd"},
    "muon": {"optimizer": "muon"},
    # Without a step that updates a basis, whose number grows with that of the matrices.
    "soap": {"optimizer": "soap", "soap_update_steps": 1000},
    "ekfac": {"kfac": True, "kfac_factor_update_steps": 1000, "kfac_inv_update_steps": 1000},
}


@functools.cache
def launches(name: str, layers: int) -> int:
    model = {"num_layers": layers, "hidden_size": 64, "num_attention_heads": 1}
    case = Case(1, {**model, **OPTIMIZERS[name]}, family=None)
    [[count]] = values(run_ranks(launches_of_updates, 1, case, 1))
    return count.total()


@pytest.mark.parametrize(
    "name",
    ["adamw", pytest.param("sgd", marks=more), pytest.param("muon", marks=pytest.mark.extended)],
)
def test_launches_do_not_grow_with_the_number_of_layers(name):
    assert launches(name, 6) == launches(name, 2)


@more
@pytest.mark.parametrize(("name", "per_layer"), [("soap", 4), ("ekfac", 0)])
def test_a_layer_adds_few_launches(name, per_layer):
    assert launches(name, 6) - launches(name, 2) <= 4 * per_layer


@pytest.mark.extended
def test_a_step_of_muon_is_two_hundred_launches_at_most():
    assert launches("muon", 2) <= 200
