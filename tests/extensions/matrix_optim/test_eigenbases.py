import pytest
import torch

from llm.extensions.matrix_optim import eigenbases
from llm.extensions.matrix_optim.eigenbases import (
    compute_eigenbasis,
    rotate,
    rotate_back,
    take_power_iteration,
)


def symmetric(size=6):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(40, size, generator=generator) * torch.linspace(1, 3, size)
    return rows.T @ rows / 40


def test_a_basis_diagonalises_its_matrix():
    matrix = symmetric()
    vectors, values, fallback, _ = compute_eigenbasis(matrix)

    torch.testing.assert_close(vectors.T @ matrix @ vectors, torch.diag(values), atol=1e-5, rtol=0)
    assert fallback == 0


@pytest.mark.parametrize(("failures", "fallback"), [(1, 1), (2, 2), (3, 3)])
def test_a_failure_falls_back_to_jitter_float64_and_the_previous_basis(
    monkeypatch, failures, fallback
):
    calls = []
    true_eigh = torch.linalg.eigh

    def eigh(matrix):
        calls.append(matrix.dtype)
        if len(calls) > failures:
            return true_eigh(matrix)
        if len(calls) == 1:
            raise torch.linalg.LinAlgError
        # A CPU says nothing.
        return torch.full_like(matrix[0], torch.nan), torch.full_like(matrix, torch.nan)

    monkeypatch.setattr(eigenbases.torch.linalg, "eigh", eigh)
    previous = torch.linalg.qr(torch.randn(6, 6))[0]

    found = compute_eigenbasis(symmetric(), previous)

    assert found.fallback == fallback
    assert calls == [torch.float32, torch.float32, torch.float64][: failures + 1]
    assert torch.equal(found.basis, previous) == (fallback == 3)
    torch.testing.assert_close(found.basis.T @ found.basis, torch.eye(6))
    assert found.basis.dtype == torch.float32


def test_a_non_finite_matrix_gives_the_previous_basis_or_the_identity():
    matrix = symmetric()
    matrix[0, 0] = torch.nan
    previous = torch.linalg.qr(torch.randn(6, 6))[0]

    assert torch.equal(compute_eigenbasis(matrix, previous).basis, previous)
    assert compute_eigenbasis(matrix, previous).fallback == 3
    assert torch.equal(compute_eigenbasis(matrix).basis, torch.eye(6))
    assert compute_eigenbasis(matrix).fallback == 4
    assert torch.isfinite(compute_eigenbasis(matrix).eigenvalues).all()


def test_power_iteration_finds_the_eigenvectors_largest_first():
    matrix = torch.diag(torch.tensor([1.0, 8.0, 64.0]))
    basis = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(1)))[0]
    for _ in range(12):
        basis, values, *_ = take_power_iteration(matrix, basis)

    torch.testing.assert_close(values, torch.tensor([64.0, 8.0, 1.0]))
    torch.testing.assert_close(basis.abs(), torch.eye(3).flip(1), atol=1e-5, rtol=0)


def test_power_iteration_keeps_its_basis_where_the_matrix_is_not_finite():
    basis = torch.eye(3)

    assert torch.equal(take_power_iteration(torch.full((3, 3), torch.nan), basis).basis, basis)


def test_rotation_by_blocks_equals_the_block_diagonal_and_is_invertible():
    torch.manual_seed(0)
    left, right = (
        [torch.linalg.qr(torch.randn(width, width))[0] for width in widths]
        for widths in ([3, 2], [4, 4, 3])
    )
    matrix = torch.randn(5, 11)

    rotated = rotate(matrix, left, right)

    expected = torch.block_diag(*left).T @ matrix @ torch.block_diag(*right)
    torch.testing.assert_close(rotated, expected)
    torch.testing.assert_close(rotate_back(rotated, left, right), matrix)
