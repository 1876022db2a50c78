"""Rules that tie several options of the trainer together.

They run before anything heavy is imported, so that a command that cannot work
is refused at once.
"""

from typing import Literal

from llm.config import GPTConfig
from llm.errors import ConfigError
from llm.layout_rules import layout_problems
from llm.model_rules import model_problems, named_problems, shape_problems
from llm.options import fields

_SOURCES = ("dataset_name", "train_file", "data_path", "train_data_path")


def check(config: GPTConfig) -> None:
    """Refuse combinations of options that cannot work.

    Raises:
        ConfigError: With all the complaints in one message, one sentence each.
    """
    problems = [
        *_data_problems(config),
        *model_problems(config),
        *_length_problems(config),
        *_schedule_problems(config),
        *_optimizer_problems(config),
        *_memory_problems(config),
        *_run_problems(config),
        *_kfac_problems(config),
        *layout_problems(config),
        *_hub_problems(config),
    ]
    if problems:
        raise ConfigError(" ".join(problems))


def check_planned(config: GPTConfig) -> list[str]:
    """Complaints about a run that is only planned, which needs no data and no tokenizer."""
    return [
        *named_problems(config),
        *shape_problems(config),
        *_length_problems(config),
        *_kfac_problems(config),
        *_memory_problems(config),
        *layout_problems(config),
    ]


def _data_problems(config: GPTConfig) -> list[str]:
    problems = []
    given = [name for name in _SOURCES if getattr(config, name)]
    if len(given) > 1:
        problems.append(
            f"{' and '.join(f'--{name}' for name in given)} are "
            f"{('two', 'three', 'four')[len(given) - 2]} sources of data; give one of them."
        )
    if not given and not config.eval_only:
        problems.append(
            "Name the training data with --dataset_name or --train_file, or token files with "
            "--data_path or --train_data_path."
        )
    if not given and config.eval_only and not (config.validation_file or config.valid_data_path):
        problems.append(
            "--eval_only needs data: --validation_file, --train_file, --dataset_name, "
            "--data_path or --valid_data_path."
        )
    if config.dataset_name is not None and config.validation_file:
        problems.append(
            "--dataset_name and --validation_file are two sources of data; give one of them."
        )
    if config.dataset_config_name is not None and config.dataset_name is None:
        problems.append("--dataset_config_name belongs to a --dataset_name; give that too.")
    return [*problems, *_token_file_problems(config), *_document_problems(config)]


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
    if config.split is not None and not config.data_path:
        problems.append("--split cuts the token files of --data_path; give that too.")
    if config.force and not token_files:
        problems.append("--force is for token files, and none are given.")
    if token_files:
        problems += [
            f"--{name} is for text, and token files are ready; leave it out."
            for name in ("text_column", "no_keep_linebreaks", "overwrite_cache")
            if getattr(config, name)
        ]
    default = next(f.default for f in fields(GPTConfig) if f.name == "validation_split_percentage")
    if token_files and config.validation_split_percentage != default:
        problems.append("--validation_split_percentage cuts text; token files are cut by --split.")
    return problems


def _document_problems(config: GPTConfig) -> list[str]:
    text = config.dataset_name or config.train_file or config.validation_file
    return [
        f"--{name} needs documents that end with the end-of-text token; leave --no_append_eos out."
        for name in ("reset_position_ids", "reset_attention_mask")
        if getattr(config, name) and text and not config.append_eos
    ]


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
    if config.num_decay_steps is not None and kind != "warmup_stable_decay":
        problems.append("--num_decay_steps goes with --lr_scheduler_type warmup_stable_decay only.")
    if kind == "constant" and (config.num_warmup_steps or config.num_warmup_samples):
        problems.append("--lr_scheduler_type constant has no warm-up; choose constant_with_warmup.")
    if len(config.betas) != 2:
        problems.append(f"--betas takes two numbers, not {len(config.betas)}.")
    return problems


