"""Create K-FAC and its optimizer from the options."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from llm.extensions.kfac.curvature import Curvature
from llm.extensions.kfac.ekfac import EKFAC
from llm.extensions.kfac.external import ExternalPreconditioner
from llm.extensions.kfac.kfac_settings import (
    KFACSettings,
    choose_kfac_method,
    list_preconditioner_options,
)
from llm.extensions.kfac.layers import Coverage, find_covered_layers
from llm.extensions.kfac.preconditioner import Preconditioner
from llm.extensions.matrix_optim.fused import find_fused_weights
from llm.extensions.matrix_optim.matrices import ShardedMatrices
from llm.extensions.matrix_optim.matrix_factories import FP32, MatrixRunOptimizer
from llm.extensions.matrix_optim.matrix_owners import MatrixOwners
from llm.extensions.matrix_optim.soap import list_basis_weights, make_soap
from llm.optim.adamw_and_sgd import adamw_settings, make_adamw
from llm.optim.groups import parameter_groups, split_groups
from llm.optim.run_optimizer import OptimizerFactory, StateMemory

EKFAC_UPDATE_STEPS = 50
EKFAC_BLOCK_WIDTH = 2
"""Width of ekfac's widest blocks, relative to the model's width; narrower blocks raise the loss."""
EIGEN_UPDATE_STEPS = 10
"""Steps between updates with eigen."""
EKFAC_STEP_DECAY = 0.99
"""Decay of ekfac's averages per step."""
DAMPING = 0.001
KL_CLIP = 0.001
MAX_DIM = 8192


class KFAC(MatrixRunOptimizer):
    """K-FAC with the optimizer of a run.

    Args:
        optimizer: Updates the weights.
        model: The model, or this rank's stages and shards of it.
        recorder: Records the tokens of a step.
        preconditioner: Changes the gradient before the optimizer's step; None with EKFAC, which is
            the optimizer.
        method_description: The method and its intervals, in a line for the log.
        matrix_owners: Owners of the matrices; None if every rank has whole weights.
        with_ends: Whether embeddings and output head have bases too.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        *,
        recorder: Curvature | ExternalPreconditioner,
        preconditioner: Preconditioner | ExternalPreconditioner | None,
        method_description: str,
        matrix_owners: MatrixOwners | None,
        with_ends: bool,
    ) -> None:
        super().__init__(
            optimizer,
            model,
            matrix_owners or MatrixOwners(),
            with_ends=with_ends,
            with_experts=True,
        )
        self.recorder = recorder
        self.preconditioner = preconditioner
        self._method_description = method_description

    def record_passes(
        self, *, token_weight: float, loss_scale: Callable[[], Tensor]
    ) -> contextlib.AbstractContextManager[None]:
        """Surround one step's forward and backward passes, all micro-batches of it."""
        return self.recorder.capture_stats(token_weight=token_weight, loss_scale=loss_scale())

    def before_clip(self, *, learning_rate: float) -> None:
        """Change the gradients of the covered layers, unless the optimizer does so.

        Gradients are clipped by the norm of the changed ones.
        """
        if self.preconditioner is not None:
            self.preconditioner.precondition(learning_rate=learning_rate)

    def parts(self) -> dict[str, Any]:
        """Return averages and bases; the moments are in the optimizer's state."""
        return {"kfac": self.preconditioner or self.recorder}

    def describe(self) -> str:
        """Return a few lines for the beginning of the log."""
        return f"{self.recorder.describe()}\n{self._method_description}"

    def metrics(self) -> dict[str, Tensor]:
        """Return the condition and the failures of the factors, and what else the method has."""
        metrics = (self.preconditioner or self.recorder).metrics()
        return {f"kfac_{name}": value for name, value in metrics.items()}

    def owner_of(self, path: str) -> int | None:
        """Return the rank that keeps a factor or the state of a matrix; None elsewhere."""
        part, _, factor_name = path.rpartition("/")[0].rpartition("/")
        if part == "kfac/factors" and isinstance(self.recorder, Curvature):
            return self.recorder.owner_of(factor_name)
        return super().owner_of(path)

    def memory(self) -> dict[str, StateMemory]:
        """Return the memory of factors and bases in a step with all of them due, as the first."""
        curvature = self.recorder
        assert isinstance(curvature, Curvature)  # the plan refuses the library
        widths = [width for factor in curvature.factors for width in factor.widths]
        factor_bytes = FP32 * sum(width**2 for width in widths)
        memory = StateMemory(
            replicated=curvature.num_bytes(),
            divided=2 * factor_bytes + FP32 * (sum(widths) + len(curvature.factors)),
            recording=factor_bytes,
            stepping=factor_bytes + FP32 * curvature.coverage.num_covered,
        )
        return {"kfac": memory}


