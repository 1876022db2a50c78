"""The auxiliary loss of an extension, compared with autograd on the whole objective."""

import re
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from llm.errors import ConfigError
from llm.models.loss import LanguageModelLoss
from llm.parallel.dims import ParallelDims
from llm.runtime.labels import IGNORED
from llm.trainers.gpt.auxiliary_loss import AuxiliaryLoss
from tests.support.models import tiny_config, tiny_model


def penalize(hidden: Tensor) -> Tensor:
    return 0.3 * hidden.float().square().mean(-1).sum(-1)


def context_of(
    loss: LanguageModelLoss,
    dims: ParallelDims = ParallelDims(),  # noqa: B008
    *,
    rank: int = 0,
    sums_of_other_ranks: tuple[float, float] = (0.0, 0.0),
) -> SimpleNamespace:
    strategy = SimpleNamespace(
        rank=rank,
        model=loss.model,
        loss=loss,
        device=torch.device("cpu"),
        token_weight=1 / 24,
        loss_scale=lambda: torch.tensor(4.0),
        reduce_sum=lambda sums: sums + torch.tensor(sums_of_other_ranks, dtype=sums.dtype),
    )
    run = SimpleNamespace(dims=dims, config=SimpleNamespace(replica_option=None))
    return SimpleNamespace(run=run, strategy=strategy)


def gradients_of(model: torch.nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


@pytest.mark.parametrize("chunked", [True, False])
def test_the_gradient_is_that_of_the_sum_of_both_losses(chunked):
    model = tiny_model(tiny_config("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    model.train()
    loss = LanguageModelLoss(model, is_chunked=chunked)
    ids = torch.randint(320, (3, 9), generator=torch.Generator().manual_seed(1))
    inputs, labels = ids[:, :-1], ids[:, 1:].clone()
    labels[2] = IGNORED  # a copy of a sample, in a short last step
    objective, _ = loss(inputs, labels)
    penalties = penalize(model.base_model(inputs).last_hidden_state)[:2]
    (4.0 * (objective + penalties.sum()) / 24).backward()
    expected = gradients_of(model)

    auxiliary = AuxiliaryLoss(context_of(loss), penalize)
    objective, sums = loss(inputs, labels)
    (4.0 * objective / 24).backward()

    gradients = gradients_of(model)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7)
    assert auxiliary.mean() == pytest.approx(penalties.sum().item() / 16)
    assert auxiliary.mean() == 0.0  # nothing since the last call
    with torch.no_grad():
        _, evaluated = loss(inputs, labels)
    assert evaluated.equal(sums)  # the loss in the log is without it
    assert auxiliary.mean() == 0.0


@pytest.mark.parametrize(
    ("reduce", "shape"),
    [
        (lambda hidden: hidden.square().mean(), "[]"),
        (lambda hidden: hidden.square().mean(-1), "[2, 8]"),
        (lambda hidden: 3.0, "float"),
    ],
)
def test_a_loss_without_a_number_for_each_sequence_is_refused(reduce, shape):
    loss = LanguageModelLoss(tiny_model(tiny_config("gpt2")))
    auxiliary = AuxiliaryLoss(context_of(loss), reduce)
    inputs = torch.arange(16).view(2, 8)

    with pytest.raises(ConfigError, match=re.escape(f" is {shape}; let it return the loss of ea")):
        loss(inputs, inputs)

    assert auxiliary.mean() == 0.0


def test_a_checkpoint_has_the_sums_of_all_ranks_and_rank_0_resumes_them():
    loss = LanguageModelLoss(tiny_model(tiny_config("gpt2")))
    inputs = torch.arange(16).view(2, 8)
    ranks = [AuxiliaryLoss(context_of(loss, rank=rank), penalize) for rank in (0, 1)]
    objective, _ = loss(inputs, inputs)
    objective.backward()  # both count the same two samples
    penalties = [rank.state_dict() for rank in ranks]
    assert penalties[0] == penalties[1]
    assert penalties[0]["num_tokens"] == 16.0

    # Rank 1 has given its sums to rank 0, also if the run continues.
    assert ranks[0].mean() == penalties[0]["loss"] / 16
    assert ranks[1].mean() == 0.0

    saved = {"loss": 0.1, "num_tokens": 3.0}
    for rank in ranks:
        rank.load_state_dict(saved)
    assert ranks[0].state_dict() == saved
    assert ranks[1].mean() == 0.0

    other_rank = context_of(loss, rank=1, sums_of_other_ranks=(2.0, 4.0))
    assert AuxiliaryLoss(other_rank, penalize).state_dict() == {"loss": 2.0, "num_tokens": 4.0}


@pytest.mark.parametrize("axis", ["pipeline", "context", "tensor"])
def test_other_layouts_are_refused(axis):
    loss = LanguageModelLoss(tiny_model(tiny_config("gpt2")))
    with pytest.raises(ConfigError, match="has been tried on replicas and shards of one model"):
        AuxiliaryLoss(context_of(loss, ParallelDims(**{axis: 2})), penalize)
