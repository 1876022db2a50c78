"""The kfac-pytorch library (Pauloski et al. 2021, arXiv:2107.01739) as the preconditioner.

It is imported only when an option selects it. The library does its own arithmetic and
communication; this module gives it the covered layers, Conv1D, loss scales and skipped steps.
"""

import contextlib
import importlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llm.errors import ConfigError
from llm.extensions.kfac.layers import Coverage, Layer
from llm.runtime.float32 import full_float32

_DECOMPOSITION_KEYS = ("qa", "qg", "dgda")
"""The library's decomposition of a layer: bases of A and G, and the divisors of the gradient."""


class ExternalPreconditioner:
    """Replaces the gradients of covered layers by gradients preconditioned with kfac-pytorch.

    Every rank keeps all factors and decompositions (COMM-OPT): the library cannot resume other
    layouts. Its clipping and the check for overflow wait for the device at each layer and step.

    Args:
        coverage: The covered layers.
        parameters: All trained parameters; if any of their gradients is not finite, the library
            skips the step.
        factor_update_steps: Steps between two updates of the averages.
        inv_update_steps: Steps between two decompositions.
        damping: Absolute damping.
        factor_decay: Decay of the factors' moving averages, per update.
        kl_clip: Bound on the update.

    Raises:
        ConfigError: The library is not installed.
    """

    def __init__(
        self,
        coverage: Coverage,
        parameters: Iterable[nn.Parameter],
        *,
        factor_update_steps: int = 10,
        inv_update_steps: int = 100,
        damping: float = 0.001,
        factor_decay: float = 0.95,
        kl_clip: float = 0.001,
    ) -> None:
        self._coverage = coverage
        self._parameters = list(parameters)
        self._loss_scale: Tensor | float = 1.0
        self._learning_rate = 0.0
        communicator = _import_library("distributed").TorchDistributedCommunicator()
        self._layers = {
            layer.name: self._make_layer(layer, communicator) for layer in coverage.layers
        }
        is_distributed = dist.is_available() and dist.is_initialized()
        assignment = _import_library("assignment").KAISAAssignment(
            {layer.name: {"A": layer.columns**3, "G": layer.rows**3} for layer in coverage.layers},
            local_rank=dist.get_rank() if is_distributed else 0,
            world_size=dist.get_world_size() if is_distributed else 1,
            grad_worker_fraction=1.0,
            group_func=dist.new_group if is_distributed else lambda ranks: None,
        )
        self._kfac = _import_library("base_preconditioner").BaseKFACPreconditioner(
            {layer.module: (layer.name, self._layers[layer.name]) for layer in coverage.layers},
            assignment=assignment,
            tdc=communicator,
            factor_update_steps=factor_update_steps,
            inv_update_steps=inv_update_steps,
            damping=damping,
            factor_decay=factor_decay,
            kl_clip=kl_clip,
            lr=lambda step: self._learning_rate,
            # The statistics of a skipped step can be dropped only if the hooks do not average them.
            update_factors_in_hook=False,
        )

    def _make_layer(self, layer: Layer, communicator: Any) -> Any:
        """Return the library's object for a covered layer, with its initial state."""
        helper = _ModuleHelper(layer)
        eigen_layer: Any = _import_library("layers.eigen").KFACEigenLayer(
            helper,
            prediv_eigenvalues=True,
            tdc=communicator,
            grad_scaler=lambda: self._loss_scale,
            factor_dtype=torch.float32,
        )
        # The library's initial values, created here so that a checkpoint can be loaded.
        input_factor, output_factor = (
            torch.eye(width, device=helper.device) for width in (layer.columns, layer.rows)
        )
        eigen_layer.a_factor, eigen_layer.g_factor = input_factor, output_factor
        divisors = torch.ones(layer.rows, layer.columns, device=helper.device)
        initial_values = (input_factor, output_factor, divisors)
        for key, values in zip(_DECOMPOSITION_KEYS, initial_values, strict=True):
            setattr(eigen_layer, key, values.clone())
        return eigen_layer

    @contextlib.contextmanager
    def capture_stats(
        self, *, token_weight: float = 1.0, loss_scale: Tensor | float = 1.0
    ) -> Iterator[None]:
        """Surround one step's forward and backward passes, all micro-batches of it.

        Args:
            token_weight: Not used: the library's G belongs to the objective.
            loss_scale: Factor on the objective before `backward`.
        """
        self._kfac.reset_batch()  # Drop the statistics of an interrupted step.
        self._loss_scale = loss_scale
        with torch.compiler.set_stance("force_eager"):
            yield

    @torch.no_grad()
    @full_float32()
    def precondition(self, *, learning_rate: float) -> None:
        """Replace the gradients of the covered layers; all ranks must call it.

        Args:
            learning_rate: Learning rate of this step, for the bound on the update.
        """
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if not bool(torch.isfinite(torch.nn.utils.get_total_norm(gradients))):
            self._kfac.reset_batch()
            return
        self._learning_rate = learning_rate
        self._kfac.step()

    def metrics(self) -> dict[str, Tensor]:
        """Return numbers for the log."""
        device = self._parameters[0].device
        return {"damping": torch.full((), self._kfac.damping, device=device)}

    def num_bytes(self) -> int:
        """Return the memory of factors and their decompositions on this rank, in bytes."""
        return int(self._kfac.memory_usage()["total"])

    def describe(self) -> str:
        """Return a few lines for the log: the coverage, and the memory on this rank."""
        return (
            f"{self._coverage.describe()}\nkfac-pytorch keeps {self.num_bytes() / 2**20:,.1f} MiB "
            "of factors and decompositions on this rank."
        )

    def state_dict(self) -> dict[str, Any]:
        """Return factors and their decompositions; the library would otherwise recompute them."""
        return {
            "steps": self._kfac.steps,
            "factors": {
                name: {
                    key: getattr(layer, key)
                    for key in ("a_factor", "g_factor", *_DECOMPOSITION_KEYS)
                }
                for name, layer in self._layers.items()
            },
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self._kfac._steps = int(state["steps"])
        for name, layer in self._layers.items():
            for key, tensor in state["factors"][name].items():
                setattr(layer, key, tensor.to(layer.module.device).clone())


class _ModuleHelper:
    """A covered layer with the methods of the library's `ModuleHelper`."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self.device = layer.weight.device
        self.a_factor_shape = (layer.columns, layer.columns)
        self.g_factor_shape = (layer.rows, layer.rows)

    def has_bias(self) -> bool:
        return self._layer.bias is not None

    def has_symmetric_factors(self) -> bool:
        return True

    def get_a_factor(self, a: Tensor) -> Tensor:
        rows = a.reshape(-1, a.shape[-1])
        if self.has_bias():
            rows = torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1)
        return rows.T @ rows / len(rows)

    def get_g_factor(self, g: Tensor) -> Tensor:
        rows = g.reshape(-1, g.shape[-1])
        return rows.T @ rows / len(rows)

    def get_grad(self) -> Tensor:
        gradient = self._layer.gradient()
        if gradient is None:
            return torch.zeros(self._layer.rows, self._layer.columns, device=self.device)
        return gradient

    def get_weight_grad(self) -> Tensor:
        gradient = self.get_grad()
        return gradient[:, :-1] if self.has_bias() else gradient

    def get_bias_grad(self) -> Tensor:
        return self.get_grad()[:, -1]

    def set_grad(self, grad: Tensor) -> None:
        for parameter, values in zip(self._layer.parameters, self._layer.split(grad), strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(values)


def _import_library(module: str) -> Any:
    """Import a module of kfac-pytorch.

    Raises:
        ConfigError: The library is not installed.
    """
    try:
        return importlib.import_module(f"kfac.{module}")
    except ImportError as error:
        raise ConfigError(
            "--kfac_library kfac-pytorch needs a library that is not installed: "
            "pip install git+https://github.com/gpauloski/kfac-pytorch; or use "
            "--kfac_library native."
        ) from error
