"""Optimizers that update matrices of equal shapes together, as on a GPU, or one after another."""

import copy

import pytest
import torch

from llm.extensions.matrix_optim import matrix_owners, muon
from llm.trainers.gpt.extensions import GPTConfig
from llm.trainers.gpt.seams import choose_factory, make_extensions
from tests.support.models import still_model

INTERVALS = {"kfac_factor_update_steps": 2, "kfac_inv_update_steps": 4}
KINDS = {
    "muon": {"optimizer": "muon"},
    "soap": {"optimizer": "soap", "soap_update_steps": 2},
    "ekfac": {"kfac": True, **INTERVALS},
    "ekfac, Nesterov": {"kfac": True, "nesterov": True, **INTERVALS},
    "ekfac in blocks": {"kfac": True, "kfac_max_dim": 20, **INTERVALS},
    "ekfac and SOAP": {"kfac": True, "optimizer": "soap", **INTERVALS},
    "eigen": {"kfac": True, "kfac_method": "eigen", **INTERVALS},
}
EVERYTHING = float("inf")


class Training:
    """A model and an optimizer whose batches have a cost, at least."""

    def __init__(self, monkeypatch, kind, *, cost, family="gpt2"):
        for module in (matrix_owners, muon):
            monkeypatch.setattr(module, "min_batch_cost", lambda device: cost)
        options = GPTConfig(
            learning_rate=1e-3, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-4, **KINDS[kind]
        )
        self.model = still_model(family)
        self.made = choose_factory(options, make_extensions(options), seed=0).make(self.model, None)
        self.optimizer = self.made.optimizer

    def step(self, number, *, skipped=False):
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, 64, (4, 16), generator=generator)
        with self.made.record_passes(token_weight=1 / 60, loss_scale=lambda: torch.ones(())):
            self.model(tokens, labels=tokens).loss.backward()
        if skipped:
            next(self.model.parameters()).grad[0, 0] = float("inf")
            for p in self.model.parameters():
                p.grad.view(-1)[0] = float("nan")
        self.made.before_clip(learning_rate=1e-3)
        self.optimizer.found_inf = torch.tensor(float(skipped))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self):
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


@pytest.mark.parametrize("family", ["gpt2", pytest.param("llama", marks=pytest.mark.extended)])
@pytest.mark.parametrize("kind", KINDS)
def test_matrices_together_train_as_one_after_another(monkeypatch, kind, family):
    found = []
    for cost in (EVERYTHING, 0):
        training = Training(monkeypatch, kind, cost=cost, family=family)
        for number in range(8):
            training.step(number, skipped=number == 5)
        found.append(training.weights())
    for name, weight in found[0].items():
        # A rate of 1e-3; where a gradient is rounding, so is its sign.
        torch.testing.assert_close(weight, found[1][name], rtol=0, atol=3e-4, msg=name)
        close = (weight - found[1][name]).abs() < 1e-5
        assert close.float().mean() > 0.99, name


@pytest.mark.parametrize("kind", ["muon", "soap", "ekfac", "ekfac, Nesterov"])
def test_a_state_that_is_no_stack_any_more_continues_bit_for_bit(monkeypatch, kind):
    """As after `load_state_dict` of torch, which gives each tensor memory of its own."""
    trainings = [Training(monkeypatch, kind, cost=EVERYTHING) for _ in range(2)]
    for number in range(6):
        if number == 3:
            moved = trainings[1].optimizer
            moved.load_state_dict(copy.deepcopy(moved.state_dict()))
        for training in trainings:
            training.step(number)
    expected = trainings[0].weights()
    assert all(torch.equal(w, expected[name]) for name, w in trainings[1].weights().items())


@pytest.mark.parametrize("kind", ["muon", "soap", "ekfac"])
def test_a_matrix_without_a_gradient_stays_and_the_others_move(monkeypatch, kind):
    found = []
    for cost in (EVERYTHING, 0):
        training = Training(monkeypatch, kind, cost=cost)
        frozen = training.model.transformer.h[0].mlp.c_fc.weight
        frozen.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        before = frozen.detach().clone()
        for number in range(4):
            training.step(number)
        assert torch.equal(frozen, before)
        found.append(training.weights())
    for name, weight in found[0].items():
        torch.testing.assert_close(weight, found[1][name], rtol=0, atol=3e-4, msg=name)


def unit(name, *, cost, kind=None):
    weight = torch.nn.Parameter(torch.zeros(2, 3))
    unit = matrix_owners.Unit(
        parameters=[weight],
        shapes=[weight.shape],
        fusion=matrix_owners.Fusion(sizes={"": 2}),
        cost=cost,
        kind=kind,
    )
    unit.name = name
    return unit


def test_batches_end_at_their_cost_and_hold_what_is_alike(monkeypatch):
    monkeypatch.setattr(matrix_owners, "min_batch_cost", lambda device: 20)
    units = [unit(n, cost=8, kind=k) for n, k in zip("abcdefg", "xyxxxyx", strict=True)]
    names = [[unit.name for unit in batch] for batch in matrix_owners.batch_equal_units(units)]
    assert names == [["a", "c", "d"], ["b", "f"], ["e", "g"]]


def test_a_cpu_updates_one_weight_after_another():
    units = [unit(name, cost=8) for name in "ab"]
    assert [len(batch) for batch in matrix_owners.batch_equal_units(units)] == [1, 1]


def test_states_that_lie_together_are_stacked_without_a_copy():
    states = [{"a": torch.full((2, 3), float(n)), "b": torch.tensor(float(n))} for n in range(3)]
    matrix_owners.make_adjacent(states)
    with matrix_owners.stacked_state(states) as joint:
        joint["a"].add_(1.0)
        joint["b"].mul_(2.0)
        assert joint["a"].data_ptr() == states[0]["a"].data_ptr()
    assert [state["a"][0, 0].item() for state in states] == [1.0, 2.0, 3.0]
    assert [state["b"].item() for state in states] == [0.0, 2.0, 4.0]


def test_other_states_are_copied_into_a_stack_and_back():
    states = [{"a": torch.full((2, 3), float(n))} for n in range(3)]
    with matrix_owners.stacked_state(states) as joint:
        joint["a"].add_(1.0)
    assert [state["a"][0, 0].item() for state in states] == [1.0, 2.0, 3.0]
