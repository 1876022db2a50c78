"""What autocast leaves in float32: of a mixture of experts its routers, otherwise nothing."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llm.models.loss import LanguageModelLoss
from llm.models.mixtures import find_routers
from tests.support.families import every_family
from tests.support.models import FAMILIES, MIXTURES, VOCAB_SIZE, tiny_config, tiny_model

IDS = torch.randint(VOCAB_SIZE, (2, 17), generator=torch.Generator().manual_seed(0))
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


@every_family
def test_autocast_leaves_no_matrix_product_in_float32(family):
    # Eager, since PyTorch's own attention computes in float32 on a CPU where it has no kernel.
    model = tiny_model(tiny_config(family), attention_implementation="eager", router_dtype="model")
    loss = LanguageModelLoss(model)

    with Float32Products() as products:
        with torch.autocast("cpu", torch.bfloat16):
            objective, _ = loss(IDS[:, :-1], IDS[:, 1:])
        objective.backward()

    assert products.found == []


class Recorded:
    """The arguments and the results of a model's routers in a forward pass."""

    def __init__(self, model):
        self.calls = []
        for router in find_routers(model):
            router.register_forward_hook(
                lambda router, args, result: self.calls.append((router, args, result))
            )


@pytest.mark.parametrize("family", ["mixtral", *MIXTURES])
def test_routers_compute_in_float32_with_the_results_of_a_float32_run(family):
    model = tiny_model(tiny_config(family))
    recorded = Recorded(model)

    with torch.autocast("cpu", torch.bfloat16):
        model(IDS, use_cache=False)

    calls = list(recorded.calls)
    assert len(calls) == (1 if family == "deepseek_v4" else 2)  # one of its layers has a hash
    for router, args, results in calls:
        assert {result.dtype for result in results} == {torch.float32, torch.int64}
        in_float32 = router(*(arg.float() for arg in args))
        for result, reference in zip(results, in_float32, strict=True):
            assert torch.equal(result, reference)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_routers_compute_as_the_rest_of_the_model_if_asked_to(family):
    model = tiny_model(tiny_config(family), router_dtype="model")
    recorded = Recorded(model)

    with torch.autocast("cpu", torch.bfloat16):
        model(IDS, use_cache=False)

    assert [logits.dtype for _, _, (logits, *_) in recorded.calls] == [torch.bfloat16] * 2


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_without_autocast_routers_compute_the_same_bits(family):
    losses = []
    for router_dtype in ("fp32", "model"):
        model = tiny_model(tiny_config(family), router_dtype=router_dtype)
        objective, _ = LanguageModelLoss(model)(IDS[:, :-1], IDS[:, 1:])
        objective.backward()
        losses.append([objective, *(p.grad for p in model.parameters())])
    for tensor, reference in zip(*losses, strict=True):
        assert torch.equal(tensor, reference)


def test_a_dense_model_has_no_routers():
    for family in FAMILIES:
        model = tiny_model(tiny_config(family), device=torch.device("meta"))
        assert len(find_routers(model)) == (2 if family == "mixtral" else 0)
