"""The card of a run has what its options and results say, and trains the model again."""

import re
import tomllib
from typing import Any

import pytest
from huggingface_hub import ModelCard

from llm.config.toml import read_toml
from llm.models.model_card import Card, write_model_card
from llm.trainers.gpt.extensions import GPTConfig
from llm.trainers.gpt.main import parse_args
from llm.trainers.gpt.results import make_card


def card_of(config: GPTConfig, **changes: Any) -> Card:
    content = {"name": "tiny", "rows": {}, "results": {}, "task_results": {}, "ranks": 1}
    return make_card(config, **content | {"initial_weights": "random, seed 7"} | changes)


def test_the_card_of_a_run_names_license_data_evaluation_and_base_model(tmp_path):
    config = GPTConfig(
        dataset_name="wikitext",
        dataset_config_name="wikitext-2-raw-v1",
        model_license="mit",
        model_languages=("en",),
    )
    card = card_of(config, results={"loss": 2.0}, initial_weights="from gpt2", ranks=2)
    write_model_card(tmp_path, card)
    found = ModelCard.load(tmp_path / "README.md", ignore_metadata_errors=False)

    assert (found.data.license, found.data.language) == ("mit", ["en"])
    assert (found.data.datasets, found.data.base_model) == (["wikitext"], "gpt2")
    assert found.data.eval_results[0].dataset_name == "wikitext (wikitext-2-raw-v1)"
    assert "torchrun --standalone --nproc_per_node=2 -m llm.trainers.gpt --config" in found.text
    assert ", on 2 ranks:" in found.text


def test_random_weights_have_no_base_model_and_a_file_no_hub_name():
    card = card_of(GPTConfig(train_file="a.txt", validation_file="b.txt"))
    assert (card.base_model, card.dataset, card.validation) == (None, None, "b.txt")


def test_the_options_in_the_card_are_those_of_the_run(tmp_path):
    """A value is the default, and the preset has another one: the card cannot name the preset."""
    argv = "--model_type gpt2 --tokenizer_name gpt2 --train_file a.txt --output_dir runs/tiny"
    given = "--preset pretrain --weight_decay 0 --seed 7 --push_to_hub --overwrite_output_dir"
    config = parse_args([*argv.split(), *given.split()])
    (tmp_path / "config.toml").write_text(card_of(config).options)

    again = parse_args(["--config", str(tmp_path / "config.toml")])
    assert (again.weight_decay, again.learning_rate) == (0, config.learning_rate)
    values = tomllib.loads(card_of(config).options)
    assert not values.keys() & {"preset", "push_to_hub", "overwrite_output_dir"}
    assert read_toml(GPTConfig, tmp_path / "config.toml")["seed"] == 7


def test_a_branch_which_needs_its_parent_shows_no_options_to_repeat():
    config = GPTConfig(train_file="a.txt", branch_from="runs/parent")
    assert card_of(config).options == ""


@pytest.mark.parametrize(
    ("ranks", "start"), [(1, "llm-trainers train"), (4, "torchrun .*=4 -m llm.trainers.gpt")]
)
def test_the_command_starts_as_many_ranks_as_the_run_had(ranks, start):
    card = card_of(GPTConfig(train_file="a.txt"), ranks=ranks)
    assert re.fullmatch(f"{start} --config config.toml", card.command)
