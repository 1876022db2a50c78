"""Save a tokenizer next to a model so that transformers' `AutoTokenizer` gives its ids."""

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from llm.errors import one_line
from llm.tokenizers.load_tokenizer import PROBE, fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("llm.tokenizers")


def save_next_to_model(
    tokenizer: "PreTrainedTokenizerBase", folder: Path, *, trust_remote_code: bool
) -> None:
    """Save a tokenizer; log a warning if `AutoTokenizer` may give other ids.

    Args:
        tokenizer: The tokenizer.
        folder: A folder with the model's configuration.
        trust_remote_code: Whether to run the Python code of a tokenizer.
    """
    tokenizer.save_pretrained(folder)
    reason = _reason_for_other_ids(tokenizer, folder, trust_remote_code=trust_remote_code)
    if reason is not None and getattr(tokenizer, "backend_tokenizer", None) is not None:
        _make_classes_follow_file(tokenizer, folder / "tokenizer_config.json")
        reason = _reason_for_other_ids(tokenizer, folder, trust_remote_code=trust_remote_code)
    if reason is not None:
        logger.warning(
            f"AutoTokenizer may give other ids than in training, because it {reason}. Read the "
            f"exported tokenizer with transformers.{type(tokenizer).__name__}.from_pretrained."
        )


def _reason_for_other_ids(
    tokenizer: "PreTrainedTokenizerBase", folder: Path, *, trust_remote_code: bool
) -> str | None:
    from transformers import AutoTokenizer

    try:
        reloaded = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
        same_rules = fingerprint(reloaded) == fingerprint(tokenizer)
        same_template = reloaded(PROBE)["input_ids"] == tokenizer(PROBE)["input_ids"]
    except Exception as error:  # the libraries raise many types of errors
        return f"cannot read it: {one_line(error)}"
    if same_rules and same_template:
        return None
    return f"reads it as {type(reloaded).__name__}"


def _make_classes_follow_file(tokenizer: "PreTrainedTokenizerBase", config_path: Path) -> None:
    """Change the settings so that every class of transformers takes tokenizer.json unchanged.

    The type of some models chooses the class. All classes pass this key on to the method that reads
    the file; `AutoTokenizer` does not read it, so it cannot make anyone trust or run code.
    """
    settings = json.loads(config_path.read_text(encoding="utf-8"))
    settings["trust_remote_code"] = True
    for role in tokenizer.SPECIAL_TOKENS_ATTRIBUTES:
        settings.setdefault(role, None)  # otherwise some classes add tokens by default
    config_path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
