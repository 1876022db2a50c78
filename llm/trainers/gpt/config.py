"""The options of the trainer's core, combined from all packages; presets, and rules.

Code of the core takes [CoreConfig][llm.trainers.gpt.config.CoreConfig], so that the type checker
refuses a read of an extension's option. `llm/trainers/gpt/extensions.py` adds those.

`--preset NAME` sets the options of a TOML file in the folder `presets`, or computes them
(`compute_optimal_preset.py`). The precedence is default < preset < TOML file (`--config`) < command
line.

The rules refuse combinations of options from several packages that cannot work. An option that
needs another one declares it (`requires`); rules within a package are in its `options.py`. All
rules run before torch is imported, so a command that cannot work is refused at once.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from llm.checkpoint.options import CheckpointOptions, checkpoint_problems
from llm.config.duration import Duration
from llm.config.options import (
    Package,
    fields,
    missing_requirements,
    names_by_alias,
    non_default,
    option,
    option_group,
    path_options,
)
from llm.config.toml import read_toml
from llm.data.options import (
    SOURCES,
    BatchOptions,
    DataOptions,
    find_batch_problems,
    find_data_problems,
)
from llm.errors import ConfigError
from llm.metrics.options import LoggingOptions, find_logging_problems
from llm.models.options import ModelOptions, find_model_problems
from llm.optim.options import OptimizerOptions, find_optimizer_problems, find_schedule_problems
from llm.parallel.options import (
    ParallelOptions,
    PrecisionOptions,
    find_parallel_problems,
    sizes_above_one,
)
from llm.tokenizers.options import TokenizerOptions, tokenizer_problems
from llm.trainers.gpt.compute_optimal_preset import COMPUTE_OPTIMAL, compute_optimal_values

_PRESETS = Path(__file__).parent / "presets"


@option_group("Evaluation")
class EvaluationOptions:
    """Evaluation: when and how."""

    eval_interval: Duration | None = option(
        None,
        "Steps, tokens or epochs between evaluations; by default an epoch. The end is always "
        "evaluated.",
        units={"steps": "eval_steps", "tokens": "eval_tokens", "epochs": ""},
        at_least=1,
        needs_validation=True,
    )
    max_eval_steps: int | None = option(
        None,
        "Maximum batches per evaluation, over all devices; by default all.",
        resume="logged",
        at_least=1,
    )
    eval_metrics: tuple[str, ...] = option(
        (),
        "Further validation metrics: accuracy of the next token, or names for evaluate.load, which "
        "runs their code.",
        needs_validation=True,
        widens_trust=True,
    )
    eval_only: bool = option(
        False,
        "Evaluate the model (or resume_from_checkpoint) and stop.",
        one_shot=True,
    )


@option_group("Run")
class RunOptions:
    """The run as a whole."""

    preset: str | None = option(
        None,
        "Options to start from: pretrain sets learning rate, warm-up, decay, betas and weight "
        "decay; compute_optimal computes them, the length and the batch from the model's size.",
    )
    seed: int | None = option(
        None,
        "Seed of weights, order and dropout; by default drawn and logged.",
        at_least=0,
        resume="fixed",
    )
    exit_after: float | None = option(
        None,
        "Minutes until the run saves and ends with exit code 75 (1 under torchrun).",
        one_shot=True,
        above=0,
    )
    max_skipped_steps: int = option(
        30,
        "Maximum consecutive steps skipped because loss or gradient is not finite.",
        at_least=1,
    )
    timeout: float = option(
        600.0,
        "Seconds until a hung step ends all ranks; three times as many for the first step, "
        "checkpoints and the export. 0 disables it.",
        at_least=0,
        at_most=604_800,
    )
    sample_prompt: str | None = option(None, "Text that the trained model continues at the end.")
    sample_steps: int | None = option(
        None,
        "Steps between text samples in log and TensorBoard.",
        at_least=1,
    )
    export_dtype: Literal["fp32", "bf16", "fp16"] = option(
        "fp32",
        "Precision of the exported weights: fp32, bf16 or fp16.",
    )
    model_license: str | None = option(
        None,
        "License on the model's card, such as apache-2.0.",
    )
    model_languages: tuple[str, ...] = option((), "Languages on the model's card, such as en de.")
    push_to_hub: bool = option(
        False,
        "Push the exported model to the Hub at the end; a new repository is private.",
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

    # The classes of `seams.Extension` in calling order; `GPTConfig` lists them.
    EXTENSIONS: ClassVar[tuple[type[Any], ...]] = ()

    # The options of most runs; `--help` lists them in this order within their groups.
    COMMON: ClassVar[tuple[str, ...]] = (
        *("model_name_or_path", "from_scratch", "model_type", "model_size", "config_overrides"),
        "tokenizer_name",
        *("dataset_name", "train_file", "validation_file", "data_path", "block_size"),
        *("per_device_train_batch_size", "gradient_accumulation_steps", "global_batch_size"),
        *("max_duration", "preset"),
        *("optimizer", "learning_rate", "lr_scheduler_type", "warmup", "weight_decay"),
        *("mixed_precision", "torch_compile"),
        *("output_dir", "overwrite_output_dir", "save_interval"),
        *("checkpointing_minutes", "resume_from_checkpoint"),
        *("eval_interval", "data_parallel_shard_size", "tensor_parallel_size"),
        "pipeline_parallel_size",
    )

    @property
    def replica_option(self) -> str | None:
        """The option that gives ranks separate weights; None if they train one model."""
        return None


def packages_in_use(config: CoreConfig) -> tuple[Package, ...]:
    """Return the installed packages with an option that is not at its default."""
    declared = {field.name: field.option.package for field in fields(type(config))}
    packages = {declared[name] for name in non_default(config)}
    return tuple(sorted(package for package in packages if package is not None))


def extensions_in_use(config: CoreConfig) -> tuple[type[Any], ...]:
    """Return the extensions that take part in a run, in calling order.

    An extension of an installed package takes part only if one of the package's options is not at
    its default, so that other runs need not have the package.
    """
    packages = (None, *packages_in_use(config))
    return tuple(extension for extension in config.EXTENSIONS if extension.package in packages)


def extension_name(cls: type[Any]) -> str:
    """Return the name of a class of an extension in messages, as `package.module:Class`."""
    return f"{cls.__module__}:{cls.__qualname__}"


def read_preset_options(values: dict[str, Any]) -> dict[str, Any]:
    """Return the options set by the preset.

    Args:
        values: The given options, by name. If they are complete, as in the `config.toml` of a run,
            the preset adds nothing: a resumed run keeps its recorded values.

    Raises:
        ConfigError: The preset does not exist or cannot be computed, or the run is a branch.
    """
    name = values.get("preset")
    if name is None or is_complete(values):
        return {}
    if values.get("branch_from") is not None:
        raise ConfigError(
            f"--preset {name} does not go with --branch_from, which takes the options of its "
            "parent; leave the preset out."
        )
    return _read_preset(name, values)


def _read_preset(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a preset, from its file or computed from other options.

    Raises:
        ConfigError: The preset does not exist or cannot be computed.
    """
    if name == COMPUTE_OPTIMAL:
        return compute_optimal_values(values)
    files = {path.stem: path for path in sorted(_PRESETS.glob("*.toml"))}
    if name not in files:
        names = ", ".join(sorted([*files, COMPUTE_OPTIMAL]))
        raise ConfigError(f"There is no --preset {name}; choose from: {names}.")
    return read_toml(CoreConfig, files[name])


