"""Combinations of options that cannot work, by subject.

Where an option needs another one, its declaration says so (`requires`). The rules run before
anything heavy is imported, so that a command that cannot work is refused at once.
"""

from typing import Literal

from llm.config.options import fields, given, lacking, paths
from llm.errors import ConfigError
from llm.trainers.gpt.config import GPTConfig
from llm.trainers.gpt.layout_rules import layout_problems

_SOURCES = ("dataset_name", "train_file", "data_path", "train_data_path")
SHAPE = ("model_size", "num_layers", "hidden_size", "num_attention_heads")
"""Options that set a model's layers, width and heads."""


def check(config: GPTConfig) -> None:
    """Refuse combinations of options that cannot work.

    Raises:
        ConfigError: With all the complaints in one message, one sentence each.
    """
    problems = [
        *_data_problems(config),
        *_token_file_problems(config),
        *_document_problems(config),
        *_tokenizer_problems(config),
        *_schedule_problems(config),
        *_run_problems(config),
        *check_planned(config),
    ]
    if problems:
        raise ConfigError(" ".join(problems))


def check_planned(config: GPTConfig) -> list[str]:
    """Complaints about a run that is only planned, which needs no data and no tokenizer."""
    return [
        *_named_problems(config),
        *_shape_problems(config),
        *_length_problems(config),
        *_optimizer_problems(config),
        *_kfac_problems(config),
        *_memory_problems(config),
        *layout_problems(config),
        *lacking(config),
    ]


def _data_problems(config: GPTConfig) -> list[str]:
    problems = []
    sources = [name for name in _SOURCES if getattr(config, name)]
    if len(sources) > 1:
        problems.append(
            f"{' and '.join(f'--{name}' for name in sources)} are "
            f"{('two', 'three', 'four')[len(sources) - 2]} sources of data; give one of them."
        )
    if not sources and not config.eval_only:
        problems.append(
            "Name the training data with --dataset_name or --train_file, or token files with "
            "--data_path or --train_data_path."
        )
    if not sources and config.eval_only and not (config.validation_file or config.valid_data_path):
        problems.append(
            "--eval_only needs data: --validation_file, --train_file, --dataset_name, "
            "--data_path or --valid_data_path."
        )
    if config.dataset_name is not None and config.validation_file:
        problems.append(
            "--dataset_name and --validation_file are two sources of data; give one of them."
        )
    return problems


def _token_file_problems(config: GPTConfig) -> list[str]:
    problems = []
    token_files = config.data_path or config.train_data_path or config.valid_data_path
    text = config.dataset_name or config.train_file or config.validation_file
    if config.valid_data_path and (config.data_path or text):
        problems.append(
            "--valid_data_path goes with --train_data_path, or alone with --eval_only; --data_path "
            "is cut by --split, and text has options of its own."
        )
    if config.validation_file and (config.data_path or config.train_data_path):
        problems.append(
            "--validation_file is text and does not go with token files; name token files to "
            "evaluate on with --valid_data_path."
        )
    if config.force and not token_files:
        problems.append("--force is for token files, and none are given.")
    if token_files:
        problems += [
            f"--{name} is for text, and token files are ready; leave it out."
            for name in ("text_column", "no_keep_linebreaks", "overwrite_cache")
            if getattr(config, name)
        ]
    if token_files and "validation_split_percentage" in given(config):
        problems.append("--validation_split_percentage cuts text; token files are cut by --split.")
    return problems


def _document_problems(config: GPTConfig) -> list[str]:
    text = config.dataset_name or config.train_file or config.validation_file
    return [
        f"--{name} needs documents that end with the end-of-text token; leave --no_append_eos out."
        for name in ("reset_position_ids", "reset_attention_mask")
        if getattr(config, name) and text and not config.append_eos
    ]


def _named_problems(config: GPTConfig) -> list[str]:
    named = config.model_name_or_path or config.config_name or config.model_type
    if not named and not shape_options(config):
        return [
            "Name the model with --model_name_or_path, --config_name, --model_type or --model_size."
        ]
    if config.model_name_or_path is not None and config.model_type is not None:
        return [
            "--model_type starts from an architecture's defaults and --model_name_or_path from a "
            "model; give one of them."
        ]
    return []


