"""What autocast leaves in float32."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llm.models.loss import LanguageModelLoss
from tests.support.models import FAMILIES, VOCAB_SIZE, tiny_config, tiny_model

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "grouped_mm_fallback"}


class Float32Products(TorchDispatchMode):
    """Lists the matrix products inside of which an operand is float32."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if func._schema.name.split("::")[1] in PRODUCTS:
            shapes = [tuple(t.shape) for t in tensors if t.dtype == torch.float32 and t.ndim > 1]
            if shapes:
                self.found.append((func._schema.name, shapes))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", FAMILIES)
def test_autocast_leaves_no_matrix_product_in_float32(family):
    # Eager, since PyTorch's own attention computes in float32 on a CPU where it has no kernel.
    model = tiny_model(tiny_config(family), attention_implementation="eager")
    loss = LanguageModelLoss(model)
    ids = torch.randint(VOCAB_SIZE, (2, 17), generator=torch.Generator().manual_seed(0))

    with Float32Products() as products:
        with torch.autocast("cpu", torch.bfloat16):
            objective, _ = loss(ids[:, :-1], ids[:, 1:])
        objective.backward()

    assert products.found == []
