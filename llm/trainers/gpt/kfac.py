"""From the options to an optimizer: K-FAC in one of its forms, or one without it."""

import contextlib
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from llm.optim.accum_adamw import make_accum_adamw
from llm.optim.groups import embeddings_and_head, make_adamw, make_sgd, parameter_groups
from llm.optim.kfac.curvature import Curvature
from llm.optim.kfac.ekfac import EKFAC
from llm.optim.kfac.external import ExternalPreconditioner
from llm.optim.kfac.layers import Coverage, find_layers
from llm.optim.kfac.options import kfac_method, preconditioner_options
from llm.optim.kfac.preconditioner import Preconditioner
from llm.optim.kfac.soap import make_soap
from llm.optim.muon import make_muon
from llm.trainers.gpt.config import GPTConfig

EKFAC_UPDATE_STEPS = 50
EKFAC_BLOCK = 2
"""Width of ekfac's widest blocks, in widths of the model; narrower ones cost steps."""
UPDATE_STEPS = 10
"""Of the other methods, and of SOAP."""
EKFAC_STEP_DECAY = 0.99
"""Weight of the past in ekfac's averages after one step."""
DAMPING = 0.001
KL_CLIP = 0.001
MAX_DIM = 8192


class KFAC:
    """What a run with K-FAC has; the trainer's `SecondOrder`.

    Args:
        optimizer: Takes the steps.
        recorder: Sees the passes of a step.
        preconditioner: Changes the gradient before the optimizer has it; None with EKFAC, which
            is the optimizer and does everything in its own step.
        description: What is covered, kept and done, in a few lines.

    Attributes:
        optimizer: The same.
        recorder: The same.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        recorder: Curvature | ExternalPreconditioner,
        preconditioner: Preconditioner | ExternalPreconditioner | None,
        description: str,
    ) -> None:
        self.optimizer = optimizer
        self._description = description
        self.recorder = recorder
        self._preconditioner = preconditioner
        self._state = recorder if preconditioner is None else preconditioner

    def capture_stats(
        self, *, token_weight: float, loss_scale: Tensor
    ) -> contextlib.AbstractContextManager[None]:
        """Surround a step's passes; see `SecondOrder`."""
        return self.recorder.capture_stats(token_weight=token_weight, loss_scale=loss_scale)

    def precondition(self, *, learning_rate: float) -> None:
        """Change the gradients of the covered layers, where the method does so."""
        if self._preconditioner is not None:
            self._preconditioner.precondition(learning_rate=learning_rate)

    def describe(self) -> str:
        """A few lines for the beginning of the log."""
        return self._description

    def metrics(self) -> dict[str, Tensor]:
        """Numbers for the log, on the device."""
        return self._state.metrics()

    def state_dict(self) -> dict[str, Any]:
        """Averages and bases; the moments are the optimizer's."""
        return self._state.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self._state.load_state_dict(state)


def make_optimizer_of(
    config: GPTConfig, model: PreTrainedModel, *, accum_steps: int | None = None
) -> torch.optim.Optimizer:
    """The optimizer of a run without K-FAC, or behind a preconditioner.

    Args:
        config: The options.
        model: What to train.
        accum_steps: Steps of a block of AccumAdamW; None for another optimizer.

    Raises:
        ConfigError: The optimizer finds nothing to train.
    """
    rate, decay = config.learning_rate, config.weight_decay
    if config.optimizer == "sgd":
        momentum = 0.9 if config.momentum is None else config.momentum
        return make_sgd(model, learning_rate=rate, weight_decay=decay, momentum=momentum)
    beta1, beta2 = config.betas
    common: dict[str, Any] = {"learning_rate": rate, "betas": (beta1, beta2), "eps": config.eps}
    if config.optimizer == "soap":
        return make_soap(
            parameter_groups(model, weight_decay=decay),
            outside=embeddings_and_head(model),
            update_steps=config.soap_update_steps or UPDATE_STEPS,
            **common,
        )
    if config.optimizer == "muon":
        momentum = 0.95 if config.momentum is None else config.momentum
        return make_muon(model, weight_decay=decay, momentum=momentum, **common)
    if accum_steps is not None:
        return make_accum_adamw(model, weight_decay=decay, accum_steps=accum_steps, **common)
    return make_adamw(model, weight_decay=decay, **common)


