"""Documents that share a window, against the same documents one by one."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from llm.data.order import DocumentBoundaries
from llm.errors import ConfigError
from llm.models.attention import check_documents_apart
from llm.models.loss import LanguageModelLoss
from tests.support.families import every_family
from tests.support.models import tiny_config, tiny_model

EOS = 0
MODELS = ["gpt2", "llama", "mistral", "gpt_neo", "mixtral"]
"""Learned positions, rotary ones, a sliding window of 8 tokens (two of them), experts."""


def packed_windows() -> tuple[Tensor, Tensor]:
    """Two windows of 40 tokens: documents of 3, 21, 1 and 15, and of 30 and 10."""
    tokens = torch.randint(1, 320, (2, 41), generator=torch.Generator().manual_seed(0))
    tokens[0, [2, 23, 24]] = EOS
    tokens[1, 29] = EOS
    return tokens[:, :-1], tokens[:, 1:]


def documents_alone() -> list[tuple[Tensor, Tensor]]:
    """The same documents, each a window of its own, with the same labels."""
    inputs, labels = packed_windows()
    bounds = [(0, 0, 3), (0, 3, 24), (0, 24, 25), (0, 25, 40), (1, 0, 30), (1, 30, 40)]
    return [(inputs[row, a:b][None], labels[row, a:b][None]) for row, a, b in bounds]


def split(positions: bool, attention: bool) -> tuple[Tensor | None, Tensor | None]:
    ends = DocumentBoundaries(EOS, positions=positions, attention=attention)
    parts = ends.split(packed_windows()[0].numpy())
    return tuple(None if part is None else torch.from_numpy(part) for part in parts)


def build(family: str, kernel: str, **options) -> PreTrainedModel:
    try:
        return tiny_model(tiny_config(family), attention_implementation=kernel, **options).eval()
    except ConfigError:
        pytest.skip(f"{family} has no {kernel} kernel")


def gradient(model: PreTrainedModel) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("family", MODELS)
def test_a_packed_window_has_the_loss_and_gradient_of_separate_documents(family, kernel):
    model = build(family, kernel)
    loss = LanguageModelLoss(model)

    alone = sum(loss(*document)[0] for document in documents_alone())
    alone.backward()
    expected = gradient(model)
    model.zero_grad()
    packed, _ = loss(*packed_windows(), *split(True, True))
    packed.backward()

    torch.testing.assert_close(packed, alone, rtol=1e-6, atol=0)
    assert (gradient(model) - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("family", MODELS)
def test_without_the_options_attention_crosses_documents(family):
    loss = LanguageModelLoss(tiny_model(tiny_config(family)).eval())

    alone = float(sum(loss(*document)[1] for document in documents_alone()))
    for chosen in (split(False, False), split(True, False), split(False, True)):
        mixed = float(loss(*packed_windows(), *chosen)[1])
        # Rotary positions are relative: with attention kept apart nothing else is to be reset.
        if family in ("llama", "mistral", "mixtral") and chosen[1] is not None:
            assert mixed == pytest.approx(alone, rel=1e-6)
        else:
            assert mixed != pytest.approx(alone, rel=1e-6)


def test_positions_alone_leave_attention_as_it_is():
    """The learned positions of GPT-2, put in by hand."""
    model = build("gpt2", "sdpa")
    inputs, labels = packed_windows()
    positions, _ = split(True, False)
    embedded = model.transformer.wte(inputs) + model.transformer.wpe(positions)
    embedded = embedded - model.transformer.wpe(torch.arange(40))
    logits = model(inputs_embeds=embedded, use_cache=False).logits
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    found, _ = LanguageModelLoss(model)(inputs, labels, positions)

    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_document_numbers_are_cleared_after_their_window():
    loss = LanguageModelLoss(build("llama", "sdpa"))
    before = loss(*packed_windows())[1]

    loss(*packed_windows(), *split(True, True))

    assert torch.equal(loss(*packed_windows())[1], before)


def test_predictions_keep_documents_apart_as_the_loss_does():
    loss = LanguageModelLoss(build("gpt2", "sdpa"))

    packed, _ = loss.predict_tokens(*packed_windows(), *split(True, True))

    alone = [loss.predict_tokens(*document)[0].flatten() for document in documents_alone()]
    assert torch.equal(packed.flatten(), torch.cat(alone))


def test_gradient_checkpointing_computes_the_same_gradient_again():
    gradients = []
    for which in ("none", "full", "selective"):
        model = tiny_model(tiny_config("mistral"), activation_checkpointing=which)
        LanguageModelLoss(model)(*packed_windows(), *split(True, True))[0].backward()
        gradients.append(gradient(model))

    torch.testing.assert_close(gradients[1], gradients[0])
    torch.testing.assert_close(gradients[2], gradients[0])


@pytest.mark.slow
def test_a_compiled_model_keeps_documents_apart_and_joins_them_again():
    loss = LanguageModelLoss(build("llama", "sdpa"))
    apart, joined = loss(*packed_windows(), *split(True, True))[1], loss(*packed_windows())[1]
    loss.compile(backend="eager")

    for _ in range(2):
        torch.testing.assert_close(loss(*packed_windows(), *split(True, True))[1], apart)
        torch.testing.assert_close(loss(*packed_windows())[1], joined)


@every_family
def test_a_family_is_refused_by_name_exactly_where_documents_are_mixed(family):
    model = tiny_model(tiny_config(family))
    loss = LanguageModelLoss(model.eval())
    alone = float(sum(loss(*document)[1] for document in documents_alone()))
    apart = float(loss(*packed_windows(), *split(True, True))[1])
    reset, plain = (loss(*packed_windows(), *split(on, False))[1] for on in (True, False))
    model.train()

    if apart == pytest.approx(alone, rel=1e-6):
        check_documents_apart(model, positions=True, attention=True)
    else:
        name = f"in {family} with the attention kernel {model.config._attn_implementation}"
        with pytest.raises(ConfigError, match=f"--reset_attention_mask cannot keep .* {name}"):
            check_documents_apart(model, positions=False, attention=True)
    if not torch.equal(reset, plain):
        check_documents_apart(model, positions=True, attention=False)
    else:
        with pytest.raises(ConfigError, match=f"--reset_position_ids has no effect on {family}"):
            check_documents_apart(model, positions=True, attention=False)
    assert model.training


def test_flash_attention_is_refused_by_name():
    model = tiny_model(tiny_config("llama"))
    model.config._attn_implementation = "flash_attention_2"

    with pytest.raises(ConfigError, match="--attention_implementation flash_attention_2; choose"):
        check_documents_apart(model, positions=True, attention=False)
