"""Three products in TF32 against one in float32, with the rounding of TF32 emulated on a CPU."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llm.extensions.matrix_optim.eigenbases import multiply_in_three_products, rotate

aten = torch.ops.aten


class TF32(TorchDispatchMode):
    """Rounds the factors of matrix products to ten bits of mantissa, or cuts them off."""

    def __init__(self, *, nearest: bool) -> None:
        super().__init__()
        self._half = (1 << 12) * nearest

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (aten.mm.default, aten.bmm.default):
            args = [(a.view(torch.int32) + self._half & -(1 << 13)).view(a.dtype) for a in args]
        return func(*args, **(kwargs or {}))


def factors(*front):
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(*front, 96, 512, generator=generator)
    basis = torch.linalg.qr(torch.randn(*front, 512, 512, generator=generator))[0]
    return a * torch.logspace(0, -3, 512), basis


def error(product, a, b):
    exact = a.double() @ b.double()
    return ((product - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("nearest", [True, False])
@pytest.mark.parametrize("front", [(), (3,)])
def test_three_products_err_about_as_one_in_float32(nearest, front):
    a, b = factors(*front)
    with TF32(nearest=nearest):
        one, three = a @ b, multiply_in_three_products(a, b)
    assert error(one, a, b) > 1e-4
    assert error(three, a, b) < 1e-6  # one in float32: 1e-7 to 4e-7, by the processor


def test_three_products_take_transposed_factors_and_write_into_out():
    a, b = factors()
    out = torch.empty(100, 96).T[:, :90]
    multiply_in_three_products(a, b[:, :90], out=out)
    torch.testing.assert_close(out, a @ b[:, :90])
    torch.testing.assert_close(multiply_in_three_products(b.mT, a.mT), b.mT @ a.mT)


def test_a_device_that_may_use_tf32_rotates_by_three_products(monkeypatch):
    monkeypatch.setattr("llm.extensions.matrix_optim.eigenbases._may_use_tf32", lambda device: True)
    a, b = factors()
    with TF32(nearest=True):
        rotated = rotate(a, None, [b])
    assert error(rotated, a, b) < 1e-6
