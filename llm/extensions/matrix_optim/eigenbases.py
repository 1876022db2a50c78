"""Eigenbases of symmetric matrices, their fallbacks, and rotations into a basis."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from llm.runtime.float32 import full_float32

Blocks = list[Tensor] | None
"""The [n, n] blocks of a block-diagonal matrix, or of a stack of matrices with the stack's
dimensions in front; None is the identity."""


class Solution(NamedTuple):
    """The decomposition of a symmetric matrix.

    Attributes:
        basis: [n, n]: eigenvectors in columns.
        eigenvalues: [n]: never negative.
        fallback: A float32 scalar, the method that succeeded: 0 the plain decomposition, 1 jitter,
            2 float64, 3 the previous basis, 4 the identity.
        order: [n]: with `take_power_iteration`, the index of each new column in the previous basis.
    """

    basis: Tensor
    eigenvalues: Tensor
    fallback: Tensor
    order: Tensor | None = None


@full_float32()
def compute_eigenbasis(matrix: Tensor, previous_basis: Tensor | None = None) -> Solution:
    """Decompose a symmetric matrix, with fallbacks; the largest eigenvalue comes first.

    If it fails, it is retried with some weight on the diagonal, then in float64; after that the
    previous basis is kept, or the identity. The host reads the result and waits for the device.

    Args:
        matrix: [n, n], fp32.
        previous_basis: [n, n]; kept if the decomposition fails.
    """
    for fallback, regularized_matrix in enumerate(_regularize_matrix(matrix)):
        try:
            values, vectors = torch.linalg.eigh(regularized_matrix)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            continue
        # On a CPU, a decomposition that did not converge may return NaN without an error.
        if _is_finite(values) and _is_finite(vectors):
            # Rounding makes the eigenvalues of a semi-definite matrix negative.
            values = values.float().clamp_min(0).flip(0)
            return _make_solution(vectors.float().flip(1), values, fallback)
    return _reuse_basis(matrix, previous_basis)


@full_float32()
def take_power_iteration(matrix: Tensor, basis: Tensor) -> Solution:
    """Take one step of orthogonal iteration, as in SOAP (Vyas et al. 2024, arXiv:2409.11321).

    It is cheaper than a decomposition, and the host does not wait for the device. The columns are
    sorted by their Rayleigh quotients, largest first; the values are the quotients of the previous
    basis.

    Args:
        matrix: [..., n, n], symmetric, fp32.
        basis: [..., n, n], orthonormal, the previous basis; it is kept if the next is not finite.
    """
    product = matrix @ basis
    quotients = torch.linalg.vecdot(basis, product, dim=-2)
    order = torch.argsort(quotients, dim=-1, descending=True, stable=True)
    sorted_product = torch.take_along_dim(product, order.unsqueeze(-2), -1)
    # The Q of `torch.linalg.qr`, without the cost of its R.
    vectors = torch.linalg.householder_product(*torch.geqrf(sorted_product))
    is_finite = torch.isfinite(vectors).all(-1).all(-1)
    values = torch.take_along_dim(quotients, order, -1).nan_to_num(1.0, 1.0, 1.0).clamp_min(0)
    previous_order = torch.arange(basis.shape[-1], device=basis.device)
    order = torch.where(is_finite.unsqueeze(-1), order, previous_order)
    vectors = torch.where(is_finite[..., None, None], vectors, basis)
    # Fallback 3 means that the previous basis is kept; computed on the device, without waiting.
    return Solution(vectors, values, 3.0 * (~is_finite), order)


def rotate(matrix: Tensor, row_bases: Blocks, column_bases: Blocks) -> Tensor:
    """Return R^T @ matrix @ C for the bases R of the rows and C of the columns, as in float32.

    Optimizers divide each entry of the result by its size, so they would enlarge TF32's error to a
    full step. If the device may use TF32, each product is computed from three TF32 products;
    otherwise in full float32.

    Args:
        matrix: [..., rows, columns].
        row_bases: Blocks of R [rows, rows].
        column_bases: Blocks of C [columns, columns].
    """
    if _may_use_tf32(matrix.device):
        column_rotated = _multiply_blocks(matrix, column_bases, multiply_in_three_products, dim=-1)
        return _multiply_blocks(column_rotated, row_bases, multiply_in_three_products, dim=-2)
    with full_float32():
        column_rotated = _multiply_blocks(matrix, column_bases, torch.matmul, dim=-1)
        return _multiply_blocks(column_rotated, row_bases, torch.matmul, dim=-2)


def _may_use_tf32(device: torch.device) -> bool:
    """Return whether a device multiplies float32 matrices in TF32, as `--tf32` lets it."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    allowed = torch.get_float32_matmul_precision() != "highest"
    return allowed and torch.cuda.get_device_capability(device) >= (8, 0)


