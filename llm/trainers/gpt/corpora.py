"""From the options to the tokens that a run trains and evaluates on."""

import logging
import os
from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from llm.data.corpus import Corpus
from llm.data.documents import DocumentEnds
from llm.data.formats.megatron import token_dtype
from llm.data.in_memory import hold_in_memory
from llm.data.preparation.cache import TokenCache
from llm.data.preparation.encoder import Encoding, end_token
from llm.data.preparation.workers import bounded_workers
from llm.data.text.hub import dataset_sources
from llm.data.text.sources import Source, file_source
from llm.data.token_corpus import TokenFileChecks, open_text_corpus, open_token_corpus
from llm.errors import ConfigError
from llm.runtime.world import launch_id
from llm.tokenizers.fast import from_transformers
from llm.tokenizers.load import fingerprint
from llm.trainers.gpt.config import GPTConfig

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
    checks = TokenFileChecks(
        tokenizer_fingerprint=fingerprint(tokenizer),
        force=config.force,
        vocab_size=vocab_size,
        eos_token_id=None if ends is None else ends.eos_token_id,
    )
    if config.data_path or config.train_data_path or config.valid_data_path:
        return open_token_corpus(
            data_path=config.data_path,
            train_data_path=config.train_data_path,
            valid_data_path=config.valid_data_path,
            split=config.split,
            checks=checks,
        )
    text_tokenizer = from_transformers(tokenizer, tokenizer.name_or_path)
    folder = config.data_cache_dir or os.environ.get("LLM_CACHE_DIR") or "~/.cache/llm"
    cache = TokenCache(
        folder=Path(folder).expanduser(),
        encoding=Encoding(
            tokenizer=text_tokenizer,
            end_token=end_token(text_tokenizer, config.append_eos),
            dtype=token_dtype(max(vocab_size, text_tokenizer.size)),
        ),
        workers=bounded_workers(config.preprocessing_num_workers),
        overwrite=config.overwrite_cache,
        launch=launch_id(),
    )
    sources = _sources(config)
    prepared = {
        split: cache.token_files(source, optional=split == "validation")
        for split, source in sources.items()
    }
    return open_text_corpus(
        train=prepared.get("train"),
        validation=prepared.get("validation"),
        validation_split_percentage=config.validation_split_percentage,
        checks=checks,
    )


def _sources(config: GPTConfig) -> dict[str, Source]:
    """The texts to train and to evaluate on, by the name of their split."""
    sources: dict[str, Source] = {}
    if config.dataset_name is not None:
        sources = dataset_sources(
            config.dataset_name,
            config.dataset_config_name,
            text_column=config.text_column,
            trust_remote_code=config.trust_remote_code,
        )
    for split in ("train", "validation"):
        name = getattr(config, f"{split}_file")
        if name is None:
            continue
        if config.text_column is not None and ".txt" in Path(name).suffixes:
            logger.warning(
                f"--text_column {config.text_column} has no effect on {name}: a text has no columns"
            )
        sources[split] = file_source(
            Path(name),
            text_column=config.text_column,
            keep_linebreaks=not config.no_keep_linebreaks,
            option=f"--{split}_file",
        )
    return sources


def hold_corpus_in_memory(corpus: Corpus, *, training: bool) -> None:
    """Copy what will be read of the token files into main memory; one rank of a node calls it."""
    for part in (*(corpus.train if training else ()), *corpus.validation):
        if part.weight > 0:
            hold_in_memory(part.stream)
