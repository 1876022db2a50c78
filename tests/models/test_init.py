import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, PreTrainedModel

from llm.models.init import materialize
from tests.support.families import every_family
from tests.support.models import tiny_config
from tests.support.ranks import run_ranks, values

CPU = torch.device("cpu")


def keyed_model(family: str, *, seed: int = 1, **changes: int) -> PreTrainedModel:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(family, **changes))
    materialize(model, seed=seed, device=CPU)
    return model


def drawn(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    return {name: p for name, p in parameters.items() if p.std() > 0 and not name.endswith("A_log")}


@every_family
def test_every_weight_starts_as_the_library_would_start_it(family: str) -> None:
    torch.manual_seed(0)
    expected = AutoModelForCausalLM.from_config(tiny_config(family))
    model = keyed_model(family)
    random = drawn(model)

    assert list(model.state_dict()) == list(expected.state_dict())
    for name, reference in expected.named_parameters():
        weight, n = model.get_parameter(name), reference.numel()
        if name in random:
            assert abs(weight.std() / reference.std() - 1) < 5 / n**0.5, name
            assert abs(weight.mean() - reference.mean()) < 5 * reference.std() * (2 / n) ** 0.5
        else:
            assert torch.equal(weight, reference), name


@every_family
def test_buffers_that_no_file_holds_are_right(family: str) -> None:
    expected = AutoModelForCausalLM.from_config(tiny_config(family))
    model = keyed_model(family)

    assert {name for name, _ in model.named_buffers()} == {n for n, _ in expected.named_buffers()}
    for name, reference in expected.named_buffers():
        assert torch.equal(model.get_buffer(name), reference), name


@every_family
def test_no_two_parameters_start_alike(family: str) -> None:
    starts = [p.flatten()[:16] for p in drawn(keyed_model(family)).values()]
    # Scaled to one deviation: the same draw would show through a different scale.
    scaled = torch.stack([start / start.abs().max() for start in starts])

    assert len(torch.unique(scaled, dim=0)) == len(starts)


@pytest.mark.parametrize(
    ("family", "layers"), [("llama", "num_hidden_layers"), ("opt", "num_hidden_layers")]
)
def test_a_deeper_model_starts_with_the_same_first_layers(family: str, layers: str) -> None:
    shallow = keyed_model(family)
    deep = keyed_model(family, **{layers: 4}).state_dict()

    assert len(deep) > len(shallow.state_dict())
    for name, weight in shallow.state_dict().items():
        assert torch.equal(weight, deep[name]), name


def test_gpt2_scales_its_residual_projections_by_depth_and_nothing_else() -> None:
    shallow = keyed_model("gpt2", n_layer=2).state_dict()
    deep = keyed_model("gpt2", n_layer=8).state_dict()

    for name, weight in shallow.items():
        ratio = 0.5 if name.endswith("c_proj.weight") else 1.0
        torch.testing.assert_close(deep[name], ratio * weight)


def sum_of_weights() -> float:
    return sum(p.double().sum().item() for p in keyed_model("mamba").parameters())


def test_another_process_starts_from_the_same_weights() -> None:
    """One of the fork server, whose hashes of strings are others."""
    assert values(run_ranks(sum_of_weights, 1)) == [sum_of_weights()]


def test_another_seed_changes_every_drawn_weight() -> None:
    first, second = drawn(keyed_model("mamba", seed=1)), drawn(keyed_model("mamba", seed=2))

    assert not [name for name in first if torch.equal(first[name], second[name])]


def test_the_callers_generator_is_left_as_it_was() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    keyed_model("gpt2")

    assert torch.equal(torch.get_rng_state(), before)


def test_tied_embeddings_share_one_tensor() -> None:
    model = keyed_model("gpt2")

    assert model.lm_head.weight is model.transformer.wte.weight


class _Gated(GPT2LMHeadModel):
    """Leaves a parameter and a buffer to its constructor, and fills another slice by slice."""

    def __init__(self, config) -> None:  # type: ignore[no-untyped-def]
        super().__init__(config)
        self.gate = nn.Parameter(torch.full((3,), 7.0))
        self.table = nn.Buffer(torch.arange(5), persistent=False)
        self.experts = nn.Parameter(torch.empty(4, 8))

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self and hasattr(self, "experts"):
            for expert in self.experts:
                expert.normal_()


def gated_model() -> _Gated:
    with torch.device("meta"):
        model = _Gated(tiny_config("gpt2"))
    materialize(model, seed=1, device=CPU)
    return model


def test_tensors_filled_only_by_the_constructor_keep_its_values() -> None:
    model = gated_model()

    assert model.gate.tolist() == [7.0, 7.0, 7.0]
    assert model.table.tolist() == [0, 1, 2, 3, 4]


def test_slices_of_one_parameter_do_not_start_alike() -> None:
    experts = gated_model().experts

    assert len(torch.unique(experts, dim=0)) == 4
    assert torch.equal(experts, gated_model().experts)
