"""The model card of a run, from its options and results."""

import dataclasses
from collections.abc import Mapping

import torch

from llm import __version__
from llm.config.options import fields, given
from llm.config.toml import values_as_toml
from llm.models.model_card import Card
from llm.runtime.counts import counted
from llm.trainers.gpt.config import CoreConfig


def make_card(
    config: CoreConfig,
    *,
    name: str,
    rows: Mapping[str, object],
    results: Mapping[str, float],
    task_results: Mapping[str, Mapping[str, float]],
    initial_weights: str,
    ranks: int,
) -> Card:
    """Return the card of a model that a run has trained.

    Args:
        config: The run's options, as recorded in its `config.toml`.
        name: The model's name.
        rows: Rows of the table about the training.
        results: Results on the validation data by name.
        task_results: Results of tasks by task and metric.
        initial_weights: Source of the weights at step 0, such as `from gpt2`.
        ranks: Ranks of the run.
    """
    software = f"llm-trainers {__version__}, torch {torch.__version__}"
    source = initial_weights.removeprefix("from ")
    start = "python" if ranks == 1 else f"torchrun --standalone --nproc_per_node={ranks}"
    return Card(
        name=name,
        rows={**rows, "software": software},
        license=config.model_license,
        languages=config.model_languages,
        dataset=config.dataset_name,
        base_model=source if source != initial_weights else None,
        validation=config.validation_file
        or " ".join(map(str, config.valid_data_path))
        or describe_data(config),
        results=results,
        task_results=task_results,
        command=f"{start} -m llm.trainers.gpt --config config.toml",
        options=_options_to_repeat(config, name),
        software=f"{software}, on {counted(ranks, 'rank')}",
    )


def _options_to_repeat(config: CoreConfig, name: str) -> str:
    """Return the options that train the model again, as TOML; "" for a branch, without its parent.

    They include the preset's values instead of its name: the preset would also set options that
    have their default in the run.
    """
    if config.branch_from is not None:
        return ""
    of_one_start = {f.name: f.default for f in fields(type(config)) if f.option.one_shot}
    changes = {**of_one_start, "preset": None, "output_dir": f"runs/{name}"}
    return values_as_toml(given(dataclasses.replace(config, **changes)))


def describe_data(config: CoreConfig) -> str:
    """Return the training data as named by the options."""
    data = config.dataset_name or config.train_file
    if data is None:
        blends = [stage.data_path for stage in config.data_stage]
        blends = blends or [config.data_path or config.train_data_path]
        data = ", then ".join(" ".join(map(str, blend)) for blend in blends)
    return f"{data} ({config.dataset_config_name})" if config.dataset_config_name else data
