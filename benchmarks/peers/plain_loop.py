"""Train in the loop of the libraries' introductions, on any device; print speed and memory.

python -m benchmarks.peers.plain_loop MODEL_FOLDER TOKENS '{"steps": ..., "precision": "bf16", ...}'
"""

import json
import statistics
import sys
import time

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def main() -> None:
    """Train, then print tokens per second after the warm-up and the peak of the device's memory."""
    folder, tokens, text = sys.argv[1:]
    sizes = json.loads(text)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)
    half = _HALF.get(sizes["precision"])
    scaler = torch.amp.GradScaler(device.type, enabled=half is torch.float16)
    batch, length = sizes["batch_size"], sizes["block_size"]
    ids = np.fromfile(tokens, dtype=np.uint16)[: batch * length].astype(np.int64)
    inputs = torch.from_numpy(ids).view(batch, length).to(device)
    times = []
    for _ in range(sizes["steps"]):
        began = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=half, enabled=half is not None):
            loss = model(input_ids=inputs, labels=inputs).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    figures = {"tokens_per_second": batch * length / statistics.median(times[sizes["warm_up"] :])}
    if on_gpu:
        figures["memory_megabytes"] = torch.cuda.max_memory_allocated() / 1e6
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
