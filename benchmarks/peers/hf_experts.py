"""Train a mixture of experts with Hugging Face's Trainer, with or without its balancing loss.

At the end it prints the validation loss, the loads of the last steps and the speed as JSON.

python -m benchmarks.peers.hf_experts MODEL_FOLDER TEXT VALIDATION '{"steps": ..., ...}'
"""

import json
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback
from transformers import TrainingArguments as Arguments


class Loads(TrainerCallback):
    """Counts the choices of experts in the last steps, and remembers when each step ended."""

    def __init__(self, model: torch.nn.Module, *, from_step: int) -> None:
        self.times: list[float] = []
        self.counts: list[torch.Tensor] = []
        self._from_step = from_step
        for module in model.modules():
            if hasattr(module, "down_proj") and hasattr(module, "num_experts"):
                self.counts.append(torch.zeros(int(module.num_experts), dtype=torch.int64))
                module.register_forward_pre_hook(self._counter(self.counts[-1]), with_kwargs=True)

    def _counter(self, counts: torch.Tensor) -> object:
        def count(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
            index = args[1] if len(args) > 1 else kwargs["top_k_index"]
            if module.training and len(self.times) >= self._from_step:
                counts.add_(index.flatten().bincount(minlength=len(counts)).cpu())

        return count

    def on_step_end(self, *_: object, **__: object) -> None:
        """Called by the Trainer."""
        self.times.append(time.perf_counter())


def windows(tokenizer: object, path: str, length: int) -> list[dict[str, torch.Tensor]]:
    """Return the samples of a text."""
    ids = torch.tensor(tokenizer(Path(path).read_text(encoding="utf-8"))["input_ids"])
    return [
        {"input_ids": part, "labels": part} for part in ids.split(length) if len(part) == length
    ]


@torch.no_grad()
def validation_loss(model: torch.nn.Module, samples: list[dict[str, torch.Tensor]]) -> float:
    """Return the mean loss of a token, without the balancing loss."""
    model.eval()
    losses = []
    for sample in samples:
        ids = sample["input_ids"][None].to(model.device)
        losses.append(model(input_ids=ids, labels=ids, output_router_logits=False).loss.item())
    return statistics.mean(losses)


def main() -> None:
    """Train, then print the figures."""
    folder, text, validation, words = sys.argv[1:]
    sizes = json.loads(words)
    torch.manual_seed(sizes["seed"])
    config = AutoConfig.from_pretrained(folder)
    coefficient = sizes["coefficient"]
    config.output_router_logits = coefficient > 0
    config.router_aux_loss_coef = coefficient
    model = AutoModelForCausalLM.from_config(config)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    loads = Loads(model, from_step=sizes["steps"] - sizes["last_steps"])
    trainer = Trainer(
        model=model,
        args=Arguments(
            output_dir="out",
            max_steps=sizes["steps"],
            seed=sizes["seed"],
            per_device_train_batch_size=sizes["batch_size"],
            learning_rate=sizes["learning_rate"],
            lr_scheduler_type="cosine",
            warmup_steps=sizes["warm_up"],
            weight_decay=0.1,
            max_grad_norm=1.0,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=windows(tokenizer, text, sizes["block_size"]),
        callbacks=[loads],
    )
    trainer.train()
    steps = [end - begin for begin, end in zip(loads.times, loads.times[1:], strict=False)]
    relative = [counts / counts.float().mean() for counts in loads.counts]
    print(
        json.dumps(
            {
                "tokens_per_second": sizes["batch_size"]
                * sizes["block_size"]
                / statistics.median(steps[len(steps) // 5 :]),
                "eval_loss": validation_loss(
                    model, windows(tokenizer, validation, sizes["block_size"])
                ),
                "max_load": max(float(load.max()) for load in relative),
                "idle_experts": sum(int((load < 0.1).sum()) for load in relative),
            }
        )
    )


if __name__ == "__main__":
    main()
