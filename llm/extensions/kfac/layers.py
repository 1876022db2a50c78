"""Find the layers that K-FAC covers: linear layers, unless their statistics would mislead."""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from llm.errors import ConfigError
from llm.extensions.matrix_optim.fused import Fusion
from llm.extensions.matrix_optim.matrix_owners import gradients_of
from llm.models.attention import evaluation_mode
from llm.optim.groups import output_head
from llm.runtime.logging import counted


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Layer:
    """A linear layer; its weight and bias form one matrix [outputs, inputs (+ 1)].

    Or a stack of matrices [experts, outputs, inputs] with two common factors, averaged over the
    tokens of all experts. So memory does not grow with the number of experts, and an expert with
    few tokens profits from the others.

    Attributes:
        name: The module's name in the model; for a stack, the parameter's name.
        module: The module.
        weight_name: The weight's name in the module.
        transposed: Whether the weight is stored as [inputs, outputs] (Hugging Face's Conv1D).
        input_name: The layer that provides the input factor: the first layer that reads the same
            tensor, such as queries for queries, keys and values.
        fusion: How the weight divides into matrices; this layer is one of them.
        part: The name of the matrix in the weight; empty if it is the only one.
    """

    name: str
    module: nn.Module
    weight_name: str
    transposed: bool
    input_name: str
    fusion: Fusion
    part: str = ""

    @property
    def weight(self) -> nn.Parameter:
        """Return the weight as the module stores it."""
        return self.module.get_parameter(self.weight_name)

    @property
    def is_stack(self) -> bool:
        """Return whether the layer is a stack of matrices."""
        return self.weight.ndim == 3

    @property
    def bias(self) -> nn.Parameter | None:
        """Return the trained bias, or None."""
        bias = getattr(self.module, "bias", None)
        return bias if isinstance(bias, nn.Parameter) and bias.requires_grad else None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Return weight and bias; fused weights whole."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    @property
    def rows(self) -> int:
        """Return the width of the outputs and of G."""
        return self.fusion.groups * self.fusion.sizes[self.part]

    @property
    def columns(self) -> int:
        """Return the width of A: the inputs, plus one with a bias."""
        inputs = int(self.weight.shape[-2 if self.transposed else -1])
        return inputs + (self.bias is not None)

    def select_outputs(self, outputs: Tensor) -> Tensor:
        """Return the columns of this matrix in the module's outputs.

        Args:
            outputs: [tokens, outputs of the module].
        """
        return self.fusion.split(outputs, 1)[self.part]

    def make_gradient_matrix(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the gradient in fp32, with the bias as the last column.

        Args:
            gradients: Gradients of `parameters`; for equal layers, stacked in a leading dimension.

        Returns:
            [rows, columns], or [experts, rows, columns] for a stack; may be a view.
        """
        num_leading_dims = gradients[0].ndim - self.weight.ndim
        weight = self.fusion.split(gradients[0], self.fusion.dim + num_leading_dims)[self.part]
        weight = weight.mT if self.transposed else weight
        if len(gradients) == 1:
            return weight.float()
        bias = self.fusion.split(gradients[1], num_leading_dims)[self.part]
        return torch.cat([weight, bias.unsqueeze(-1)], dim=-1).float()

    def gradient(self) -> Tensor | None:
        """Return the matrix of the present gradients; None if the weight has no gradient."""
        gradients = gradients_of(self.parameters)
        return None if gradients is None else self.make_gradient_matrix(gradients)

    def split(self, matrix: Tensor) -> list[Tensor]:
        """Return views of a matrix in the layout of weight and bias, ordered as `parameters`."""
        weight = matrix if self.bias is None else matrix[..., :-1]
        weight = weight.mT if self.transposed else weight
        return [weight] if self.bias is None else [weight, matrix[..., -1]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Coverage:
    """The layers of a model that K-FAC covers.

    Attributes:
        layers: The covered layers, in the model's order.
        skipped: Reasons why modules with parameters are not covered, by module name.
        num_covered: Trained parameters in covered layers.
        num_skipped: Trained parameters outside.
        factor_sizes: Widths of the whole model's factors, by factor, grouped by the layer of the
            input.
    """

    layers: tuple[Layer, ...]
    skipped: dict[str, str]
    num_covered: int
    num_skipped: int
    factor_sizes: dict[str, dict[str, int]]

    def restrict_to_stage(self, model: nn.Module) -> "Coverage":
        """Return the coverage of a pipeline stage: the layers with modules in `model`.

        Raises:
            ConfigError: There are none.
        """
        stage_modules = set(model.modules())
        layers = tuple(layer for layer in self.layers if layer.module in stage_modules)
        if not layers:
            raise ConfigError(
                "A pipeline stage has no layer for K-FAC: leave out --kfac_skip_layers, or make "
                "--pipeline_parallel_size smaller."
            )
        return dataclasses.replace(self, layers=layers)

    def describe(self) -> str:
        """Return a few lines for the log."""
        num_trained = max(1, self.num_covered + self.num_skipped)
        num_layers = sum(len(factors) - 1 for factors in self.factor_sizes.values())  # but for A
        lines = [
            f"K-FAC covers {counted(num_layers, 'layer')} with {self.num_covered:,} of "
            f"{num_trained:,} parameters ({self.num_covered / num_trained:.1%})."
        ]
        num_stacks = sum(layer.is_stack for layer in self.layers)
        if num_stacks:
            lines.append(
                f"In {num_stacks} of them, stacks of experts, all experts share two factors."
            )
        for reason, count in Counter(self.skipped.values()).items():
            names = [name for name, skip_reason in self.skipped.items() if skip_reason == reason]
            examples = ", ".join(names[:3]) + (", ..." if count > 3 else "")
            lines.append(f"Not covered, {reason}: {examples} ({counted(count, 'module')}).")
        return "\n".join(lines)


def find_covered_layers(
    model: nn.Module,
    *,
    skip_layers: Sequence[str] = (),
    covers_stacks: bool = True,
    fusions: Mapping[nn.Parameter, Fusion] | None = None,
    sample_forward: Callable[[nn.Module], Any] | None = None,
) -> Coverage:
    """Find the layers that K-FAC covers: Linear, Conv1D, stacks of experts, if trained and untied.

    An output head is left out because its factor would be as wide as the vocabulary.

    Args:
        model: The model, not wrapped.
        skip_layers: Regular expressions; layers with matching names are skipped.
        covers_stacks: Whether to cover stacks of experts.
        fusions: Fused weights; each of their matrices becomes a layer.
        sample_forward: Runs the model once on any input, without gradients, to find layers that
            read the same tensor and so share a factor. None: no layers share one.

    Raises:
        ConfigError: No layer is covered, or a pattern is invalid or matches no layer.
    """
    layers, skipped = _select_layers(model, skip_layers=skip_layers, covers_stacks=covers_stacks)
    layers = [part for layer in layers for part in _split_fused_layer(layer, fusions or {})]
    if not layers:
        raise ConfigError(
            "--kfac found no layer to cover: apart from its output head and the layers of "
            "--kfac_skip_layers, the model has no trained Linear or Conv1D; train without --kfac."
        )
    if sample_forward is not None:
        first_reader_by_layer = _find_shared_inputs(model, layers, sample_forward)
        layers = [
            dataclasses.replace(
                layer, input_name=first_reader_by_layer.get(layer.name, layer.input_name)
            )
            for layer in layers
        ]
    num_covered = sum(p.numel() for p in {p for layer in layers for p in layer.parameters})
    num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return Coverage(
        layers=tuple(layers),
        skipped=skipped,
        num_covered=num_covered,
        num_skipped=num_trained - num_covered,
        factor_sizes=_list_factor_sizes(layers),
    )


def _list_factor_sizes(layers: Sequence[Layer]) -> dict[str, dict[str, int]]:
    """Return the widths of factors by name, grouped by the layer that provides the input."""
    sizes_by_input: dict[str, dict[str, int]] = {}
    for layer in layers:
        factor_sizes = {f"{layer.input_name}.A": layer.columns, f"{layer.name}.G": layer.rows}
        sizes_by_input.setdefault(layer.input_name, {}).update(factor_sizes)
    return sizes_by_input


def _split_fused_layer(layer: Layer, fusions: Mapping[nn.Parameter, Fusion]) -> list[Layer]:
    """Return a layer for each matrix of a fused weight; they read the same tensor."""
    fusion = fusions.get(layer.weight)
    if fusion is None:
        return [layer]
    name_by_part = {part: f"{layer.name}.{part}" for part in fusion.sizes}
    first_name, *_ = name_by_part.values()
    return [
        dataclasses.replace(layer, name=name, input_name=first_name, fusion=fusion, part=part)
        for part, name in name_by_part.items()
    ]


def _select_layers(
    model: nn.Module, *, skip_layers: Sequence[str], covers_stacks: bool
) -> tuple[list[Layer], dict[str, str]]:
    """Return the covered layers, and the reason why each other module is not covered, by name.

    Raises:
        ConfigError: A pattern is invalid or matches no layer.
    """
    patterns = [_compile_pattern(pattern) for pattern in skip_layers]
    unmatched_patterns = set(skip_layers)
    num_uses_by_param = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    head = output_head(model)
    layers: list[Layer] = []
    reason_by_name: dict[str, str] = {}
    for name, module in model.named_modules():
        weight_names = [weight_name for weight_name, _ in module.named_parameters(recurse=False)]
        if not weight_names:
            continue
        if _is_conv1d(module) or isinstance(module, nn.Linear):
            weight_name_by_layer = {name: "weight"}
        else:
            module_reason = _find_module_skip_reason(module, covers_stacks=covers_stacks)
            if module_reason is not None:
                reason_by_name[name] = module_reason
                continue
            weight_name_by_layer = {
                f"{name}.{weight_name}": weight_name for weight_name in weight_names
            }
        for layer_name, weight_name in weight_name_by_layer.items():
            matching_patterns = {
                pattern.pattern for pattern in patterns if pattern.search(layer_name)
            }
            unmatched_patterns -= matching_patterns
            weight_reason = _find_weight_skip_reason(
                module, weight_name, num_uses=num_uses_by_param, is_matched=bool(matching_patterns)
            )
            if module is head:
                weight_reason = "since it is the output head"
            if weight_reason is None:
                layers.append(_make_layer(layer_name, module, weight_name))
            else:
                reason_by_name[layer_name] = weight_reason
    if unmatched_patterns:
        raise ConfigError(
            f"--kfac_skip_layers {min(unmatched_patterns)!r} matches no Linear or Conv1D layer of "
            "this model, nor a stack of experts; correct the pattern or leave it out."
        )
    return layers, reason_by_name


def _make_layer(name: str, module: nn.Module, weight_name: str) -> Layer:
    """Return the layer of a weight; it shares no input and is not fused."""
    is_conv1d = _is_conv1d(module)
    num_outputs = getattr(module, weight_name).shape[-1 if is_conv1d else -2]
    return Layer(
        name=name,
        module=module,
        weight_name=weight_name,
        transposed=is_conv1d,
        input_name=name,
        fusion=Fusion(sizes={"": num_outputs}),
    )


def _compile_pattern(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"--kfac_skip_layers {pattern!r} is not a regular expression: {error}."
        ) from error


def _is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is Hugging Face's Conv1D, without importing transformers."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _find_module_skip_reason(module: nn.Module, *, covers_stacks: bool) -> str | None:
    """Return the reason why a nonlinear module is not covered; None for stacks of experts."""
    num_dims = {p.ndim for p in module.parameters(recurse=False)}
    # Stacks like Mixtral's experts in transformers 5; a convolution's weight only looks like one.
    if 3 not in num_dims or isinstance(module, nn.modules.conv._ConvNd):
        class_name = type(module).__name__
        return f"since it is {'an' if class_name[0] in 'AEIOU' else 'a'} {class_name}"
    if not covers_stacks:
        return "since it is a stack of experts"
    # Recording needs a module that can use torch's `linear` for each matrix.
    has_description = all(hasattr(module, name) for name in ("config", "is_transposed", "has_bias"))
    if has_description and num_dims == {3} and not module.is_transposed and not module.has_bias:
        return None
    return "since its stack of experts is of another form"


def _find_weight_skip_reason(
    module: nn.Module, weight_name: str, *, num_uses: Counter[int], is_matched: bool
) -> str | None:
    """Return the reason why a weight is not covered, or None."""
    weight = getattr(module, weight_name)
    parameters = [weight] if weight.ndim == 3 else module.parameters(recurse=False)
    is_tied = any(num_uses[id(parameter)] > 1 for parameter in parameters)
    if is_tied or not isinstance(weight, nn.Parameter):
        return "since its weight is tied to another's or computed"
    if not weight.requires_grad:
        return "since its weight is frozen"
    return "as --kfac_skip_layers asks" if is_matched else None


@torch.no_grad()
def _find_shared_inputs(
    model: nn.Module, layers: Sequence[Layer], sample_forward: Callable[[nn.Module], Any]
) -> dict[str, str]:
    """Find layers that read the same tensor as an earlier layer.

    Returns:
        The name of the first layer that reads the tensor, by the name of each later one.
    """
    calls = _record_calls(model, layers, sample_forward)
    num_calls = Counter(layer.name for layer, _ in calls)
    first_reader_by_layer: dict[str, str] = {}
    first_calls: list[tuple[Layer, Tensor]] = []
    for layer, input_tensor in calls:
        first_readers = (
            first_layer
            for first_layer, tensor in first_calls
            # With a bias, A has one more column.
            if tensor is input_tensor and first_layer.columns == layer.columns
        )
        first_reader = next(first_readers, None)
        if first_reader is None:
            first_calls.append((layer, input_tensor))
        else:
            first_reader_by_layer[layer.name] = first_reader.name
    # A layer that runs twice reads two tensors, and only one would be shared.
    return {
        name: first_layer
        for name, first_layer in first_reader_by_layer.items()
        if num_calls[name] == 1 and num_calls[first_layer] == 1
    }


def _record_calls(
    model: nn.Module, layers: Sequence[Layer], sample_forward: Callable[[nn.Module], Any]
) -> list[tuple[Layer, Tensor]]:
    """Run a model once; return each call of a layer in order, with its input; not of stacks."""
    calls: list[tuple[Layer, Tensor]] = []

    def record_call(
        layer: Layer, _: nn.Module, args: tuple[Any, ...], kwargs: Any, __: Any
    ) -> None:
        calls.append((layer, read_input(args, kwargs)))

    handles = [
        layer.module.register_forward_hook(partial(record_call, layer), with_kwargs=True)
        for layer in layers
        if not layer.is_stack
    ]
    try:
        with evaluation_mode(model):
            sample_forward(model)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def read_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the input tensor of a linear layer's call."""
    input_tensor = args[0] if args else next(iter(kwargs.values()))
    assert isinstance(input_tensor, Tensor)
    return input_tensor
