"""AdamW for ranks that see few samples each: moments of a block of steps, a step of every gradient.

Where ranks average weights instead of gradients, each one's moments are those of its own small
batches: the second moment counts the noise of a single rank, which all-reduce would have averaged
away, and so the steps are too short. AccumAdamW advances its moments only once in K steps, from
the mean of their gradients, which has the noise of a batch K times as large; every step still uses
its own gradient. The idea is that of the optimizer of the same name in Decent-DP (Wang et al.).
"""

from typing import Any

import torch
from torch import Tensor

from llm.optim.adamw import adamw_settings, adamw_state
from llm.optim.groups import parameter_groups
from llm.optim.options import OptimizerOptions


class AccumAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter 2019) whose moments advance once per K steps.

    Of a step with gradient g, with the moments m and v that the last whole block left:

    1. theta <- (1 - lr * weight_decay) * theta
    2. m^ = beta1 m + (1 - beta1) g and v^ = beta2 v + (1 - beta2) g^2, bias-corrected by the
       number of blocks begun
    3. theta <- theta - lr * m^ / (sqrt(v^) + eps)
    4. after the K-th step of a block: m and v advance in the same way by the block's mean gradient

    K = 1 is AdamW. Like the fused optimizers of PyTorch, `step` reads the attribute `found_inf`:
    a float tensor on the device that holds 1 where weights and state shall stay as they are. Which
    step of its block this is, is kept on the device too, so that nothing waits for it.

    The state is three times the size of the parameters: both moments, and `grad_mean`, the part of
    the block's mean gradient that there is so far.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate.
        betas: Decay of the two moments per block.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled decay per step, times the learning rate.
        accum_steps: K, the steps of a block.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        accum_steps: int = 1,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "accum_steps": accum_steps,
        }
        super().__init__(params, defaults)
        for group in self.param_groups:
            for p in group["params"]:
                # At once, so that a checkpoint can be loaded into it.
                self.state[p] = {**adamw_state(p), "grad_mean": torch.zeros_like(p)}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        Where `found_inf` is set, gradients become zero, and nothing else changes.

        Args:
            closure: Not supported.
        """
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            by_device_and_dtype: dict[Any, list[Tensor]] = {}
            for p in params:
                by_device_and_dtype.setdefault((p.device, p.dtype), []).append(p)
            for alike in by_device_and_dtype.values():
                self._step(alike, group, found_inf)

    def _step(self, params: list[Tensor], group: dict[str, Any], found_inf: Tensor | None) -> None:
        states = [self.state[p] for p in params]
        steps = [state["step"] for state in states]
        averages = [state["exp_avg"] for state in states]
        squares = [state["exp_avg_sq"] for state in states]
        means = [state["grad_mean"] for state in states]
        grads = [p.grad for p in params if p.grad is not None]
        beta1, beta2 = group["betas"]
        lr, block = group["lr"], group["accum_steps"]

        device = params[0].device
        precise = torch.float32 if device.type == "mps" else torch.float64
        taken = torch.ones((), dtype=precise, device=device)
        if found_inf is not None:
            taken = taken - found_inf.to(taken)
            skipping = taken == 0
            for grad in grads:
                # Times 0 would not do: infinity times 0 is no number.
                grad.masked_fill_(skipping, 0.0)
        torch._foreach_add_(steps, [taken] * len(steps))
        torch._foreach_add_(means, grads, alpha=1 / block)

        # One number per parameter, since one may have had fewer gradients than another.
        counts = torch.stack(steps).to(taken.dtype)
        begun = torch.ceil(counts / block).clamp(min=1)
        root_correction = (1 - beta2**begun).sqrt()
        scale = taken * lr * root_correction / (1 - beta1**begun)

        if group["weight_decay"] != 0:
            torch._foreach_mul_(params, 1 - taken * (lr * group["weight_decay"]))
        present = torch._foreach_lerp(averages, grads, 1 - beta1)
        roots = torch._foreach_mul(squares, beta2)
        torch._foreach_addcmul_(roots, grads, grads, 1 - beta2)
        torch._foreach_sqrt_(roots)
        # m^ / (sqrt(v^) + eps), with the correction of v moved to where it costs no pass.
        torch._foreach_add_(roots, (root_correction * group["eps"]).unbind())
        torch._foreach_mul_(present, scale.unbind())
        torch._foreach_addcdiv_(params, present, roots, -1.0)

        ended = (counts % block == 0) * taken
        moved = ended.to(params[0].dtype)
        torch._foreach_lerp_(averages, means, (moved * (1 - beta1)).unbind())
        torch._foreach_lerp_(
            squares, torch._foreach_mul(means, means), (moved * (1 - beta2)).unbind()
        )
        torch._foreach_mul_(means, (1 - ended).unbind())


def make_accum_adamw(
    options: OptimizerOptions, model: torch.nn.Module, *, accum_steps: int
) -> AccumAdamW:
    """Make AccumAdamW with decay on matrices only; see `llm.optim.groups`.

    Args:
        options: Learning rate, decay rates, epsilon and weight decay.
        model: What to train.
        accum_steps: Steps of a block, of which the options have no default.
    """
    groups = parameter_groups(model, weight_decay=options.weight_decay)
    return AccumAdamW(groups, **adamw_settings(options), accum_steps=accum_steps)
