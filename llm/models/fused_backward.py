"""Fused backward passes of norms, GELU and biases in compiled blocks.

Inductor computes the backward pass of a norm in two or three kernels, and reads a large gradient
once more for the gradient of each bias. Here, the modules' backward passes are operations of
`backward_kernels`, and a pass over the compiled graph gives these operations what surrounds them:
the sum of gradients in front of them, the gradient of the residual stream, casts, and sums over
tokens. The pass leaves all else unchanged.

The modules' gradients do not change, except that fp32 sums have another order. Gradients of biases
and weights are not rounded to half precision on their way to fp32. `python -m benchmarks.generated`
counts what each part saves.
"""

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.distributed.tensor import DTensor
from torch.fx import Graph, Node
from torch.utils._pytree import tree_map_only

from llm.models import backward_kernels
from llm.models.patches.gelu import FusedTanhGELU

RMS_NORMS = frozenset(
    f"{family}RMSNorm"
    for family in (
        *("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "Phi3"),
        *("Granite", "GraniteMoe", "Olmoe", "SmolLM3", "DeepseekV3"),
    )
)
"""Classes of transformers with the formula of LlamaRMSNorm; a test compares their code."""

_aten, _ops = torch.ops.aten, torch.ops.llm
_cast = torch.ops.prims.convert_element_type.default


@functools.cache  # modules share a graph only if they have the same instance of the pass
def inductor_options() -> dict[str, Any]:
    """Return the options of torch.compile for modules with fused backward passes."""
    return {"post_grad_custom_pre_pass": FuseBackward()}


def fuse_norms(model: nn.Module) -> list[nn.Module]:
    """Let LayerNorm, and the classes in `RMS_NORMS`, have a fused backward pass where compiled.

    The modules' classes change in place: parameters, names and hooks stay.

    Returns:
        The norms.
    """
    norms: list[nn.Module] = []
    module: Any
    for module in model.modules():
        norm_class: Any = type(module)
        if norm_class is nn.LayerNorm and len(module.normalized_shape) == 1:
            module.__class__ = FusedLayerNorm
        elif (
            norm_class.__name__ in RMS_NORMS
            and norm_class.__module__.startswith("transformers.models.")  # not code from the Hub
        ):
            module.__class__ = _make_fused_class(norm_class)
        else:
            continue
        norms.append(module)
    return norms


def fuse_gelu_backward(model: nn.Module) -> None:
    """Let the tanh form of GELU compute the gradient of the bias in front, where compiled."""
    for module in model.modules():
        if type(module) is FusedTanhGELU:
            module.__class__ = FusedBackwardGELU


class FusedLayerNorm(nn.LayerNorm):
    """LayerNorm; its backward pass in a compiled graph is `norm_backward`."""

    def forward(self, input: Tensor) -> Tensor:
        """Return a tensor of the same shape."""
        if not _can_fuse(input, self.weight) or not _can_fuse(input, self.bias):
            return super().forward(input)
        normalized: Tensor = _LayerNorm.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps
        )
        return normalized


@functools.cache  # one class for all layers, which share a graph
def _make_fused_class(norm_class: Any) -> type[nn.Module]:
    """Return a subclass of an RMSNorm with `norm_backward` as backward pass where compiled."""
    plain_forward: Callable[..., Tensor] = norm_class.forward

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        if not _can_fuse(hidden_states, self.weight):
            return plain_forward(self, hidden_states)
        normalized: Tensor = _RMSNorm.apply(  # type: ignore[no-untyped-call]
            hidden_states, self.weight, self.variance_epsilon
        )
        return normalized

    return type(f"Fused{norm_class.__name__}", (norm_class,), {"forward": forward})


class FusedBackwardGELU(FusedTanhGELU):
    """GELU in its tanh form; its backward pass in a compiled graph is `gelu_backward`."""

    def forward(self, values: Tensor) -> Tensor:
        """Return a tensor of the same shape."""
        if not _is_compiled_training(values):
            return super().forward(values)
        activated: Tensor = _TanhGELU.apply(values)  # type: ignore[no-untyped-call]
        return activated


