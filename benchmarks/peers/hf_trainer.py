"""Train with Hugging Face's Trainer on packed samples, as run_clm does.

It prints a line with each reading of the loss, and at the end the speed as JSON. On a GPU it trains
in bf16, compiled.

python -m benchmarks.peers.hf_trainer MODEL_FOLDER TOKENS '{"steps": ..., ...}'
"""

import itertools
import json
import statistics
import sys
import time

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainerState
from transformers import TrainingArguments as Arguments


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Windows of a flat token file."""

    def __init__(self, path: str, block_size: int) -> None:
        self.tokens = np.memmap(path, dtype=np.uint16, mode="r")
        self.block_size = block_size

    def __len__(self) -> int:
        return len(self.tokens) // self.block_size

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        window = self.tokens[number * self.block_size : (number + 1) * self.block_size]
        ids = torch.from_numpy(window.astype(np.int64))
        return {"input_ids": ids, "labels": ids}


class Clock(TrainerCallback):
    """Remembers when each step ended, and prints when the Trainer has read the loss."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *_: object, **__: object) -> None:
        """Called by the Trainer."""
        self.times.append(time.perf_counter())

    def on_log(self, _: object, state: TrainerState, *__: object, **___: object) -> None:
        """Called by the Trainer."""
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        print(f"step {state.global_step} peak {peak}", flush=True)


def main() -> None:
    """Train, then print tokens per second after the warm-up."""
    on_gpu = torch.cuda.is_available()
    folder, tokens, text = sys.argv[1:]
    sizes = json.loads(text)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    clock = Clock()
    trainer = Trainer(
        model=model,
        args=Arguments(
            output_dir="out",
            max_steps=sizes["steps"],
            per_device_train_batch_size=sizes["batch_size"],
            learning_rate=1e-3,
            weight_decay=0.1,
            logging_steps=sizes.get("log_steps", 10),
            logging_nan_inf_filter=False,  # which reads every loss on a GPU
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not on_gpu,
            bf16=on_gpu,
            tf32=on_gpu or None,
            torch_compile=on_gpu,
            dataloader_num_workers=2 if on_gpu else 0,
        ),
        train_dataset=Samples(tokens, sizes["block_size"]),
        callbacks=[clock],
    )
    trainer.train()
    counted = clock.times[sizes["warm_up"] - 1 :]
    seconds = statistics.median(after - before for before, after in itertools.pairwise(counted))
    done = sizes["batch_size"] * sizes["block_size"]
    print(json.dumps({"tokens_per_second": done / seconds}))


if __name__ == "__main__":
    main()
