"""AdamW for replicas with small batches: its moments advance once per block of steps.

If ranks average weights instead of gradients, each rank computes moments from small local batches:
the second moment includes the noise of a single rank, which an all-reduce would average away, so
the steps are too short. AccumAdamW advances its moments only once in K steps, by the mean of the K
gradients, with the noise of a batch K times as large; every step still uses the present gradient.
The idea is from the optimizer of the same name in Decent-DP (Wang et al.).
"""

from typing import Any

import torch
from torch import Tensor

from llm.optim.adamw_and_sgd import adamw_settings, adamw_state
from llm.optim.groups import parameter_groups
from llm.optim.options import OptimizerOptions


class AccumAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) that updates its moments once in K steps.

    A step with gradient g, and the moments m and v after the last complete block:

    1. theta <- (1 - lr * weight_decay) * theta
    2. m^ = beta1 m + (1 - beta1) g and v^ = beta2 v + (1 - beta2) g^2, bias-corrected by the
       number of blocks begun
    3. theta <- theta - lr * m^ / (sqrt(v^) + eps)
    4. after the K-th step of a block: m and v advance in the same way by the block's mean gradient

    K = 1 is AdamW. Like torch's fused optimizers, `step` reads the attribute `found_inf`, a float
    tensor on the device: if it is 1, weights and state do not change. The position in the block is
    also on the device, so nothing waits for it.

    The state is three times the size of the parameters: both moments, and `grad_mean`, the sum of
    the block's gradients so far, divided by K.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate.
        betas: Decay of the two moments per block.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled decay per step, times the learning rate.
        accum_steps: K, the steps of a block.
    """

    found_inf: Tensor | None = None

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
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "accum_steps": accum_steps})
        for group in self.param_groups:
            for p in group["params"]:
                # Created here instead of in the first step, so that a checkpoint can be loaded.
                self.state[p] = {**adamw_state(p), "grad_mean": torch.zeros_like(p)}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        If `found_inf` is 1, gradients are set to zero, and nothing else changes.
        """
        for group in self.param_groups:
            params_by_device_and_dtype: dict[Any, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    params_by_device_and_dtype.setdefault((p.device, p.dtype), []).append(p)
            for params in params_by_device_and_dtype.values():
                self._step_parameters(params, group)

    def _step_parameters(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """Update parameters of one device and dtype, which all have gradients, and their state."""
        step_tensors, first_moments, second_moments, grad_means = (
            [self.state[p][key] for p in params]
            for key in ("step", "exp_avg", "exp_avg_sq", "grad_mean")
        )
        grads = [p.grad for p in params if p.grad is not None]
        beta1, beta2 = group["betas"]
        lr, block_steps = group["lr"], group["accum_steps"]

        update_mask = self._mask_skipped_gradients(grads)
        torch._foreach_add_(step_tensors, [update_mask] * len(step_tensors))
        torch._foreach_add_(grad_means, grads, alpha=1 / block_steps)

        # [number of parameters], because some parameters may have had fewer gradients.
        step_counts = torch.stack(step_tensors).to(update_mask.dtype)
        num_blocks = torch.ceil(step_counts / block_steps).clamp(min=1)
        root_correction = (1 - beta2**num_blocks).sqrt()
        scale = update_mask * lr * root_correction / (1 - beta1**num_blocks)

        if group["weight_decay"] != 0:
            torch._foreach_mul_(params, 1 - update_mask * (lr * group["weight_decay"]))
        numerators = torch._foreach_lerp(first_moments, grads, 1 - beta1)
        denominators = torch._foreach_mul(second_moments, beta2)
        torch._foreach_addcmul_(denominators, grads, grads, 1 - beta2)
        torch._foreach_sqrt_(denominators)
        # m^ / (sqrt(v^) + eps); the bias correction of v is in `scale` and eps, without a pass.
        torch._foreach_add_(denominators, (root_correction * group["eps"]).unbind())
        torch._foreach_mul_(numerators, scale.unbind())
        torch._foreach_addcdiv_(params, numerators, denominators, -1.0)

        block_ended = (step_counts % block_steps == 0) * update_mask
        # 1 for parameters with a block ending at this step.
        moment_mask = block_ended.to(params[0].dtype)
        torch._foreach_lerp_(first_moments, grad_means, (moment_mask * (1 - beta1)).unbind())
        torch._foreach_lerp_(
            second_moments,
            torch._foreach_mul(grad_means, grad_means),
            (moment_mask * (1 - beta2)).unbind(),
        )
        torch._foreach_mul_(grad_means, (1 - block_ended).unbind())

    def _mask_skipped_gradients(self, grads: list[Tensor]) -> Tensor:
        """Return 1.0, or 0.0 if the step is skipped; gradients are then set to zero in place."""
        device = grads[0].device
        # 1 - beta^n loses digits in float32 for a beta close to 1; MPS has no float64.
        count_dtype = torch.float32 if device.type == "mps" else torch.float64
        update_mask = torch.ones((), dtype=count_dtype, device=device)
        if self.found_inf is not None:
            update_mask = update_mask - self.found_inf.to(update_mask)
            is_skipped = update_mask == 0
            for grad in grads:
                # Not multiplied by 0, because infinity times 0 is NaN.
                grad.masked_fill_(is_skipped, 0.0)
        return update_mask


def make_accum_adamw(
    options: OptimizerOptions, model: torch.nn.Module, *, accum_steps: int
) -> AccumAdamW:
    """Make AccumAdamW with weight decay on matrices only; see `llm.optim.groups`.

    Args:
        options: Learning rate, decay rates, epsilon and weight decay.
        model: The model to train.
        accum_steps: Steps of a block; its default is not in the options, but follows the strategy.
    """
    groups = parameter_groups(options, model)
    return AccumAdamW(groups, **adamw_settings(options), accum_steps=accum_steps)
