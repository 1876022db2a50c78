"""Rules that tie several options of the trainer together.

They run before anything heavy is imported, so that a command that cannot work
is refused at once.
"""

from llm.config import GPTConfig
from llm.errors import ConfigError
from llm.options import fields


def check(config: GPTConfig) -> None:
    """Refuse combinations of options that cannot work.

    Raises:
        ConfigError: With all the complaints in one message, one sentence each.
    """
    problems = [
        *_data_problems(config),
        *_model_problems(config),
        *_length_problems(config),
        *_schedule_problems(config),
        *_run_problems(config),
    ]
    if problems:
        raise ConfigError(" ".join(problems))


def _data_problems(config: GPTConfig) -> list[str]:
    problems = []
    if config.dataset_name is None and config.train_file is None:
        if not config.eval_only:
            problems.append("Name the training data with --dataset_name or --train_file.")
        elif config.validation_file is None:
            problems.append(
                "--eval_only needs data: --validation_file, --train_file or --dataset_name."
            )
    if config.dataset_name is not None and (config.train_file or config.validation_file):
        problems.append(
            "--dataset_name and --train_file or --validation_file are two sources of data; "
            "give one of them."
        )
    if config.dataset_config_name is not None and config.dataset_name is None:
        problems.append("--dataset_config_name belongs to a --dataset_name; give that too.")
    return problems


def _model_problems(config: GPTConfig) -> list[str]:
    problems = []
    if (
        config.model_name_or_path is None
        and config.config_name is None
        and config.model_type is None
    ):
        problems.append("Name the model with --model_name_or_path, --config_name or --model_type.")
    if (config.vocab_file is None) != (config.merges_file is None):
        problems.append("--vocab_file and --merges_file go together; give both.")
    elif config.vocab_file is not None and config.tokenizer_name is not None:
        problems.append("--tokenizer_name and --vocab_file name two tokenizers; give one.")
    elif (config.tokenizer_name or config.vocab_file or config.model_name_or_path) is None:
        problems.append(
            "There is no tokenizer: name one with --tokenizer_name, or with --vocab_file and "
            "--merges_file."
        )
    return problems


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


def _run_problems(config: GPTConfig) -> list[str]:
    problems = []
    if config.resume_from_checkpoint and config.overwrite_output_dir:
        problems.append(
            "--resume_from_checkpoint keeps the run and --overwrite_output_dir removes it; "
            "give one of them."
        )
    if config.save_top_k and config.checkpointing_steps is None:
        problems.append("--save_top_k needs checkpoints; give --checkpointing_steps.")
    if config.keep_checkpoints is not None and config.checkpointing_steps is None:
        problems.append("--keep_checkpoints needs checkpoints; give --checkpointing_steps.")
    if "none" in config.report_to and len(config.report_to) > 1:
        problems.append("--report_to none stands alone.")
    known = {field.name for field in fields(GPTConfig)}
    for name in config.change_on_resume:
        if name not in known:
            problems.append(f"--change_on_resume names '{name}', which is no option.")
    if config.kfac:
        problems.append("--kfac is not available yet; leave it out to train with AdamW.")
    return problems
