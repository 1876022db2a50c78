"""The z-loss against its formula, in float64 and by autograd on the full logits."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from llm.models.cross_entropy import chunked_cross_entropy
from llm.models.loss import LanguageModelLoss
from tests.support.models import tiny_config, tiny_model


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(320, (3, 22), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, :5] = -100
    return tokens[:, :-1], labels


def far_from_its_start(family: str) -> PreTrainedModel:
    """A model whose logits differ from token to token, in evaluation mode: without dropout."""
    model = tiny_model(tiny_config(family), pad_vocab_to_multiple_of=128).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def reference(model: PreTrainedModel, z_loss: float) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Cross-entropy and z-loss in float64, and the gradients of their sum."""
    precise = copy.deepcopy(model).double()
    input_ids, labels = batch()
    logits = precise(input_ids, use_cache=False).logits[..., :320]
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    z_sum = z_loss * logits[labels != -100].exp().sum(dim=-1).log().square().sum()
    (loss + z_sum).backward()
    gradients = {n: p.grad for n, p in precise.named_parameters() if p.grad is not None}
    return loss.detach(), z_sum.detach(), gradients


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("family", ["gpt2", "phi"])  # a tied head, and one with a bias
@pytest.mark.parametrize("z_loss", [1e-4, 0.3])
def test_loss_and_gradients_are_those_of_the_formula(
    family: str, chunked: bool, z_loss: float
) -> None:
    model = far_from_its_start(family)
    expected, expected_z, gradients = reference(model, z_loss)
    loss = LanguageModelLoss(model, is_chunked=chunked, chunk_bytes=10 * 4 * 384, z_loss=z_loss)
    assert loss.training

    objective, (loss_sum, z_sum) = loss(*batch())
    objective.backward()

    torch.testing.assert_close(loss_sum.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(z_sum.double(), expected_z, rtol=1e-5, atol=0)
    torch.testing.assert_close(objective.detach(), loss_sum + z_sum)
    for name, gradient in gradients.items():
        found = model.get_parameter(name).grad
        assert found is not None, name
        assert (found - gradient).norm() <= 1e-5 * gradient.norm() + 1e-6, name


def test_an_evaluation_has_no_z_loss() -> None:
    model = far_from_its_start("gpt2")
    for chunked in (True, False):
        loss = LanguageModelLoss(model, is_chunked=chunked, z_loss=1e-2).eval()
        objective, (loss_sum, z_sum) = loss(*batch())
        assert torch.equal(objective, loss_sum)
        assert z_sum == 0


def test_half_precision_keeps_a_z_loss_smaller_than_its_rounding() -> None:
    """1 + 2 z_loss log-sum-exp is 1 in bf16, but not its product with the probabilities."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(512, 64, generator=generator).requires_grad_()
    weight = (0.3 * torch.randn(4096, 64, generator=generator)).requires_grad_()
    labels = torch.randint(4096, (512,), generator=generator)

    def gradient(z_loss: float) -> Tensor:
        hidden.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            loss, _ = chunked_cross_entropy(
                hidden, weight, None, labels, vocab_size=4096, chunk_rows=512, z_loss=z_loss
            )
        loss.backward()
        assert hidden.grad is not None
        return hidden.grad.double()

    z_loss = 1e-4
    precise = hidden.detach().double().requires_grad_()
    logits = precise @ weight.detach().double().T
    (z_loss * logits.logsumexp(dim=-1).square().sum()).backward()
    assert precise.grad is not None
    found = gradient(z_loss) - gradient(0.0)
    share = (found * precise.grad).sum() / precise.grad.square().sum()
    assert 0.8 < share < 1.2
