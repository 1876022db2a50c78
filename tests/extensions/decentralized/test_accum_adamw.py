"""AccumAdamW against PyTorch's AdamW, and against its own definition in NumPy."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from llm.extensions.decentralized.accum_adamw import AccumAdamW, make_accum_adamw
from llm.optim.adamw_and_sgd import make_adamw
from llm.optim.options import OptimizerOptions
from tests.support.models import tiny_config
from tests.support.operations import Reads

SETTINGS = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def gradients(steps: int, dtype=torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, 2, generator=generator, dtype=dtype) for _ in range(steps)]


def parameter(dtype=torch.float64) -> torch.nn.Parameter:
    start = torch.arange(1.0, 7.0, dtype=dtype).reshape(3, 2)
    return torch.nn.Parameter(start)


def train(optimizer_of, grads: list[torch.Tensor]) -> torch.nn.Parameter:
    weight = parameter(grads[0].dtype)
    optimizer = optimizer_of([weight])
    for grad in grads:
        weight.grad = grad.clone()
        optimizer.step()
    return weight


def by_definition(grads: list[torch.Tensor], accum_steps: int) -> np.ndarray:
    lr, (beta1, beta2), eps, decay = SETTINGS.values()
    theta = parameter().detach().numpy().copy()
    m = v = block = np.zeros_like(theta)
    for number, grad in enumerate(grads):
        g = grad.numpy()
        theta = theta * (1 - lr * decay)
        begun = number // accum_steps + 1
        m_hat = (beta1 * m + (1 - beta1) * g) / (1 - beta1**begun)
        v_hat = (beta2 * v + (1 - beta2) * g**2) / (1 - beta2**begun)
        theta = theta - lr * m_hat / (np.sqrt(v_hat) + eps)
        block = block + g / accum_steps
        if (number + 1) % accum_steps == 0:
            m = beta1 * m + (1 - beta1) * block
            v = beta2 * v + (1 - beta2) * block**2
            block = np.zeros_like(theta)
    return theta


@pytest.mark.parametrize("accum_steps", [1, 2, 3, 8])
def test_a_step_uses_the_last_blocks_moments_and_the_present_gradient(accum_steps):
    grads = gradients(20)
    weight = train(lambda p: AccumAdamW(p, **SETTINGS, accum_steps=accum_steps), grads)
    expected = by_definition(grads, accum_steps)
    np.testing.assert_allclose(weight.detach().numpy(), expected, rtol=0, atol=1e-13)


def test_a_whole_model_trains_as_with_torchs_fused_adamw():
    """Decay on matrices only, tied embeddings, two groups."""
    models = []
    options = OptimizerOptions(learning_rate=1e-2, weight_decay=0.1, betas=(0.9, 0.95))
    for make, more in ((make_adamw, {}), (make_accum_adamw, {"accum_steps": 1})):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(tiny_config("gpt2")).double().eval()
        optimizer = make(options, model, **more)
        tokens = torch.arange(64).reshape(4, 16)
        for _ in range(5):
            optimizer.zero_grad()
            model(tokens, labels=tokens).loss.backward()
            optimizer.step()
        models.append(model)
    for ours, fused in zip(models[1].parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(ours, fused, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("accum_steps", [1, 3])
@pytest.mark.parametrize("poison", [0, 2, 5])
def test_a_skipped_step_changes_no_weight_state_or_block_boundary(accum_steps, poison):
    grads = gradients(9)
    sound = train(lambda p: AccumAdamW(p, **SETTINGS, accum_steps=accum_steps), grads)
    weight = parameter()
    optimizer = AccumAdamW([weight], **SETTINGS, accum_steps=accum_steps)
    for number, grad in enumerate(grads):
        if number == poison:
            weight.grad = torch.full_like(weight, float("nan"))
            weight.grad[0, 0] = float("inf")
            optimizer.found_inf = torch.ones(())
            before = [t.clone() for t in (weight, *optimizer.state[weight].values())]
            optimizer.step()
            after = [t.clone() for t in (weight, *optimizer.state[weight].values())]
            # At the very first step there is no state yet, and a skipped one makes zeros.
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=False))
            assert poison > 0 or not any(t.any() for t in after[1:])
        weight.grad = grad.clone()
        optimizer.found_inf = torch.zeros(())
        optimizer.step()
    assert torch.equal(weight, sound)


def test_a_parameter_without_a_gradient_stays_and_counts_its_own_steps():
    grads = gradients(9)
    alone = train(lambda p: AccumAdamW(p, **SETTINGS, accum_steps=2), grads[::3])
    always, sometimes = parameter(), parameter()
    optimizer = AccumAdamW([always, sometimes], **SETTINGS, accum_steps=2)
    for number, grad in enumerate(grads):
        always.grad = grad.clone()
        sometimes.grad = grad.clone() if number % 3 == 0 else None
        optimizer.step()
    assert torch.equal(sometimes, alone)
    np.testing.assert_allclose(always.detach().numpy(), by_definition(grads, 2), rtol=0, atol=1e-13)


def test_parameters_of_two_dtypes_train_side_by_side():
    double, half = parameter(), parameter(torch.bfloat16)
    optimizer = AccumAdamW([double, half], **SETTINGS, accum_steps=2)
    for grad in gradients(6):
        double.grad, half.grad = grad.clone(), grad.bfloat16()
        optimizer.step()
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.double(), double.data, rtol=0.02, atol=0)


def test_a_step_reads_no_value_from_the_device():
    weight = parameter()
    optimizer = AccumAdamW([weight], **SETTINGS, accum_steps=2)
    for grad in gradients(3):
        weight.grad = grad
        optimizer.found_inf = torch.zeros(())
        with Reads() as reads:
            optimizer.step()
        assert reads.seen == []


def test_it_takes_the_steps_of_decent_dps_optimizer():
    decent = pytest.importorskip("decent_dp.optim")
    grads = gradients(20)
    ours = train(lambda p: AccumAdamW(p, **SETTINGS, accum_steps=4), grads)
    theirs = train(lambda p: decent.AccumAdamW(p, **SETTINGS, accum_iter=4), grads)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
