"""Train any model in the loop of nanoGPT; print a line with each reading of the loss.

The model of transformers and the loss are compiled as one, weights are float32 under bf16 autocast,
AdamW is fused, and batches are random windows, copied from pinned memory during the step before.

python -m benchmarks.peers.plain_loop MODEL_FOLDER TOKENS '{"steps": ..., "log_steps": ..., ...}'
"""

import json
import sys

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM


def main() -> None:
    """Train; print the finished steps and the peak of the device's memory."""
    folder, path, text = sys.argv[1:]
    sizes = json.loads(text)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    torch.set_float32_matmul_precision("high")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).to(device).train()
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=1e-4,
        betas=(0.9, 0.95),
        fused=True,
    )
    tokens = np.memmap(path, dtype=np.uint16, mode="r")
    length, batch_size = sizes["block_size"], sizes["batch_size"]

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(tokens) - length, (batch_size,)).tolist()
        windows = np.stack([tokens[at : at + length + 1] for at in starts]).astype(np.int64)
        ids = torch.from_numpy(windows)
        if on_gpu:
            ids = ids.pin_memory().to(device, non_blocking=True)
        return ids[:, :-1], ids[:, 1:]

    def loss_of(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=inputs, use_cache=False).logits
        return cross_entropy(logits.flatten(0, 1), labels.flatten())

    compiled = torch.compile(loss_of) if on_gpu else loss_of
    batch = draw()
    for step in range(1, sizes["steps"] + 1):
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=on_gpu):
            loss = compiled(*batch)
        batch = draw()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % sizes["log_steps"] == 0:
            loss.item()  # waits for the step
            peak = torch.cuda.max_memory_allocated() if on_gpu else 0
            print(f"step {step} peak {peak}", flush=True)


if __name__ == "__main__":
    main()
