"""Answers task requests with the model in training, in any layout."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from llm.data.loader import MicroBatch
from llm.errors import DivergedError
from llm.models.sampling import continue_tokens
from llm.parallel.base import AcceleratedStrategy
from llm.runtime.agreement import gather
from llm.runtime.labels import IGNORED


class Scored(NamedTuple):
    """A text with an end to score.

    Attributes:
        tokens: Its last tokens, at most one more than the model has positions.
        num_scored: Number of tokens at its end; their log-probabilities are summed.
    """

    tokens: list[int]
    num_scored: int


class Prompt(NamedTuple):
    """A text that the model continues.

    Attributes:
        tokens: Its last tokens; they leave positions for the new ones.
        max_new_tokens: Maximum number of tokens to add.
        generation: Further arguments of `generate`.
    """

    tokens: list[int]
    max_new_tokens: int
    generation: dict[str, Any]


def score(
    strategy: AcceleratedStrategy,
    texts: Sequence[Scored],
    *,
    batch_size: int,
    multiple: int,
    on_batch: Callable[[], None],
) -> list[tuple[float, bool]]:
    """Return the log-probability of each text's end, and whether its tokens are the likeliest.

    The texts are sorted by length and distributed over the data slices in batches. All ranks get
    the same number of batches, padded with the last text, because every forward pass gathers
    sharded weights.

    Args:
        strategy: The prepared model; every rank calls this with the same texts.
        texts: The texts.
        batch_size: Texts per batch.
        multiple: The length of a batch's rows is padded to a multiple of this number.
        on_batch: Called after each batch.
    """
    if not texts:
        return []
    order = sorted(range(len(texts)), key=lambda number: -len(texts[number].tokens))
    share = batch_size * strategy.data_ranks
    order += order[-1:] * (-len(order) % share)
    scores = []
    for start in range(strategy.data_rank * batch_size, len(order), share):
        batch = [texts[number] for number in order[start : start + batch_size]]
        micro_batch = _micro_batch(batch, multiple, strategy.device)
        likeliest, log_probs = strategy.predict(micro_batch)
        wrong = (micro_batch.labels != IGNORED) & (likeliest != micro_batch.labels)
        scores.append(torch.stack([log_probs.sum(dim=1), (~wrong.any(dim=1)).float()], dim=1))
        on_batch()
    gathered = strategy.gather(torch.stack(scores)).unflatten(0, (strategy.data_ranks, -1))
    in_order = gathered.transpose(0, 1).flatten(0, 2).tolist()
    answers = dict(zip(order, in_order, strict=True))
    return [(answers[number][0], bool(answers[number][1])) for number in range(len(texts))]


def _micro_batch(texts: Sequence[Scored], multiple: int, device: torch.device) -> MicroBatch:
    """Return texts as inputs and labels, padded on the right, where no token attends."""
    length = max(len(text.tokens) for text in texts) - 1
    input_ids = torch.zeros(len(texts), length + -length % multiple, dtype=torch.int64)
    labels = torch.full_like(input_ids, IGNORED)
    for row, (tokens, num_scored) in enumerate(texts):
        end = len(tokens) - 1
        input_ids[row, :end] = torch.tensor(tokens[:-1])
        labels[row, end - num_scored : end] = torch.tensor(tokens[-num_scored:])
    return MicroBatch(input_ids.to(device), labels.to(device))


def generate(
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
        seed: Keys the draws, if a task samples.
        on_batch: Called after each text, on all ranks equally often.
    """
    local_texts = {}
    num_rounds = -(-len(prompts) // strategy.world_size)
    for number in range(strategy.rank, num_rounds * strategy.world_size, strategy.world_size):
        if number >= len(prompts):
            on_batch()
            continue
        tokens, max_new_tokens, generation = prompts[number]
        try:
            with strategy.autocast():
                new = continue_tokens(
                    model,
                    tokenizer,
                    tokens,
                    max_new_tokens=max_new_tokens,
                    seed=seed + number,
                    **generation,
                )
        except DivergedError:
            new = []
        local_texts[number] = tokenizer.decode(new, skip_special_tokens=True)
        on_batch()
    parts = gather(local_texts)
    return [parts[number % strategy.world_size][number] for number in range(len(prompts))]
