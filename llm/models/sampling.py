"""Samples text from a model."""

from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from llm.errors import DivergedError
from llm.models.attention import evaluation_mode
from llm.models.configuration import max_positions
from llm.models.init import keyed_generator
from llm.tokenizers.prompts import encode_prompt


def sample_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt: str,
    max_new_tokens: int,
    seed: int,
    **generation: Any,
) -> str:
    """Continue a text with the model.

    Args:
        model: A causal language model; its mode is restored.
        tokenizer: The tokenizer that it was trained with. Its template is added to the prompt.
        prompt: The beginning of the text; may be empty.
        max_new_tokens: Maximum number of tokens to add; fewer if the model has no more positions.
        seed: Keys the draws: the same seed gives the same text.
        generation: Further arguments of `generate`, such as temperature, top_p or a streamer.

    Returns:
        The prompt and its continuation.

    Raises:
        DataError: The tokenizer fails on the prompt.
        DivergedError: The model's logits are not finite.
    """
    start = encode_prompt(tokenizer, prompt)
    end = tokenizer.eos_token_id
    if not start:
        start = [end if end is not None else 0]
    limit = max_positions(model.config)
    if limit is not None:
        # A long prompt is cut on the left, to half of the positions or more.
        start = start[-max(1, limit // 2, limit - max_new_tokens) :]
        max_new_tokens = min(max_new_tokens, limit - len(start))
    new = continue_tokens(
        model, tokenizer, start, max_new_tokens=max_new_tokens, seed=seed, **generation
    )
    text: str = tokenizer.decode(start + new, skip_special_tokens=True)
    return text


@torch.no_grad()
def continue_tokens(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    start: list[int],
    *,
    max_new_tokens: int,
    seed: int,
    **generation: Any,
) -> list[int]:
    """Generate a continuation of tokens.

    Args:
        model: A causal language model; its mode is restored.
        tokenizer: The tokenizer that it was trained with.
        start: At least one token; the model must have positions for these and the new tokens.
        max_new_tokens: Maximum number of tokens to add.
        seed: Keys the draws.
        generation: Further arguments of `generate`.

    Raises:
        DivergedError: The model's logits are not finite.
    """
    end = tokenizer.eos_token_id
    input_ids = torch.tensor([start], device=model.device)
    # Never draw rows of the head that are not tokens, such as padding.
    unused = list(range(len(tokenizer), model.get_input_embeddings().weight.shape[0]))
    # A compiled model would recompile as the text grows.
    eager = torch.compiler.set_stance("force_eager")
    with evaluation_mode(model), eager, keyed_generator(seed, "sample", model.device):
        output = model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=max_new_tokens,
            pad_token_id=end if end is not None else 0,
            eos_token_id=end,
            suppress_tokens=unused or None,
            logits_processor=[partial(_check_logits, model)],
            **{"do_sample": True, **generation},
        )
    new: list[int] = output[0, len(start) :].tolist()
    return new


def _check_logits(model: PreTrainedModel, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return the logits if a token can be drawn from them, else raise."""
    # -inf may exclude a token; NaN and inf are visible in the maximum.
    if bool(logits.amax(dim=-1).isfinite().all()):
        return logits
    finite = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    what = "logits are not finite, although its weights are" if finite else "weights are not finite"
    raise DivergedError(f"The model cannot write: its {what}.")
