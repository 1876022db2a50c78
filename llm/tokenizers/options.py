"""Options of the tokenizer."""

from llm.config.options import option, option_group

TOKENIZER_FILES = ("tokenizer_name", "vocab_file", "merges_file")
"""Options that name the tokenizer, instead of `model_name_or_path`."""


@option_group("Tokenizer", resume="fixed")
class TokenizerOptions:
    """The tokenizer that turns text into ids."""

    tokenizer_name: str | None = option(
        None,
        "Hub name, folder or tokenizer.json; by default the model's or the token files'.",
        path=True,
    )
    vocab_file: str | None = option(
        None, "GPT-2 style vocab.json, with merges_file.", requires=("merges_file",), path=True
    )
    merges_file: str | None = option(
        None,
        "GPT-2 style merges.txt, with vocab_file.",
        requires=("vocab_file",),
        path=True,
        aliases=("merge_file",),
    )
    use_slow_tokenizer: bool = option(False, "Use the tokenizer's Python implementation.")


def tokenizer_problems(options: TokenizerOptions) -> list[str]:
    """Return faults of the tokenizer options, one sentence each."""
    if options.vocab_file is not None and options.tokenizer_name is not None:
        return ["--tokenizer_name and --vocab_file name two tokenizers; give one."]
    return []