class KFACFactory(OptimizerFactory):
    """Makes K-FAC and its optimizer."""

    def __init__(self, options: KFACSettings) -> None:
        self._options = options
        self._coverage: Coverage | None = None
        self._basis_weights: Sequence[str] | None = None

    def inspect_model(self, model: nn.Module) -> None:
        """Find the covered layers of the whole model; it runs the model once."""
        self._coverage = find_model_coverage(self._options, model)
        if self._options.optimizer == "soap":
            self._basis_weights = list_basis_weights(model)

    def make(self, model: nn.Module, mesh: DeviceMesh | None) -> KFAC:
        """Return K-FAC for the layers that this rank has."""
        return make_kfac(
            self._options,
            model,
            coverage=self._coverage,
            matrix_owners=None if mesh is None else ShardedMatrices(mesh),
            basis_weights=self._basis_weights,
        )


def find_model_coverage(options: KFACSettings, model: nn.Module) -> Coverage:
    """Find the layers of a model that K-FAC covers; it runs the model once.

    Raises:
        ConfigError: No layer is covered, or a pattern matches none.
    """
    return find_covered_layers(
        model,
        skip_layers=options.kfac_skip_layers,
        covers_stacks=covers_stacks(options),
        fusions=find_fused_weights(model) if covers_stacks(options) else {},
        sample_forward=_sample_forward,
    )


def make_kfac(
    options: KFACSettings,
    model: nn.Module,
    *,
    coverage: Coverage | None = None,
    matrix_owners: MatrixOwners | None = None,
    basis_weights: Sequence[str] | None = None,
) -> KFAC:
    """Make K-FAC and its optimizer; process groups must exist.

    Args:
        options: K-FAC's and AdamW's.
        model: The model to train.
        coverage: Coverage of the model before it was divided over ranks; None for a whole model.
        matrix_owners: Owners of matrices if weights are sharded; None if they are whole.
        basis_weights: For SOAP with ekfac, as for `make_soap`.

    Raises:
        ConfigError: No layer is covered, a stage has none, a pattern matches none, or a library is
            missing.
    """
    if coverage is None:
        coverage = find_model_coverage(options, model)
    else:
        coverage = coverage.restrict_to_stage(model)
    method = choose_kfac_method(options)
    update_settings = _choose_update_settings(options)
    preconditioner_settings: dict[str, Any] = {
        "damping": options.kfac_damping or DAMPING,
        "kl_clip": options.kfac_kl_clip or KL_CLIP,
    }
    optimizer: torch.optim.Optimizer
    recorder: Curvature | ExternalPreconditioner
    preconditioner: Preconditioner | ExternalPreconditioner | None
    if options.kfac_library == "kfac-pytorch":
        optimizer = make_adamw(options, model)
        recorder = preconditioner = ExternalPreconditioner(
            coverage,
            _parameters_of(optimizer.param_groups),
            **preconditioner_settings,
            **update_settings,
        )
    else:
        recorder = curvature = Curvature(
            coverage,
            method=method,
            max_dim=choose_max_block_width(options, model),
            spread=not options.torch_compile,  # else all factors are due at the same steps
            ranks=None if matrix_owners is None else matrix_owners.factor_ranks,
            **update_settings,
        )
        if method == "ekfac":
            preconditioner = None
            optimizer = _make_ekfac(
                options, model, curvature, matrix_owners=matrix_owners, basis_weights=basis_weights
            )
        else:
            optimizer = make_adamw(options, model)
            preconditioner = Preconditioner(
                curvature,
                _parameters_of(optimizer.param_groups),
                matrix_owners=matrix_owners,
                **preconditioner_settings,
            )
    return KFAC(
        optimizer,
        model,
        recorder=recorder,
        preconditioner=preconditioner,
        method_description=_describe_method(options, update_settings),
        matrix_owners=matrix_owners,
        with_ends=options.optimizer == "soap",
    )


