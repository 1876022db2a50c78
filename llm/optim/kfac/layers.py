"""Which modules K-FAC covers: linear layers, except where their statistics would mislead."""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from llm.errors import ConfigError


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Layer:
    """A linear layer whose weight and bias make one matrix [outputs, inputs (+ 1)].

    Or a stack of matrices [experts, outputs, inputs] that have their factors in common: those of
    all tokens, each counted at the experts that it was sent to. So memory does not grow with the
    number of experts, and one that has seen few tokens profits from the others.

    Attributes:
        name: The module's name in the model; of a stack, the parameter's.
        module: The module.
        leaf: What the module calls the weight.
        transposed: Whether the weight is stored as [inputs, outputs] (Hugging Face's Conv1D).
        input_name: The layer that gives this one its input factor: the first of those that read
            the same tensor, such as the queries' of queries, keys and values.
    """

    name: str
    module: nn.Module
    leaf: str = "weight"
    transposed: bool
    input_name: str

    @property
    def weight(self) -> nn.Parameter:
        """The weight as the module stores it."""
        return self.module.get_parameter(self.leaf)

    @property
    def is_stack(self) -> bool:
        """Whether it is a stack of matrices."""
        return self.weight.ndim == 3

    @property
    def bias(self) -> nn.Parameter | None:
        """The bias, if it has one that is trained."""
        bias = getattr(self.module, "bias", None)
        return bias if isinstance(bias, nn.Parameter) and bias.requires_grad else None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Weight and bias."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    @property
    def rows(self) -> int:
        """Outputs."""
        return int(self.weight.shape[-1 if self.transposed else -2])

    @property
    def columns(self) -> int:
        """Inputs, and one for the bias."""
        inputs = int(self.weight.shape[-2 if self.transposed else -1])
        return inputs + (self.bias is not None)

    def gradient(self) -> Tensor | None:
        """The gradient as a matrix in fp32, the bias' as the last column; None if there is none.

        It may be a view of the weight's gradient.
        """
        if self.weight.grad is None:
            return None
        matrix = self.weight.grad.T if self.transposed else self.weight.grad
        if self.bias is None:
            return matrix.float()
        column = self.bias.grad
        if column is None:
            column = torch.zeros_like(self.bias)
        return torch.cat([matrix, column.unsqueeze(1)], dim=1).float()

    def parts(self, matrix: Tensor) -> list[Tensor]:
        """Views of a matrix as weight and bias store it, in the order of `parameters`."""
        weight = matrix if self.bias is None else matrix[:, :-1]
        weight = weight.T if self.transposed else weight
        return [weight] if self.bias is None else [weight, matrix[:, -1]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Coverage:
    """What K-FAC covers of a model.

    Attributes:
        layers: The covered layers, in the model's order.
        skipped: Why a module with parameters of its own is not covered, by module name.
        num_covered: Trained parameters in covered layers.
        num_skipped: Trained parameters outside.
    """

    layers: tuple[Layer, ...]
    skipped: dict[str, str]
    num_covered: int
    num_skipped: int

    def describe(self) -> str:
        """A few lines for the log."""
        whole = max(1, self.num_covered + self.num_skipped)
        lines = [
            f"K-FAC covers {len(self.layers)} layers with {self.num_covered:,} of {whole:,} "
            f"parameters ({self.num_covered / whole:.1%})."
        ]
        for reason, count in Counter(self.skipped.values()).items():
            names = [name for name, why in self.skipped.items() if why == reason]
            shown = ", ".join(names[:3]) + (", ..." if count > 3 else "")
            lines.append(f"Not covered, {reason}: {shown} ({count} modules).")
        return "\n".join(lines)


def find_layers(
    model: nn.Module,
    *,
    skip_layers: Sequence[str] = (),
    stacks: bool = True,
    sample_forward: Callable[[nn.Module], Any] | None = None,
) -> Coverage:
    """Find what K-FAC covers: Linear, Conv1D and stacks of experts, if trained and not tied.

    An output head is left out since its factor would be as large as the vocabulary.

    Args:
        model: The model, not wrapped.
        skip_layers: Regular expressions; a layer whose name one of them is found in is skipped.
        stacks: Whether to cover stacks of experts.
        sample_forward: Runs the model once on anything, without gradients, to see which layers
            read the same tensor; those share a factor. None: no layers share one.

    Raises:
        ConfigError: No layer is covered, or a pattern is invalid or matches no layer.
    """
    found, skipped = _divide_modules(model, skip_layers=skip_layers, stacks=stacks)
    if not found:
        raise ConfigError(
            "--kfac found no layer to cover: the model has no trained Linear or Conv1D beside "
            "its output head that --kfac_skip_layers leaves; train without --kfac."
        )
    linear = [(name, module) for name, module, _ in found if _is_linear(module)]
    input_names = _shared_inputs(model, linear, sample_forward)
    layers = tuple(
        Layer(
            name=name,
            module=module,
            leaf=leaf,
            transposed=_is_conv1d(module),
            input_name=input_names.get(name, name),
        )
        for name, module, leaf in found
    )
    covered = sum(p.numel() for layer in layers for p in layer.parameters)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return Coverage(
        layers=layers, skipped=skipped, num_covered=covered, num_skipped=trained - covered
    )


def _divide_modules(
    model: nn.Module, *, skip_layers: Sequence[str], stacks: bool
) -> tuple[list[tuple[str, nn.Module, str]], dict[str, str]]:
    """What is covered, as name, module and parameter; and why anything else is not, by name."""
    patterns = [_compile(pattern) for pattern in skip_layers]
    unmatched = {pattern.pattern for pattern in patterns}
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if callable(get_head) else None
    found: list[tuple[str, nn.Module, str]] = []
    skipped: dict[str, str] = {}
    for name, module in model.named_modules():
        own = [leaf for leaf, _ in module.named_parameters(recurse=False)]
        if not own:
            continue
        reason = _kind_reason(module, head=head, stacks=stacks)
        if reason is not None and not _is_linear(module):
            skipped[name] = reason
            continue
        leaves = ["weight"] if _is_linear(module) else own
        for leaf in leaves:
            full = name if _is_linear(module) else f"{name}.{leaf}"
            matched = {pattern.pattern for pattern in patterns if pattern.search(full)}
            unmatched -= matched
            why = reason or _weight_reason(module, leaf, uses=uses, matched=bool(matched))
            if why is None:
                found.append((full, module, leaf))
            else:
                skipped[full] = why
    if unmatched:
        raise ConfigError(
            f"--kfac_skip_layers {min(unmatched)!r} matches no Linear or Conv1D layer of this "
            "model, nor a stack of experts; correct the pattern or leave it out."
        )
    return found, skipped


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"--kfac_skip_layers {pattern!r} is no regular expression: {error}."
        ) from error


