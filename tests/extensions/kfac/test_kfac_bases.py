"""How diagonal a second moment is, by which the bases of K-FAC, SOAP and others are compared."""

import pytest
import torch

from benchmarks.kfac_bases import diagonal_share, likely_factors


def test_entries_that_never_occur_together_have_a_diagonal_second_moment():
    samples = torch.eye(4).repeat(3, 1).reshape(12, 2, 2)
    assert diagonal_share(samples) == pytest.approx(1)


def test_of_four_equal_entries_a_quarter_is_on_the_diagonal():
    samples = torch.tensor([1.0, -2.0, 3.0])[:, None, None] * torch.ones(2, 2)
    assert diagonal_share(samples) == pytest.approx(0.25)


def test_in_the_factors_eigenbases_a_kronecker_product_is_diagonal():
    torch.manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(6, 6))[0] for _ in range(2))
    scales = torch.logspace(0, 2, 6)
    samples = left @ (scales[:, None] * torch.randn(4000, 6, 6) * scales) @ right.T
    assert diagonal_share(left.T @ samples @ right) == pytest.approx(1, abs=0.05)
    assert diagonal_share(samples) < 0.5


def test_factors_by_maximum_likelihood_see_through_the_size_of_tokens():
    """A token's a and g have the size of their token, which plain means weigh by its square."""
    torch.manual_seed(0)
    expected_inputs = torch.diag(torch.tensor([0.6, 0.3, 0.1]))
    expected_outputs = torch.diag(torch.tensor([0.8, 0.2]))
    sizes = torch.randn(20_000, 1).exp()
    a = torch.randn(20_000, 3) @ expected_inputs.sqrt() * sizes
    g = torch.randn(20_000, 2) @ expected_outputs.sqrt() / sizes  # their product has no size
    outputs, inputs = likely_factors([(a[:5_000], g[:5_000]), (a[5_000:], g[5_000:])])
    torch.testing.assert_close(inputs, expected_inputs, atol=0.02, rtol=0)
    torch.testing.assert_close(outputs, expected_outputs, atol=0.02, rtol=0)
    plain = a.T @ a / a.square().sum()
    assert (inputs - expected_inputs).norm() < (plain - expected_inputs).norm()
