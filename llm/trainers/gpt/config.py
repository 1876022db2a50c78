"""The options of the trainer's core, combined from all packages, and presets.

Code of the core takes [CoreConfig][llm.trainers.gpt.config.CoreConfig], so that the type checker
refuses a read of an extension's option. `llm/trainers/gpt/extensions.py` adds those. Rules about
options of several packages are in `llm/trainers/gpt/rules.py`.

`--preset NAME` sets the options of a TOML file in the folder `presets`. The precedence is default <
preset < TOML file (`--config`) < command line.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from llm.checkpoint.options import CheckpointOptions
from llm.config.options import Tokens, fields, option, option_group
from llm.config.toml import read_toml
from llm.data.options import BatchOptions, DataOptions
from llm.errors import ConfigError
from llm.metrics.options import LoggingOptions
from llm.models.options import ModelOptions
from llm.optim.options import OptimizerOptions
from llm.parallel.options import ParallelOptions, PrecisionOptions
from llm.tokenizers.options import TokenizerOptions

_PRESETS = Path(__file__).parent / "presets"

_IN_PLACE_OF = {"num_warmup_steps": ("num_warmup_samples", "num_warmup_tokens")}
"""Equivalent options in other units, by the option that a preset sets."""


@option_group("Evaluation")
class EvaluationOptions:
    """Evaluation: when and how."""

    eval_steps: int | None = option(
        None,
        "Steps between two evaluations; by default the end of each epoch. The end of training is "
        "always evaluated.",
        at_least=1,
    )
    eval_tokens: Tokens | None = option(
        None,
        "Tokens between two evaluations, instead of eval_steps.",
        at_least=1,
    )
    max_eval_steps: int | None = option(
        None,
        "Maximum batches of an evaluation, over all devices; by default the whole validation "
        "split.",
        resume="logged",
        at_least=1,
    )
    eval_metrics: tuple[str, ...] = option(
        (),
        "Further metrics of the validation split: accuracy (of the next token), or names for "
        "evaluate.load.",
    )
    eval_only: bool = option(
        False,
        "Evaluate the model (or the checkpoint of resume_from_checkpoint) and stop.",
        one_shot=True,
    )


@option_group("Run")
class RunOptions:
    """The run as a whole."""

    preset: str | None = option(
        None,
        "Options to start from; config and command line override them. pretrain: learning rate, "
        "warm-up, decay, betas and weight decay for training from random weights.",
    )
    seed: int | None = option(
        None,
        "Seed of weights, order and dropout; by default drawn, logged, and kept on resume.",
        at_least=0,
        resume="fixed",
    )
    exit_after: float | None = option(
        None,
        "Minutes until the run saves a checkpoint and ends with exit code 75 (1 under torchrun), "
        "as after a signal.",
        one_shot=True,
        above=0,
    )
    max_skipped_steps: int = option(
        30,
        "Maximum number of consecutive steps skipped because loss or gradient is not finite, "
        "before training stops.",
        at_least=1,
    )
    timeout: float = option(
        600.0,
        "Seconds that a step, or a batch of an evaluation, may take before a rank counts as hung: "
        "the log names it and all ranks end. The first step, a checkpoint and the export may take "
        "three times as long. 0 disables the timeout.",
        at_least=0,
        at_most=604_800,
    )
    sample_prompt: str | None = option(
        None, "Text that the trained model continues at the end of the run."
    )
    sample_steps: int | None = option(
        None,
        "Steps between text samples in log and TensorBoard during training; they continue "
        "sample_prompt, if set.",
        at_least=1,
    )
    export_dtype: Literal["fp32", "bf16", "fp16"] = option(
        "fp32",
        "Precision of the weights in the exported model; training and checkpoints stay float32.",
    )
    model_license: str | None = option(
        None,
        "License of the trained model for its card, by the Hub's identifier: apache-2.0, mit, "
        "other.",
    )
    model_languages: tuple[str, ...] = option(
        (), "Languages of the text for the model's card, as codes such as en de."
    )
    push_to_hub: bool = option(
        False,
        "Upload the trained model, its tokenizer and card to the Hugging Face Hub at the end; a "
        "new repository is private.",
        one_shot=True,
    )
    hub_model_id: str | None = option(
        None,
        "Repository to push to, as OWNER/NAME; by default named after output_dir.",
        requires=("push_to_hub",),
        one_shot=True,
    )


# Not written here: `GPTConfig` gets its own methods, and they take 10 ms.
@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class CoreConfig(
    ModelOptions,
    PrecisionOptions,
    TokenizerOptions,
    DataOptions,
    BatchOptions,
    OptimizerOptions,
    ParallelOptions,
    CheckpointOptions,
    EvaluationOptions,
    LoggingOptions,
    RunOptions,
):
    """Options of the core: of every package, and of the run as a whole."""

    # The options of most runs; `--help` lists them in this order within their groups.
    COMMON: ClassVar[tuple[str, ...]] = (
        *("model_name_or_path", "from_scratch", "model_type", "model_size", "config_overrides"),
        "tokenizer_name",
        *("dataset_name", "train_file", "validation_file", "data_path", "block_size"),
        *("per_device_train_batch_size", "gradient_accumulation_steps", "global_batch_size"),
        *("num_train_epochs", "max_train_steps", "max_train_tokens", "preset"),
        *("optimizer", "learning_rate", "lr_scheduler_type", "num_warmup_steps"),
        *("num_warmup_tokens", "weight_decay"),
        *("mixed_precision", "torch_compile"),
        *("output_dir", "overwrite_output_dir", "checkpointing_steps"),
        *("checkpointing_minutes", "resume_from_checkpoint"),
        *("eval_steps", "data_parallel_shard_size", "tensor_parallel_size"),
        "pipeline_parallel_size",
    )

    @property
    def finds_batch_size(self) -> bool:
        """Whether an extension finds the micro-batch of `per_device_train_batch_size auto`."""
        return False

    @property
    def several_models(self) -> str | None:
        """The option that gives ranks separate weights; None if they train one model."""
        return None

    @property
    def default_optimizer(self) -> str:
        """The optimizer of a run that names none."""
        return "adamw"


def preset_options(values: dict[str, Any]) -> dict[str, Any]:
    """Return the options set by the preset.

    Args:
        values: The given options, by name. If they are complete, as in the `config.toml` of a run,
            the preset adds nothing: a resumed run keeps its recorded values.

    Raises:
        ConfigError: The preset does not exist, or the run is a branch.
    """
    name = values.get("preset")
    if name is None or is_complete(values):
        return {}
    if values.get("branch_from") is not None:
        raise ConfigError(
            f"--preset {name} does not go with --branch_from, which takes the options of its "
            "parent; leave the preset out."
        )
    return {
        option: value
        for option, value in read_preset(name).items()
        if all(values.get(other) is None for other in _IN_PLACE_OF.get(option, ()))
    }


def read_preset(name: str) -> dict[str, Any]:
    """Return the options in the file of a preset.

    Raises:
        ConfigError: The preset does not exist.
    """
    files = {path.stem: path for path in sorted(_PRESETS.glob("*.toml"))}
    if name not in files:
        raise ConfigError(f"There is no --preset {name}; choose from: {', '.join(files)}.")
    return read_toml(CoreConfig, files[name])


def values_of_preset(config: CoreConfig) -> dict[str, Any]:
    """Return the options of a run's preset that the run does not override."""
    assert config.preset is not None
    preset = read_preset(config.preset)
    return {name: value for name, value in preset.items() if getattr(config, name) == value}


def is_complete(names: Collection[str]) -> bool:
    """Return whether every option that `config.toml` always records has a value."""
    recorded = [f for f in fields(CoreConfig) if not (f.option.one_shot or f.option.extension)]
    return {f.name for f in recorded if f.default is not None} <= {*names}
