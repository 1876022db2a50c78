import pytest
import torch

from llm.optim.kfac.factors import gram


@pytest.mark.parametrize("size", [1, 256, 257, 300, 1030])
def test_half_of_a_symmetric_product_is_all_of_it(size):
    rows = torch.randn(40, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(gram(rows), rows.T @ rows)
    assert gram(rows).equal(gram(rows).T)
