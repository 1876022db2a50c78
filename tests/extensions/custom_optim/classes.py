"""Optimizers as users write them, sound ones and others."""

import torch
from torch.optim import Optimizer


class Counting(Optimizer):
    """An elementwise class with Python numbers in its state and in its groups."""

    whole_matrices = False

    def __init__(self, params, lr=1e-3, beta=0.9, weight_decay=0.0):
        super().__init__(
            params, {"lr": lr, "beta": beta, "weight_decay": weight_decay, "rate_sum": 0.0}
        )

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["rate_sum"] += group["lr"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, momentum=torch.zeros_like(p), first=p.clone())
                state["step"] += 1
                state["momentum"].lerp_(p.grad, 1 - group["beta"])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.lerp_(state["first"], 0.01 * group["rate_sum"])
                correction = 1 - group["beta"] ** state["step"]
                p.sub_(torch.tanh(100 * state["momentum"] / correction), alpha=group["lr"])


class RowNormed(Optimizer):
    """A class that needs whole matrices: it divides by norms, and keeps one for each row."""

    whole_matrices = True

    def __init__(self, params, lr=1e-3, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, gradient = self.state[p], p.grad.reshape(len(p), -1)
                if not state:
                    state["squares"] = torch.zeros(len(p), 1, device=p.device)
                state["squares"].lerp_(gradient.square().mean(1, keepdim=True), 0.5)
                update = gradient / (state["squares"].sqrt() + gradient.norm() + 1e-6)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(update.view_as(p), alpha=group["lr"])


class ColumnNormed(RowNormed):
    """The same, by a class that does not say that it needs whole matrices."""

    whole_matrices = None


class FalselyElementwise(RowNormed):
    whole_matrices = False


class Skipping(Counting):
    """A class that skips a step on the device."""

    found_inf = None

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                gradient = p.grad
                if self.found_inf is not None:
                    gradient = gradient.masked_fill(self.found_inf > 0, 0.0)
                p.sub_(gradient, alpha=group["lr"])


class NotSkipping(Counting):
    found_inf = None


class Forgetful(Counting):
    """Keeps a number where no checkpoint looks for it."""

    num_steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.num_steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] / self.num_steps)


class Tallying(Counting):
    """Keeps a number where no checkpoint looks for it, and depends on it after many steps."""

    def __init__(self, params, lr=1e-3, weight_decay=0.0):
        super().__init__(params, lr=lr, weight_decay=weight_decay)
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.num_steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] / (1 + self.num_steps // 100))


class Decaying(Counting):
    """Halves the weight decay in each step."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["weight_decay"] /= 2
            for p in group["params"]:
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(p.grad, alpha=group["lr"])


class Dividing(Counting):
    """Divides by a gradient of zero."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.div_(p.grad - p.grad)


class DividingByRate(Counting):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * (group["lr"] / group["lr"] if group["lr"] else float("nan")))


class Listing(Counting):
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p]["past"] = [p.clone()]


class Coupled(Counting):
    """Divides by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            norm = torch.nn.utils.get_total_norm(
                [p.grad for g in self.param_groups for p in g["params"]]
            )
            for p in group["params"]:
                p.sub_(p.grad / norm, alpha=group["lr"])


class Noisy(Counting):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad + torch.randn_like(p), alpha=group["lr"])


class Replacing(Counting):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p - group["lr"] * p.grad


class Failing(Counting):
    """A class that fails in the third step with more weights than the trial has."""

    def step(self, closure=None):
        super().step()
        for p, state in self.state.items():
            if p.numel() > 100 and state["step"] == 3:
                raise RuntimeError("the roof fell in")


class Closing(Counting):
    def step(self, closure):
        closure()


class Switching(Counting):
    def eval(self):
        """As schedule-free optimizers have it."""


class WithoutRate(Optimizer):
    def __init__(self, params, weight_decay=0.0):
        super().__init__(params, {"weight_decay": weight_decay})


class WithoutDecay(Counting):
    def __init__(self, params, lr=1e-3):
        super().__init__(params, lr=lr)


NOT_A_CLASS = 3
