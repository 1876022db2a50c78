"""From the options to an optimizer of a class, on the ranks of a run."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from llm.checkpoint.format import OPTIMIZER_TENSORS
from llm.errors import CheckpointError, ConfigError
from llm.extensions.custom_optim.class_optimizer import ClassOptimizer
from llm.extensions.custom_optim.class_settings import CustomOptimizerOptions
from llm.extensions.custom_optim.class_trial import Traits, try_class
from llm.extensions.custom_optim.import_class import OptimizerClass, import_optimizer
from llm.extensions.matrix_optim.matrices import BUCKET, ShardedMatrices
from llm.optim.groups import parameter_groups
from llm.optim.run_optimizer import MatrixTraffic, OptimizerFactory, RunOptimizer, StateMemory
from llm.parallel.options import sizes_above_one
from llm.runtime.logging import SAME_ON_ALL_RANKS
from llm.runtime.world import device_of, world_from_environment

_ELEMENTWISE = frozenset(
    f"torch.optim:{name}"
    for name in (
        *("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop"),
        *("Rprop", "SGD"),
    )
)
"""Classes of torch that update each element by itself."""

_FP32 = 4
"""Bytes of a number."""

logger = logging.getLogger("llm")


class ClassRecord:
    """The class of a run's optimizer in checkpoints.

    Args:
        optimizer_class: The class.
    """

    def __init__(self, optimizer_class: OptimizerClass) -> None:
        self._class = optimizer_class

    def state_dict(self) -> dict[str, Any]:
        """Return name and version of the class."""
        return {"name": self._class.name, "version": self._class.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Warn if the checkpoint was saved with another version of the class."""
        if state["version"] != self._class.version:
            logger.warning(
                f"The checkpoint was saved with {self._class.name} of {state['version']}, and this "
                f"is {self._class.version}: the next steps may differ.",
                extra=SAME_ON_ALL_RANKS,
            )


class ClassRunOptimizer(RunOptimizer):
    """An optimizer of a class from outside of this package.

    Args:
        optimizer: Updates the weights.
        model: The model, or this rank's stages and shards of it.
        record: The part of checkpoints that names the class.
        takes_matrices: Whether it updates whole matrices.
        description: For the beginning of the log.
    """

    def __init__(
        self,
        optimizer: ClassOptimizer,
        model: nn.Module,
        *,
        record: ClassRecord,
        takes_matrices: bool,
        description: str,
    ) -> None:
        super().__init__(optimizer)
        self._class_optimizer = optimizer
        self._record, self._description = record, description
        self._takes_matrices = takes_matrices
        names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        params = [p for group in optimizer.param_groups for p in group["params"]]
        self._param_by_name: dict[str, Tensor] = {names[p]: p for p in params}
        self._shapes = {names[p]: p.shape for p in params}
        self._owner_by_path = {
            f"{OPTIMIZER_TENSORS}{names[unit.weight]}": unit.owner for unit in optimizer.units
        }

    def localize(self, local_of: Mapping[Tensor, nn.Parameter]) -> None:
        """Use the local shards of parameters."""
        self._param_by_name = {name: local_of[p] for name, p in self._param_by_name.items()}
        self._class_optimizer.localize(local_of)

    def owner_of(self, path: str) -> int | None:
        """Return the rank that keeps the whole state of a parameter; None if all have theirs."""
        return self._owner_by_path.get(path.rpartition("/")[0])

    def prepare_load(self, list_saved_tensors: Callable[[], Mapping[str, Tensor]]) -> None:
        """Allocate the state that a checkpoint has; the class makes it in its first step only.

        Raises:
            CheckpointError: The state is not elementwise, as shards need it.
        """
        state_by_param: dict[Tensor, dict[str, Tensor]] = {
            p: {} for p in self._param_by_name.values()
        }
        for path, tensor in list_saved_tensors().items():
            name, _, key = path.removeprefix(OPTIMIZER_TENSORS).rpartition("/")
            param = self._param_by_name.get(name)
            if param is not None and path.startswith(OPTIMIZER_TENSORS):
                state_by_param[param][key] = self._make_local_state(name, key, tensor)
        self._class_optimizer.allocate_state(state_by_param)

    def _make_local_state(self, name: str, key: str, saved_tensor: Tensor) -> Tensor:
        """Return a tensor of a parameter's state with the shape that it has on this rank."""
        local_shape, full_shape = self._param_by_name[name].shape, self._shapes[name]
        is_shard = not self._owner_by_path and local_shape != full_shape
        if not is_shard or not saved_tensor.ndim:
            return saved_tensor
        if saved_tensor.shape != full_shape:
            raise CheckpointError(
                f"The state {key} of {name} has another shape than the weight, so ranks "
                "cannot divide it; resume with --optimizer_input matrices."
            )
        return saved_tensor.new_empty(local_shape)

    def parts(self) -> dict[str, Any]:
        """Return the part with the name and the version of the class."""
        return {"optimizer_class": self._record}

    def describe(self) -> str:
        """Return the class, its version, and what it updates on each rank."""
        return self._description

    def memory(self) -> dict[str, StateMemory]:
        """Return the memory of the weights and gradients of owned matrices."""
        if not self._takes_matrices:
            return {}
        elements = sum(shape.numel() for shape in self._shapes.values())
        return {"whole matrices": StateMemory(divided=2 * _FP32 * elements)}

    def traffic(self) -> MatrixTraffic | None:
        """Return what is sent to owners, the gradient and the weight, and back, the weight."""
        if not self._takes_matrices:
            return None
        return MatrixTraffic(
            bytes_per_element=3 * _FP32, with_ends=True, with_experts=True, bucket=BUCKET
        )


