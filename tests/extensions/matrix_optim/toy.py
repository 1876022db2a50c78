"""Gradients, states and polynomials for the tests of optimizers."""

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
