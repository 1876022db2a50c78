"""Layers computed by several ranks together train as the whole model does on one rank."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from llm.parallel.tensor import TensorParallelRNG, divide_layers
from tests.support.layouts import STEPS, make_divisible_model, prepare, share, take_steps
from tests.support.ranks import run_ranks, values

TP2, TP4, TP2_FSDP2 = {"tensor": 2}, {"tensor": 4}, {"tensor": 2, "shard": 2}


def train(
    family: str,
    sizes: dict[str, int],
    accumulation: int = 1,
    chunked: bool = True,
    aligned: bool = False,
):
    """Losses and norms of a few steps; then an evaluation, predictions and the weights."""
    strategy = prepare(make_divisible_model(family), sizes, chunked=chunked, aligned=aligned)
    seen = take_steps(strategy, accumulation)
    batches, _ = share(STEPS, strategy, accumulation)
    pairs = [map(strategy.gather, strategy.predict(batch)) for batch in batches]
    predicted = [torch.cat(values) for values in zip(*pairs, strict=True)]
    return seen, predicted, strategy.gather_full_state_dict()


def train_each(cases):
    return [train(*case) for case in cases]


def assert_trains_as_on_one_rank(ranks: int, cases) -> None:
    """Every case on so many ranks against its model on one rank.

    Each model has separate processes: PyTorch 2.10 takes the embedding of one for another's.
    """
    for family in dict.fromkeys(family for family, *_ in cases):
        of_family = [case for case in cases if case[0] == family]
        ((expected,),) = values(run_ranks(train_each, 1, [(family, {})]))
        for rank, outcomes in enumerate(values(run_ranks(train_each, ranks, of_family))):
            for case, outcome in zip(of_family, outcomes, strict=True):
                assert_same_training(case, rank, outcome, expected)


def assert_same_training(case, rank: int, outcome, expected) -> None:
    (seen, predicted, weights), (seen_whole, predicted_whole, weights_whole) = outcome, expected
    torch.testing.assert_close(
        seen, seen_whole, rtol=1e-5, atol=0, msg=lambda text: f"{case}: {text}"
    )
    # Of two logits that are as good as equal, rounding may prefer either.
    assert (predicted[0] == predicted_whole[0]).float().mean() > 0.97, case
    torch.testing.assert_close(predicted[1], predicted_whole[1], rtol=1e-4, atol=1e-5)
    assert weights.keys() == (weights_whole.keys() if rank == 0 else set())
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, weights_whole[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "family",
    [
        "qwen3",  # others of the ordinary suite are below
        *(
            pytest.param(family, marks=pytest.mark.layouts)
            for family in ("llama", "gpt_neox", "phi", "gpt2", "opt", "gpt_neo")
        ),
    ],
)
def test_two_ranks_compute_each_layer_of_every_kind_of_plan(family):
    assert_trains_as_on_one_rank(2, [(family, TP2)])


@pytest.mark.extended
def test_a_head_whose_rows_are_padded_on_each_rank_trains_the_same():
    # 321 rows on two ranks, 161 and 160, each of which becomes 256; phi's head has a bias.
    assert_trains_as_on_one_rank(2, [(f, TP2, 1, True, True) for f in ("gpt2", "phi")])


def train_with_z_loss(sizes: dict[str, int], chunked: bool):
    """Loss, z-loss and norm of each step, then the weights."""
    strategy = prepare(make_divisible_model("gpt2"), sizes, chunked=chunked, z_loss=0.1)
    seen = []
    for step in range(STEPS):
        batches, num_tokens = share(step, strategy, 2)
        sums = strategy.forward_backward(batches, num_tokens=num_tokens)
        norm, _ = strategy.optimizer_step(0.5)
        seen.append([*strategy.reduce_sum(sums).tolist(), norm.item()])
    return torch.tensor(seen), strategy.gather_full_state_dict()


@pytest.mark.extended
def test_a_z_loss_over_a_divided_vocabulary_is_that_of_one_rank():
    # 321 tokens: the second rank has a row of padding less than the first.
    ((whole, weights),) = values(run_ranks(train_with_z_loss, 1, {}, True))
    assert (whole[:, 1] > 0.1 * whole[:, 0]).all()
    for chunked in (True, False):
        (seen, divided), _ = values(run_ranks(train_with_z_loss, 2, TP2, chunked))
        torch.testing.assert_close(seen, whole, rtol=1e-5, atol=0)
        for name, tensor in divided.items():
            torch.testing.assert_close(tensor, weights[name], rtol=1e-5, atol=1e-5)


@pytest.mark.extended
def test_accumulated_gradients_and_gathered_logits_are_the_same():
    cases = [(family, TP2, 2) for family in ("gpt2", "qwen3")]
    assert_trains_as_on_one_rank(2, [*cases, ("gpt2", TP2, 1, False), ("llama", TP2, 1, False)])


@pytest.mark.layouts
def test_tensor_parallelism_combines_with_sharding_and_replicas():
    cases = [(family, sizes, 2) for family in ("gpt2", "llama") for sizes in (TP2_FSDP2, TP2)]
    assert_trains_as_on_one_rank(4, [*cases, ("llama", TP4), ("gpt2", TP4), ("qwen3", TP2_FSDP2)])


def pieces(sizes: dict[str, int]):
    """What each rank holds of GPT-2, and what a checkpoint would take it for."""
    strategy = prepare(make_divisible_model("gpt2"), sizes)
    held = total = 0
    for name, parameter in strategy.model.named_parameters():
        local, whole = parameter, parameter.detach()
        if isinstance(parameter, DTensor):
            local, whole = parameter.to_local(), parameter.full_tensor().detach()
            shape, offset = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            box = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
            assert torch.equal(local, whole[box]), name
        assert local.untyped_storage().nbytes() <= 4 * local.numel() + 1024, name
        if whole.ndim == 2 and "wpe" not in name:
            held, total = held + local.numel(), total + whole.numel()
    return held / total


@pytest.mark.parametrize("sizes", [TP2, pytest.param(TP2_FSDP2, marks=pytest.mark.extended)])
def test_a_rank_holds_only_one_shard_of_each_matrix(sizes):
    ranks = 2 * sizes.get("shard", 1)
    for fraction in values(run_ranks(pieces, ranks, sizes)):
        assert fraction == pytest.approx(1 / ranks, rel=0.02)


def draw_around_own_heads():
    """Numbers drawn before, between and after two stretches of own numbers; then again."""
    dist.init_process_group("gloo")
    own = TensorParallelRNG(torch.device("cpu"), dist.get_rank())
    first, last = torch.nn.Identity(), torch.nn.Identity()
    first.register_forward_hook(own.use_rank_state)
    last.register_forward_pre_hook(own.use_shared_state)

    def draw():
        torch.manual_seed(3)
        drawn = [torch.rand(4)]
        for _ in range(2):
            for module in (first, first, last):
                module(drawn[0])
                drawn.append(torch.rand(4))
        return torch.stack(drawn)

    result = draw(), draw()
    dist.barrier()  # rank 0 has the store, which the others need to connect
    return result


def test_ranks_draw_the_same_numbers_except_for_their_own_heads():
    (one, again), (other, _) = values(run_ranks(draw_around_own_heads, 2))
    # before | twice own, common | twice own, common
    alike = [torch.equal(a, b) for a, b in zip(one, other, strict=True)]
    assert alike == [True, False, False, True, False, False, True]
    assert len({tuple(draw.tolist()) for draw in one}) == 7
    assert torch.equal(one, again)


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_the_tensor_parallel_rng_works_on_any_accelerator(monkeypatch, kind):
    """On stand-ins for the generators of its two devices."""
    generators = (torch.Generator(), torch.Generator().manual_seed(3))
    rand = torch.rand
    monkeypatch.setattr(torch.get_device_module(kind), "default_generators", generators)
    monkeypatch.setattr(torch, "rand", lambda *size, device: rand(*size, generator=generators[1]))
    device = torch.device(kind, 1)
    own = TensorParallelRNG(device, rank=0)
    first, last = torch.nn.Identity(), torch.nn.Identity()
    first.register_forward_hook(own.use_rank_state)
    last.register_forward_pre_hook(own.use_shared_state)

    common = generators[1].get_state()
    first(torch.ones(1))
    assert generators[1].initial_seed() != 3
    last(torch.ones(1))
    assert generators[1].initial_seed() == 3
    expected = torch.Generator()
    expected.set_state(common)
    rand((), generator=expected)  # what tells two stretches apart
    assert torch.equal(generators[1].get_state(), expected.get_state())


def train_with_dropout(recompute: bool):
    """Weights after steps with dropout everywhere, as each rank has them."""
    drops = {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}
    model = make_divisible_model("gpt2", **drops, attn_implementation="eager")
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    strategy = prepare(model, TP2)
    for step in range(STEPS):
        torch.manual_seed(step)  # as the loop does, the same for all ranks of a sample
        batches, num_tokens = share(step, strategy, 1)
        loss = strategy.forward_backward(batches, num_tokens=num_tokens)
        norm, _ = strategy.optimizer_step(0.5)
    return loss.item(), norm.item(), model.get_parameter("transformer.ln_f.weight").detach()


def test_dropout_keeps_the_ranks_together_and_is_recomputed_as_it_was():
    (loss, norm, gains), other = values(run_ranks(train_with_dropout, 2, False))
    recomputed, _ = values(run_ranks(train_with_dropout, 2, True))
    assert (loss, norm) == other[:2]
    assert torch.equal(gains, other[2])
    assert recomputed[:2] == pytest.approx((loss, norm), rel=1e-6)


def sum_gradient_of_a_shared_gain():
    """A gain that each rank applies to heads of its own, over two micro-batches."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    model = make_divisible_model("qwen3")
    divide_layers(model, mesh)
    norm = model.model.layers[0].self_attn.q_norm
    for _ in range(2):
        norm(torch.full((1, 1, 16), 1.0 + dist.get_rank())).sum().backward()
    return norm.weight.grad


def test_a_replicated_gain_gets_the_gradient_of_all_heads_once():
    for gradient in values(run_ranks(sum_gradient_of_a_shared_gain, 2)):
        # The normalised input is 1 everywhere: one for each rank and each micro-batch.
        torch.testing.assert_close(gradient, torch.full((16,), 4.0), rtol=1e-4, atol=0)
