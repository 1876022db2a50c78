"""The example of docs/guides/optimizers.md, as its reader writes it."""

import torch


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al. 2023, arXiv:2302.06675): the sign of the momentum is the step."""

    whole_matrices = False  # each element is updated by itself

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(torch.lerp(p.grad, state["momentum"], beta1).sign(), alpha=group["lr"])
                state["momentum"].lerp_(p.grad, 1 - beta2)