class ClassFactory(OptimizerFactory):
    """Makes an optimizer of a class.

    Args:
        options: The learning rate and the weight decay.
        optimizer_class: The class and its arguments.
        traits: Its behavior in a trial.
        takes_matrices: Whether it updates whole matrices.
        reason: Why, for the log.
    """

    def __init__(
        self,
        options: CustomOptimizerOptions,
        optimizer_class: OptimizerClass,
        traits: Traits,
        *,
        takes_matrices: bool,
        reason: str,
    ) -> None:
        self._options, self._class, self._traits = options, optimizer_class, traits
        self._takes_matrices, self._reason = takes_matrices, reason

    def make(self, model: nn.Module, mesh: DeviceMesh | None) -> RunOptimizer:
        """Return the optimizer of the weights that this rank has."""
        optimizer = ClassOptimizer(
            self._class.make,
            parameter_groups(self._options, model),
            lr=self._options.learning_rate,
            reads_found_inf=self._traits.reads_found_inf,
            scalar_devices=self._traits.scalar_devices,
            matrices=ShardedMatrices(mesh) if mesh is not None and self._takes_matrices else None,
        )
        if any(p.is_meta for p in model.parameters()):
            self._allocate_meta_state(optimizer)
        return ClassRunOptimizer(
            optimizer,
            model,
            record=ClassRecord(self._class),
            takes_matrices=self._takes_matrices,
            description=self._description,
        )

    @property
    def _description(self) -> str:
        """The class, its version, and what it updates on each rank."""
        name = self._class.name
        target = "whole matrices, each on one rank" if self._takes_matrices else "shards"
        lines = [
            f"optimizer: {name} of {self._class.version}; where ranks divide the weights it "
            f"updates {target}, because {self._reason}"
        ]
        if not self._traits.reads_found_inf:
            lines.append(
                f"optimizer: {name} does not read found_inf, so the host waits for the norm of "
                "each gradient, and skips the step if it is not finite"
            )
        if names := ", ".join(self._traits.changing_attributes):
            lines.append(
                f"optimizer: {name} changes {names} outside of its state, which checkpoints do not "
                "hold: if its steps depend on that, a resumed run differs"
            )
        return "\n".join(lines)

    def _allocate_meta_state(self, optimizer: ClassOptimizer) -> None:
        """Allocate the state that a step makes, for an optimizer of weights on the meta device."""
        params = [p for group in optimizer.param_groups for p in group["params"]]
        for p in params:
            p.grad = torch.empty_like(p)
        try:
            optimizer.step()
        except Exception:
            bytes_per_element = self._traits.bytes_per_element
            logger.warning(
                f"{self._class.name} cannot step without values, so its state is assumed to take "
                f"{bytes_per_element:g} bytes for each weight, as for a matrix of 6 x 4."
            )
            optimizer.allocate_state(
                {
                    p: {"state": torch.empty(int(bytes_per_element * p.numel()), dtype=torch.uint8)}
                    for p in params
                }
            )
        for p in params:
            p.grad = None


def make_class_factory(options: CustomOptimizerOptions, *, is_run: bool) -> ClassFactory:
    """Return the factory of the class in `optimizer`, after a trial of the class.

    Args:
        options: The class, its arguments, and the sizes of the layout.
        is_run: Whether a run starts; otherwise the trial is on the CPU.

    Raises:
        ConfigError: The class cannot be imported, or cannot train this run.
    """
    optimizer_class = import_optimizer(options)
    device = device_of(world_from_environment()) if is_run else torch.device("cpu")
    traits = try_class(optimizer_class, device)
    takes_matrices, reason = _choose_input(options, optimizer_class)
    _check_traits(options, traits, takes_matrices=takes_matrices, reason=reason)
    return ClassFactory(
        options, optimizer_class, traits, takes_matrices=takes_matrices, reason=reason
    )


def _check_traits(
    options: CustomOptimizerOptions, traits: Traits, *, takes_matrices: bool, reason: str
) -> None:
    """Refuse a class whose updates would depend on how ranks divide the weights."""
    name, sizes = options.optimizer, sizes_above_one(options)
    if traits.is_random and (sizes or world_from_environment().world_size > 1):
        raise ConfigError(
            f"--optimizer {name} draws random numbers, which would differ between ranks; train on "
            "one rank, or choose another class."
        )
    if sizes and traits.is_coupled:
        raise ConfigError(
            f"--optimizer {name} updates a weight depending on other weights, which --{sizes[0]} "
            "divides; leave one of them out."
        )
    if not takes_matrices and not traits.is_elementwise:
        raise ConfigError(
            f"--optimizer {name} is not elementwise: it trains the halves of a matrix otherwise "
            f"than the matrix, and yet {reason}; use --optimizer_input matrices."
        )


def _choose_input(
    options: CustomOptimizerOptions, optimizer_class: OptimizerClass
) -> tuple[bool, str]:
    """Return whether a class takes whole matrices, and the reason for the log."""
    if options.optimizer_input is not None:
        reason = f"--optimizer_input says {options.optimizer_input}"
        return options.optimizer_input == "matrices", reason
    declared = getattr(optimizer_class.cls, "whole_matrices", None)
    if declared is not None:
        return bool(declared), f"its attribute whole_matrices is {bool(declared)}"
    if optimizer_class.name in _ELEMENTWISE:
        return False, "it is elementwise"
    return True, "it does not say whether it is elementwise (whole_matrices = False)"
