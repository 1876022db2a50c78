import contextlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from llm.extensions.kfac.curvature import Curvature, is_update_due
from llm.extensions.kfac.factors import Factor, choose_block_widths
from llm.extensions.kfac.layers import find_covered_layers
from tests.extensions.kfac.toy import forward_backward, loss_sum, toy_batch, toy_model


def averages(curvature):
    return {factor.name: factor.averages()[0].clone() for factor in curvature.factors}


def recorded(model, *, seed=0, **split):
    curvature = Curvature(find_covered_layers(model))
    forward_backward(model, curvature, *toy_batch(seed), **split)
    curvature.update()
    return averages(curvature)


def by_hand(model, inputs, labels):
    """A and G from the definition: means over tokens of a a^T and g g^T."""
    rows = inputs.flatten(0, 1)
    hidden = model.first(rows).detach().requires_grad_()
    logits = model.second(torch.tanh(hidden)).detach().requires_grad_()
    nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum").backward()
    out = nn.functional.cross_entropy(
        model.second(torch.tanh(hidden)), labels.flatten(), reduction="sum"
    )
    out.backward()
    first = torch.cat([rows, torch.ones(len(rows), 1)], dim=1)
    second = torch.tanh(hidden.detach())
    pairs = {
        "first.A": first,
        "first.G": hidden.grad,
        "second.A": second,
        "second.G": logits.grad,
    }
    return {name: values.T @ values / len(values) for name, values in pairs.items()}


def test_factors_are_means_over_tokens_of_inputs_and_output_gradients():
    model = toy_model()

    torch.testing.assert_close(recorded(model), by_hand(model, *toy_batch(0)))


@pytest.mark.parametrize(
    "split", [{"micro_batches": 4}, {"loss_scale": 1024.0}, {"micro_batches": 2, "loss_scale": 8.0}]
)
def test_accumulation_and_loss_scale_do_not_change_the_factors(split):
    model = toy_model()

    torch.testing.assert_close(recorded(model, **split), recorded(model), rtol=1e-5, atol=1e-7)


def observe(factor, *micro_batches, decay):
    for rows in micro_batches:
        factor.record(rows)
    factor.update_average(*factor.pop_step_sums(), decay=decay)


def test_a_moving_average_is_weighted_by_tokens_and_bias_corrected():
    factor = Factor("x", size=1, max_dim=8, device=torch.device("cpu"))
    observe(factor, torch.full((10, 1), 1.0), decay=0.5)
    observe(factor, torch.full((30, 1), 2.0), decay=0.5)

    # Ten tokens of 1, which weigh half by now, and thirty of 4.
    assert factor.averages()[0].item() == pytest.approx((5 * 1 + 30 * 4) / 35)


def test_a_factor_that_saw_no_token_keeps_its_average():
    factor = Factor("expert", size=2, max_dim=8, device=torch.device("cpu"))
    observe(factor, torch.eye(2), decay=0.9)
    before = [tensor.clone() for tensor in factor.tensors().values()]
    observe(factor, torch.zeros(0, 2), decay=0.9)
    observe(factor, decay=0.9)

    assert all(map(torch.equal, before, factor.tensors().values()))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_a_micro_batch_with_non_finite_statistics_is_dropped(bad):
    factor = Factor("x", size=2, max_dim=8, device=torch.device("cpu"))
    sound, unsound = torch.tensor([[1.0, 2.0]]), torch.tensor([[bad, 2.0], [1.0, 1.0]])
    observe(factor, sound, unsound, decay=0.9)

    torch.testing.assert_close(factor.averages()[0], torch.tensor([[1.0, 2.0], [2.0, 4.0]]))


def test_a_checkpointed_block_is_counted_once():
    model = toy_model()
    plain = recorded(model)
    forward = model.forward
    model.forward = lambda inputs: checkpoint(forward, inputs, use_reentrant=False)

    torch.testing.assert_close(recorded(model), plain)


def test_statistics_are_float32_under_autocast():
    model = toy_model()
    plain = recorded(model)
    forward = model.forward

    def autocast(inputs):
        with torch.autocast("cpu", torch.bfloat16):
            return forward(inputs).float()

    model.forward = autocast
    for name, found in recorded(model).items():
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, plain[name], rtol=0.05, atol=0.05 * plain[name].max())


