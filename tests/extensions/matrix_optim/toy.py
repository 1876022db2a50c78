"""Gradients, states and polynomials for the tests of optimizers."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch


def put_gradients(model, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


def state_of(model, optimizer) -> list[torch.Tensor]:
    moments = [t for p in model.parameters() for t in optimizer.state[p].values()]
    return [t.detach().clone() for t in (*model.parameters(), *moments)]


def quintic(values):
    """The polynomial of Jordan et al. 2024, five times."""
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return values


def soap_updates(
    grads: Sequence[np.ndarray], sides: Sequence[int], *, betas, eps: float, update_steps: int
) -> Iterator[np.ndarray]:
    """Each step's update of SOAP (Vyas et al. 2024) for a matrix; the first one is zero."""
    beta1, beta2 = betas
    first, second = np.zeros_like(grads[0]), np.zeros_like(grads[0])
    factors = [np.zeros((n, n)) for n in grads[0].shape]
    bases = [np.eye(n) for n in grads[0].shape]
    for step, g in enumerate(grads):
        update = np.zeros_like(g)
        if step > 0:
            turned = bases[0].T @ g @ bases[1]
            first = beta1 * first + (1 - beta1) * g
            second = beta2 * second + (1 - beta2) * turned**2
            m = (bases[0].T @ first @ bases[1]) / (1 - beta1**step)
            update = m / (np.sqrt(second / (1 - beta2**step)) + eps)
            update = bases[0] @ update @ bases[1].T
        yield update
        for side, square in ((0, g @ g.T), (1, g.T @ g)):
            factors[side] = beta2 * factors[side] + (1 - beta2) * square
        for side in sides:
            if step == 0:
                bases[side] = np.linalg.eigh(factors[side])[1][:, ::-1]
            elif step % update_steps == 0:
                product = factors[side] @ bases[side]
                order = np.argsort(-(bases[side] * product).sum(axis=0))
                second = np.take(second, order, axis=side)
                bases[side] = np.linalg.qr(product[:, order])[0]
