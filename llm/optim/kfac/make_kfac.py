"""Create K-FAC and its optimizer from the options."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from llm.optim.adamw import adamw_settings, make_adamw
from llm.optim.fused import fused_weights
from llm.optim.groups import parameter_groups, split_groups
from llm.optim.kfac.curvature import Curvature
from llm.optim.kfac.ekfac import EKFAC
from llm.optim.kfac.external import ExternalPreconditioner
from llm.optim.kfac.layers import Coverage, find_layers
from llm.optim.kfac.options import KFACOptions, kfac_method, preconditioner_options
from llm.optim.kfac.preconditioner import Preconditioner
from llm.optim.options import OptimizerOptions
from llm.optim.soap import make_soap
from llm.optim.whole import WholeMatrices

EKFAC_UPDATE_STEPS = 50
EKFAC_BLOCK = 2
"""Width of ekfac's widest blocks, relative to the model's width; narrower blocks raise the loss."""
UPDATE_STEPS = 10
"""Steps between updates with eigen."""
EKFAC_STEP_DECAY = 0.99
"""Decay of ekfac's averages per step."""
DAMPING = 0.001
KL_CLIP = 0.001
MAX_DIM = 8192


@dataclasses.dataclass(frozen=True, kw_only=True)
class KFAC:
    """K-FAC and the optimizer of a run, for the strategy and the training loop.

    Attributes:
        optimizer: The optimizer that takes the steps.
        recorder: Records the tokens of a step.
        preconditioner: Changes the gradient before the optimizer's step; None with EKFAC, which is
            the optimizer.
        settings: The method and its intervals, in a line for the log.
    """

    optimizer: torch.optim.Optimizer
    recorder: Curvature | ExternalPreconditioner
    preconditioner: Preconditioner | ExternalPreconditioner | None
    settings: str

    def capture_stats(
        self, *, token_weight: float, loss_scale: Tensor
    ) -> contextlib.AbstractContextManager[None]:
        """Surround one step's forward and backward passes, all micro-batches of it.

        Args:
            token_weight: Factor on the loss of each token in the objective of a rank.
            loss_scale: Factor on the objective before `backward`.
        """
        return self.recorder.capture_stats(token_weight=token_weight, loss_scale=loss_scale)

    def precondition(self, *, learning_rate: float) -> None:
        """Change the gradients of the covered layers, unless the optimizer does this."""
        if self.preconditioner is not None:
            self.preconditioner.precondition(learning_rate=learning_rate)

    def describe(self) -> str:
        """Return a few lines for the beginning of the log."""
        return f"{self.recorder.describe()}\n{self.settings}"

    def metrics(self) -> dict[str, Tensor]:
        """Return numbers for the log, on the device."""
        return (self.preconditioner or self.recorder).metrics()

    def owner_of(self, factor: str) -> int | None:
        """Return the rank that saves a factor; None if any rank may, as with the library."""
        return self.recorder.owner_of(factor) if isinstance(self.recorder, Curvature) else None

    def state_dict(self) -> dict[str, Any]:
        """Return averages and bases; the moments are in the optimizer's state."""
        return (self.preconditioner or self.recorder).state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        (self.preconditioner or self.recorder).load_state_dict(state)


def cover_model(options: OptimizerOptions, model: PreTrainedModel) -> Coverage:
    """Find the layers of a model that K-FAC covers; it runs the model once.

    Raises:
        ConfigError: No layer is covered, or a pattern matches none.
    """
    return find_layers(
        model,
        skip_layers=options.kfac_skip_layers,
        stacks=covers_stacks(options),
        fusions=fused_weights(model) if covers_stacks(options) else {},
        sample_forward=_sample_forward,
    )


