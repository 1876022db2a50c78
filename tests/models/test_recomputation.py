"""What is kept for the backward pass, what that saves, and that it changes no gradient."""

import functools

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import CheckpointPolicy
from transformers import GPT2Config

from llm.models.loss import LanguageModelLoss
from llm.models.patches.recomputation import _SAVED_OPERATIONS, _checkpoint_policy
from tests.support.models import tiny_config, tiny_model

CHOICES = ("none", "selective", "full")
SMALL = GPT2Config(
    vocab_size=320,
    n_layer=6,
    n_embd=128,
    n_head=4,
    n_positions=256,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
)


def step(loss: LanguageModelLoss, *, length: int, batch: int = 2) -> tuple[torch.Tensor, ...]:
    """Loss and gradients, with the same tokens and dropout each time."""
    torch.manual_seed(0)
    tokens = torch.randint(320, (batch, length + 1))
    objective, _ = loss(tokens[:, :-1], tokens[:, 1:])
    objective.backward()
    return objective.detach(), *[p.grad.clone() for p in loss.parameters() if p.grad is not None]


def peak(which: str) -> int:
    """Bytes at the fullest moment of a step, beyond those of the weights."""
    loss = LanguageModelLoss(tiny_model(SMALL, activation_checkpointing=which))
    tracker = MemTracker()
    tracker.track_external(loss)
    with tracker:
        step(loss, length=256, batch=8)
    weights = sum(4 * parameter.numel() for parameter in loss.parameters())
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]) - weights


def test_selective_takes_less_memory_than_none_and_more_than_full() -> None:
    none, selective, full = (peak(which) for which in CHOICES)

    assert selective < 0.75 * none
    assert full < 0.65 * selective


@pytest.mark.parametrize("options", [{}, {"fused_gelu": True, "tied_gradients": True}])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_losses_and_gradients_are_bit_for_bit_the_same_with_dropout_too(
    attention: str, options: dict[str, bool]
) -> None:
    expected = None
    for which in CHOICES:
        config = tiny_config("gpt2")
        assert config.resid_pdrop == config.attn_pdrop == 0.1
        model = tiny_model(
            config, attention_implementation=attention, activation_checkpointing=which, **options
        )
        found = step(LanguageModelLoss(model), length=16)
        expected = expected or found
        assert len(found) == len(expected) == 29
        for tensor, reference in zip(found, expected, strict=True):
            assert torch.equal(tensor, reference)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_with_and_without_biases_are_recomputed_bit_for_bit(family: str) -> None:
    expected = None
    for which in CHOICES:
        model = tiny_model(tiny_config(family), activation_checkpointing=which)
        found = step(LanguageModelLoss(model), length=16)
        expected = expected or found
        for tensor, reference in zip(found, expected, strict=True):
            assert torch.equal(tensor, reference)


@pytest.mark.slow
def test_a_compiled_step_is_the_same() -> None:
    plain = LanguageModelLoss(tiny_model(SMALL))
    compiled = LanguageModelLoss(tiny_model(SMALL, activation_checkpointing="selective"))
    compiled.compile(backend="aot_eager")

    for tensor, reference in zip(step(compiled, length=16), step(plain, length=16), strict=True):
        torch.testing.assert_close(tensor, reference)


def test_attention_that_draws_dropout_is_computed_again_to_draw_it_again() -> None:
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default

    policy = functools.partial(_checkpoint_policy, _SAVED_OPERATIONS)
    assert policy(None, attention, None, None, None, 0.0) == CheckpointPolicy.MUST_SAVE
    assert policy(None, attention, None, None, None, 0.1) == CheckpointPolicy.MUST_RECOMPUTE
    assert policy(None, torch.ops.aten.bmm.default) == CheckpointPolicy.PREFER_RECOMPUTE


if __name__ == "__main__":
    print({which: peak(which) for which in CHOICES})