def values_of_preset(config: CoreConfig) -> dict[str, Any]:
    """Return the options of a run's preset that the run does not override."""
    assert config.preset is not None
    try:
        preset = _read_preset(config.preset, vars(config))
    except ConfigError:  # a resumed run may have another length, in steps
        return {}
    return {name: value for name, value in preset.items() if getattr(config, name) == value}


def is_complete(names: Collection[str]) -> bool:
    """Return whether every option that `config.toml` always records has a value."""
    recorded = [f for f in fields(CoreConfig) if not (f.option.one_shot or f.option.extension)]
    return {f.name for f in recorded if f.default is not None} <= {*names}


# A rule names the sizes and precisions that an option allows. It therefore refuses one that is
# added later, until somebody has checked the combination. `OptimizerKind` does so for optimizers.


def check_config(config: CoreConfig) -> None:
    """Refuse combinations of options that cannot work.

    Raises:
        ConfigError: One message with a sentence for each problem.
    """
    problems = [
        *find_data_problems(config),
        *tokenizer_problems(config),
        *find_schedule_problems(config),
        *checkpoint_problems(config),
        *find_logging_problems(config),
        *_find_source_problems(config),
        *_find_run_problems(config),
        *find_planned_run_problems(config),
    ]
    if problems:
        raise ConfigError(" ".join([*problems, *_from_preset(config, " ".join(problems))]))


