"""From the options to Muon or SOAP on the ranks of a run."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from llm.checkpoint.format import OPTIMIZER_TENSORS
from llm.extensions.matrix_optim.fused import find_expert_fusions
from llm.extensions.matrix_optim.matrices import BUCKET, ShardedMatrices
from llm.extensions.matrix_optim.matrix_owners import MatrixOwners, units_of
from llm.extensions.matrix_optim.matrix_settings import MatrixSettings
from llm.extensions.matrix_optim.muon import make_muon
from llm.extensions.matrix_optim.soap import list_basis_weights, make_soap
from llm.optim.run_optimizer import MatrixTraffic, OptimizerFactory, RunOptimizer

FP32, BF16 = 4, 2
"""Bytes of a number."""


class MatrixRunOptimizer(RunOptimizer):
    """An optimizer of whole matrices, each of which one rank owns where weights are sharded.

    Args:
        optimizer: Updates the weights.
        model: The model, or this rank's stages and shards of it.
        matrix_owners: Owners of the matrices.
        update_bytes: Bytes of an element of an update when it is sent.
        with_ends: Whether embeddings and output head are such matrices too.
        with_experts: Whether a stack of experts has one owner.
        description: For the beginning of the log.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        matrix_owners: MatrixOwners,
        *,
        update_bytes: int = FP32,
        with_ends: bool = False,
        with_experts: bool = False,
        description: str = "",
    ) -> None:
        super().__init__(optimizer)
        self._description = description
        self.matrix_owners = matrix_owners
        self._traffic = MatrixTraffic(
            bytes_per_element=FP32 + update_bytes,
            with_ends=with_ends,
            with_experts=with_experts,
            bucket=BUCKET,
        )
        names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        self._owner_by_path = {
            f"{OPTIMIZER_TENSORS}{names[parameter]}": unit.owner
            for unit in units_of(optimizer)
            for parameter in unit.parameters
        }

    def describe(self) -> str:
        """Return which optimizer trains the experts of a mixture; empty for other models."""
        return self._description

    def localize(self, local_of: Mapping[Tensor, nn.Parameter]) -> None:
        """Replace the parameters of all matrices by this rank's shards."""
        self.matrix_owners.localize(local_of)

    def owner_of(self, path: str) -> int | None:
        """Return the rank that keeps the whole state of a matrix; None elsewhere."""
        return self._owner_by_path.get(path.rpartition("/")[0])

    def traffic(self) -> MatrixTraffic:
        """Return what is sent to the owners and back."""
        return self._traffic


def make_matrix_owners(mesh: DeviceMesh | None) -> MatrixOwners:
    """Return what gives matrices their owners: on a mesh one rank each, else every rank all."""
    return MatrixOwners() if mesh is None else ShardedMatrices(mesh)


class MuonFactory(OptimizerFactory):
    """Makes Muon or NorMuon."""

    def __init__(self, options: MatrixSettings) -> None:
        self._options = options
        self._description = ""

    def inspect_model(self, model: nn.Module) -> None:
        """Count the matrices of experts in the whole model."""
        stacks = find_expert_fusions(model)
        matrices = sum(p.shape[0] * len(fusion.sizes) for p, fusion in stacks.items())
        if matrices:
            self._description = (
                f"{self._options.optimizer}: trains the {matrices:,} matrices of experts one by "
                "one; adamw trains their routers and biases"
            )

    def make(self, model: nn.Module, mesh: DeviceMesh | None) -> RunOptimizer:
        """Return Muon for the weights that this rank has.

        Raises:
            ConfigError: The model has no matrix for it.
        """
        matrix_owners = make_matrix_owners(mesh)
        muon = make_muon(self._options, model, matrix_owners)
        return MatrixRunOptimizer(
            muon, model, matrix_owners, update_bytes=BF16, description=self._description
        )


class SOAPFactory(OptimizerFactory):
    """Makes SOAP."""

    def __init__(self, options: MatrixSettings) -> None:
        self._options = options
        self._basis_weights: Sequence[str] | None = None
        self._description = ""

    def inspect_model(self, model: nn.Module) -> None:
        """Order the updates of the bases by the whole model, and count its experts' weights."""
        self._basis_weights = list_basis_weights(model)
        num_expert_weights = sum(stack.numel() for stack in find_expert_fusions(model))
        if num_expert_weights:
            share = num_expert_weights / sum(p.numel() for p in model.parameters())
            self._description = (
                f"soap: adamw trains the experts, which have {share:.1%} of the weights; soap "
                "has bases for the other matrices"
            )

    def make(self, model: nn.Module, mesh: DeviceMesh | None) -> RunOptimizer:
        """Return SOAP for the weights that this rank has."""
        matrix_owners = make_matrix_owners(mesh)
        soap = make_soap(
            self._options, model, matrix_owners=matrix_owners, basis_weights=self._basis_weights
        )
        return MatrixRunOptimizer(
            soap, model, matrix_owners, with_ends=True, description=self._description
        )
