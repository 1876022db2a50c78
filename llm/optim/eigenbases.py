"""Eigenbases and inverses of factors, what happens if they fail, and rotations into a basis."""

from typing import NamedTuple

import torch
from torch import Tensor

Blocks = list[Tensor] | None
"""The blocks of a block-diagonal matrix; None is the identity."""


class Solution(NamedTuple):
    """What was computed of a symmetric matrix.

    Attributes:
        basis: [n, n]: eigenvectors in columns, or the damped inverse.
        values: [n]: eigenvalues, never negative; ones beside an inverse.
        fallback: A float32 scalar. How the first failure was answered: 0 none failed, 1 jitter,
            2 float64, 3 the previous basis, 4 the identity.
        order: [n]: of an iteration, the former columns in the order of the new ones.
    """

    basis: Tensor
    values: Tensor
    fallback: Tensor
    order: Tensor | None = None


def eigenbasis(matrix: Tensor, previous: Tensor | None = None) -> Solution:
    """Decompose a symmetric matrix; where that fails, find the next best basis.

    In turn: some weight on the diagonal, float64, the previous basis, the identity. It reads
    the result, so the host waits for the device. The largest eigenvalue comes first.

    Args:
        matrix: [n, n], fp32.
        previous: The basis so far.
    """
    for fallback, attempt in enumerate(_attempts(matrix)):
        try:
            values, vectors = torch.linalg.eigh(attempt)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            continue
        # On a CPU, what did not converge may come back as NaN without a word.
        if _is_finite(values) and _is_finite(vectors):
            values = values.float().clamp_min(0).flip(0)
            return _solution(vectors.float().flip(1), values, fallback)
    return _previous(matrix, previous)


def damped_inverse(
    matrix: Tensor, damping: Tensor | float, previous: Tensor | None = None
) -> Solution:
    """Invert matrix + damping I by its Cholesky factor; where that fails, as `eigenbasis` does.

    Args:
        matrix: [n, n], fp32, positive semi-definite up to rounding.
        damping: What is added to the diagonal.
        previous: The inverse so far.
    """
    for fallback, attempt in enumerate(_attempts(matrix)):
        identity = torch.eye(len(matrix), dtype=attempt.dtype, device=attempt.device)
        try:
            inverse = torch.cholesky_inverse(torch.linalg.cholesky(attempt + damping * identity))
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            continue
        if _is_finite(inverse.float()):
            return _solution(inverse.float(), torch.ones_like(matrix[0]), fallback)
    return _previous(matrix, previous)._replace(values=torch.ones_like(matrix[0]))


def power_iteration(matrix: Tensor, basis: Tensor) -> Solution:
    """One step of orthogonal iteration from a basis, as in SOAP (Vyas et al. 2024, 2409.11321).

    Cheaper than a decomposition, and nothing waits for the device. The columns are sorted by
    their Rayleigh quotients, largest first; the values are the quotients of the basis so far.

    Args:
        matrix: [n, n], symmetric, fp32.
        basis: [n, n], orthonormal; it is kept where the next is not finite.
    """
    product = matrix @ basis
    quotients = torch.linalg.vecdot(basis, product, dim=0)
    order = torch.argsort(quotients, descending=True, stable=True)
    # The Q of `torch.linalg.qr`, without its R.
    vectors = torch.linalg.householder_product(*torch.geqrf(product[:, order]))
    finite = torch.isfinite(vectors).all()
    values = quotients[order].nan_to_num(1.0, 1.0, 1.0).clamp_min(0)
    order = torch.where(finite, order, torch.arange(len(basis), device=basis.device))
    return Solution(torch.where(finite, vectors, basis), values, 3.0 * (~finite), order)


def rotate(matrix: Tensor, left: Blocks, right: Blocks) -> Tensor:
    """Return left^T @ matrix @ right for block-diagonal left and right, and each of a stack."""
    return _times_left(_times_right(matrix, right), left)


def rotate_back(matrix: Tensor, left: Blocks, right: Blocks) -> Tensor:
    """Return left @ matrix @ right^T, which undoes `rotate`."""
    return rotate(matrix, _transposed(left), _transposed(right))


def _attempts(matrix: Tensor) -> list[Tensor]:
    """The matrix as it is, with some weight on the diagonal, and so in float64."""
    matrix = (matrix + matrix.T) / 2
    if not _is_finite(matrix):
        return []
    diagonal = matrix.diagonal()
    jitter = torch.diag_embed((1e-6 * diagonal.abs().mean()).expand_as(diagonal))
    return [matrix, matrix + jitter, (matrix + jitter).double()]


def _previous(matrix: Tensor, previous: Tensor | None) -> Solution:
    fallback = 3
    if previous is None or not _is_finite(previous):
        previous = torch.eye(len(matrix), device=matrix.device)
        fallback = 4
    values = torch.linalg.vecdot(previous, matrix @ previous, dim=0)
    return _solution(previous, values.nan_to_num(1.0, 1.0, 1.0).clamp_min(0), fallback)


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _solution(basis: Tensor, values: Tensor, fallback: int) -> Solution:
    # Filled on the device: a copy from the host would wait.
    return Solution(basis, values, torch.full((), float(fallback), device=basis.device))


def _transposed(blocks: Blocks) -> Blocks:
    return None if blocks is None else [block.T for block in blocks]


def _times_right(matrix: Tensor, blocks: Blocks) -> Tensor:
    if blocks is None:
        return matrix
    if len(blocks) == 1:
        return matrix @ blocks[0]
    product, widths = torch.empty_like(matrix), [len(block) for block in blocks]
    parts = zip(matrix.split(widths, dim=-1), blocks, product.split(widths, dim=-1), strict=True)
    for part, block, out in parts:
        torch.matmul(part, block, out=out)
    return product


def _times_left(matrix: Tensor, blocks: Blocks) -> Tensor:
    if blocks is None:
        return matrix
    if len(blocks) == 1:
        return blocks[0].T @ matrix
    product, widths = torch.empty_like(matrix), [len(block) for block in blocks]
    parts = zip(matrix.split(widths, dim=-2), blocks, product.split(widths, dim=-2), strict=True)
    for part, block, out in parts:
        torch.matmul(block.T, part, out=out)
    return product
