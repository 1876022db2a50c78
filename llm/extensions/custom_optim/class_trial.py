"""A trial of an optimizer's class on small weights, before a run depends on it."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from llm.errors import ConfigError, one_line
from llm.extensions.custom_optim.class_optimizer import NUMBER_PREFIX, ClassOptimizer
from llm.extensions.custom_optim.import_class import OptimizerClass

_STEPS = 3
_LEARNING_RATE, _WEIGHT_DECAY = 0.1, 0.1

_SCALER_ATTRIBUTES = ("found_inf", "grad_scale")
"""Attributes that the trainer, or a gradient scaler of torch, sets before a step."""

_SPLITS_IN_HALVES: tuple[Callable[[Tensor], tuple[Tensor, ...]], ...] = (
    lambda matrix: matrix.split(matrix.shape[0] // 2, 0),
    lambda matrix: matrix.split(matrix.shape[1] // 2, 1),
)


@dataclass(frozen=True, kw_only=True)
class Traits:
    """The behavior of a class in a trial.

    Attributes:
        reads_found_inf: Whether it skips a step if its `found_inf` is 1.
        is_elementwise: Whether an update of a part of a matrix is a part of the matrix's update.
        is_coupled: Whether the update of a weight depends on other weights.
        is_random: Whether an update draws random numbers.
        changing_attributes: Numbers and tensors outside of its state that its steps change.
        scalar_devices: Devices of scalar tensors in its state, by their name.
        bytes_per_element: Bytes of state for each element of a matrix.
    """

    reads_found_inf: bool
    is_elementwise: bool
    is_coupled: bool
    is_random: bool
    changing_attributes: tuple[str, ...]
    scalar_devices: dict[str, torch.device]
    bytes_per_element: float


def try_class(optimizer_class: OptimizerClass, device: torch.device) -> Traits:
    """Train a matrix and a vector by a class, and return what a run has to know about it.

    Args:
        optimizer_class: The class and its arguments.
        device: Device of the run.

    Raises:
        ConfigError: The class fails, or a run could not resume it or skip its steps.
    """
    trial = _Trial(optimizer_class, device)
    try:
        return trial.find_traits()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"--optimizer {optimizer_class.name} fails in a trial on a matrix and a vector "
            f"({type(error).__name__}: {one_line(error)}); check --optimizer_kwargs, or choose "
            "another class."
        ) from error


class _Trial:
    """Small weights with gradients, and optimizers of a class for them."""

    def __init__(self, optimizer_class: OptimizerClass, device: torch.device) -> None:
        self._class = optimizer_class
        generator = torch.Generator().manual_seed(0)
        draws = [
            [torch.randn(shape, generator=generator).to(device) for shape in ((6, 4), (6,))]
            for _ in range(1 + _STEPS)
        ]
        self._weights, *self._gradients = draws
        self._reads_found_inf = hasattr(optimizer_class.cls, "found_inf")

    def find_traits(self) -> Traits:
        """Return the behavior of the class.

        Raises:
            ConfigError: A run could not resume it, or could not skip a step.
        """
        trial_params = [nn.Parameter(weight.clone()) for weight in self._weights]
        trial_optimizer = self._class.make(
            [{"params": trial_params, "weight_decay": 0.0}], _LEARNING_RATE
        )
        # torch's fused classes have no such attribute before a step.
        self._reads_found_inf |= bool(getattr(trial_optimizer, "_step_supports_amp_scaling", False))
        self._check_finite_steps()
        optimizer = self._make_optimizer(self._weights)
        addresses = [p.data_ptr() for p in _params_of(optimizer)]
        _take_steps(optimizer, self._gradients)
        weights = _weights_of(optimizer)
        self._check_addresses(optimizer, addresses)
        self._check_resume(weights)
        self._check_skipped_step(optimizer)
        matrix, _ = weights
        matrix_state = optimizer.state[optimizer.param_groups[0]["params"][0]]
        state_tensors = [tensor for tensor in matrix_state.values() if tensor.ndim]
        is_elementwise = all(tensor.shape == matrix.shape for tensor in state_tensors) and all(
            _are_close(self._train_halves(split), [matrix]) for split in _SPLITS_IN_HALVES
        )
        reseeded_optimizer = self._train(self._weights, self._gradients, seed=1)
        return Traits(
            reads_found_inf=self._reads_found_inf,
            is_elementwise=is_elementwise,
            is_coupled=not _are_close([self._train_alone(0), self._train_alone(1)], weights),
            is_random=not all(map(torch.equal, _weights_of(reseeded_optimizer), weights)),
            changing_attributes=self._find_changing_attributes(trial_optimizer),
            scalar_devices={
                key: tensor.device
                for key, tensor in matrix_state.items()
                if tensor.ndim == 0 and not key.startswith(NUMBER_PREFIX)
            },
            bytes_per_element=sum(tensor.nbytes for tensor in state_tensors) / matrix.numel(),
        )

    def _make_optimizer(self, weights: Sequence[Tensor]) -> ClassOptimizer:
        """Return an optimizer of weights; matrices decay, and vectors do not."""
        groups = [
            {
                "params": [nn.Parameter(weight.clone())],
                "weight_decay": _WEIGHT_DECAY if weight.ndim > 1 else 0.0,
            }
            for weight in weights
        ]
        return ClassOptimizer(
            self._class.make, groups, lr=_LEARNING_RATE, reads_found_inf=self._reads_found_inf
        )

    def _train(
        self, weights: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]], *, seed: int = 0
    ) -> ClassOptimizer:
        """Return an optimizer after steps with the gradients of the weights."""
        optimizer = self._make_optimizer(weights)
        _take_steps(optimizer, gradients, seed=seed)
        return optimizer

    def _train_alone(self, index: int) -> Tensor:
        """Return one of the weights, trained without the others."""
        gradients = [[step_gradients[index]] for step_gradients in self._gradients]
        return _weights_of(self._train([self._weights[index]], gradients))[0]

    def _train_halves(self, split: Callable[[Tensor], tuple[Tensor, ...]]) -> list[Tensor]:
        """Return the matrix after its halves were trained separately."""
        halves = [
            _weights_of(self._train([half], [[split(step[0])[index]] for step in self._gradients]))
            for index, half in enumerate(split(self._weights[0]))
        ]
        dim = int(halves[0][0].shape[0] == self._weights[0].shape[0])
        return [torch.cat([half for (half,) in halves], dim)]

    def _find_changing_attributes(self, optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
        """Return the names of the attributes of an optimizer that its first step changes."""
        attributes = copy.deepcopy(_numbers_and_tensors(vars(optimizer)))
        for p, gradient in zip(_params_of(optimizer), self._gradients[0], strict=True):
            p.grad = gradient.clone()
        optimizer.step()
        changed_attributes = _numbers_and_tensors(vars(optimizer))
        return tuple(
            name
            for name, value in changed_attributes.items()
            if name not in attributes or not _are_equal(value, attributes[name])
        )

    def _check_finite_steps(self) -> None:
        """Refuse a class that makes weights which are not finite."""
        for rates, condition in (
            ([_LEARNING_RATE] * _STEPS, ""),
            ([0.0] + [_LEARNING_RATE] * (_STEPS - 1), " if the learning rate begins at 0"),
        ):
            optimizer = self._make_optimizer(self._weights)
            for rate, step_gradients in zip(rates, self._gradients, strict=True):
                for group in optimizer.param_groups:
                    group["lr"] = rate
                _take_steps(optimizer, [step_gradients])
            if not all(weight.isfinite().all() for weight in _weights_of(optimizer)):
                raise ConfigError(
                    f"--optimizer {self._class.name} makes weights that are not finite in a trial "
                    f"on a matrix and a vector{condition}; correct its step."
                )

    def _check_addresses(self, optimizer: ClassOptimizer, addresses: Sequence[int]) -> None:
        """Refuse a class that replaces the memory of weights, which had these addresses before."""
        if [p.data_ptr() for p in _params_of(optimizer)] != addresses:
            raise ConfigError(
                f"--optimizer {self._class.name} puts new tensors in the place of weights (p.data "
                "= ...), which ranks that divide the weights do not see; let it change them in "
                "place, as p.copy_(...) does."
            )

    def _check_resume(self, expected_weights: Sequence[Tensor]) -> None:
        """Refuse a class that needs more than its state to continue an interrupted training."""
        interrupted_optimizer = self._train(self._weights, self._gradients[:-1])
        resumed_optimizer = self._make_optimizer(_weights_of(interrupted_optimizer))
        state_by_param: dict[Tensor, dict[str, Tensor]] = dict(
            zip(_params_of(resumed_optimizer), interrupted_optimizer.state.values(), strict=True)
        )
        resumed_optimizer.allocate_state(
            {p: {k: t.to("meta") for k, t in state.items()} for p, state in state_by_param.items()}
        )
        for p, state in resumed_optimizer.state.items():
            for key, tensor in state.items():
                tensor.copy_(state_by_param[p][key])
        _take_steps(resumed_optimizer, self._gradients[-1:])
        if not all(map(torch.equal, _weights_of(resumed_optimizer), expected_weights)):
            raise ConfigError(
                f"--optimizer {self._class.name} keeps a value outside of its state that changes "
                "its steps, so a resumed run would differ; keep it in self.state, or as a number "
                "in its groups."
            )

    def _check_skipped_step(self, optimizer: ClassOptimizer) -> None:
        """Refuse a class that has the attribute `found_inf` and takes a step all the same."""
        weights = _weights_of(optimizer)
        optimizer.found_inf = torch.ones((), device=weights[0].device)
        _take_steps(optimizer, self._gradients[:1])
        if not all(map(torch.equal, _weights_of(optimizer), weights)):
            raise ConfigError(
                f"--optimizer {self._class.name} has the attribute found_inf, and changes weights "
                "although it is 1; let it skip the step, or remove the attribute."
            )


def _numbers_and_tensors(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in attributes.items()
        if isinstance(value, bool | int | float | Tensor) and name not in _SCALER_ATTRIBUTES
    }


def _are_equal(value: Any, other_value: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other_value, Tensor):
        return torch.equal(value, other_value)
    return bool(value == other_value)


def _params_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _weights_of(optimizer: ClassOptimizer) -> list[Tensor]:
    """Return copies of the weights of an optimizer."""
    return [p.detach().clone() for p in _params_of(optimizer)]


def _take_steps(
    optimizer: ClassOptimizer, gradients: Sequence[Sequence[Tensor]], *, seed: int = 0
) -> None:
    """Take a step with each of the gradients, after seeding the generators, as a run does."""
    for step_gradients in gradients:
        torch.manual_seed(seed)
        for p, gradient in zip(_params_of(optimizer), step_gradients, strict=True):
            p.grad = gradient.clone()
        optimizer.step()


def _are_close(weights: Sequence[Tensor], expected_weights: Sequence[Tensor]) -> bool:
    """Return whether weights are equal except for rounding."""
    return all(
        torch.allclose(weight, expected, rtol=1e-4, atol=1e-4)
        for weight, expected in zip(weights, expected_weights, strict=True)
    )
