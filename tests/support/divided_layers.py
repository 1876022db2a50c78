"""Models and batches that tensor-parallel ranks train together in a few steps."""

import torch
from transformers import AutoModelForCausalLM

from llm.data.loader import MicroBatch
from llm.models.attention import disable_packing_detection
from llm.models.loss import LanguageModelLoss
from llm.optim.run_optimizer import OptimizerFactory
from tests.support.layouts import make_optimizer, make_strategy
from tests.support.models import tiny_config

BATCH, LENGTH, STEPS = 8, 12, 3
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
CHANGES = {
    **dict.fromkeys(("llama", "mistral", "qwen2"), HEADS),
    "qwen3": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    # A vocabulary that no number of ranks divides, tied to the head.
    "gpt2": {"n_head": 4, "vocab_size": 321, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
    "gpt_neo": {"embed_dropout": 0, "attention_dropout": 0, "resid_dropout": 0},
    "opt": {"dropout": 0, "attention_dropout": 0, "pad_token_id": 1},
    "gpt_neox": {"tie_word_embeddings": True},
    "phi": {"attention_dropout": 0, "resid_pdrop": 0},  # its head has a bias
}


def make_model(family: str, **changes):
    torch.manual_seed(0)
    config = tiny_config(family, **{**CHANGES[family], **changes})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # a bias of zeros or a gain of ones would hide a mistake
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn(parameter.shape)
    return model


def prepare(
    model,
    sizes: dict[str, int],
    *,
    chunked: bool = True,
    aligned: bool = False,
    z_loss: float = 0,
    mixed_precision: str = "no",
    sequence_parallel: bool = False,
):
    """A strategy that trains the model on the ranks of a layout."""
    disable_packing_detection()
    strategy = make_strategy(sizes, mixed_precision, sequence_parallel=sequence_parallel)

    loss = LanguageModelLoss(model, chunked=chunked, aligned=aligned, z_loss=z_loss)
    strategy.prepare(loss, OptimizerFactory(make_optimizer).make)
    return strategy


def micro_batches(strategy, step: int, accumulation: int):
    """This rank's share of a step's batch, and the number of tokens of the whole one."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(320, (BATCH, LENGTH + 1), generator=generator)
    inputs, labels = tokens[:, :-1], tokens[:, 1:].clone()
    labels[0, : LENGTH // 2] = -100  # an uneven number of tokens on the ranks
    size = BATCH // (strategy.data_ranks * accumulation)
    starts = range(strategy.data_rank * size, BATCH, strategy.data_ranks * size)
    parts = [slice(start, start + size) for start in starts]
    return [MicroBatch(inputs[p], labels[p]) for p in parts], int((labels != -100).sum())


def take_steps(strategy, accumulation: int) -> torch.Tensor:
    """Loss, norm and whether the step was skipped, of a few steps and then of an evaluation."""
    seen = []
    for step in range(STEPS):
        torch.manual_seed(step)  # as the loop does
        batches, num_tokens = micro_batches(strategy, step, accumulation)
        loss = strategy.forward_backward(batches, num_tokens=num_tokens)
        norm, skipped = strategy.optimizer_step(0.5)
        seen.append([strategy.reduce_sum(loss.clone()).item(), norm.item(), skipped.item()])
    batches, _ = micro_batches(strategy, STEPS, accumulation)
    evaluated = sum(torch.stack(strategy.evaluate(batch)) for batch in batches)
    seen.append([*strategy.reduce_sum(evaluated).tolist(), 0.0])
    return torch.tensor(seen)
