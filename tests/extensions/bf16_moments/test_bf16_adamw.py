"""AdamW with moments in bf16: its random bits, its rounding, and torch's AdamW to compare with."""

import shutil

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from llm.data.loader import MicroBatch
from llm.extensions.bf16_moments import bf16_adamw
from llm.extensions.bf16_moments.bf16_adamw import (
    BF16AdamW,
    draw_random_bits,
    make_bf16_adamw,
    round_moments,
    round_stochastically,
)
from llm.models.attention import disable_packing_detection
from llm.models.loss import LanguageModelLoss
from llm.optim.adamw_and_sgd import make_adamw
from llm.optim.options import OptimizerOptions
from llm.optim.run_optimizer import OptimizerFactory
from tests.support.layouts import make_strategy
from tests.support.models import tiny_config, tiny_model
from tests.support.operations import Reads
from tests.support.ranks import run_ranks, values

OPTIONS = OptimizerOptions(learning_rate=1e-2, weight_decay=0.1, betas=(0.9, 0.95))


def start_of(key: int, first: int) -> Tensor:
    return torch.tensor(key + first * bf16_adamw._ELEMENT_STRIDE).to(torch.int32)  # wraps around


def bits_of(update: int, *, size: int = 1000, key: int = 1, first: int = 0) -> Tensor:
    return draw_random_bits(torch.tensor(float(update)), start_of(key, first), size=size)


def test_the_mean_of_many_roundings_is_the_number_itself():
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(1000, generator=generator) * 10.0 ** torch.arange(-20, 20).repeat(25)
    total = torch.zeros(1000, dtype=torch.float64)
    for update in range(4000):
        rounded = round_stochastically(numbers.clone(), bits_of(update) & 0xFFFF)
        assert torch.equal(rounded.bfloat16().float(), rounded)
        total += rounded.double()
    step = numbers.double().abs() * 2.0**-7  # the distance of two bf16 numbers is at most this
    # A rounding deviates by at most half a step; the mean of 4,000, by five sigmas at most.
    assert ((total / 4000 - numbers.double()).abs() < 5 * 0.5 * step / 4000**0.5).all()


def test_numbers_of_bf16_stay_as_they_are():
    numbers = torch.tensor([0.0, 1.0, -1.5, 2.0**-130, -(2.0**127)])
    for bits in (0, 1, 0x8000, 0xFFFF):
        rounded = round_stochastically(numbers.clone(), torch.full((5,), bits, dtype=torch.int32))
        assert torch.equal(rounded, numbers)


@pytest.mark.parametrize("half", [0, 16])
def test_random_bits_are_even_and_independent_of_their_neighbours(half):
    """Of elements side by side, of one element's updates, and of both moments."""
    table = torch.stack([bits_of(update, size=512) for update in range(512)])
    drawn = ((table >> half) & 0xFFFF).double() / 65536
    other = ((table >> (16 - half)) & 0xFFFF).double() / 65536
    counts = torch.histc(drawn.float(), bins=64, min=0, max=1)
    expected = 512 * 512 / 64
    assert ((counts - expected) ** 2 / expected).sum() < 120  # chi squared of 63; p = 1e-5

    def correlation(one: Tensor, two: Tensor) -> float:
        return float(((one - 0.5) * (two - 0.5)).mean() * 12)

    for pair in (
        (drawn[:, 1:], drawn[:, :-1]),
        (drawn[1:], drawn[:-1]),
        (drawn, other),
        (drawn[1:], other[:-1]),
    ):
        assert abs(correlation(*pair)) < 5 / 512
    assert (drawn.mean(dim=0) - 0.5).abs().max() < 5 * (1 / 12 / 512) ** 0.5
    assert (drawn.mean(dim=1) - 0.5).abs().max() < 5 * (1 / 12 / 512) ** 0.5


def test_a_part_of_a_parameter_has_the_bits_of_its_place():
    whole = bits_of(3, size=100)
    assert torch.equal(bits_of(3, size=20, first=40), whole[40:60])
    assert not torch.equal(bits_of(4, size=100), whole)
    assert not torch.equal(bits_of(3, size=100, key=2), whole)


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(48, 32), nn.Linear(32, 48))


def set_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_weights_stay_near_those_of_float32_moments():
    ours, theirs = model_of(), model_of()
    optimizers = make_bf16_adamw(OPTIONS, ours), make_adamw(OPTIONS, theirs)
    start = [p.detach().clone() for p in ours.parameters()]
    for step in range(50):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            set_gradients(model, step)
            optimizer.step()
    for before, one, other in zip(start, ours.parameters(), theirs.parameters(), strict=True):
        if one.ndim == 1:
            assert torch.equal(one, other)  # vectors have moments in float32
        else:
            assert (one - other).norm() < 0.02 * (other - before).norm()