def _is_compiled_training(values: Tensor) -> bool:
    """Return whether a graph with a backward pass is traced, for a plain tensor."""
    is_traced = torch.compiler.is_compiling() and torch.is_grad_enabled()
    return is_traced and values.requires_grad and not isinstance(values, DTensor)


def _can_fuse(inputs: Tensor, parameter: Tensor | None) -> bool:
    """Return whether `norm_backward` computes the gradients of a norm with this parameter."""
    return (
        parameter is not None
        and parameter.requires_grad
        and not isinstance(parameter, DTensor)
        and inputs.dtype == parameter.dtype == torch.float32
        and inputs.shape[-1] <= backward_kernels.MAX_NORM_WIDTH
        and _is_compiled_training(inputs)
    )


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, gains: Tensor, biases: Tensor, epsilon: float) -> Tensor:
        normalized, means, inverse_deviations = torch.native_layer_norm(
            inputs, gains.shape, gains, biases, epsilon
        )
        ctx.save_for_backward(inputs, means, inverse_deviations, gains)
        return normalized

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        inputs, means, inverse_deviations, gains = ctx.saved_tensors
        input_gradient, _, sums = _ops.norm_backward(
            [gradient], inputs, means, inverse_deviations, gains, None, None
        )
        return input_gradient, sums[0], sums[1], None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, gains: Tensor, epsilon: float) -> Tensor:
        inverse_deviations = torch.rsqrt(inputs.pow(2).mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(inputs, inverse_deviations, gains)
        return gains * (inputs * inverse_deviations)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        inputs, inverse_deviations, gains = ctx.saved_tensors
        input_gradient, _, sums = _ops.norm_backward(
            [gradient], inputs, None, inverse_deviations, gains, None, None
        )
        return input_gradient, sums[0], None


class _TanhGELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        ctx.save_for_backward(values)
        return nn.functional.gelu(values, approximate="tanh")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        input_gradient: Tensor = _ops.gelu_backward(gradient, *ctx.saved_tensors)[0]
        return input_gradient


class FuseBackward(CustomGraphPass):
    """Inductor's pass over a compiled graph that extends the operations of `backward_kernels`."""

    _SOURCES: ClassVar = (__file__, backward_kernels.__file__)

    def uuid(self) -> bytes:
        """Return what identifies the pass in Inductor's cache."""
        return get_hash_for_files(self._SOURCES)

    def __call__(self, graph: Graph) -> None:
        """Change a backward graph in place."""
        inputs = graph.find_nodes(op="placeholder")
        if not any(node.name.startswith("tangents") for node in inputs):
            return
        for node in graph.find_nodes(op="call_function", target=_ops.norm_backward.default):
            _fuse_into_norm_backward(node)
        for node in graph.find_nodes(op="call_function", target=_aten.sum.dim_IntList):
            _fuse_sum_into_writer(node)
        for node in graph.find_nodes(op="call_function", target=_cast):
            _compute_product_in_fp32(node)
        stable_topological_sort(graph)
        graph.eliminate_dead_code()
        graph.lint()


def _fuse_into_norm_backward(norm_backward: Node) -> None:
    """Let a `norm_backward` also compute the casts and additions before and after it.

    Without this, its gradients reach it as fp32, through casts that are written to memory, and its
    result is added to the gradient of the residual stream, and cast for the matrix products in
    front.
    """
    arguments: tuple[Any, ...] = norm_backward.args
    ((gradient,), inputs, means, inverse_deviations, gains, _, _) = arguments
    gradients = list(_find_half_precision_terms(gradient))
    if None in gradients or len(gradients) > backward_kernels.MAX_GRADIENTS:
        gradients = [gradient]
    input_gradient = _get_item(norm_backward, 0)
    residual = _find_added_residual(input_gradient)
    if residual is not None:
        # The operation now returns the sum, so the addition after it is removed.
        (addition,) = input_gradient.users
        addition.replace_all_uses_with(input_gradient)
        addition.graph.erase_node(addition)
    half_casts = [user for user in input_gradient.users if _is_cast_to_half(user)]
    half_dtype = half_casts[0].args[1] if half_casts else None
    norm_backward.args = (gradients, inputs, means, inverse_deviations, gains, residual, half_dtype)
    # Its results now have other shapes and dtypes.
    _infer_value(norm_backward)
    for result in norm_backward.users:
        _infer_value(result)
    for half_cast in half_casts:
        if half_cast.args[1] == half_dtype:
            half_cast.replace_all_uses_with(_get_item(norm_backward, 1))


def _find_half_precision_terms(value: Node) -> Iterator[Node | None]:
    """Yield the terms of a sum of casts from half precision to fp32, and None for other terms."""
    value = _without_reshapes(value)
    is_addition = value.target is _aten.add.Tensor and not value.kwargs
    if is_addition and all(_has_shape_of(term, value) for term in value.args):
        for term in value.args:
            yield from _find_half_precision_terms(term)  # type: ignore[arg-type]
        return
    is_cast = value.target is _cast and value.args[1] == torch.float32
    source = value.args[0] if is_cast else None
    is_half = isinstance(source, Node) and _dtype(source) in (torch.bfloat16, torch.float16)
    yield _without_reshapes(source) if is_half else None  # type: ignore[arg-type]


def _find_added_residual(input_gradient: Node) -> Node | None:
    """Return the fp32 tensor of equal shape that is added to a gradient, its only use."""
    if len(input_gradient.users) != 1:
        return None
    (addition,) = input_gradient.users
    if addition.target is not _aten.add.Tensor or addition.kwargs:
        return None
    residuals = [term for term in addition.args if term is not input_gradient]
    if len(residuals) != 1 or not _has_shape_of(residuals[0], input_gradient):
        return None
    residual: Node = residuals[0]  # type: ignore[assignment]
    if _dtype(residual) != torch.float32 or _depends_on(residual, input_gradient.args[0]):  # type: ignore[arg-type]
        return None
    return residual


def _has_shape_of(term: Any, value: Node) -> bool:
    """Return whether an operand is a tensor of the same shape."""
    return isinstance(term, Node) and _shape(term) == _shape(value)


def _fuse_sum_into_writer(row_sum: Node) -> None:
    """Let the kernel of `backward_kernels` that writes a matrix also sum its rows."""
    matrix = row_sum.args[0]
    if not isinstance(matrix, Node) or row_sum.args[1] != [0] or len(_shape(matrix)) != 2:
        return
    writer_output = _without_reshapes(matrix)
    if _shape(writer_output)[-1] != _shape(matrix)[-1]:
        return
    parts = _find_joinable_parts(writer_output)
    if parts:
        writer_output = _replace_by_join(writer_output, parts)
    if writer_output.target is not operator.getitem:
        return
    writer, result_index = cast("tuple[Node, int]", writer_output.args)
    writes_and_sums = (_ops.gelu_backward.default, _ops.join_columns.default)
    if writer.target in writes_and_sums and result_index == 0:
        _replace_half_sum(row_sum, _get_item(writer, 1))
    elif writer.target is _ops.norm_backward.default and result_index == 1:
        column_sums = _get_item(writer, 2)  # the last row is the sum of the copy in half precision
        _replace_half_sum(
            row_sum, _call_after(column_sums, _aten.select.int, 0, _shape(column_sums)[0] - 1)
        )


def _find_joinable_parts(node: Node) -> list[Node]:
    """Return the operands of a concatenation or a cast that `join_columns` can compute instead.

    These are the results of other operations, and the block's gradient. The operands of others,
    such as products with a dropout mask, would have to be written to memory for it.
    """
    if node.target is _aten.cat.default and len(node.args) == 2:
        parts, dimension = cast("tuple[list[Node], int]", node.args)
        joins_columns = dimension in (-1, len(_shape(node)) - 1)
        return parts if joins_columns and all(map(_is_in_memory, parts)) else []
    if _is_cast_to_half(node):
        (operand, _) = cast("tuple[Node, torch.dtype]", node.args)
        return [operand] if operand.op == "placeholder" else []
    return []


def _replace_by_join(node: Node, parts: list[Node]) -> Node:
    """Replace a concatenation or a cast by the first result of a `join_columns`, and return it."""
    with node.graph.inserting_before(node):
        join = node.graph.call_function(_ops.join_columns.default, (parts, _dtype(node)))
    _infer_value(join)
    joined = _get_item(join, 0)
    node.replace_all_uses_with(joined)
    return joined


def _replace_half_sum(half_sum: Node, kernel_sum: Node) -> None:
    """Replace a sum in half precision by the fp32 sum of a kernel, [width], and drop its cast."""
    # Follow the sum through reshapes to its cast to fp32, which the kernel's sum makes superfluous.
    fp32_sum = half_sum
    while len(fp32_sum.users) == 1 and _dtype(fp32_sum) != torch.float32:
        (user,) = fp32_sum.users
        if user.target is not _aten.reshape.default and user.target is not _cast:
            break
        fp32_sum = user
    replaced_node, replacement_node = fp32_sum, kernel_sum
    if _dtype(fp32_sum) != torch.float32:
        replaced_node, replacement_node = half_sum, _call_after(kernel_sum, _cast, _dtype(half_sum))
    replaced_node.replace_all_uses_with(
        _call_after(replacement_node, _aten.reshape.default, list(_shape(replaced_node)))
    )


def _compute_product_in_fp32(fp32_cast: Node) -> None:
    """Compute a weight's gradient as a product with fp32 output, without rounding it first."""
    product = fp32_cast.args[0]
    if not isinstance(product, Node) or product.target is not _aten.mm.default:
        return
    is_graph_output = all(user.op == "output" for user in fp32_cast.users)
    is_only_use = len(product.users) == 1
    is_on_gpu = fp32_cast.meta["val"].device.type == "cuda"
    if fp32_cast.args[1] == torch.float32 and is_graph_output and is_only_use and is_on_gpu:
        fp32_cast.target = _aten.mm.dtype
        fp32_cast.args = (*product.args, torch.float32)


def _is_in_memory(part: Node) -> bool:
    """Return whether a tensor is a view of another operation's result, so in memory anyway."""
    while part.target in (_aten.reshape.default, _aten.permute.default):
        part = part.args[0]  # type: ignore[assignment]
    return part.target is operator.getitem


def _is_cast_to_half(node: Node) -> bool:
    return node.target is _cast and node.args[1] in (torch.bfloat16, torch.float16)


def _without_reshapes(node: Node) -> Node:
    while node.target is _aten.reshape.default:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _shape(node: Node) -> torch.Size:
    shape: torch.Size = node.meta["val"].shape
    return shape


def _dtype(node: Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _depends_on(node: Node, ancestor: Node) -> bool:
    """Return whether a node is computed from an earlier one."""
    pending, visited = [node], {node}
    while pending:
        operation = pending.pop()
        if operation is ancestor:
            return True
        pending += set(operation.all_input_nodes) - visited
        visited |= set(operation.all_input_nodes)
    return False


def _get_item(node: Node, index: int) -> Node:
    """Return the node that takes a result of an operation; the graph gets one if it has none."""
    for user in node.users:
        if user.target is operator.getitem and user.args[1] == index:
            return user
    return _call_after(node, operator.getitem, index)


def _call_after(node: Node, target: Callable[..., Any], *args: Any) -> Node:
    """Insert a call with a node as its first argument."""
    with node.graph.inserting_after(node):
        call = node.graph.call_function(target, (node, *args))
    _infer_value(call)
    return call


def _infer_value(node: Node) -> None:
    """Set the fake values of a node and its arguments, which Inductor reads for their strides."""
    args = tree_map_only(Node, lambda argument: argument.meta["val"], node.args)
    with detect_fake_mode(args) or contextlib.nullcontext():
        node.meta["val"] = node.target(*args)  # type: ignore[operator]
    node.meta["eager_input_vals"] = (args, {})
