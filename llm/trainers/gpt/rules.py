"""Refuses combinations of options from several packages that cannot work.

An option that needs another one declares it (`requires`); rules within a package are in its
`options.py`. All rules run before torch is imported, so a command that cannot work is refused at
once.
"""

import re

from llm.checkpoint.options import checkpoint_problems
from llm.config.options import fields, missing_requirements, names_by_alias, paths
from llm.data.options import SOURCES, batch_problems, data_problems
from llm.errors import ConfigError
from llm.metrics.options import logging_problems
from llm.models.options import model_problems
from llm.optim.options import optimizer_problems, schedule_problems
from llm.parallel.options import parallel_problems, sizes_above_one
from llm.tokenizers.options import tokenizer_problems
from llm.trainers.gpt.config import CoreConfig, values_of_preset
from llm.trainers.gpt.seams import extensions_of

# A rule names the sizes and precisions that an option allows. It therefore refuses one that is
# added later, until somebody has checked the combination. `OptimizerKind` does so for optimizers.


def check(config: CoreConfig) -> None:
    """Refuse combinations of options that cannot work.

    Raises:
        ConfigError: One message with a sentence for each problem.
    """
    problems = [
        *data_problems(config),
        *tokenizer_problems(config),
        *schedule_problems(config),
        *checkpoint_problems(config),
        *logging_problems(config),
        *_source_problems(config),
        *_run_problems(config),
        *check_planned(config),
    ]
    if problems:
        raise ConfigError(" ".join([*problems, *_from_preset(config, " ".join(problems))]))


def _from_preset(config: CoreConfig, problems: str) -> list[str]:
    """Return a sentence about options in the problems that come from the preset, not the user."""
    names = [] if config.preset is None else values_of_preset(config)
    named = [f"--{name}" for name in names if re.search(rf"--{name}\b", problems)]
    if not named:
        return []
    return [
        f"--preset {config.preset} sets {' and '.join(named)}; give another value, or no preset."
    ]


def check_planned(config: CoreConfig) -> list[str]:
    """Return the problems of a run that is only planned, without data and tokenizer."""
    return [
        *model_problems(config),
        *batch_problems(config),
        *optimizer_problems(config),
        *parallel_problems(config),
        *_size_problems(config),
        *_precision_problems(config),
        *(p for each, options in extensions_of(config) for p in each.problems(options)),
        *missing_requirements(config),
    ]


def _source_problems(config: CoreConfig) -> list[str]:
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


def _run_problems(config: CoreConfig) -> list[str]:
    problems = []
    if config.init_from is not None and config.eval_only:
        problems.append(
            "--init_from starts a training; to evaluate a checkpoint, name it with "
            "--resume_from_checkpoint."
        )
    if config.eval_steps is not None and config.eval_tokens is not None:
        problems.append("--eval_steps and --eval_tokens exclude each other; give one of them.")
    if config.per_device_train_batch_size == "auto" and not config.finds_batch_size:
        problems.append(
            "--per_device_train_batch_size auto needs an extension that finds the batch size, and "
            "none is installed; give a number."
        )
    if config.push_to_hub and config.eval_only:
        problems.append("--push_to_hub has nothing to push with --eval_only.")
    problems += [
        f"--{name} {text!a} is not UTF-8, as config.toml has to be; rename it."
        for name, text in paths(config)
        if text.encode(errors="replace") != text.encode(errors="surrogatepass")
    ]
    known = {field.name for field in fields(type(config))} | names_by_alias(type(config)).keys()
    for name in config.change_on_resume:
        if name not in known:
            problems.append(f"--change_on_resume names '{name}', which is not an option.")
    return problems


def _size_problems(config: CoreConfig) -> list[str]:
    sizes = sizes_above_one(config)
    if not sizes:
        return []
    kind = config.optimizer_kind
    problems = []
    if not (kind.averaged_shards if config.several_models else kind.sharded):
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


def _precision_problems(config: CoreConfig) -> list[str]:
    precision = config.mixed_precision
    problems = [*_all_reduce_problems(config), *_fp8_gather_problems(config)]
    if precision in (None, "no", "fp16", "bf16"):
        return problems
    allowed = ("data_parallel_shard_size", "context_parallel_size") if precision == "fp8" else ()
    problems += [
        f"--mixed_precision {precision} does not go with --{name}; use bf16 or no."
        for name in sizes_above_one(config)
        if name not in allowed
    ]
    return problems


def _fp8_gather_problems(config: CoreConfig) -> list[str]:
    if not config.fp8_all_gather:
        return []
    others = [f"--{name}" for name in sizes_above_one(config) if name != "data_parallel_shard_size"]
    if not config.optimizer_kind.averaged_shards:  # it is not elementwise
        others.append(f"--optimizer {config.optimizer}")
    if config.unsharded_gradients:
        others.append("--unsharded_gradients")
    if config.several_models is not None:
        others.append(config.several_models)
    if config.besides_optimizer is not None:
        others.append(config.besides_optimizer)
    problems = [
        f"--fp8_all_gather has been tried with one sharded model and elementwise optimizers only, "
        f"and does not go with {other}; leave one of them out."
        for other in others
    ]
    if config.mixed_precision != "fp8":
        problems.append("--fp8_all_gather is for the float8 layers of --mixed_precision fp8.")
    return problems


def _all_reduce_problems(config: CoreConfig) -> list[str]:
    if config.all_reduce_dtype == "fp32":
        return []
    others = [f"--{name}" for name in sizes_above_one(config)]
    if config.mixed_precision not in (None, "no", "bf16"):
        others.append(f"--mixed_precision {config.mixed_precision}")
    if config.several_models:
        others.append(config.several_models)
    if config.besides_optimizer is not None:
        others.append(config.besides_optimizer)
    return [
        f"--all_reduce_dtype {config.all_reduce_dtype} is for the gradients of whole weights in "
        f"float32 or bf16 runs, and does not go with {other}; leave one of them out."
        for other in others
    ]
