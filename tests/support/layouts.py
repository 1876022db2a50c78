"""Strategies of any layout over the ranks of a test, with tiny models and the batches of a step."""

import math
import os
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from llm.data.loader import MicroBatch
from llm.models.attention import disable_packing_detection
from llm.models.loss import LanguageModelLoss
from llm.optim.adamw_and_sgd import make_adamw
from llm.optim.options import OptimizerOptions
from llm.optim.run_optimizer import OptimizerFactory
from llm.parallel.accelerator import make_accelerator
from llm.parallel.base import AcceleratedStrategy
from llm.parallel.dims import ParallelDims
from llm.parallel.fsdp import ShardedStrategy
from llm.parallel.options import ParallelOptions, PrecisionOptions
from llm.parallel.pipeline.pipelined import PipelineStrategy
from tests.support.models import still_model, tiny_config

BATCH, LENGTH, STEPS = 8, 16, 3
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
_CHANGES = {
    **dict.fromkeys(("llama", "mistral", "qwen2"), _HEADS),
    "qwen3": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    # A vocabulary that no number of ranks divides, tied to the head.
    "gpt2": {"n_head": 4, "vocab_size": 321, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
    "gpt_neo": {"embed_dropout": 0, "attention_dropout": 0, "resid_dropout": 0},
    "opt": {"dropout": 0, "attention_dropout": 0, "pad_token_id": 1},
    "gpt_neox": {"tie_word_embeddings": True},
    "phi": {"attention_dropout": 0, "resid_pdrop": 0},  # its head has a bias
}


MODEL_OPTIONS = {
    "no_bias": True,
    "pad_vocab_to_multiple_of": 129,  # 387 rows, which four ranks cannot divide evenly
    "tied_gradients": True,
    "fused_gelu": True,
}


def cpu_accelerator(mixed_precision: str = "no", **options: Any) -> Any:
    precision = PrecisionOptions(mixed_precision=mixed_precision, **options)
    return make_accelerator(precision, device=torch.device("cpu"))


def dims_of(**sizes: int) -> ParallelDims:
    """The dims with these sizes, such as shard=2; the ranks that are left replicate."""
    ranks = int(os.environ["WORLD_SIZE"])
    dividing = math.prod(size for axis, size in sizes.items() if axis != "expert")
    return ParallelDims(replicate=ranks // dividing, **sizes)


def make_strategy(
    sizes: dict[str, int], mixed_precision: str = "no", **options: Any
) -> AcceleratedStrategy:
    """A strategy on the ranks that there are, without a model yet.

    Args:
        sizes: As for `dims_of`.
        mixed_precision: Of `PrecisionOptions`.
        options: Of `ParallelOptions`, for a pipeline or shards.
    """
    accelerator, dims = cpu_accelerator(mixed_precision), dims_of(**sizes)
    if dims.pipeline > 1:
        return PipelineStrategy(ParallelOptions(**options), accelerator, dims)
    if dims.world_size > 1:
        return ShardedStrategy(ParallelOptions(**options), accelerator, dims)
    return AcceleratedStrategy(accelerator)


def make_data_parallel(
    mixed_precision: str = "no", *, family: str = "gpt2", **options: Any
) -> AcceleratedStrategy:
    """One device or DistributedDataParallel over all ranks, with a tiny model and AdamW.

    Args:
        mixed_precision: Of `PrecisionOptions`.
        family: Architecture of the model.
        options: The others of `PrecisionOptions`.
    """
    strategy = AcceleratedStrategy(cpu_accelerator(mixed_precision, **options))
    # Ranks that do not know of one another would pass every test here.
    assert strategy.world_size == int(os.environ["WORLD_SIZE"])
    disable_packing_detection()
    strategy.prepare(LanguageModelLoss(still_model(family)), OptimizerFactory(make_optimizer).make)
    return strategy


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """AdamW for comparisons of layouts: eps is above the rounding errors of their gradients."""
    options = OptimizerOptions(learning_rate=1e-2, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-4)
    return make_adamw(options, model)


def make_sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters())


def make_divisible_model(family: str, **changes: Any) -> PreTrainedModel:
    """A model without dropout whose heads 4 tensor-parallel ranks can divide."""
    torch.manual_seed(0)
    config = tiny_config(family, **{**_CHANGES[family], **changes})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # a bias of zeros or a gain of ones would hide a mistake
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn(parameter.shape)
    return model


def prepare(
    model: PreTrainedModel,
    sizes: dict[str, int],
    *,
    chunked: bool = True,
    aligned: bool = False,
    z_loss: float = 0,
    mixed_precision: str = "no",
    sequence_parallel: bool = False,
) -> AcceleratedStrategy:
    """A strategy that trains the model on the ranks of a layout."""
    disable_packing_detection()
    strategy = make_strategy(sizes, mixed_precision, sequence_parallel=sequence_parallel)
    loss = LanguageModelLoss(model, is_chunked=chunked, is_aligned=aligned, z_loss=z_loss)
    strategy.prepare(loss, OptimizerFactory(make_optimizer).make)
    return strategy


def step_data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs and labels of a step, int64 [BATCH, LENGTH] each."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(320, (BATCH, LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, : LENGTH // 2] = -100  # an uneven number of tokens on the ranks
    return tokens[:, :-1], labels


def share(
    step: int, strategy: AcceleratedStrategy, accumulation: int
) -> tuple[list[MicroBatch], int]:
    """This rank's micro-batches of a step, and the number of tokens on all ranks."""
    inputs, labels = step_data(step)
    size = BATCH // (strategy.data_ranks * accumulation)
    starts = range(strategy.data_rank * size, BATCH, strategy.data_ranks * size)
    parts = [slice(start, start + size) for start in starts]
    return [MicroBatch(inputs[p], labels[p]) for p in parts], int((labels != -100).sum())


def take_steps(strategy: AcceleratedStrategy, accumulation: int) -> torch.Tensor:
    """Loss, norm and whether the step was skipped, of a few steps and then of an evaluation."""
    seen = []
    for step in range(STEPS):
        torch.manual_seed(step)  # as the loop does
        batches, num_tokens = share(step, strategy, accumulation)
        loss = strategy.forward_backward(batches, num_tokens=num_tokens)
        norm, skipped = strategy.optimizer_step(0.5)
        seen.append([strategy.reduce_sum(loss.clone()).item(), norm.item(), skipped.item()])
    batches, _ = share(STEPS, strategy, accumulation)
    evaluated = sum(torch.stack(strategy.evaluate(batch)) for batch in batches)
    seen.append([*strategy.reduce_sum(evaluated).tolist(), 0.0])
    return torch.tensor(seen)