def _make_ekfac(
    options: KFACSettings,
    model: nn.Module,
    curvature: Curvature,
    *,
    matrix_owners: MatrixOwners | None,
    basis_weights: Sequence[str] | None,
) -> EKFAC:
    """Make EKFAC for the covered layers, and AdamW or SOAP for the rest."""
    groups = parameter_groups(options, model)
    make_soap_for_rest = None
    covered_params = {p for layer in curvature.layers for p in layer.parameters}
    if options.optimizer == "soap" and not covered_params.issuperset(_parameters_of(groups)):
        make_soap_for_rest = partial(
            make_soap,
            options,
            model,
            matrix_owners=matrix_owners,
            basis_weights=basis_weights,
            excluded_params=covered_params,
        )
        groups = split_groups(groups, covered_params, chosen_settings={}, other_settings=None)
    return EKFAC(
        groups,
        curvature,
        nesterov=options.nesterov,
        make_soap=make_soap_for_rest,
        matrix_owners=matrix_owners,
        **adamw_settings(options),
    )


def covers_stacks(options: KFACSettings) -> bool:
    """Return whether stacks and fused weights are divided into matrices; not for the library."""
    return options.kfac_library != "kfac-pytorch"


def choose_max_block_width(options: KFACSettings, model: nn.Module) -> int:
    """Return the maximum width of a factor's block; by default twice the model's with ekfac."""
    if options.kfac_max_dim is not None:
        return options.kfac_max_dim
    if choose_kfac_method(options) != "ekfac":
        return MAX_DIM
    config: Any = model.config
    width: int = getattr(config.get_text_config(), "hidden_size", MAX_DIM)
    return min(EKFAC_BLOCK_WIDTH * width, MAX_DIM)


def _sample_forward(model: nn.Module) -> None:
    """Run the model once on a few tokens, to find layers that read the same tensor."""
    device = next(model.parameters()).device
    with torch.compiler.set_stance("force_eager"):  # compiled graphs do not support hooks
        model(input_ids=torch.zeros(1, 8, dtype=torch.long, device=device), use_cache=False)


def _parameters_of(groups: list[dict[str, Any]]) -> list[nn.Parameter]:
    return [p for group in groups for p in group["params"]]


def _choose_update_settings(options: KFACSettings) -> dict[str, Any]:
    """Return the intervals and the decay of the averages, with the method's defaults.

    They are keyword arguments of `Curvature` and `ExternalPreconditioner`.
    """
    is_ekfac = choose_kfac_method(options) == "ekfac"
    default_steps = EKFAC_UPDATE_STEPS if is_ekfac else EIGEN_UPDATE_STEPS
    factor_update_steps = options.kfac_factor_update_steps or default_steps
    # With this default, ekfac decays equally per step, regardless of the interval.
    default_decay = EKFAC_STEP_DECAY**factor_update_steps if is_ekfac else 0.95
    return {
        "factor_update_steps": factor_update_steps,
        "inv_update_steps": options.kfac_inv_update_steps or default_steps,
        "factor_decay": options.kfac_factor_decay or default_decay,
    }


def _describe_method(options: KFACSettings, update_settings: Mapping[str, Any]) -> str:
    """Return a line for the log: the method, which options selected it, and its intervals."""
    flags = [f"--{name}" for name in list_preconditioner_options(options)]
    reason = ""
    if options.kfac_method is None and flags:
        reason = f" because of {' and '.join(flags)}, which ekfac does not take"
    description = (
        f"K-FAC's method is {choose_kfac_method(options)}{reason}; "
        f"factor_update_steps={update_settings['factor_update_steps']}, "
        f"inv_update_steps={update_settings['inv_update_steps']}"
    )
    if not flags:
        description += f"; {options.optimizer or 'adamw'} trains the rest"
    return description
