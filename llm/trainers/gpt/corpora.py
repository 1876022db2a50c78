"""From the options to the tokens that a run trains and evaluates on."""

import logging
import os
from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from llm.config import GPTConfig
from llm.data.corpus import Corpus, open_corpus
from llm.data.documents import DocumentEnds
from llm.data.memory import hold_in_memory
from llm.data.token_corpus import TokenFileChecks, open_token_corpus
from llm.errors import ConfigError
from llm.runtime import launch_id
from llm.text_tokenizer import from_transformers
from llm.tokenizer import fingerprint

logger = logging.getLogger("llm")


def document_ends(config: GPTConfig, tokenizer: PreTrainedTokenizerBase) -> DocumentEnds | None:
    """How to keep the documents of a sample apart, if they shall be.

    Raises:
        ConfigError: The tokenizer has no end-of-text token.
    """
    if not (config.reset_position_ids or config.reset_attention_mask):
        return None
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            "--reset_position_ids and --reset_attention_mask need an end-of-text token between "
            "documents, and the tokenizer has none; use one that has."
        )
    return DocumentEnds(
        int(tokenizer.eos_token_id),
        positions=config.reset_position_ids,
        attention=config.reset_attention_mask,
    )


def open_corpus_of(
    config: GPTConfig,
    model_config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    ends: DocumentEnds | None,
) -> Corpus:
    """Training and validation tokens, out of token files or of text.

    Raises:
        LLMError: The data cannot be read, or do not fit the tokenizer or the model.
    """
    vocab_size = max(len(tokenizer), model_config.get_text_config().vocab_size)
    if config.data_path or config.train_data_path or config.valid_data_path:
        return open_token_corpus(
            data_path=config.data_path,
            train_data_path=config.train_data_path,
            valid_data_path=config.valid_data_path,
            split=config.split,
            checks=TokenFileChecks(
                tokenizer_fingerprint=fingerprint(tokenizer),
                force=config.force,
                vocab_size=vocab_size,
                eos_token_id=None if ends is None else ends.eos_token_id,
            ),
        )
    cache = config.data_cache_dir or os.environ.get("LLM_CACHE_DIR") or "~/.cache/llm"
    return open_corpus(
        dataset_name=config.dataset_name,
        dataset_config_name=config.dataset_config_name,
        train_file=_path(config.train_file),
        validation_file=_path(config.validation_file),
        validation_split_percentage=config.validation_split_percentage,
        text_column=config.text_column,
        keep_linebreaks=not config.no_keep_linebreaks,
        trust_remote_code=config.trust_remote_code,
        tokenizer=from_transformers(tokenizer, tokenizer.name_or_path),
        vocab_size=vocab_size,
        append_eos=config.append_eos,
        preprocessing_num_workers=config.preprocessing_num_workers,
        cache_dir=Path(cache).expanduser(),
        overwrite_cache=config.overwrite_cache,
        launch=launch_id(),
        progress=_report_progress,
    )


def _path(name: str | None) -> Path | None:
    return None if name is None else Path(name)


def _report_progress(rows: int, tokens: int, num_bytes: int) -> None:
    logger.info(f"tokenising: {rows:,} rows, {num_bytes / 1e6:,.1f} MB, {tokens:,} tokens")


def hold_corpus_in_memory(corpus: Corpus, *, training: bool) -> None:
    """Copy what will be read of the token files into main memory; one rank of a node calls it."""
    for part in (*(corpus.train if training else ()), *corpus.validation):
        if part.weight > 0:
            hold_in_memory(part.stream)