def _optimizer_problems(config: GPTConfig) -> list[str]:
    kind = config.optimizer
    problems = []
    if config.momentum is not None and kind not in ("sgd", "muon"):
        problems.append("--momentum belongs to --optimizer sgd or muon; leave it out.")
    if config.soap_update_steps is not None and kind != "soap":
        problems.append("--soap_update_steps belongs to --optimizer soap; leave it out.")
    if kind == "sgd":
        defaults = {field.name: field.default for field in fields(GPTConfig)}
        problems += [
            f"--{name} is not for --optimizer sgd, which takes --momentum; leave it out."
            for name in ("betas", "eps")
            if getattr(config, name) != defaults[name]
        ]
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


def recomputation(config: GPTConfig) -> Literal["none", "full", "selective"]:
    """The activations to compute once more, by either of the option's two names."""
    return config.activation_checkpointing or ("full" if config.gradient_checkpointing else "none")


def _memory_problems(config: GPTConfig) -> list[str]:
    chosen = config.activation_checkpointing
    if config.gradient_checkpointing and chosen not in (None, "full"):
        return [
            "--gradient_checkpointing is --activation_checkpointing full, and this run asks for "
            f"{chosen}; leave one of them out."
        ]
    return []


def _run_problems(config: GPTConfig) -> list[str]:
    problems = []
    if config.resume_from_checkpoint and config.overwrite_output_dir:
        problems.append(
            "--resume_from_checkpoint keeps the run and --overwrite_output_dir removes it; "
            "give one of them."
        )
    saves = config.checkpointing_steps is not None or config.checkpointing_minutes is not None
    for name in ("save_top_k", "keep_checkpoints"):
        if getattr(config, name) and not saves:
            problems.append(
                f"--{name} needs checkpoints; give --checkpointing_steps or "
                "--checkpointing_minutes."
            )
    if config.init_from is not None and config.eval_only:
        problems.append(
            "--init_from starts a training; to evaluate a checkpoint, name it with "
            "--resume_from_checkpoint."
        )
    if "none" in config.report_to and len(config.report_to) > 1:
        problems.append("--report_to none stands alone.")
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


def kfac_method(config: GPTConfig) -> Literal["ekfac", "eigen", "cholesky"]:
    """The K-FAC method that is asked for by name, or by options that only some have."""
    if config.kfac_method is not None:
        return config.kfac_method
    return "eigen" if preconditioner_options(config) else "ekfac"


def preconditioner_options(config: GPTConfig) -> list[str]:
    """The K-FAC options given that ekfac, which takes AdamW's place, has no use for."""
    given = [n for n in ("kfac_damping", "kfac_kl_clip") if getattr(config, n) is not None]
    given += ["kfac_compat"] if config.kfac_compat else []
    given += ["kfac_library kfac-pytorch"] if config.kfac_library == "kfac-pytorch" else []
    return given


def _kfac_problems(config: GPTConfig) -> list[str]:
    names = [field.name for field in fields(GPTConfig) if field.name.startswith("kfac_")]
    given = [name for name in names if getattr(config, name) not in (None, (), False)]
    if not config.kfac:
        return [f"--{name} belongs to K-FAC; give --kfac too." for name in given]
    problems = []
    if config.kfac_method == "ekfac":
        problems += [
            f"--{name} is not for --kfac_method ekfac; choose eigen or cholesky, or leave it out."
            for name in preconditioner_options(config)
        ]
    if config.kfac_library == "kfac-pytorch":
        native = ("kfac_strategy", "kfac_max_dim", "kfac_compat")
        problems += [
            f"--{name} is for --kfac_library native; leave it out with kfac-pytorch."
            for name in native
            if name in given
        ]
    return problems


def _hub_problems(config: GPTConfig) -> list[str]:
    if config.push_to_hub:
        return ["--push_to_hub has nothing to push with --eval_only."] if config.eval_only else []
    if config.hub_model_id is None:
        return []
    return ["--hub_model_id belongs to --push_to_hub; give that too."]


def ties_gradients(config: GPTConfig) -> bool:
    """Whether an embedding that is also the output head makes one gradient of the two."""
    # torch.compile traces no such detour, and divided rows are looked up in another way.
    whole = config.tensor_parallel_size == 1 and not config.torch_compile
    return config.tied_gradients and whole


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