def make_kfac(
    options: OptimizerOptions,
    model: PreTrainedModel,
    *,
    torch_compile: bool,
    coverage: Coverage | None = None,
    whole: WholeMatrices | None = None,
    order: Sequence[str] | None = None,
) -> KFAC:
    """Make K-FAC and its optimizer; process groups must exist.

    Args:
        options: K-FAC's and AdamW's.
        model: The model to train.
        torch_compile: Whether the model is compiled; all factors are then due at the same steps.
        coverage: Coverage of the model before it was divided over ranks; None for a whole model.
        whole: Owners of matrices if weights are sharded; None if they are whole.
        order: For SOAP with ekfac, as for `make_soap`.

    Raises:
        ConfigError: No layer is covered, a pattern matches none, or a library is missing.
    """
    coverage = cover_model(options, model) if coverage is None else coverage.within(model)
    method, settings = kfac_method(options), _settings(options)
    line = _describe_method(options, settings)
    damping, kl_clip = options.kfac_damping or DAMPING, options.kfac_kl_clip or KL_CLIP
    if options.kfac_library == "kfac-pytorch":
        adamw = make_adamw(options, model)
        external = ExternalPreconditioner(
            coverage,
            _parameters(adamw.param_groups),
            damping=damping,
            kl_clip=kl_clip,
            **settings,
        )
        return KFAC(optimizer=adamw, recorder=external, preconditioner=external, settings=line)
    curvature = Curvature(
        coverage,
        method=method,
        max_dim=max_dim(options, model),
        spread=not torch_compile,
        ranks=None if whole is None else whole.factor_ranks,
        **settings,
    )
    if method == "ekfac":
        groups, others = parameter_groups(options, model), None
        covered = {p for layer in curvature.layers for p in layer.parameters}
        if options.optimizer == "soap" and not covered.issuperset(_parameters(groups)):
            others = partial(make_soap, options, model, whole=whole, order=order, without=covered)
            groups = split_groups(groups, covered, {}, None)
        ekfac = EKFAC(
            groups,
            curvature,
            nesterov=options.nesterov,
            others=others,
            whole=whole,
            **adamw_settings(options),
        )
        return KFAC(optimizer=ekfac, recorder=curvature, preconditioner=None, settings=line)
    adamw = make_adamw(options, model)
    preconditioner = Preconditioner(
        curvature,
        _parameters(adamw.param_groups),
        damping=damping,
        kl_clip=kl_clip,
        whole=whole,
    )
    return KFAC(optimizer=adamw, recorder=curvature, preconditioner=preconditioner, settings=line)


def covers_stacks(options: KFACOptions) -> bool:
    """Return whether stacks and fused weights are divided into matrices; not for the library."""
    return options.kfac_library != "kfac-pytorch"


def max_dim(options: KFACOptions, model: PreTrainedModel) -> int:
    """Return the width of a factor's widest block; by default twice the model's with ekfac."""
    if options.kfac_max_dim is not None:
        return options.kfac_max_dim
    if kfac_method(options) != "ekfac":
        return MAX_DIM
    width: int = getattr(model.config.get_text_config(), "hidden_size", MAX_DIM)
    return min(EKFAC_BLOCK * width, MAX_DIM)


def _sample_forward(model: torch.nn.Module) -> None:
    """Run the model once on a few tokens, to find layers that read the same tensor."""
    device = next(model.parameters()).device
    with torch.compiler.set_stance("force_eager"):  # compiled graphs do not support hooks
        model(input_ids=torch.zeros(1, 8, dtype=torch.long, device=device), use_cache=False)


def _parameters(groups: list[dict[str, Any]]) -> list[torch.nn.Parameter]:
    return [p for group in groups for p in group["params"]]


def _settings(options: KFACOptions) -> dict[str, Any]:
    """Return the intervals and the decay, with the method's defaults."""
    is_ekfac = kfac_method(options) == "ekfac"
    default_steps = EKFAC_UPDATE_STEPS if is_ekfac else UPDATE_STEPS
    factor_update_steps = options.kfac_factor_update_steps or default_steps
    # So ekfac decays equally per step, regardless of the steps between two updates.
    default_decay = EKFAC_STEP_DECAY**factor_update_steps if is_ekfac else 0.95
    return {
        "factor_update_steps": factor_update_steps,
        "inv_update_steps": options.kfac_inv_update_steps or default_steps,
        "factor_decay": options.kfac_factor_decay or default_decay,
    }


def _describe_method(options: OptimizerOptions, settings: Mapping[str, Any]) -> str:
    """Return a line for the log: the method, which options selected it, and its intervals."""
    asked = [f"--{name}" for name in preconditioner_options(options)]
    chosen = options.kfac_method is None and asked
    reason = f", which {' and '.join(asked)} selects (ekfac has no such thing)" if chosen else ""
    return (
        f"K-FAC's method is {kfac_method(options)}{reason}; "
        f"factor_update_steps={settings['factor_update_steps']}, "
        f"inv_update_steps={settings['inv_update_steps']}"
        + (f"; {options.optimizer or 'adamw'} trains the rest" if not asked else "")
    )
