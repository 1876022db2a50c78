"""Answers task requests with the model in training, in any layout."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from llm.data.loader import MicroBatch
from llm.errors import DivergedError
from llm.models.sampling import continue_tokens
from llm.parallel.base import AcceleratedStrategy
from llm.runtime.agreement import gather
from llm.runtime.labels import IGNORED


class ScoredText(NamedTuple):
    """A text with an end to score.

    Attributes:
        tokens: The last tokens of the text, at most one more than the model has positions.
        num_scored: Number of tokens at the end; their log-probabilities are summed.
    """

    tokens: list[int]
    num_scored: int


class Prompt(NamedTuple):
    """A text that the model continues.

    Attributes:
        tokens: The last tokens of the text; they leave positions for the new ones.
        max_new_tokens: Maximum number of tokens to add.
        generation: Further arguments of transformers' `generate`.
    """

    tokens: list[int]
    max_new_tokens: int
    generation: dict[str, Any]


def score_texts(
    strategy: AcceleratedStrategy,
    texts: Sequence[ScoredText],
    *,
    batch_size: int,
    length_multiple: int,
    on_batch: Callable[[], None],
) -> list[tuple[float, bool]]:
    """Return the log-probability of each text's end, and whether greedy decoding would give it.

    The texts are sorted by length and distributed over the data slices in batches. All ranks get
    the same number of batches, padded with the last text, because every forward pass gathers
    sharded weights.

    Args:
        strategy: The prepared model; every rank calls this with the same texts.
        texts: The texts.
        batch_size: Texts per batch.
        length_multiple: The length of a batch's rows is padded to a multiple of this number.
        on_batch: Called after each batch.
    """
    if not texts:
        return []
    order = sorted(range(len(texts)), key=lambda text_index: -len(texts[text_index].tokens))
    texts_per_round = batch_size * strategy.data_ranks
    order += order[-1:] * (-len(order) % texts_per_round)
    scores_of_rounds = []
    for batch_start in range(strategy.data_rank * batch_size, len(order), texts_per_round):
        text_indices = order[batch_start : batch_start + batch_size]
        batch_texts = [texts[text_index] for text_index in text_indices]
        scores_of_rounds.append(_score_batch(strategy, batch_texts, length_multiple))
        on_batch()
    gathered_scores = strategy.gather(torch.stack(scores_of_rounds))
    # [data_ranks, rounds, batch_size, 2] to the order of the texts: by round, then by rank.
    scores_by_rank = gathered_scores.unflatten(0, (strategy.data_ranks, -1))
    ordered_scores = scores_by_rank.transpose(0, 1).flatten(0, 2).tolist()
    score_by_text = dict(zip(order, ordered_scores, strict=True))
    scores = [score_by_text[text_index] for text_index in range(len(texts))]
    return [(log_prob, bool(is_greedy)) for log_prob, is_greedy in scores]


def _score_batch(
    strategy: AcceleratedStrategy, texts: Sequence[ScoredText], length_multiple: int
) -> Tensor:
    """Return the log-probability of each text's end, and 1.0 if it is greedy, [texts, 2]."""
    micro_batch = _make_micro_batch(texts, length_multiple, strategy.device)
    predictions, log_probs = strategy.predict(micro_batch)
    is_wrong = (micro_batch.labels != IGNORED) & (predictions != micro_batch.labels)
    is_greedy = ~is_wrong.any(dim=1)
    return torch.stack([log_probs.sum(dim=1), is_greedy.float()], dim=1)


def _make_micro_batch(
    texts: Sequence[ScoredText], length_multiple: int, device: torch.device
) -> MicroBatch:
    """Return texts as inputs and labels, padded on the right, where no token attends."""
    length = max(len(text.tokens) for text in texts) - 1
    input_ids = torch.zeros(len(texts), length + -length % length_multiple, dtype=torch.int64)
    labels = torch.full_like(input_ids, IGNORED)
    for row, (tokens, num_scored) in enumerate(texts):
        end = len(tokens) - 1
        input_ids[row, :end] = torch.tensor(tokens[:-1])
        labels[row, end - num_scored : end] = torch.tensor(tokens[-num_scored:])
    return MicroBatch(input_ids.to(device), labels.to(device))


def continue_prompts(
    strategy: AcceleratedStrategy,
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    *,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    on_batch: Callable[[], None],
) -> list[str]:
    """Return the continuations of texts; each rank generates a share.

    Args:
        strategy: The prepared model; every rank calls this with the same prompts.
        model: The whole model.
        prompts: The texts.
        tokenizer: The run's tokenizer.
        seed: With the prompt's index, determines the random draws of tasks that sample.
        on_batch: Called after each text, on all ranks equally often.
    """
    local_texts = {}
    num_rounds = -(-len(prompts) // strategy.world_size)
    for prompt_index in range(strategy.rank, num_rounds * strategy.world_size, strategy.world_size):
        if prompt_index >= len(prompts):
            on_batch()
            continue
        tokens, max_new_tokens, generation_options = prompts[prompt_index]
        try:
            with strategy.autocast():
                new_tokens = continue_tokens(
                    model,
                    tokenizer,
                    tokens,
                    max_new_tokens=max_new_tokens,
                    seed=seed + prompt_index,
                    **generation_options,
                )
        except DivergedError:
            new_tokens = []
        local_texts[prompt_index] = tokenizer.decode(new_tokens, skip_special_tokens=True)
        on_batch()
    texts_by_rank = gather(local_texts)
    return [
        texts_by_rank[prompt_index % strategy.world_size][prompt_index]
        for prompt_index in range(len(prompts))
    ]
