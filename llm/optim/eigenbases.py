"""Eigenbases of symmetric matrices, their fallbacks, and rotations into a basis."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from llm.runtime.float32 import full_float32

Blocks = list[Tensor] | None
"""The blocks of a block-diagonal matrix, [n, n] each; None is the identity."""


class Solution(NamedTuple):
    """The decomposition of a symmetric matrix.

    Attributes:
        basis: [n, n]: eigenvectors in columns.
        values: [n]: eigenvalues, never negative.
        fallback: A float32 scalar, the method that succeeded: 0 the first one, 1 jitter,
            2 float64, 3 the previous basis, 4 the identity.
        order: [n]: with `power_iteration`, the index of each new column in the previous basis.
    """

    basis: Tensor
    values: Tensor
    fallback: Tensor
    order: Tensor | None = None


@full_float32()
def eigenbasis(matrix: Tensor, previous: Tensor | None = None) -> Solution:
    """Decompose a symmetric matrix, with fallbacks; the largest eigenvalue comes first.

    If it fails, it is tried with some weight on the diagonal, then in float64; then the previous
    basis is kept, or the identity. It reads the result, so the host waits for the device.

    Args:
        matrix: [n, n], fp32.
        previous: [n, n], the previous basis.
    """
    for fallback, attempt in enumerate(_attempts(matrix)):
        try:
            values, vectors = torch.linalg.eigh(attempt)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            continue
        # On a CPU, a decomposition that did not converge may return NaN without an error.
        if _is_finite(values) and _is_finite(vectors):
            # Rounding makes the eigenvalues of a semi-definite matrix negative.
            values = values.float().clamp_min(0).flip(0)
            return _solution(vectors.float().flip(1), values, fallback)
    return _previous(matrix, previous)


@full_float32()
def power_iteration(matrix: Tensor, basis: Tensor) -> Solution:
    """Take one step of orthogonal iteration, as in SOAP (Vyas et al. 2024, arXiv:2409.11321).

    It is cheaper than a decomposition, and nothing waits for the device. The columns are sorted by
    their Rayleigh quotients, largest first; the values are the quotients of the previous basis.

    Args:
        matrix: [n, n], symmetric, fp32.
        basis: [n, n], orthonormal, the previous basis; it is kept if the next is not finite.
    """
    product = matrix @ basis
    quotients = torch.linalg.vecdot(basis, product, dim=0)
    order = torch.argsort(quotients, descending=True, stable=True)
    # The Q of `torch.linalg.qr`, without the cost of its R.
    vectors = torch.linalg.householder_product(*torch.geqrf(product[:, order]))
    finite = torch.isfinite(vectors).all()
    values = quotients[order].nan_to_num(1.0, 1.0, 1.0).clamp_min(0)
    order = torch.where(finite, order, torch.arange(len(basis), device=basis.device))
    # Fallback 3 where the previous basis is kept: computed on the device, without waiting.
    return Solution(torch.where(finite, vectors, basis), values, 3.0 * (~finite), order)


@full_float32()
def rotate(matrix: Tensor, left: Blocks, right: Blocks) -> Tensor:
    """Return left^T @ matrix @ right for block-diagonal left and right, in full float32.

    Optimizers divide entries of the result by their own size: they would enlarge the error of TF32
    to a full step.

    Args:
        matrix: [..., rows, columns].
        left: Blocks of a matrix [rows, rows].
        right: Blocks of a matrix [columns, columns].
    """
    return _times_blocks(_times_blocks(matrix, right, dim=-1), left, dim=-2)


def rotate_back(matrix: Tensor, left: Blocks, right: Blocks) -> Tensor:
    """Return left @ matrix @ right^T, which undoes `rotate`, in the precision that is set."""
    left, right = (blocks and [block.T for block in blocks] for blocks in (left, right))
    return _times_blocks(_times_blocks(matrix, right, dim=-1), left, dim=-2)


def _attempts(matrix: Tensor) -> list[Tensor]:
    """Return the matrix, the same with some weight on the diagonal, and that in float64."""
    # Exactly symmetric, since eigh reads one triangle only.
    matrix = (matrix + matrix.T) / 2
    if not _is_finite(matrix):
        return []
    diagonal = matrix.diagonal()
    # A few times the rounding error of fp32, relative to the diagonal.
    jitter = torch.diag_embed((1e-6 * diagonal.abs().mean()).expand_as(diagonal))
    return [matrix, matrix + jitter, (matrix + jitter).double()]


def _previous(matrix: Tensor, previous: Tensor | None) -> Solution:
    """Return the previous basis, or the identity, with its Rayleigh quotients."""
    fallback = 3
    if previous is None or not _is_finite(previous):
        previous = torch.eye(len(matrix), device=matrix.device)
        fallback = 4
    values = torch.linalg.vecdot(previous, matrix @ previous, dim=0)
    return _solution(previous, values.nan_to_num(1.0, 1.0, 1.0).clamp_min(0), fallback)


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _solution(basis: Tensor, values: Tensor, fallback: int) -> Solution:
    # Filled on the device, since the copy of a tensor from the host would wait.
    return Solution(basis, values, torch.full((), float(fallback), device=basis.device))


def _times_blocks(matrix: Tensor, blocks: Blocks, *, dim: Literal[-1, -2]) -> Tensor:
    """Return matrix @ right, or left^T @ matrix with -2, for the blocks of right or left."""
    if blocks is None:
        return matrix
    if len(blocks) == 1:
        return matrix @ blocks[0] if dim == -1 else blocks[0].T @ matrix
    product, widths = torch.empty_like(matrix), [len(block) for block in blocks]
    slices = zip(matrix.split(widths, dim), blocks, product.split(widths, dim), strict=True)
    for values, block, out in slices:
        # Written in place, which saves the concatenation of the products.
        torch.matmul(*((values, block) if dim == -1 else (block.T, values)), out=out)
    return product