def multiply_in_three_products(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return a @ b in float32 from three TF32 products, which are faster than one in float32.

    Each factor is split into a TF32 part and a remainder. The product of both remainders, 2^-22 of
    the whole, is left out (3xTF32 of NVIDIA's CUTLASS). On a device without TF32, the result is a
    float32 product, computed more slowly.

    Args:
        a: [..., rows, n], fp32.
        b: [..., n, columns], fp32.
        out: Tensor that receives the product.
    """
    (a_high, a_low), (b_high, b_low) = _split_tf32(a), _split_tf32(b)
    # Add the smallest terms first.
    return torch.add((a_low @ b_high).add_(a_high @ b_low), a_high @ b_high, out=out)


def _split_tf32(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return float32 values rounded to the ten bits of mantissa that TF32 has, and the rest."""
    # Add half of the last kept bit, then clear the 13 bits below it.
    high = (values.view(torch.int32) + (1 << 12)).bitwise_and_(-(1 << 13))
    rounded = high.view(torch.float32)
    return rounded, values - rounded


def rotate_back(matrix: Tensor, row_bases: Blocks, column_bases: Blocks) -> Tensor:
    """Undo `rotate`: return R @ matrix @ C^T, in the current precision."""
    row_bases, column_bases = (
        blocks and [block.mT for block in blocks] for blocks in (row_bases, column_bases)
    )
    column_rotated = _multiply_blocks(matrix, column_bases, torch.matmul, dim=-1)
    return _multiply_blocks(column_rotated, row_bases, torch.matmul, dim=-2)


def _regularize_matrix(matrix: Tensor) -> list[Tensor]:
    """Return the matrix, the matrix with some weight on the diagonal, and the latter in float64."""
    # Exactly symmetric, because eigh reads only one triangle.
    matrix = (matrix + matrix.T) / 2
    if not _is_finite(matrix):
        return []
    diagonal = matrix.diagonal()
    # A few times the rounding error of fp32, relative to the diagonal.
    jitter = torch.diag_embed((1e-6 * diagonal.abs().mean()).expand_as(diagonal))
    return [matrix, matrix + jitter, (matrix + jitter).double()]


def _reuse_basis(matrix: Tensor, previous_basis: Tensor | None) -> Solution:
    """Return the previous basis, or the identity, with its Rayleigh quotients."""
    fallback = 3
    basis = previous_basis
    if basis is None or not _is_finite(basis):
        basis = torch.eye(len(matrix), device=matrix.device)
        fallback = 4
    quotients = torch.linalg.vecdot(basis, matrix @ basis, dim=0)
    return _make_solution(basis, quotients.nan_to_num(1.0, 1.0, 1.0).clamp_min(0), fallback)


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _make_solution(basis: Tensor, values: Tensor, fallback: int) -> Solution:
    # Filled on the device, because a copy from the host would wait.
    return Solution(basis, values, torch.full((), float(fallback), device=basis.device))


def _multiply_blocks(
    matrix: Tensor, blocks: Blocks, multiply: Callable[..., Tensor], *, dim: Literal[-1, -2]
) -> Tensor:
    """Return the product of a matrix with a block-diagonal one.

    Args:
        matrix: [..., rows, columns].
        blocks: Blocks of the other matrix B.
        multiply: Multiplies two matrices, as `torch.matmul` does.
        dim: -1 for matrix @ B, -2 for B^T @ matrix.
    """
    if blocks is None:
        return matrix
    if len(blocks) == 1:
        (block,) = blocks
        return multiply(matrix, block) if dim == -1 else multiply(block.mT, matrix)
    product = torch.empty_like(matrix)
    widths = [block.shape[-1] for block in blocks]
    matrix_slices, product_slices = matrix.split(widths, dim), product.split(widths, dim)
    for matrix_slice, block, product_slice in zip(
        matrix_slices, blocks, product_slices, strict=True
    ):
        # Written in place, to save the concatenation of the products.
        if dim == -1:
            multiply(matrix_slice, block, out=product_slice)
        else:
            multiply(block.mT, matrix_slice, out=product_slice)
    return product
