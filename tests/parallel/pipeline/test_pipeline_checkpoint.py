"""Every stage's tensors are in a checkpoint, whatever parts it has."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from llm.checkpoint.load import find_newest_checkpoint, load_state
from llm.checkpoint.options import CheckpointOptions
from llm.checkpoint.save import Saver
from llm.models.loss import LanguageModelLoss
from llm.models.patches.tied_embedding import tie_gradients
from llm.optim.run_optimizer import OptimizerFactory
from tests.support import layouts
from tests.support.models import tiny_config
from tests.support.ranks import run_ranks, values


class Norms:
    """A part that the strategy knows nothing of: a number for each parameter of this rank.

    Args:
        strategy: A prepared strategy.
        value: The number.
    """

    def __init__(self, strategy: Any, value: float) -> None:
        names = [name for name, _ in strategy.model.named_parameters()]
        self.state = {
            "by_parameter": {name: torch.full((2,), value) for name in names},
            "on_every_rank": torch.full((3,), value),
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def make_strategy() -> tuple[Any, list[str]]:
    """A strategy of two stages, and the names of the whole model's parameters."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("gpt2", num_hidden_layers=2))
    tie_gradients(model)
    names = [name for name, _ in model.named_parameters()]
    strategy = layouts.make_strategy({"pipeline": 2}, pipeline_schedule="1f1b", virtual_stages=1)
    strategy.prepare(LanguageModelLoss(model), OptimizerFactory(layouts.make_optimizer).make)
    return strategy, names


def saved_and_loaded(folder) -> tuple[list[str], list[float]]:
    strategy, names = make_strategy()
    saver = Saver(
        CheckpointOptions(),
        folder,
        parts={"strategy": strategy, "norms": Norms(strategy, 1.5)},
        metadata={},
        rank=strategy.rank,
        world_size=strategy.world_size,
        owner_ranks=strategy.owner_ranks,
    )
    saver.save(step=1, eval_loss=None)
    saver.finish(is_final=True)
    loaded = Norms(strategy, 0.0)
    load_state(find_newest_checkpoint(folder), {"norms": loaded})
    found = torch.stack([*loaded.state["by_parameter"].values()])
    return names, found.unique().tolist()


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.layouts)])
def test_a_part_that_is_new_is_saved_from_every_stage(tmp_path, ranks):
    outcomes = values(run_ranks(saved_and_loaded, ranks, tmp_path))

    names, _ = outcomes[0]
    files = [
        load_file(path) for path in find_newest_checkpoint(tmp_path).path.glob("*.safetensors")
    ]
    written = sorted(name for file in files for name in file if name.startswith("norms/"))
    assert written == sorted(
        ["norms/on_every_rank", *(f"norms/by_parameter/{name}" for name in names)]
    )  # once each
    assert all(found == [1.5] for _, found in outcomes)
