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
    prompt_ids = encode_prompt(tokenizer, prompt)
    eos_token_id = tokenizer.eos_token_id
    if not prompt_ids:
        prompt_ids = [eos_token_id if eos_token_id is not None else 0]
    position_limit = max_positions(model.config)
    if position_limit is not None:
        # A long prompt is cut on the left, to half of the positions or more.
        prompt_ids = prompt_ids[-max(1, position_limit // 2, position_limit - max_new_tokens) :]
        max_new_tokens = min(max_new_tokens, position_limit - len(prompt_ids))
    new_ids = continue_tokens(
        model, tokenizer, prompt_ids, max_new_tokens=max_new_tokens, seed=seed, **generation
    )
    text: str = tokenizer.decode(prompt_ids + new_ids, skip_special_tokens=True)
    return text


@torch.no_grad()
def continue_tokens(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: list[int],
    *,
    max_new_tokens: int,
    seed: int,
    **generation: Any,
) -> list[int]:
    """Generate a continuation of tokens.

    Args:
        model: A causal language model; its mode is restored.
        tokenizer: The tokenizer that it was trained with.
        prompt_ids: At least one token; the model must have positions for the prompt and the new
            tokens.
        max_new_tokens: Maximum number of tokens to add.
        seed: Keys the draws.
        generation: Further arguments of `generate`.

    Returns:
        The new tokens.

    Raises:
        DivergedError: The model's logits are not finite.
    """
    eos_token_id = tokenizer.eos_token_id
    input_ids = torch.tensor([prompt_ids], device=model.device)
    # Never draw rows of the head that are not tokens, such as padding.
    excluded_ids = list(range(len(tokenizer), model.get_input_embeddings().weight.shape[0]))
    # A compiled model would recompile as the text grows.
    eager_mode = torch.compiler.set_stance("force_eager")
    with evaluation_mode(model), eager_mode, keyed_generator(seed, "sample", model.device):
        output = model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=max_new_tokens,
            pad_token_id=eos_token_id if eos_token_id is not None else 0,
            eos_token_id=eos_token_id,
            suppress_tokens=excluded_ids or None,
            logits_processor=[partial(_require_finite_logits, model)],
            **{"do_sample": True, **generation},
        )
    new_ids: list[int] = output[0, len(prompt_ids) :].tolist()
    return new_ids


def _require_finite_logits(
    model: PreTrainedModel, token_ids: torch.Tensor, logits: torch.Tensor
) -> torch.Tensor:
    """Return the logits, [batch, columns], if a token can be drawn from them.

    Raises:
        DivergedError: A logit is infinite or NaN.
    """
    # -inf may exclude a token; NaN and inf are visible in the maximum.
    if bool(logits.amax(dim=-1).isfinite().all()):
        return logits
    has_finite_weights = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    cause = "weights are not finite"
    if has_finite_weights:
        cause = "logits are not finite, although its weights are"
    raise DivergedError(f"The model cannot write: its {cause}.")
