"""One gradient of an embedding that is also the output head, where autograd makes two."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from llm.models.loss import LanguageModelLoss
from llm.models.patches.tied_embedding import TiedEmbedding, tie_gradients
from tests.support.families import every_family
from tests.support.models import tiny_config, tiny_model

TIED = ("gpt2", "gpt_neo", "opt", "bloom", "falcon", "mamba")


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(320, (3, 21), generator=generator)
    input_ids[1, :9] = 1  # OPT's padding, whose embedding has no gradient
    labels = torch.randint(320, (3, 21), generator=generator)
    labels[0, :5] = -100
    return input_ids, labels


def gradients(model: PreTrainedModel, *, micro_batches: int = 1) -> dict[str, Tensor]:
    loss = LanguageModelLoss(model)
    for number in range(1, micro_batches + 1):
        (loss(*batch())[0] / number).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        difference = (found[name] - gradient).norm()
        assert difference <= 1e-6 * gradient.norm() + 1e-12, name


@pytest.mark.parametrize("micro_batches", [1, 3])
@every_family
def test_the_gradient_is_that_of_autograd(family, micro_batches):
    plain = tiny_model(tiny_config(family)).eval()
    tied = tiny_model(tiny_config(family), tied_gradients=True).eval()
    expected = gradients(plain, micro_batches=micro_batches)
    assert_same(gradients(tied, micro_batches=micro_batches), expected)


class Operations(TorchDispatchMode):
    """Names of the operations that run inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_frequent_tokens_are_added_in_parallel_on_every_device(device):
    embedding = tiny_model(tiny_config("gpt2"), tied_gradients=True).get_input_embeddings()
    embedding.to(device)
    with Operations() as operations:
        embedding(batch()[0].to(device)).sum().backward()
    assert "index_add_" in operations.names
    assert "index_put_" not in operations.names  # serial for each token, on a GPU


def test_families_with_a_tied_head_get_the_tied_embedding():
    kinds = {
        family: type(tiny_model(tiny_config(family), tied_gradients=True).get_input_embeddings())
        for family in TIED
    }
    assert set(kinds.values()) == {TiedEmbedding}, kinds


def test_with_recomputed_activations_the_gradient_is_the_same():
    plain = tiny_model(tiny_config("gpt2"), activation_checkpointing="full")
    tied = tiny_model(tiny_config("gpt2"), activation_checkpointing="full", tied_gradients=True)
    for model in (plain, tied):
        torch.manual_seed(0)
        gradients(model)
    expected, found = (
        {name: p.grad for name, p in model.named_parameters()} for model in (plain, tied)
    )
    assert_same(found, expected)


def test_a_frozen_embedding_gets_no_gradient():
    model = tiny_model(tiny_config("gpt2"), tied_gradients=True)
    model.get_input_embeddings().weight.requires_grad_(False)
    assert "transformer.wte.weight" not in gradients(model)


def test_the_models_own_loss_has_the_same_gradient():
    found = {}
    for tied in (False, True):
        model = tiny_model(tiny_config("gpt2"), tied_gradients=tied).eval()
        model(input_ids=batch()[0], labels=batch()[0]).loss.backward()
        found[tied] = {name: p.grad for name, p in model.named_parameters()}
    assert_same(found[True], found[False])


def test_a_gradient_that_the_lookup_never_used_raises():
    model = tiny_model(tiny_config("gpt2"), tied_gradients=True)
    model.get_input_embeddings().head_gradient = torch.zeros(1)
    with pytest.raises(RuntimeError, match="never reached the embedding"):
        LanguageModelLoss(model, is_chunked=True)(*batch())


def test_an_embedding_that_does_more_than_look_up_is_left_alone():
    class Scaled(nn.Embedding):
        pass

    model = tiny_model(tiny_config("gpt2"))
    model.get_input_embeddings().__class__ = Scaled
    tie_gradients(model)
    assert type(model.get_input_embeddings()) is Scaled
