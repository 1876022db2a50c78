"""From the options to K-FAC in one of its forms."""

import contextlib
from typing import Any, TypedDict

import torch
from torch import Tensor
from transformers import PreTrainedModel

from llm.optim.adamw import adamw_settings, make_adamw
from llm.optim.groups import parameter_groups
from llm.optim.kfac.curvature import Curvature
from llm.optim.kfac.ekfac import EKFAC
from llm.optim.kfac.external import ExternalPreconditioner
from llm.optim.kfac.layers import Coverage, find_layers
from llm.optim.kfac.options import KFACOptions, kfac_method, preconditioner_options
from llm.optim.kfac.preconditioner import Preconditioner
from llm.optim.options import OptimizerOptions

EKFAC_UPDATE_STEPS = 50
EKFAC_BLOCK = 2
"""Width of ekfac's widest blocks, in widths of the model; narrower ones cost steps."""
UPDATE_STEPS = 10
"""Of eigen and cholesky."""
EKFAC_STEP_DECAY = 0.99
"""Weight of the past in ekfac's averages after one step."""
DAMPING = 0.001
KL_CLIP = 0.001
MAX_DIM = 8192


class KFAC:
    """What a run with K-FAC has, as the strategy and the loop call it.

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
        """Return a context for the passes of a step, in which statistics are captured.

        Args:
            token_weight: The weight of each token's loss in the objective of a rank.
            loss_scale: The factor of the objective before `backward`.
        """
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


def make_kfac(options: OptimizerOptions, model: PreTrainedModel, *, torch_compile: bool) -> KFAC:
    """Make K-FAC and its optimizer; process groups must have been formed.

    Args:
        options: K-FAC's, and those of AdamW.
        model: What to train.
        torch_compile: Whether the model is compiled; all factors are then due at the same steps.

    Raises:
        ConfigError: Nothing is covered, a pattern matches nothing, the ranks cannot be divided
            as asked, or a library is missing.
    """
    coverage = find_layers(
        model,
        skip_layers=options.kfac_skip_layers,
        stacks=covers_stacks(options),
        sample_forward=_sample_forward,
    )
    if options.kfac_library == "kfac-pytorch":
        return _make_kfac_pytorch(options, model, coverage)
    return _make_native(options, model, coverage, torch_compile=torch_compile)


def covers_stacks(options: KFACOptions) -> bool:
    """Whether stacks of experts are covered: the library, whose arithmetic compat is, has none."""
    return options.kfac_library != "kfac-pytorch" and not options.kfac_compat


def max_dim(options: KFACOptions, model: PreTrainedModel) -> int:
    """The widest block of a factor: as the option says, or with ekfac twice the model's width."""
    if options.kfac_max_dim is not None:
        return options.kfac_max_dim
    if kfac_method(options) != "ekfac":
        return MAX_DIM
    width: int = getattr(model.config.get_text_config(), "hidden_size", MAX_DIM)
    return min(EKFAC_BLOCK * width, MAX_DIM)


def _make_native(
    options: OptimizerOptions, model: PreTrainedModel, coverage: Coverage, *, torch_compile: bool
) -> KFAC:
    method, settings = kfac_method(options), _settings(options)
    curvature = Curvature(
        coverage,
        method=method,
        **settings,
        max_dim=max_dim(options, model),
        strategy=options.kfac_strategy or "comm-opt",
        spread=not torch_compile,
        compat=options.kfac_compat,
    )
    description = f"{curvature.describe()}\n{_describe_updates(options)}"
    if method == "ekfac":
        groups = parameter_groups(model, weight_decay=options.weight_decay)
        ekfac = EKFAC(groups, curvature, **adamw_settings(options))
        return KFAC(ekfac, recorder=curvature, preconditioner=None, description=description)
    adamw = make_adamw(options, model)
    preconditioner = Preconditioner(
        curvature,
        _optimized_parameters(adamw),
        damping=settings["damping"],
        kl_clip=options.kfac_kl_clip or KL_CLIP,
        graft=not options.kfac_compat,
    )
    return KFAC(adamw, recorder=curvature, preconditioner=preconditioner, description=description)


def _make_kfac_pytorch(
    options: OptimizerOptions, model: PreTrainedModel, coverage: Coverage
) -> KFAC:
    method = kfac_method(options)
    assert method != "ekfac"  # the library is one of the options that select eigen
    adamw = make_adamw(options, model)
    external = ExternalPreconditioner(
        coverage,
        _optimized_parameters(adamw),
        method=method,
        **_settings(options),
        kl_clip=options.kfac_kl_clip or KL_CLIP,
    )
    description = (
        f"{coverage.describe()}\nkfac-pytorch keeps {external.num_bytes() / 2**20:,.1f} MiB of "
        f"factors and what it computes of them on this rank.\n{_describe_updates(options)}"
    )
    return KFAC(adamw, recorder=external, preconditioner=external, description=description)


def _sample_forward(model: torch.nn.Module) -> None:
    """Run the model once on a few tokens, to see which layers read the same tensor."""
    device = next(model.parameters()).device
    model(input_ids=torch.zeros(1, 8, dtype=torch.long, device=device))


def _optimized_parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


class _Settings(TypedDict):
    """What our K-FAC and the library take by the same names."""

    factor_update_steps: int
    inv_update_steps: int
    factor_decay: float
    damping: float


def _settings(options: KFACOptions) -> _Settings:
    """The settings that are given, and the method's defaults for the others."""
    is_ekfac = kfac_method(options) == "ekfac"
    default_steps = EKFAC_UPDATE_STEPS if is_ekfac else UPDATE_STEPS
    factor_update_steps = options.kfac_factor_update_steps or default_steps
    default_decay = EKFAC_STEP_DECAY**factor_update_steps if is_ekfac else 0.95
    return {
        "factor_update_steps": factor_update_steps,
        "inv_update_steps": options.kfac_inv_update_steps or default_steps,
        "factor_decay": options.kfac_factor_decay or default_decay,
        "damping": options.kfac_damping or DAMPING,
    }


def _describe_updates(options: KFACOptions) -> str:
    """The method, why it is this one, and its update intervals, for the log."""
    asked = [f"--{name}" for name in preconditioner_options(options)]
    chosen = options.kfac_method is None and asked
    reason = f", which {' and '.join(asked)} selects (ekfac has no such thing)" if chosen else ""
    settings = _settings(options)
    return (
        f"K-FAC's method is {kfac_method(options)}{reason}; "
        f"factor_update_steps={settings['factor_update_steps']}, "
        f"inv_update_steps={settings['inv_update_steps']}"
    )
