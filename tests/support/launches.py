"""How many operations the optimizer's part of a step launches on the made-up device."""

import json
import sys
from collections import Counter
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _foreach_utils

from llm.data.loader import MicroBatch
from tests.support.made_up_run import Case, prepared

LATE = 64
"""A step at which the exact decompositions and short intervals of a run's start are over."""


def launches_of_updates(case: Case, steps: int) -> list[Counter[str]]:
    """Return the launches of some consecutive steps, without forward and backward passes.

    Clipping counts, and so do the curvature of K-FAC and the preconditioning by it; what its hooks
    launch in the backward pass does not. Call it in a process of its own.
    """
    # So that PyTorch clips by operations on lists, as on a GPU.
    _foreach_utils._foreach_supported_types.append(FakeTensor)
    with prepared(case) as (strategy, strict, config, _):
        tokens = torch.zeros(case.shape, dtype=torch.long, device=strategy.device)
        batch, counts = MicroBatch(tokens, tokens), []
        kfac = getattr(strategy.run_optimizer, "recorder", None)
        if kfac is not None:
            kfac.steps = LATE
        for state in strategy.optimizer.state.values():
            for key, tensor in state.items():
                if key.endswith("calls"):
                    tensor.fill_(LATE)
        for step in range(steps):
            strategy.set_learning_rate(1e-3)
            if step == 0 or kfac is not None:  # else the gradients stay
                strategy.forward_backward([batch], num_tokens=tokens.numel())
            strict.take_notes()
            strategy.optimizer_step(config.max_grad_norm)
            counts.append(strict.take_notes().launches)
        return counts


def main(options: dict[str, Any], steps: int) -> None:
    """Print the number of launches of each step, for a model that the options describe."""
    case = Case(1, options, family=None, shape=(1, 16))
    print(json.dumps([count.total() for count in launches_of_updates(case, steps)]))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]))