def make_kfac(config: GPTConfig, model: PreTrainedModel) -> KFAC:
    """K-FAC as the options have it; the ranks must have met.

    Raises:
        ConfigError: Nothing is covered, a pattern matches nothing, the ranks cannot be divided
            as asked, or a library is missing.
    """
    coverage = find_layers(
        model,
        skip_layers=config.kfac_skip_layers,
        stacks=covers_stacks(config),
        sample_forward=_forward_a_few_tokens,
    )
    if config.kfac_library == "kfac-pytorch":
        return _external(config, model, coverage)
    return _native(config, model, coverage)


def covers_stacks(config: GPTConfig) -> bool:
    """Whether stacks of experts are covered: the library, whose arithmetic compat is, has none."""
    return config.kfac_library == "native" and not config.kfac_compat


def max_dim(config: GPTConfig, model: PreTrainedModel) -> int:
    """The widest block of a factor: as the option says, or with ekfac twice the model's width."""
    if config.kfac_max_dim is not None:
        return config.kfac_max_dim
    if kfac_method(config) != "ekfac":
        return MAX_DIM
    width: int = getattr(model.config.get_text_config(), "hidden_size", MAX_DIM)
    return min(EKFAC_BLOCK * width, MAX_DIM)


def _native(config: GPTConfig, model: PreTrainedModel, coverage: Coverage) -> KFAC:
    method, settings = kfac_method(config), _settings(config)
    curvature = Curvature(
        coverage,
        method=method,
        **settings,
        max_dim=max_dim(config, model),
        strategy=config.kfac_strategy or "comm-opt",
        spread=not config.torch_compile,
        compat=config.kfac_compat,
    )
    description = f"{curvature.describe()}\n{_course(config, settings)}"
    if method == "ekfac":
        beta1, beta2 = config.betas
        ekfac = EKFAC(
            parameter_groups(model, weight_decay=config.weight_decay),
            curvature,
            lr=config.learning_rate,
            betas=(beta1, beta2),
            eps=config.eps,
        )
        return KFAC(ekfac, recorder=curvature, preconditioner=None, description=description)
    adamw = make_optimizer_of(config, model)
    preconditioner = Preconditioner(
        curvature,
        _trained(adamw),
        damping=settings["damping"],
        kl_clip=config.kfac_kl_clip or KL_CLIP,
        graft=not config.kfac_compat,
    )
    return KFAC(adamw, recorder=curvature, preconditioner=preconditioner, description=description)


def _external(config: GPTConfig, model: PreTrainedModel, coverage: Coverage) -> KFAC:
    method, settings = kfac_method(config), _settings(config)
    assert method != "ekfac"  # rules.py has refused it
    adamw = make_optimizer_of(config, model)
    external = ExternalPreconditioner(
        coverage,
        _trained(adamw),
        method=method,
        **settings,
        kl_clip=config.kfac_kl_clip or KL_CLIP,
    )
    description = (
        f"{coverage.describe()}\nkfac-pytorch keeps {external.num_bytes() / 2**20:,.1f} MiB of "
        f"factors and what it computes of them on this rank.\n{_course(config, settings)}"
    )
    return KFAC(adamw, recorder=external, preconditioner=external, description=description)


def _forward_a_few_tokens(model: torch.nn.Module) -> None:
    """Run the model once, to see which layers read the same tensor."""
    device = next(model.parameters()).device
    model(input_ids=torch.zeros(1, 8, dtype=torch.long, device=device))


def _trained(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _settings(config: GPTConfig) -> dict[str, Any]:
    """What our K-FAC and the library take by the same names, with the defaults of the method."""
    ekfac = kfac_method(config) == "ekfac"
    default = EKFAC_UPDATE_STEPS if ekfac else UPDATE_STEPS
    every = config.kfac_factor_update_steps or default
    return {
        "factor_update_steps": every,
        "inv_update_steps": config.kfac_inv_update_steps or default,
        "factor_decay": config.kfac_factor_decay or (EKFAC_STEP_DECAY**every if ekfac else 0.95),
        "damping": config.kfac_damping or DAMPING,
    }


def _course(config: GPTConfig, settings: dict[str, Any]) -> str:
    """What is done how often, and why by this method, for the log."""
    asked = [f"--{name}" for name in preconditioner_options(config)]
    chosen = config.kfac_method is None and asked
    reason = f", which {' and '.join(asked)} selects (ekfac has no such thing)" if chosen else ""
    return (
        f"K-FAC's method is {kfac_method(config)}{reason}; factors are updated every "
        f"{settings['factor_update_steps']} steps, what is computed of them every "
        f"{settings['inv_update_steps']}."
    )