def _is_conv1d(module: nn.Module) -> bool:
    """Hugging Face's Conv1D, known by its name so that transformers need not be imported."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or _is_conv1d(module)


def _has_stacks(module: nn.Module) -> bool:
    """Whether a module holds matrices as stacks, as Mixtral's experts in transformers 5."""
    convolves = isinstance(module, nn.modules.conv._ConvNd)
    return not convolves and any(p.ndim == 3 for p in module.parameters(recurse=False))


def _can_record(module: nn.Module) -> bool:
    """Whether a module with stacks multiplies with each matrix by torch's `linear`, if asked."""
    described = all(hasattr(module, name) for name in ("config", "is_transposed", "has_bias"))
    plain = all(p.ndim == 3 for p in module.parameters(recurse=False))
    return described and plain and not module.is_transposed and not module.has_bias


def _kind_reason(module: nn.Module, *, head: nn.Module | None, stacks: bool) -> str | None:
    """Why a module is not covered whatever its weights are."""
    if _has_stacks(module):
        if not stacks:
            return "since it is a stack of experts"
        return None if _can_record(module) else "since its stack of experts is of another form"
    if not _is_linear(module):
        kind = type(module).__name__
        return f"since it is {'an' if kind[0] in 'AEIOU' else 'a'} {kind}"
    return "since it is the output head" if module is head else None


def _weight_reason(
    module: nn.Module, leaf: str, *, uses: Counter[int], matched: bool
) -> str | None:
    """Why a weight is not covered."""
    weight = getattr(module, leaf)
    own = [weight] if weight.ndim == 3 else module.parameters(recurse=False)
    if not isinstance(weight, nn.Parameter) or any(uses[id(parameter)] > 1 for parameter in own):
        return "since its weight is tied to another's or computed"
    if not weight.requires_grad:
        return "since its weight is frozen"
    return "as --kfac_skip_layers asks" if matched else None


@torch.no_grad()
def _shared_inputs(
    model: nn.Module,
    found: list[tuple[str, nn.Module]],
    sample_forward: Callable[[nn.Module], Any] | None,
) -> dict[str, str]:
    """For each layer that reads the same tensor as an earlier one, the name of that one."""
    if sample_forward is None:
        return {}
    seen: list[tuple[Tensor, str, int]] = []  # the tensors stay alive: no two are at one place
    shared: dict[str, str] = {}
    calls: Counter[str] = Counter()

    def watch(name: str, module: nn.Module) -> Any:
        columns = len(list(module.parameters(recurse=False)))

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], __: Any) -> None:
            calls[name] += 1
            value = read_input(args, kwargs)
            for tensor, first, first_columns in seen:
                if tensor is value and first_columns == columns:
                    shared[name] = first
                    return
            seen.append((value, name, columns))

        return module.register_forward_hook(hook, with_kwargs=True)

    handles = [watch(name, module) for name, module in found]
    training = model.training
    model.eval()
    try:
        sample_forward(model)
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    return {name: first for name, first in shared.items() if calls[name] == 1 and calls[first] == 1}


def read_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The tensor that a linear layer was called with."""
    value = args[0] if args else next(iter(kwargs.values()))
    assert isinstance(value, Tensor)
    return value
