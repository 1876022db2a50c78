"""An optimizer of any class, as the trainer needs it: skipped steps, owners, a state of tensors."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from llm.errors import ConfigError
from llm.extensions.custom_optim.import_class import MakeOptimizer
from llm.extensions.matrix_optim.fused import Fusion
from llm.extensions.matrix_optim.matrices import ShardedMatrices
from llm.extensions.matrix_optim.matrix_owners import Unit

NUMBER_PREFIX, GROUP_PREFIX = "number.", "group."
"""Prefixes of the names of numbers in a parameter's state: Python numbers of the state, and numbers
of the parameter's group that have changed."""

_RUN_SETTINGS = ("params", "lr")
"""Entries of a group that the trainer sets before each step."""

_DTYPE_BY_TYPE = {bool: torch.bool, int: torch.int64, float: torch.float64}
"""The dtypes that hold Python's numbers exactly."""


class ClassOptimizer(torch.optim.Optimizer):
    """Lets an optimizer of any class update parameters, or whole matrices at their owners.

    The inner optimizer is made by the first step, when the groups are final and the parameters are
    the tensors of this rank. The state is the inner one's, by the parameters of this optimizer; it
    has only tensors, because checkpoints keep them for any layout.

    Args:
        make_optimizer: Makes the inner optimizer.
        groups: Parameter groups with their weight decay.
        lr: Learning rate.
        reads_found_inf: Whether the inner optimizer skips a step if its `found_inf` is 1.
        scalar_devices: Devices of scalar tensors in the state, by their name; by default the
            parameter's device.
        matrices: Gives each parameter an owner; None if the inner optimizer updates the parameters
            of this optimizer.

    Attributes:
        units: Parameters with owners; empty without `matrices`.
        found_inf: 1.0 to skip the next step, else 0.0; None: no step is skipped.
    """

    found_inf: Tensor | None = None

    def __init__(
        self,
        make_optimizer: MakeOptimizer,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        reads_found_inf: bool = False,
        scalar_devices: Mapping[str, torch.device] | None = None,
        matrices: ShardedMatrices | None = None,
    ) -> None:
        self._inner_optimizer: torch.optim.Optimizer | None = None
        self._inner_params: dict[Tensor, nn.Parameter] = {}
        self._group_indices: dict[Tensor, int] = {}
        self._initial_settings: list[dict[str, Any]] = []
        self._number_tensors: dict[tuple[Tensor, str], Tensor] = {}
        self._has_loaded_numbers = False
        super().__init__(groups, {"lr": lr})
        self._make_optimizer, self._reads_found_inf = make_optimizer, reads_found_inf
        self._scalar_devices = scalar_devices or {}
        self._matrices = matrices
        self.units: list[Unit] = []
        if matrices is not None:
            self.units = [
                Unit(parameters=[p], shapes=[p.shape], fusion=Fusion(sizes={"": 1}), cost=p.numel())
                for group in self.param_groups
                for p in group["params"]
            ]
            matrices.assign(self.units)

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The state by parameter: tensors of the inner optimizer, and numbers as scalar tensors."""
        states = {p: dict(self._state_tensors(p, inner)) for p, inner in self._inner_params.items()}
        return defaultdict(dict, states)

    @state.setter
    def state(self, state: object) -> None:
        """Ignore another state: the inner optimizer has it."""

    def _state_tensors(self, p: Tensor, inner_param: nn.Parameter) -> Iterator[tuple[str, Tensor]]:
        """Yield the state of a parameter by key: tensors, and numbers as scalar tensors."""
        assert self._inner_optimizer is not None
        for key, value in self._inner_optimizer.state.get(inner_param, {}).items():
            if isinstance(value, Tensor):
                yield key, value
            elif value is not None:
                _check_number(key, value)
                number_key = f"{NUMBER_PREFIX}{key}"
                yield number_key, self._hold_number(p, number_key, value)
        group_index = self._group_indices[inner_param]
        group = self._inner_optimizer.param_groups[group_index]
        for key, initial_value in self._initial_settings[group_index].items():
            number_key = f"{GROUP_PREFIX}{key}"
            if group[key] != initial_value or (p, number_key) in self._number_tensors:
                yield number_key, self._hold_number(p, number_key, group[key])

    def _hold_number(self, p: Tensor, key: str, value: float) -> Tensor:
        """Return the tensor that holds a number; after a load it keeps the loaded value."""
        tensor, dtype = self._number_tensors.get((p, key)), _DTYPE_BY_TYPE[type(value)]
        if tensor is not None and (self._has_loaded_numbers or tensor.dtype == dtype):
            return tensor if self._has_loaded_numbers else tensor.fill_(value)
        tensor = self._number_tensors[p, key] = torch.tensor(value, dtype=dtype)
        return tensor

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        Unless the class reads `found_inf`, the host waits for it.
        """
        if self._inner_optimizer is None:
            self._make_inner_optimizer()
        if self._has_loaded_numbers:
            self._restore_numbers()
        if self.found_inf is not None and not self._reads_found_inf and bool(self.found_inf):
            return
        if self._matrices is None:
            self._step_inner_optimizer()
        else:
            self._step_matrices(self._matrices)

    def _step_matrices(self, matrices: ShardedMatrices) -> None:
        """Update whole matrices at their owners, and send the new weights back."""
        units = [unit for unit in self.units if unit.weight.grad is not None]
        gradients = matrices.gather_matrices(units, lambda unit: [_gradient(unit.weight)])
        weights = matrices.gather_matrices(units, lambda unit: [unit.weight.detach()])
        for unit in weights:
            matrix = self._inner_params[unit.weight]
            matrix.data, matrix.grad = weights[unit][0], gradients.pop(unit)[0]
        self._step_inner_optimizer()
        for unit, (weight,) in matrices.scatter_matrices(units, weights):
            unit.weight.copy_(weight)
        self._free_matrices()

    def localize(self, local_of: Mapping[Tensor, nn.Parameter]) -> None:
        """Replace the parameters of the model in all units by this rank's shards of them."""
        if self._matrices is not None:
            self._matrices.localize(local_of)

    def _step_inner_optimizer(self) -> None:
        """Take a step of the inner optimizer at this rate, if it has parameters."""
        if self._inner_optimizer is None:
            return
        rate_by_param = {p: group["lr"] for group in self.param_groups for p in group["params"]}
        rate_by_inner_param = {inner: rate_by_param[p] for p, inner in self._inner_params.items()}
        for group in self._inner_optimizer.param_groups:
            group["lr"] = rate_by_inner_param[group["params"][0]]
        if self._reads_found_inf:
            self._inner_optimizer.found_inf = self.found_inf  # type: ignore[attr-defined]
        self._inner_optimizer.step()

    def _make_inner_optimizer(self) -> None:
        """Make the inner optimizer of the parameters, or of the matrices that this rank owns."""
        groups = self._make_inner_groups()
        self._number_tensors, self._inner_optimizer = {}, None
        if not groups:
            return  # other ranks own all matrices
        self._inner_optimizer = self._make_optimizer(groups, self.defaults["lr"])
        self._initial_settings, self._group_indices = [], {}
        for group_index, group in enumerate(self._inner_optimizer.param_groups):
            self._initial_settings.append(_numeric_settings(group))
            self._group_indices |= dict.fromkeys(group["params"], group_index)
        self._free_matrices()

    def _make_inner_groups(self) -> list[dict[str, Any]]:
        """Make the inner parameters of this rank; return their groups, without empty ones."""
        unit_by_param = {unit.weight: unit for unit in self.units}
        self._inner_params, groups = {}, []
        for group in self.param_groups:
            for p in group["params"]:
                if self._matrices is None:
                    self._inner_params[p] = p
                elif self._matrices.owns(unit_by_param[p]):
                    shape = unit_by_param[p].shapes[0]
                    matrix = torch.zeros(shape, dtype=p.dtype, device=p.device)
                    self._inner_params[p] = nn.Parameter(matrix)
            inner_params = [
                self._inner_params[p] for p in group["params"] if p in self._inner_params
            ]
            if inner_params:
                settings = {key: group[key] for key in ("lr", "weight_decay")}
                groups.append({"params": inner_params, **settings})
        return groups

    def _free_matrices(self) -> None:
        """Free the weights and gradients that this rank had only for a step."""
        if self._matrices is not None:
            for matrix in self._inner_params.values():
                matrix.data = torch.empty(0, dtype=matrix.dtype, device=matrix.device)
                matrix.grad = None

    def allocate_state(self, state_by_param: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
        """Replace the state by one with other tensors, which a checkpoint then overwrites.

        Args:
            state_by_param: State by parameter and key; tensors on the meta device, in the shapes
                of this rank's shards or of matrices.
        """
        self._make_inner_optimizer()
        for p, inner_param in self._inner_params.items():
            assert self._inner_optimizer is not None
            inner_state: dict[str, Any] = {}
            for key, tensor in state_by_param.get(p, {}).items():
                device = p.device if tensor.ndim else self._scalar_devices.get(key, p.device)
                if key.startswith((NUMBER_PREFIX, GROUP_PREFIX)):
                    number = self._number_tensors[p, key] = torch.zeros_like(tensor, device="cpu")
                    if key.startswith(NUMBER_PREFIX):
                        inner_state[key.removeprefix(NUMBER_PREFIX)] = number.item()
                else:
                    inner_state[key] = torch.zeros_like(tensor, device=device)
            if inner_state:
                self._inner_optimizer.state[inner_param] = inner_state
        self._has_loaded_numbers = True

    def _restore_numbers(self) -> None:
        """Give the inner optimizer the numbers that were read from a checkpoint."""
        self._has_loaded_numbers = False
        for (p, key), tensor in self._number_tensors.items():
            assert self._inner_optimizer is not None
            inner_param = self._inner_params[p]
            if key.startswith(NUMBER_PREFIX):
                state = self._inner_optimizer.state[inner_param]
                state[key.removeprefix(NUMBER_PREFIX)] = tensor.item()
            else:
                group = self._inner_optimizer.param_groups[self._group_indices[inner_param]]
                group[key.removeprefix(GROUP_PREFIX)] = tensor.item()


def _check_number(key: object, value: object) -> None:
    """Refuse a value in an optimizer's state that is no number, or has no name."""
    if not isinstance(key, str) or type(value) not in _DTYPE_BY_TYPE:
        raise ConfigError(
            f"The optimizer keeps {key!r} in its state, a {type(value).__name__}, "
            "which checkpoints do not hold; let it keep tensors and numbers, by name."
        )


def _gradient(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    return weight.grad


def _numeric_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers among the settings of a parameter group, except those of the run."""
    return {
        key: value
        for key, value in group.items()
        if key not in _RUN_SETTINGS and type(value) in _DTYPE_BY_TYPE
    }