def _from_preset(config: CoreConfig, problems: str) -> list[str]:
    """Return a sentence about options in the problems that come from the preset, not the user."""
    names = [] if config.preset is None else values_of_preset(config)
    flags = [f"--{name}" for name in names if re.search(rf"--{name}\b", problems)]
    if not flags:
        return []
    return [
        f"--preset {config.preset} sets {' and '.join(flags)}; give another value, or no preset."
    ]


def find_planned_run_problems(config: CoreConfig) -> list[str]:
    """Return the problems of a run that is only planned, without data and tokenizer."""
    return [
        *find_model_problems(config),
        *find_batch_problems(config),
        *find_optimizer_problems(config),
        *find_parallel_problems(config),
        *_find_divided_model_problems(config),
        *_find_precision_problems(config),
        *_find_fused_kernels_problems(config),
        *_find_computed_rate_problems(config),
        *(
            problem
            for extension in extensions_in_use(config)
            for problem in _find_extension_problems(extension, config)
        ),
        *missing_requirements(config),
    ]


def _find_extension_problems(extension: type[Any], config: CoreConfig) -> Sequence[str]:
    """Return the problems that an extension finds; the only one if it returns something else."""
    problems: Sequence[str] = extension(config).find_problems()
    is_sequence = isinstance(problems, list | tuple)
    if is_sequence and all(isinstance(problem, str) for problem in problems):
        return problems
    return [
        f"The extension {extension_name(extension)} returns a value of the type "
        f"{type(problems).__name__} from find_problems; let it return a list of strings, a "
        "sentence for each problem."
    ]


def _find_source_problems(config: CoreConfig) -> list[str]:
    """Return the problems of a run without data or without a tokenizer."""
    problems = []
    if not any(getattr(config, name) for name in SOURCES):
        if not config.eval_only:
            problems.append(
                "Name the training data with --dataset_name or --train_file, or token files with "
                "--data_path or --train_data_path (or data_stage in the TOML file)."
            )
        elif not (config.validation_file or config.valid_data_path):
            problems.append(
                "--eval_only needs data: --validation_file, --train_file, --dataset_name, "
                "--data_path or --valid_data_path."
            )
    if (config.tokenizer_name or config.vocab_file or config.model_name_or_path) is None:
        problems.append(
            "No tokenizer is named: give --tokenizer_name, or --vocab_file and --merges_file."
        )
    return problems


def _find_run_problems(config: CoreConfig) -> list[str]:
    """Return the problems of options about the run as a whole: its start, its end, its paths."""
    problems = []
    if config.init_from is not None and config.eval_only:
        problems.append(
            "--init_from starts a training; to evaluate a checkpoint, name it with "
            "--resume_from_checkpoint."
        )
    if config.per_device_train_batch_size == "auto" and config.replica_option:
        problems.append(
            f"--per_device_train_batch_size auto does not go with {config.replica_option}; give a "
            "number."
        )
    if config.push_to_hub and config.eval_only:
        problems.append("--push_to_hub has nothing to push with --eval_only.")
    problems += [
        f"--{name} {text!a} is not UTF-8, as config.toml has to be; rename it."
        for name, text in path_options(config)
        if text.encode(errors="replace") != text.encode(errors="surrogatepass")
    ]
    option_names = {field.name for field in fields(type(config))}
    option_names |= names_by_alias(type(config)).keys()
    for name in config.change_on_resume:
        if name not in option_names:
            problems.append(f"--change_on_resume names '{name}', which is not an option.")
    return problems


def _find_divided_model_problems(config: CoreConfig) -> list[str]:
    """Return the problems of options that need the whole model or plain attention on each rank."""
    sizes = sizes_above_one(config)
    if not sizes:
        return []
    kind = config.optimizer_kind
    problems = []
    allows_shards = kind.averaged_shards if config.replica_option else kind.sharded
    if not allows_shards:
        problems.append(
            f"--optimizer {config.optimizer} needs whole weights on every rank of a replica, which "
            f"--{sizes[0]} divides; take adamw or sgd."
        )
    if config.sample_steps is not None:
        problems.append(
            f"--sample_steps needs the whole model on one rank, which --{sizes[0]} divides; leave "
            "one of them out."
        )
    kernel = config.attention_implementation
    if config.context_parallel_size > 1 and kernel not in (None, "sdpa"):
        problems.append(
            f"--context_parallel_size computes attention by sdpa, not by {kernel}; leave "
            "--attention_implementation out."
        )
    return problems


