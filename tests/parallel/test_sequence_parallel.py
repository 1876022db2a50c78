"""Ranks that share each sample's tokens between tensor-parallel layers train as one rank does."""

from collections import Counter
from functools import partial

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from llm.errors import ConfigError
from llm.parallel.tensor_plans import check_sequence_parallel
from tests.support.layouts import BATCH, LENGTH, make_divisible_model, prepare, share, take_steps
from tests.support.models import tiny_config
from tests.support.ranks import run_ranks, values

TP2, TP4, TP2_FSDP2 = {"tensor": 2}, {"tensor": 4}, {"tensor": 2, "shard": 2}
RING_PASSES = {"all_reduce": 2, "all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}
RECOMPUTED = {"accumulation": 2, "recompute": True}
DROPS = {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}


def make(family: str, recompute: bool = False, **changes):
    model = make_divisible_model(family, **changes)
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def train(
    family: str,
    sizes: dict[str, int],
    *,
    accumulation: int = 1,
    precision: str = "no",
    recompute: bool = False,
    **changes,
):
    """Losses and norms of a few steps, then an evaluation and the weights."""
    strategy = prepare(
        make(family, recompute, **changes),
        sizes,
        mixed_precision=precision,
        sequence_parallel="tensor" in sizes,
    )
    return take_steps(strategy, accumulation), strategy.gather_full_state_dict()


def train_each(cases):
    return [train(family, sizes, **options) for family, sizes, options in cases]


def assert_trains_as_on_one_rank(ranks: int, cases) -> None:
    for family in dict.fromkeys(family for family, *_ in cases):
        of_family = [case for case in cases if case[0] == family]
        (((expected, whole),),) = values(run_ranks(train_each, 1, [(family, {}, {})]))
        for rank, outcomes in enumerate(values(run_ranks(train_each, ranks, of_family))):
            for case, (seen, weights) in zip(of_family, outcomes, strict=True):
                torch.testing.assert_close(seen, expected, rtol=1e-5, atol=0)
                assert weights.keys() == (whole.keys() if rank == 0 else set()), case
                for name, tensor in weights.items():
                    torch.testing.assert_close(tensor, whole[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gpt2", RECOMPUTED),
        *(
            pytest.param(*case, marks=pytest.mark.extended)
            for case in (("gpt2", {}), ("llama", {}), ("llama", RECOMPUTED))
        ),
    ],
)
def test_two_ranks_train_gpt2_and_llama_as_one_rank_does(family, options):
    assert_trains_as_on_one_rank(2, [(family, TP2, options)])


@pytest.mark.layouts
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        *(("gpt2", TP2_FSDP2), ("qwen3", TP2_FSDP2)),
        *(("llama", TP4), ("mistral", TP4), ("qwen2", TP4)),
    ],
)
def test_four_ranks_train_every_family_as_one_rank_does(family, sizes):
    assert_trains_as_on_one_rank(4, [(family, sizes, {"accumulation": 2})])


@pytest.mark.extended
def test_half_precision_is_close_to_one_rank():
    options = {"precision": "bf16", "accumulation": 2}
    expected, _ = values(run_ranks(partial(train, "llama", {}, **options), 1))[0]
    seen, _ = values(run_ranks(partial(train, "llama", TP2, **options), 2))[0]
    torch.testing.assert_close(seen[:, 0], expected[:, 0], rtol=1e-4, atol=0)
    torch.testing.assert_close(seen[:, 1], expected[:, 1], rtol=1e-2, atol=0)


def masks_of_dropouts(sharded: bool):
    """Which numbers of the embedding's dropout and of a layer's are zero on this rank."""
    strategy = prepare(make("gpt2", **DROPS), TP2, sequence_parallel=sharded)
    transformer = strategy.model.transformer
    masks = []
    for module in (transformer.drop, transformer.h[0].mlp.dropout):
        module.register_forward_hook(lambda *args: masks.append(args[-1] == 0))
    torch.manual_seed(0)
    batches, num_tokens = share(0, strategy, 1)
    strategy.forward_backward(batches, num_tokens=num_tokens)
    return masks


