"""Which matrix products are in full float32 where TF32 is on."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llm.extensions.matrix_optim.eigenbases import (
    compute_eigenbasis,
    rotate,
    rotate_back,
    take_power_iteration,
)
from llm.models.attention import check_documents_apart
from llm.parallel.context import check_context_parallel
from llm.parallel.pipeline.stage import check_cut
from llm.runtime.float32 import full_float32
from tests.extensions.kfac.toy import forward_backward, toy_batch, toy_ekfac, toy_model
from tests.support.models import tiny_config, tiny_model

OPERATIONS = {"mm", "addmm", "bmm", "linalg_eigh", "_linalg_eigh", "geqrf"}
ON_GPUS, ON_CPUS = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
SQUARE = torch.eye(4) + 0.1 * torch.ones(4, 4)


class Precisions(TorchDispatchMode):
    """Lists the precision that is set at each matrix product and decomposition."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.split("::")[1] in OPERATIONS:
            self.seen.append((ON_GPUS.fp32_precision, ON_CPUS.fp32_precision))
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _tf32():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    assert (ON_GPUS.fp32_precision, ON_CPUS.fp32_precision) == ("tf32", "bf16")
    yield
    assert (ON_GPUS.fp32_precision, ON_CPUS.fp32_precision) == ("tf32", "bf16")
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    "compute",
    [
        lambda: compute_eigenbasis(SQUARE),
        lambda: compute_eigenbasis(SQUARE * torch.nan, torch.eye(4)),
        lambda: take_power_iteration(SQUARE, torch.eye(4)),
        lambda: rotate(SQUARE, [torch.eye(4)], [torch.eye(2), torch.eye(2)]),
        lambda: check_documents_apart(
            tiny_model(tiny_config("llama")), positions=True, attention=True
        ),
        lambda: check_context_parallel(
            tiny_model(tiny_config("llama")), num_ranks=2, block_size=16
        ),
        lambda: check_cut(tiny_model(tiny_config("llama")), 2),
    ],
    ids=[
        *("eigenbasis", "previous basis", "power iteration", "rotation"),
        *("documents", "shards of a sequence", "stages"),
    ],
)
def test_bases_and_comparisons_of_logits_are_in_full_float32(compute):
    with Precisions() as precisions:
        compute()

    assert set(precisions.seen) == {("ieee", "ieee")}


def test_ekfac_only_rotates_its_update_back_in_tf32():
    model = toy_model()
    optimizer = toy_ekfac(model)
    for seed in range(3):
        forward_backward(model, optimizer.curvature, *toy_batch(seed))
        with Precisions() as precisions:
            optimizer.step()

        # Two layers, from left and right; also after a step that has changed the bases.
        assert precisions.seen.count(("tf32", "bf16")) == 4
        assert precisions.seen.count(("ieee", "ieee")) >= 4


def test_rotating_back_keeps_the_precision_that_is_set():
    with Precisions() as precisions:
        rotate_back(SQUARE, [torch.eye(4)], [torch.eye(4)])

    assert precisions.seen == [("tf32", "bf16")] * 2


def test_the_compiler_can_ask_for_the_precision_inside():
    with full_float32():
        assert not ON_GPUS.allow_tf32
    assert ON_GPUS.allow_tf32


def test_an_error_restores_the_precision():
    with pytest.raises(ValueError, match="once"), full_float32():
        raise ValueError("once")

    assert ON_GPUS.fp32_precision == "tf32"