def _find_precision_problems(config: CoreConfig) -> list[str]:
    """Return the problems of precisions with the sizes that divide the model."""
    precision = config.mixed_precision
    problems = [
        *_find_all_reduce_problems(config),
        *_find_fp8_gather_problems(config),
        *_find_fp8_head_problems(config),
    ]
    if precision in (None, "no", "fp16", "bf16"):
        return problems
    allowed_sizes = (
        ("data_parallel_shard_size", "context_parallel_size") if precision == "fp8" else ()
    )
    problems += [
        f"--mixed_precision {precision} does not go with --{name}; use bf16 or no."
        for name in sizes_above_one(config)
        if name not in allowed_sizes
    ]
    return problems


_MAX_FLOAT8_Z_LOSS = 1e-3
"""Gradients of logits stay below 1.75, the largest that fits, up to log-sum-exps of 375."""


def _find_fp8_head_problems(config: CoreConfig) -> list[str]:
    """Return the problems of an output head in float8: it has been tried with whole weights."""
    if not config.fp8_head:
        return []
    conflicts = [f"--{name}" for name in sizes_above_one(config)]
    conflicts += filter(None, (config.replica_option, config.extra_optimizer_option))
    if config.z_loss > _MAX_FLOAT8_Z_LOSS:
        conflicts.append(f"--z_loss above {_MAX_FLOAT8_Z_LOSS:g}")  # the gradient would overflow
    return [f"--fp8_head does not go with {name}; leave one of them out." for name in conflicts]


def _find_computed_rate_problems(config: CoreConfig) -> list[str]:
    """Return the problems of rates that were computed for AdamW and one model."""
    if config.preset != COMPUTE_OPTIMAL:
        return []
    computed_names = ("learning_rate", "weight_decay")
    names = [name for name in values_of_preset(config) if name in computed_names]
    optimizer = None if config.optimizer in (None, "adamw") else f"--optimizer {config.optimizer}"
    other_options = optimizer, config.extra_optimizer_option, config.step_change_option
    return [
        f"--preset {config.preset} computes {' and '.join(names)} for AdamW and one model, not for "
        f"{conflict}; set {' and '.join(names)} too."
        for conflict in filter(None, (*other_options, config.replica_option))
        if names
    ]


def _find_fused_kernels_problems(config: CoreConfig) -> list[str]:
    """Return the problems of kernels that have been tried with few options."""
    if config.fused_kernels == "measured":
        return []
    conflicts = [f"--{name}" for name in sizes_above_one(config)]
    if config.activation_checkpointing == "selective":
        conflicts.append("--activation_checkpointing selective")
    if config.fp8_head:
        conflicts.append("--fp8_head")
    if config.mixed_precision not in (None, "no", "fp16", "bf16"):
        conflicts.append(f"--mixed_precision {config.mixed_precision}")
    conflicts += filter(None, (config.replica_option, config.extra_optimizer_option))
    return [
        f"--fused_kernels {config.fused_kernels} has been tried with whole weights that all ranks "
        f"share, and does not go with {conflict}; leave one of them out."
        for conflict in conflicts
    ]


def _find_fp8_gather_problems(config: CoreConfig) -> list[str]:
    """Return the problems of gathering weights in float8: it has been tried with few options."""
    if not config.fp8_all_gather:
        return []
    conflicts = [
        f"--{name}" for name in sizes_above_one(config) if name != "data_parallel_shard_size"
    ]
    if not config.optimizer_kind.averaged_shards:  # it is not elementwise
        conflicts.append(f"--optimizer {config.optimizer}")
    if config.unsharded_gradients:
        conflicts.append("--unsharded_gradients")
    other_options = config.extra_optimizer_option, config.step_change_option
    conflicts += filter(None, (config.replica_option, *other_options))
    problems = [
        f"--fp8_all_gather has been tried with one sharded model and elementwise optimizers only, "
        f"and does not go with {conflict}; leave one of them out."
        for conflict in conflicts
    ]
    if config.mixed_precision != "fp8":
        problems.append("--fp8_all_gather is for the float8 layers of --mixed_precision fp8.")
    return problems


def _find_all_reduce_problems(config: CoreConfig) -> list[str]:
    """Return the problems of an all-reduce of gradients in another dtype than fp32."""
    if config.all_reduce_dtype == "fp32":
        return []
    conflicts = [f"--{name}" for name in sizes_above_one(config)]
    if config.mixed_precision not in (None, "no", "bf16"):
        conflicts.append(f"--mixed_precision {config.mixed_precision}")
    conflicts += filter(None, (config.replica_option, config.extra_optimizer_option))
    return [
        f"--all_reduce_dtype {config.all_reduce_dtype} is for the gradients of whole weights in "
        f"float32 or bf16 runs, and does not go with {conflict}; leave one of them out."
        for conflict in conflicts
    ]