def test_each_rank_draws_its_own_dropout_for_its_tokens():
    whole, other = values(run_ranks(masks_of_dropouts, 2, False))
    for mask, same in zip(whole, other, strict=True):
        assert torch.equal(mask, same)
    first, second = values(run_ranks(masks_of_dropouts, 2, True))
    for mask, different, full in zip(first, second, whole, strict=True):
        assert mask.shape[1] == full.shape[1] // 2
        assert 0.2 < mask.float().mean() < 0.4
        assert 0.3 < (mask != different).float().mean() < 0.5  # 2 * 0.3 * 0.7


@pytest.mark.extended
def test_recomputed_layers_draw_the_same_dropout():
    options = {**DROPS, "attn_implementation": "eager"}
    kept, *others = values(run_ranks(partial(train, "gpt2", TP2, **options), 2))
    again, *_ = values(run_ranks(partial(train, "gpt2", TP2, recompute=True, **options), 2))
    torch.testing.assert_close(again[0], kept[0], rtol=1e-6, atol=0)
    for seen, _ in others:
        assert torch.equal(seen, kept[0])


class Messages(TorchDispatchMode):
    """Counts the functional collectives inside the context and the bytes that a rank sends."""

    def __init__(self):
        super().__init__()
        self.counts, self.sent = Counter(), 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operations on local tensors follow
        name = func.name().partition("::")[2]
        if func.namespace == "_c10d_functional" and name in RING_PASSES:
            self.counts[name] += 1
            # A ring of two sends half of the whole; an all-gather is given a half.
            whole = args[0].nbytes * (2 if name == "all_gather_into_tensor" else 1)
            self.sent += RING_PASSES[name] * whole / 2
        return func(*args, **(kwargs or {}))


def messages_of_a_layer(family: str, sharded: bool, precision: str):
    """Collectives of a layer in a micro-batch, and what it sends in hidden states of one byte."""
    found = []
    for layers in (2, 4):
        field = "n_layer" if family == "gpt2" else "num_hidden_layers"
        model = make(family, **{field: layers})
        strategy = prepare(model, TP2, mixed_precision=precision, sequence_parallel=sharded)
        batches, num_tokens = share(0, strategy, 1)
        with Messages() as messages:
            strategy.forward_backward(batches, num_tokens=num_tokens)
        found.append(messages)
    few, many = found
    counts = {name: (n - few.counts[name]) / 2 for name, n in many.counts.items()}
    elements = BATCH * LENGTH * model.config.hidden_size
    return Counter(counts), (many.sent - few.sent) / 2 / elements


@pytest.mark.parametrize(
    ("family", "precision"),
    [
        pytest.param("llama", "bf16", marks=pytest.mark.extended),
        ("gpt2", "no"),
        pytest.param("llama", "no", marks=pytest.mark.layouts),
        pytest.param("gpt2", "bf16", marks=pytest.mark.layouts),
    ],
)
def test_gathers_and_scatters_replace_the_all_reduces_of_a_layer(family, precision):
    (before, sent), _ = values(run_ranks(messages_of_a_layer, 2, family, False, precision))
    (after, less), _ = values(run_ranks(messages_of_a_layer, 2, family, True, precision))
    changes = {name: after[name] - before[name] for name in RING_PASSES}
    assert changes["all_gather_into_tensor"] == changes["reduce_scatter_tensor"] == 4
    # GPT-2's columns have one input, and query, key and value have a bias on every rank.
    assert after["all_reduce"] == (1 if family == "gpt2" else 0)
    assert changes["all_reduce"] <= -4
    assert less < (sent if precision == "bf16" else sent + 1e-6)
    if family == "llama":
        # Half of the whole, for each of four gathers and four scatters.
        assert less == 8 / 2 * (2 if precision == "bf16" else 4)


def test_other_architectures_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"is for gpt2, llama, .* and this model is gpt_neox"):
        check_sequence_parallel(tiny_config("gpt_neox"))
    check_sequence_parallel(tiny_config("qwen3"))
