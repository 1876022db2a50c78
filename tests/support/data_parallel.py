"""A tiny model, its data and the strategy of one device or of DistributedDataParallel."""

import os
from typing import Any

import torch

from llm.data.loader import MicroBatch
from llm.models.attention import disable_packing_detection
from llm.models.loss import LanguageModelLoss
from llm.optim.optimizers import make_adamw
from llm.optim.options import OptimizerOptions
from llm.optim.run_optimizer import OptimizerFactory
from llm.parallel.base import AcceleratedStrategy
from tests.support import layouts
from tests.support.models import still_model

BATCH, LENGTH = 8, 16


def step_data(step: int):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(320, (BATCH, LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, : LENGTH // 2] = -100  # an uneven number of tokens on the ranks
    return tokens[:, :-1], labels


def make_optimizer(model):
    options = OptimizerOptions(learning_rate=1e-2, weight_decay=0.1, betas=(0.9, 0.95))
    return make_adamw(options, model)


def make_strategy(mixed_precision: str = "no", **options: Any) -> AcceleratedStrategy:
    """The strategy of the ranks that there are, with precision `options`."""
    strategy = AcceleratedStrategy(layouts.cpu_accelerator(mixed_precision, **options))
    # Ranks that do not know of one another would pass every test here.
    assert strategy.world_size == int(os.environ["WORLD_SIZE"])
    disable_packing_detection()
    strategy.prepare(LanguageModelLoss(still_model()), OptimizerFactory(make_optimizer).make)
    return strategy


def share(step: int, strategy: AcceleratedStrategy, accumulation: int):
    input_ids, labels = step_data(step)
    size = BATCH // (strategy.world_size * accumulation)
    micro_batches = []
    for number in range(accumulation):
        first = (number * strategy.world_size + strategy.rank) * size
        part = slice(first, first + size)
        micro_batches.append(MicroBatch(input_ids[part], labels[part]))
    return micro_batches, int((labels != -100).sum())
