"""Save a tokenizer next to a model so that transformers' `AutoTokenizer` gives its ids."""

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from llm.errors import one_line
from llm.tokenizers.load_tokenizer import PROBE, compute_fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("llm.tokenizers")


def save_tokenizer_with_model(
    tokenizer: "PreTrainedTokenizerBase", folder: Path, *, trust_remote_code: bool
) -> None:
    """Save a tokenizer in a model's folder; log a warning if `AutoTokenizer` may give other ids."""
    tokenizer.save_pretrained(folder)
    mismatch = _find_id_mismatch(tokenizer, folder, trust_remote_code=trust_remote_code)
    if mismatch is not None and getattr(tokenizer, "backend_tokenizer", None) is not None:
        _prevent_class_overrides(tokenizer, folder / "tokenizer_config.json")
        mismatch = _find_id_mismatch(tokenizer, folder, trust_remote_code=trust_remote_code)
    if mismatch is not None:
        logger.warning(
            f"AutoTokenizer may give other ids than in training, because it {mismatch}. Read the "
            f"exported tokenizer with transformers.{type(tokenizer).__name__}.from_pretrained."
        )


def _find_id_mismatch(
    tokenizer: "PreTrainedTokenizerBase", folder: Path, *, trust_remote_code: bool
) -> str | None:
    """Return how the tokenizer that `AutoTokenizer` reads differs; None if its ids are equal."""
    from transformers import AutoTokenizer

    try:
        reloaded = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
        has_same_rules = compute_fingerprint(reloaded) == compute_fingerprint(tokenizer)
        has_same_template = reloaded(PROBE)["input_ids"] == tokenizer(PROBE)["input_ids"]
    except Exception as error:  # the libraries raise many types of errors
        return f"cannot read it: {one_line(error)}"
    if has_same_rules and has_same_template:
        return None
    return f"reads it as {type(reloaded).__name__}"


def _prevent_class_overrides(tokenizer: "PreTrainedTokenizerBase", config_path: Path) -> None:
    """Change `tokenizer_config.json` so that no class of transformers overrides `tokenizer.json`.

    For some types of models, `AutoTokenizer` takes a class with its own rules. With the key
    `trust_remote_code`, every class reads the rules of the file. `AutoTokenizer` ignores the key
    itself, so nobody runs code because of it.
    """
    tokenizer_config = json.loads(config_path.read_text(encoding="utf-8"))
    tokenizer_config["trust_remote_code"] = True
    for token_name in tokenizer.SPECIAL_TOKENS_ATTRIBUTES:
        # Without a value, some classes add a token by default.
        tokenizer_config.setdefault(token_name, None)
    config_path.write_text(json.dumps(tokenizer_config, indent=2) + "\n", encoding="utf-8")