def test_hooks_are_there_only_while_a_step_with_due_factors_is_recorded():
    model = toy_model()
    curvature = Curvature(
        find_covered_layers(model), factor_update_steps=3, inv_update_steps=100, spread=False
    )
    hooked = []
    for _ in range(8):
        with curvature.capture_stats():
            hooked.append(len(model.first._forward_hooks))
        curvature.update()
        assert not model.first._forward_hooks

    assert hooked == [1, 1, 1, 1, 1, 0, 1, 0]


def test_updates_due_every_eight_steps_are_more_frequent_at_first():
    assert [step for step in range(30) if is_update_due(8, step)] == [0, 1, 2, 4, 8, 16, 24]
    assert [step for step in range(30) if is_update_due(8, step, 0.5)] == [0, 1, 3, 6, 12, 20, 28]
    assert [step for step in range(8) if is_update_due(1, step, 0.9)] == list(range(8))


def test_basis_updates_are_spread_over_the_steps_of_an_interval():
    curvature = Curvature(
        find_covered_layers(toy_model()), factor_update_steps=100, inv_update_steps=4
    )
    renewed = []
    for _ in range(12):
        with curvature.capture_stats():
            pass
        renewed.append(sorted(curvature.update()))

    everything = ["first.A", "first.G", "second.A", "second.G"]
    assert renewed[0] == renewed[1] == everything
    for window in (renewed[2:4], renewed[4:8], renewed[8:12]):
        assert sorted(name for names in window for name in names) == everything
        assert max(map(len, window)) <= 2


def test_a_factor_is_recorded_at_the_step_at_which_its_basis_is_renewed():
    curvature = Curvature(
        find_covered_layers(toy_model()), factor_update_steps=5, inv_update_steps=10
    )
    for _ in range(40):
        with curvature.capture_stats():
            pass
        recorded = {factor.name for factor in curvature._recorded_factors}
        assert curvature.update().keys() <= recorded


def test_an_evaluation_inside_a_recording_is_not_counted():
    model = toy_model()
    curvature = Curvature(find_covered_layers(model))
    inputs, labels = toy_batch(0)
    with curvature.capture_stats():
        loss_sum(model, inputs, labels).backward()
        with torch.no_grad():
            loss_sum(model, 10 * inputs, labels)
    curvature.update()

    torch.testing.assert_close(averages(curvature), by_hand(model, inputs, labels))


def test_an_aborted_step_leaves_no_statistics():
    model = toy_model()
    curvature = Curvature(find_covered_layers(model))
    with contextlib.suppress(KeyboardInterrupt), curvature.capture_stats():
        loss_sum(model, *toy_batch(7)).backward()
        raise KeyboardInterrupt
    forward_backward(model, curvature, *toy_batch(0))
    curvature.update()

    torch.testing.assert_close(averages(curvature), by_hand(model, *toy_batch(0)))


def test_a_wide_factor_is_kept_in_blocks_of_nearly_equal_width():
    assert choose_block_widths(10, 4) == [4, 3, 3]
    assert choose_block_widths(8, 8) == [8]


def test_the_bias_column_makes_no_new_block():
    assert choose_block_widths(9, 8) == [9]
    assert choose_block_widths(33, 8) == [9, 8, 8, 8]
    assert choose_block_widths(1, 8) == [1]


def test_the_log_lists_covered_layers_and_their_memory():
    model = nn.Sequential(nn.Linear(255, 256), nn.LayerNorm(256))

    # A and G of 256 x 256 in fp32, an eigenbasis each, and little else.
    assert Curvature(find_covered_layers(model)).describe().splitlines() == [
        "K-FAC covers 1 layer with 65,536 of 66,048 parameters (99.2%).",
        "Not covered, since it is a LayerNorm: 1 (1 module).",
        "K-FAC keeps 1.0 MiB of factors and bases on this rank.",
    ]
    # In halves: A and G are two blocks of 128 x 128 each.
    halves = Curvature(find_covered_layers(model), max_dim=128).describe()
    assert "keeps 0.5 MiB of factors and bases on this rank, 2 of 2 factors in diag" in halves