def _shape_problems(config: GPTConfig) -> list[str]:
    changed = [name for name in SHAPE[1:] if getattr(config, name) is not None]
    named = config.model_name_or_path or config.config_name or config.model_type
    if config.model_size is not None and changed:
        return [
            f"--model_size {config.model_size} sets --{changed[0]} already; leave one of them out."
        ]
    if changed and not named and len(changed) < 3:
        missing = " and ".join(f"--{name}" for name in SHAPE[1:] if name not in changed)
        return [
            f"--{changed[0]} changes a model that is named by --model_name_or_path, --config_name "
            f"or --model_type; without one, give {missing} too."
        ]
    return []


def shape_options(config: GPTConfig) -> list[str]:
    """The options given that set a model's layers, width and heads."""
    return [name for name in SHAPE if getattr(config, name) is not None]


def _tokenizer_problems(config: GPTConfig) -> list[str]:
    if config.vocab_file is not None and config.tokenizer_name is not None:
        return ["--tokenizer_name and --vocab_file name two tokenizers; give one."]
    if (config.tokenizer_name or config.vocab_file or config.model_name_or_path) is None:
        return [
            "There is no tokenizer: name one with --tokenizer_name, or with --vocab_file and "
            "--merges_file."
        ]
    return []


def _length_problems(config: GPTConfig) -> list[str]:
    problems = []
    if config.max_train_steps is not None and config.max_train_samples is not None:
        problems.append("--max_train_steps and --max_train_samples exclude each other.")
    if config.num_warmup_steps and config.num_warmup_samples is not None:
        problems.append("--num_warmup_steps and --num_warmup_samples exclude each other.")
    if config.global_batch_size is not None and config.gradient_accumulation_steps != 1:
        problems.append(
            "--global_batch_size decides gradient accumulation; leave out "
            "--gradient_accumulation_steps."
        )
    return problems


def _schedule_problems(config: GPTConfig) -> list[str]:
    problems = []
    kind = config.lr_scheduler_type
    if config.min_learning_rate > config.learning_rate:
        problems.append(
            f"--min_learning_rate {config.min_learning_rate:g} is above --learning_rate "
            f"{config.learning_rate:g}."
        )
    if config.min_learning_rate and kind in ("constant", "constant_with_warmup"):
        problems.append(f"--lr_scheduler_type {kind} never decays to --min_learning_rate.")
    if config.num_constant_steps and kind not in ("linear", "cosine"):
        problems.append("--num_constant_steps goes with the linear and cosine schedules only.")
    if kind == "constant" and (config.num_warmup_steps or config.num_warmup_samples):
        problems.append("--lr_scheduler_type constant has no warm-up; choose constant_with_warmup.")
    if len(config.betas) != 2:
        problems.append(f"--betas takes two numbers, not {len(config.betas)}.")
    return problems


def _optimizer_problems(config: GPTConfig) -> list[str]:
    kind = config.optimizer
    problems = []
    if kind == "sgd":
        problems += [
            f"--{name} is not for --optimizer sgd, which takes --momentum; leave it out."
            for name in ("betas", "eps")
            if name in given(config)
        ]
    uses_blocks = kind == "accumadamw" or (kind is None and config.data_parallel == "gossip")
    if config.accum_steps is not None and not uses_blocks:
        problems.append(
            "--accum_steps needs --optimizer accumadamw; give that too, or leave it out."
        )
    if config.kfac and kind not in (None, "adamw"):
        problems.append(
            f"--optimizer {kind} does not go with --kfac, which has an optimizer of its own or "
            "adamw; leave one of them out."
        )
    if kind == "soap" and config.data_parallel != "allreduce":
        problems.append(
            "--optimizer soap has bases that cannot be averaged over ranks with weights of their "
            f"own, as --data_parallel {config.data_parallel} has them; choose another optimizer."
        )
    return problems


