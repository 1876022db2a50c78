"""Fused backward passes: the kernels in Triton's interpreter, and blocks that use them.

The interpreter cuts a number to bf16 where a GPU rounds it, so bf16 results are compared loosely,
and blocks in fp16.
"""

import copy
import importlib.util
import inspect
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from llm.models.attention import disable_packing_detection
from llm.models.patches.gelu import FusedTanhGELU
from llm.models.sizes import find_blocks
from tests.support.models import tiny_config, tiny_model
from tests.support.training import NO_DROPOUT

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="needs Triton, which comes with CUDA builds and with the extra `dev`",
)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def close(found: Tensor, expected: Tensor, *, bf16: bool = False) -> None:
    tolerance = 1e-2 if bf16 else 1e-5
    scale = expected.double().abs().max().item()
    torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=tolerance * scale)


def check_norm(
    rows: int, width: int, *, means: bool, terms: int, residual: bool, low: torch.dtype | None
) -> None:
    """`norm_backward` against autograd in float64, with inputs far from zero."""
    from llm.models.backward_kernels import norm_backward

    generator = torch.Generator().manual_seed(rows)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    inputs = (2 * draw(rows, width) + 0.5).double().requires_grad_()
    gains, biases = (draw(width).double().requires_grad_() for _ in range(2))
    gradients = [draw(rows, width).to(BF16) for _ in range(terms)]
    added = draw(rows, width) if residual else None
    mean = inputs.mean(-1, keepdim=True) if means else torch.zeros(rows, 1).double()
    inverse = ((inputs - mean).pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
    outputs = gains * (inputs - mean) * inverse + biases
    outputs.backward(torch.stack(gradients).double().sum(0))
    assert inputs.grad is not None
    expected = inputs.grad if added is None else inputs.grad + added

    single = [tensor.detach().float() for tensor in (inputs, mean, inverse, gains)]
    found, half, sums = norm_backward(
        gradients, single[0], single[1] if means else None, *single[2:], added, low
    )
    close(found, expected)
    close(sums[0], gains.grad)
    if means:
        close(sums[1], biases.grad)
    assert len(sums) == 1 + means + (low is not None)
    if low is None:
        assert half.numel() == 0
    else:
        assert half.dtype == low
        close(half, expected, bf16=True)
        close(sums[-1], half.double().sum(0))


def check_gelu(dtype: torch.dtype) -> None:
    from llm.models.backward_kernels import gelu_backward

    values = torch.linspace(-9, 9, 3 * 43 * 300).view(3, 43, 300).to(dtype)
    gradient = torch.randn(3, 43, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = values.double().requires_grad_()
    nn.functional.gelu(exact, approximate="tanh").backward(gradient.double())
    found, sums = gelu_backward(gradient, values)
    assert found.dtype == dtype
    close(found, exact.grad, bf16=dtype == BF16)
    close(sums, found.double().sum((0, 1)))
    extreme = torch.tensor([[-1e4, 1e4]]).to(dtype)
    assert gelu_backward(torch.ones_like(extreme), extreme)[0].tolist() == [[0, 1]]


def check_join() -> None:
    """Of parts with odd widths, which are views with other strides."""
    from llm.models.backward_kernels import join_columns

    generator = torch.Generator().manual_seed(0)
    parts = [
        torch.randn(2, 5, 70, 16, generator=generator).transpose(1, 2).flatten(2),
        torch.randn(2, 70, 300, generator=generator)[..., :271],
    ]
    joined, sums = join_columns(parts, FP16)
    assert torch.equal(joined, torch.cat(parts, -1).to(FP16))
    close(sums, joined.double().sum((0, 1)))


def check_fake_results() -> None:
    """Their shapes, dtypes and strides, from which Inductor plans memory, are the real ones."""
    from llm.models.backward_kernels import gelu_backward, join_columns, norm_backward

    inputs, means = torch.randn(35, 2, 96).transpose(0, 1), torch.randn(2, 35, 1)
    gradient = torch.randn(2, 96, 35).transpose(1, 2)
    gains = torch.randn(96)
    arguments = [gradient], inputs, means, means.exp(), gains, gradient, FP16
    torch.library.opcheck(norm_backward, arguments)
    arguments = [gradient.to(BF16)] * 2, inputs, None, means.exp(), gains, None, None
    torch.library.opcheck(norm_backward, arguments)
    torch.library.opcheck(gelu_backward, (gradient.to(BF16), inputs.to(BF16)))
    torch.library.opcheck(join_columns, ([gradient, inputs[..., :71]], FP16))


class Compiler:
    """Compiles blocks with the pass, and runs their graphs operation by operation."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.norms: list[tuple[Any, ...]] = []

    def __call__(self, graph: GraphModule, inputs: list[Tensor]) -> Any:
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(graph, inputs, inner_compile=self._run_pass)

    def _run_pass(self, graph: GraphModule, inputs: list[Tensor], **_: Any) -> Any:
        from torch._inductor.compile_fx import view_to_reshape

        from llm.models.fused_backward import FuseBackward

        view_to_reshape(graph)
        FuseBackward()(graph.graph)
        graph.recompile()
        for node in graph.graph.nodes:
            self.calls[str(node.target)] += 1
            if str(node.target) == "llm.norm_backward.default":
                self.norms.append((len(node.args[0]), node.args[5] is not None, node.args[6]))

        def call(arguments: list[Tensor]) -> Any:
            return graph(*arguments)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call


def block_gradients(block: nn.Module, compiler: Compiler | None, **inputs: Any) -> list[Tensor]:
    """The output of a block under autocast, and the gradients of its input and its weights."""
    from llm.models.fused_backward import fuse_gelu_backward, fuse_norms

    block = copy.deepcopy(block)
    run = block
    if compiler is not None:
        fuse_gelu_backward(block)
        fuse_norms(block)
        torch._dynamo.reset()
        run = torch.compile(block, backend=compiler, dynamic=False, fullgraph=True)  # type: ignore[assignment]
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 9, 32, generator=generator).requires_grad_()
    with torch.autocast("cpu", FP16):
        output = run(hidden, attention_mask=None, use_cache=False, **inputs)
    output = output[0] if isinstance(output, tuple) else output
    output.backward(torch.randn(output.shape, generator=generator))
    parameters = [parameter.grad for parameter in block.parameters()]
    return [output.detach(), hidden.grad, *parameters]  # type: ignore[list-item]


def check_block(family: str, recompute: bool = False) -> Compiler:
    disable_packing_detection()
    config = tiny_config(family, **(NO_DROPOUT if family == "gpt2" else {}))
    model = tiny_model(config, fused_gelu=True)
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    block = find_blocks(model)[0].train()
    inputs: dict[str, Any] = {}
    if family != "gpt2":
        positions = torch.arange(9)[None]
        inputs["position_embeddings"] = model.model.rotary_emb(torch.zeros(1), positions)
    compiler = Compiler()
    found = block_gradients(block, compiler, **inputs)
    expected = block_gradients(block, None, **inputs)
    assert torch.equal(found[0], expected[0])
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == FP32
        assert (one - other).norm() < 2e-3 * other.norm()
    return compiler


def check_blocks() -> None:
    gpt2 = check_block("gpt2")
    # The second norm has the gradient of the residual stream, and casts it for the projection.
    assert gpt2.norms == [(1, True, FP16), (1, True, None)]
    # One for the block's gradient, with the bias of the last projection; one for q, k and v.
    assert gpt2.calls["llm.join_columns.default"] == 2
    assert gpt2.calls["llm.gelu_backward.default"] == 1
    assert gpt2.calls["aten.sum.dim_IntList"] == 0
    # Gate and up; query, key and value.
    assert check_block("llama").norms == [(2, True, FP16), (3, True, None)]
    assert sum(check_block("gpt2", recompute=True).calls.values()) > 0


@pytest.mark.parametrize("check", ["kernels", pytest.param("blocks", marks=pytest.mark.extended)])
def test_kernels_and_blocks_agree_with_autograd(check):
    # Triton reads the variable when it is imported.
    done = subprocess.run(
        [sys.executable, "-m", "tests.models.test_fused_backward", check],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr


def test_rms_norms_have_the_formula_of_llamas():
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    from llm.models.fused_backward import RMS_NORMS

    formula = inspect.getsource(LlamaRMSNorm.forward)
    for name in RMS_NORMS:
        family = name.removesuffix("RMSNorm")
        module = {"Qwen2Moe": "qwen2_moe", "Qwen3Moe": "qwen3_moe", "GraniteMoe": "granitemoe"}
        module |= {"DeepseekV3": "deepseek_v3"}
        path = module.get(family, family.lower())
        library = importlib.import_module(f"transformers.models.{path}.modeling_{path}")
        assert inspect.getsource(getattr(library, name).forward) == formula, name


def test_uncompiled_modules_and_other_norms_stay_as_they_are():
    from llm.models.fused_backward import fuse_gelu_backward, fuse_norms

    class OwnNorm(nn.LayerNorm):
        pass

    norms = nn.ModuleList([nn.LayerNorm(8), nn.LayerNorm((2, 8)), OwnNorm(8), nn.BatchNorm1d(8)])
    plain = copy.deepcopy(norms[0])
    assert fuse_norms(norms) == [norms[0]]
    inputs = torch.randn(3, 8, requires_grad=True)
    assert torch.equal(norms[0](inputs), plain(inputs))
    assert norms[0].state_dict().keys() == plain.state_dict().keys()
    gelu = nn.Sequential(FusedTanhGELU())
    expected = gelu(inputs)
    fuse_gelu_backward(gelu)
    assert torch.equal(gelu(inputs), expected)


if __name__ == "__main__":
    if sys.argv[1] == "blocks":
        check_blocks()
    else:
        check_norm(70, 96, means=True, terms=1, residual=True, low=BF16)
        check_norm(33, 129, means=False, terms=3, residual=False, low=None)
        check_norm(1, 768, means=True, terms=2, residual=False, low=FP16)
        check_norm(64, 40, means=False, terms=1, residual=True, low=BF16)
        check_gelu(FP32)
        check_gelu(BF16)
        check_join()
        check_fake_results()
