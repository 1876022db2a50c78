"""Rules that tie the options of model and tokenizer together; see `llm/rules.py`."""

from llm.config import GPTConfig

SHAPE = ("model_size", "num_layers", "hidden_size", "num_attention_heads")
"""Options that set a model's layers, width and heads."""


def named_problems(config: GPTConfig) -> list[str]:
    """Complaints about what names the model."""
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


def model_problems(config: GPTConfig) -> list[str]:
    """Complaints about the model and its tokenizer."""
    problems = [*named_problems(config), *shape_problems(config)]
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


def shape_options(config: GPTConfig) -> list[str]:
    """The options given that set a model's layers, width and heads."""
    return [name for name in SHAPE if getattr(config, name) is not None]


def shape_problems(config: GPTConfig) -> list[str]:
    """Complaints about its layers, width and heads."""
    given = [name for name in SHAPE[1:] if getattr(config, name) is not None]
    named = config.model_name_or_path or config.config_name or config.model_type
    if config.model_size is not None and given:
        return [
            f"--model_size {config.model_size} sets --{given[0]} already; leave one of them out."
        ]
    if given and not named and len(given) < 3:
        missing = " and ".join(f"--{name}" for name in SHAPE[1:] if name not in given)
        return [
            f"--{given[0]} changes a model that is named by --model_name_or_path, --config_name or "
            f"--model_type; without one, give {missing} too."
        ]
    return []