def _kfac_problems(config: GPTConfig) -> list[str]:
    problems = []
    if config.kfac_method == "ekfac":
        problems += [
            f"--{name} is not for --kfac_method ekfac; choose eigen or cholesky, or leave it out."
            for name in preconditioner_options(config)
        ]
    if config.kfac_library == "kfac-pytorch":
        problems += [
            f"--{name} is for --kfac_library native; leave it out with kfac-pytorch."
            for name in ("kfac_strategy", "kfac_max_dim", "kfac_compat")
            if name in given(config)
        ]
    return problems


def kfac_method(config: GPTConfig) -> Literal["ekfac", "eigen", "cholesky"]:
    """The K-FAC method that is asked for by name, or by options that only some have."""
    if config.kfac_method is not None:
        return config.kfac_method
    return "eigen" if preconditioner_options(config) else "ekfac"


def preconditioner_options(config: GPTConfig) -> list[str]:
    """The K-FAC options given that ekfac, which takes AdamW's place, has no use for."""
    names = [n for n in ("kfac_damping", "kfac_kl_clip") if getattr(config, n) is not None]
    names += ["kfac_compat"] if config.kfac_compat else []
    names += ["kfac_library kfac-pytorch"] if config.kfac_library == "kfac-pytorch" else []
    return names


def _memory_problems(config: GPTConfig) -> list[str]:
    chosen = config.activation_checkpointing
    if config.gradient_checkpointing and chosen not in (None, "full"):
        return [
            "--gradient_checkpointing is --activation_checkpointing full, and this run asks for "
            f"{chosen}; leave one of them out."
        ]
    return []


def recomputation(config: GPTConfig) -> Literal["none", "full", "selective"]:
    """The activations to compute once more, by either of the option's two names."""
    return config.activation_checkpointing or ("full" if config.gradient_checkpointing else "none")


def ties_gradients(config: GPTConfig) -> bool:
    """Whether an embedding that is also the output head makes one gradient of the two."""
    # torch.compile traces no such detour, and divided rows are looked up in another way.
    whole = config.tensor_parallel_size == 1 and not config.torch_compile
    return config.tied_gradients and whole


def _run_problems(config: GPTConfig) -> list[str]:
    problems = []
    if config.resume_from_checkpoint and config.overwrite_output_dir:
        problems.append(
            "--resume_from_checkpoint keeps the run and --overwrite_output_dir removes it; "
            "give one of them."
        )
    if config.init_from is not None and config.eval_only:
        problems.append(
            "--init_from starts a training; to evaluate a checkpoint, name it with "
            "--resume_from_checkpoint."
        )
    if config.push_to_hub and config.eval_only:
        problems.append("--push_to_hub has nothing to push with --eval_only.")
    if "none" in config.report_to and len(config.report_to) > 1:
        problems.append("--report_to none stands alone.")
    problems += [
        f"--{name} {text!a} is not UTF-8, as config.toml has to be; rename it."
        for name, text in paths(config)
        if text.encode(errors="replace") != text.encode(errors="surrogatepass")
    ]
    known = {field.name for field in fields(GPTConfig)}
    for name in config.change_on_resume:
        if name not in known:
            problems.append(f"--change_on_resume names '{name}', which is no option.")
    try:
        span = profiled_steps(config)
    except ConfigError as error:
        problems.append(str(error))
    else:
        steps = config.max_train_steps
        if span is not None and steps is not None and span[1] > steps:
            problems.append(
                f"--profile {config.profile} ends after the last of --max_train_steps {steps}."
            )
    return problems


def profiled_steps(config: GPTConfig) -> tuple[int, int] | None:
    """The steps to profile: after the first number, up to the second; None for none.

    Raises:
        ConfigError: The option is not two growing numbers.
    """
    if config.profile is None:
        return None
    start, colon, stop = config.profile.partition(":")
    if not (colon and start.isdigit() and stop.isdigit() and int(start) < int(stop)):
        raise ConfigError(
            f"--profile {config.profile} is not START:STOP, two growing numbers of steps such as "
            "10:13, which profiles steps 11 to 13."
        )
    return int(start), int(stop)