def test_small_changes_of_a_moment_add_up():
    """To the nearest number, the second moment of gradients of 1 would stop at about a third."""
    weight = nn.Parameter(torch.zeros(64, 64))
    optimizer = BF16AdamW([{"params": [weight], "keys": [1]}], lr=0.0, betas=(0.9, 0.999), eps=1)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    weight.grad = torch.ones(64, 64)
    for _ in range(2000):
        optimizer.step()
    state = optimizer.state[weight]
    assert state["exp_avg_sq"].dtype == torch.bfloat16
    assert state["step"] == 2000
    mean = float(state["exp_avg_sq"].double().mean())
    assert mean == pytest.approx(1 - 0.999**2000, rel=0.005)


@pytest.mark.extended
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_a_compiled_rounding_has_the_same_bits():
    generator = torch.Generator().manual_seed(0)
    compiled = torch.compile(round_moments, dynamic=True)
    for size, key, first in ((1000, 2**32 - 1, 0), (777, 5, 2**24), (2, 3, 2**22)):
        moments = [torch.randn(size, generator=generator) for _ in range(2)]
        updates = torch.tensor(7.0)
        rounded = []
        for function in (round_moments, compiled):
            halves = [torch.zeros(size, dtype=torch.bfloat16) for _ in range(2)]
            function(halves, [m.clone() for m in moments], updates, start_of(key, first))
            rounded.append(torch.cat(halves))
        assert torch.equal(*rounded)


@pytest.mark.parametrize("size", [7, 1000])
def test_the_size_of_a_slice_does_not_matter(size, monkeypatch):
    models = []
    for elements in (2**22, size):
        monkeypatch.setattr(bf16_adamw, "_CPU_SLICE_SIZE", elements)
        model = model_of()
        optimizer = make_bf16_adamw(OPTIONS, model, seed=3)
        for step in range(3):
            set_gradients(model, step)
            optimizer.step()
        moments = [m for p in model.parameters() for m in optimizer.state[p].values()]
        models.append([*model.parameters(), *moments])
    for one, other in zip(*models, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-6)
        if one.dtype == torch.bfloat16:  # the kernel may round float32 in another way
            assert (one == other).double().mean() > 0.98


def test_a_skipped_step_changes_nothing():
    model = model_of()
    optimizer = make_bf16_adamw(OPTIONS, model)
    set_gradients(model, 0)
    optimizer.step()
    tensors = [
        *model.parameters(),
        *(m for p in model.parameters() for m in optimizer.state[p].values()),
    ]
    before = [tensor.detach().clone() for tensor in tensors]
    set_gradients(model, 1)
    model[0].weight.grad[0, 0] = torch.nan
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(tensors, before, strict=True))


def test_a_step_reads_no_value_from_the_device():
    model = model_of()
    optimizer = make_bf16_adamw(OPTIONS, model)
    set_gradients(model, 0)
    optimizer.found_inf = torch.zeros(())
    with Reads() as reads:
        optimizer.step()
    assert reads.seen == []


def moments_on(sizes: dict[str, int]) -> dict[str, Tensor]:
    """The moments after a few steps on the ranks of a layout, whole."""
    disable_packing_detection()
    changes = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    strategy = make_strategy(sizes)
    model = tiny_model(tiny_config("gpt2", **changes))
    strategy.prepare(
        LanguageModelLoss(model),
        OptimizerFactory(lambda m: make_bf16_adamw(OPTIONS, m, seed=5)).make,
    )
    size = 4 // strategy.data_ranks
    rows = slice(strategy.data_rank * size, (strategy.data_rank + 1) * size)
    for step in range(4):
        tokens = torch.randint(320, (4, 17), generator=torch.Generator().manual_seed(step))
        batch = MicroBatch(tokens[rows, :-1], tokens[rows, 1:])
        strategy.forward_backward([batch], num_tokens=64)
        strategy.optimizer_step(0.5)
    moments = {
        f"{name}/{key}": tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, state in strategy.state_dict()["optimizer"].items()
        for key, tensor in state.items()
    }
    strategy.close()
    return moments


def test_shards_of_rows_are_rounded_as_the_whole_parameter_is():
    (whole,) = values(run_ranks(moments_on, 1, {}))
    sharded, _ = values(run_ranks(moments_on, 2, {"shard": 2}))
    assert sharded.keys() == whole.keys()
    in_bf16 = [name for name, tensor in whole.items() if tensor.dtype == torch.bfloat16]
    assert len(in_bf16) > 8
    # Gradients differ by rounding; other random bits would round every second number otherwise.
    equal = torch.cat([(sharded[n] == whole[n]).flatten() for n in in_bf16]).double().mean()
    assert equal > 0.98
