"""Steps of optimizers of whole matrices, on any layout, as the trainer makes them."""

from typing import Any

import torch

from llm.models.attention import disable_packing_detection
from llm.models.loss import LanguageModelLoss
from llm.parallel.base import AcceleratedStrategy
from llm.trainers.gpt.extensions import GPTConfig
from llm.trainers.gpt.seams import choose_factory, make_extensions
from tests.support import layouts
from tests.support.models import still_model

_INTERVALS = {"kfac_factor_update_steps": 2, "kfac_inv_update_steps": 4}
KINDS: dict[str, dict[str, Any]] = {
    "muon": {"optimizer": "muon"},
    "normuon": {"optimizer": "normuon", "muon_coefficients": "polar_express"},
    "adamw-hyperball": {"optimizer": "adamw", "hyperball": True},
    "normuon-hyperball": {"optimizer": "normuon", "hyperball": True},
    "soap-hyperball": {"optimizer": "soap", "soap_update_steps": 4, "hyperball": True},
    "soap": {"optimizer": "soap", "soap_update_steps": 4},
    "ekfac": {"kfac": True, **_INTERVALS},
    "ekfac-soap": {
        **{"kfac": True, "optimizer": "soap", "soap_update_steps": 4, "nesterov": True},
        **_INTERVALS,
    },
    "eigen": {"kfac": True, "kfac_method": "eigen", **_INTERVALS},
}

_STRATEGIES: list[AcceleratedStrategy] = []
"""All that a rank makes. The process groups of several are not destroyed before it ends, because
that waits for gloo's threads with the GIL held, which they may need to free their tensors."""


def make_model() -> Any:
    """A GPT-2 whose matrices are square, so that no basis is left to rounding."""
    return still_model("gpt2", n_embd=16, n_inner=16)


def make_strategy(
    kind: str, sizes: dict[str, int] | None, model: Any = None
) -> AcceleratedStrategy:
    """A strategy with its model and optimizer, as the trainer makes them; DDP without sizes."""
    disable_packing_detection()
    model = make_model() if model is None else model
    options = GPTConfig(
        learning_rate=1e-3,
        embedding_learning_rate=2e-3,
        weight_decay=0.1,
        betas=(0.9, 0.95),
        eps=1e-4,  # above the rounding errors of gradients, which differ between layouts
        **KINDS[kind],
    )
    if sizes is None:
        strategy = AcceleratedStrategy(layouts.cpu_accelerator())
    else:
        strategy = layouts.make_strategy(sizes)
    factory = choose_factory(options, make_extensions(options), seed=0)
    factory.inspect_model(model)
    strategy.prepare(LanguageModelLoss(model), factory.make)
    _STRATEGIES.append(strategy)
    return strategy


def train(
    strategy: AcceleratedStrategy, steps: range, *, accumulation: int = 2, clip: float = 0.5
) -> list[float]:
    """Take some steps; the losses of each, over all ranks."""
    losses = []
    for step in steps:
        micro_batches, num_tokens = layouts.share(step, strategy, accumulation)
        loss = strategy.forward_backward(micro_batches, num_tokens=num_tokens)
        strategy.set_learning_rate(1e-3)
        strategy.optimizer_step(clip)
        losses.append(strategy.reduce_sum(loss.clone()).item() / num_tokens)
    return losses


def whole_weights(strategy: AcceleratedStrategy) -> dict[str, torch.Tensor]:
    """The weights on rank 0, by name."""
    return {name: t.clone() for name, t in strategy.gather_full_state_dict().items()}
