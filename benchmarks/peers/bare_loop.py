"""Train our model with our kernels in a minimal loop, without data, log and saving.

python -m benchmarks.peers.bare_loop MODEL_FOLDER TOKENS '{"steps": ..., ...}'
"""

import json
import statistics
import sys
import time

import numpy as np
import torch
from transformers import AutoConfig

from llm.models.build import build_model
from llm.models.loss import LanguageModelLoss
from llm.models.options import ModelOptions
from llm.optim.adamw_and_sgd import make_adamw
from llm.optim.options import OptimizerOptions
from llm.runtime.process_settings import restart_with_kept_memory


def main() -> None:
    """Train, then print tokens per second after the warm-up."""
    folder, tokens, text = sys.argv[1:]
    sizes = json.loads(text)
    config = AutoConfig.from_pretrained(folder)
    model = build_model(
        ModelOptions(),
        config,
        weights_from=None,
        seed=1,
        device=torch.device("cpu"),
        vocab_size=config.vocab_size,
    )
    loss = LanguageModelLoss(model)
    optimizer = make_adamw(OptimizerOptions(learning_rate=1e-3, weight_decay=0.1), model)
    batch, length = sizes["batch_size"], sizes["block_size"]
    ids = np.fromfile(tokens, dtype=np.uint16)[: batch * (length + 1)].astype(np.int64)
    windows = torch.from_numpy(ids).view(batch, length + 1)
    inputs, labels = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
    times = []
    for _ in range(sizes["steps"]):
        began = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        objective, _ = loss(inputs, labels)
        (objective / (batch * length)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        times.append(time.perf_counter() - began)
    # The median tenth, as in our log, so that slow steps count in both.
    counted = times[sizes["warm_up"] :]
    tenth = max(1, len(times) // 10)
    tenths = [counted[first : first + tenth] for first in range(0, len(counted), tenth)]
    seconds = statistics.median(statistics.fmean(part) for part in tenths)
    print(json.dumps({"tokens_per_second": batch * length / seconds}))


if __name__ == "__main__":
    restart_with_kept_memory()
    main()
