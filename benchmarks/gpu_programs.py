"""The models of the GPU benchmark, the tokens that they train on, and the programs that train them.

All programs read their loss every `LOG_STEPS` steps and train until they are stopped.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_timing import Program
from benchmarks.measure import search_path
from benchmarks.shapes import write_gpt2, write_tokenizer

ROOT = Path(__file__).parent.parent
LOG_STEPS = 10
_ENDLESS = 1_000_000
_TOKENS = 24_000_000


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model to train.

    Attributes:
        name: Its name in the report.
        layers: Number of blocks.
        width: Width of the hidden states.
        heads: Attention heads.
        vocab_size: Size of the vocabulary.
        batch_tokens: Tokens of a micro-batch that nearly fills 80 GB, full logits included.
        key_value_heads: Key-value heads of a Llama; 0 for another family.
        inner: Width of a Llama's MLP.
        is_tied: Whether a Llama's head is its embedding.
        recomputes: Whether it needs recomputation of activations.
        num_experts: Experts of each layer of an OLMoE, which sends a token to an eighth of them; 0
            for a dense model.
    """

    name: str
    layers: int
    width: int
    heads: int
    vocab_size: int
    batch_tokens: int
    key_value_heads: int = 0
    inner: int = 0
    is_tied: bool = False
    recomputes: bool = False
    num_experts: int = 0

    @property
    def is_llama(self) -> bool:
        """Whether it is a Llama; without experts, it is else a GPT-2."""
        return self.key_value_heads > 0

    def batch_size(self, length: int, *, memory: float) -> int:
        """Return the samples of a micro-batch, a power of two.

        Args:
            length: Tokens of a sample.
            memory: Bytes of the device.
        """
        samples = self.batch_tokens * memory / 80e9 / length
        return 1 << max(0, int(samples).bit_length() - 1)


MODELS = {
    "124M": Model(
        name="GPT-2 124M", layers=12, width=768, heads=12, vocab_size=50_257, batch_tokens=65_536
    ),
    "350M": Model(
        name="GPT-2 350M", layers=24, width=1024, heads=16, vocab_size=50_257, batch_tokens=32_768
    ),
    "1.1B": Model(
        name="TinyLlama 1.1B", layers=22, width=2048, heads=32, vocab_size=32_000,
        batch_tokens=16_384, key_value_heads=4, inner=5632,
    ),
    "3B": Model(
        name="Llama 3.2 3B", layers=28, width=3072, heads=24, vocab_size=128_256,
        batch_tokens=16_384, key_value_heads=8, inner=8192, is_tied=True, recomputes=True,
    ),
    # 12 bytes for each weight with moments in bf16: 96 GB, which an H200 has.
    "8B": Model(
        name="Llama 3.1 8B", layers=32, width=4096, heads=32, vocab_size=128_256,
        batch_tokens=8192, key_value_heads=8, inner=14_336, recomputes=True,
    ),
    # Six of the 16 layers of OLMoE-1B-7B: 2.7B parameters, 0.6B of them active.
    "OLMoE": Model(
        name="OLMoE-1B-7B, 6 layers", layers=6, width=2048, heads=16, vocab_size=50_304,
        batch_tokens=16_384, num_experts=64,
    ),
    "toy-moe": Model(
        name="toy mixture", layers=2, width=32, heads=2, vocab_size=320, batch_tokens=64,
        num_experts=8,
    ),
    "toy-llama": Model(
        name="toy Llama", layers=2, width=32, heads=2, vocab_size=320, batch_tokens=64,
        key_value_heads=1, inner=64, recomputes=True,
    ),
    "toy": Model(name="toy", layers=2, width=32, heads=2, vocab_size=320, batch_tokens=64),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Training:
    """A model in training.

    Attributes:
        model: Folder with a configuration and a tokenizer, and without weights.
        tokens: Folder with the token file `train.bin`.
        shape: The model.
        length: Tokens of a sample.
        batch_size: Samples of a step.
        on_gpu: Whether it trains on a GPU, where other programs use bf16 and compile.
    """

    model: Path
    tokens: Path
    shape: Model
    length: int
    batch_size: int
    on_gpu: bool


def write_model(shape: Model, length: int, folder: Path) -> None:
    """Write a configuration and a tokenizer."""
    sizes = {"layers": shape.layers, "width": shape.width, "heads": shape.heads}
    write_gpt2(folder, **sizes, positions=length, vocab_size=shape.vocab_size)
    write_tokenizer(folder, shape.vocab_size)
    if shape.is_llama:
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": shape.layers,
            "hidden_size": shape.width,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.key_value_heads,
            "intermediate_size": shape.inner,
            "max_position_embeddings": length,
            "vocab_size": shape.vocab_size,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "tie_word_embeddings": shape.is_tied,
        }
        (folder / "config.json").write_text(json.dumps(config))
    if shape.num_experts:
        config = {
            "architectures": ["OlmoeForCausalLM"],
            "model_type": "olmoe",
            "num_hidden_layers": shape.layers,
            "hidden_size": shape.width,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.heads,
            "intermediate_size": shape.width // 2,
            "num_experts": shape.num_experts,
            "num_experts_per_tok": shape.num_experts // 8,
            "max_position_embeddings": length,
            "vocab_size": shape.vocab_size,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "pad_token_id": None,
            "tie_word_embeddings": False,
        }
        (folder / "config.json").write_text(json.dumps(config))


def write_tokens(vocab_size: int, folder: Path, number: int = _TOKENS) -> None:
    """Write token ids as a nanoGPT data folder; id k is drawn 1 / (k + 1) as often as id 0.

    Frequent tokens matter: the gradient of an embedding adds up the rows of equal ids. The file has
    ids of 16 bits, so the rarest tokens of larger vocabularies are absent.
    """
    import numpy as np

    shares = np.cumsum(1 / np.arange(1, min(vocab_size, 2**16) + 1))
    draws = np.random.default_rng(0).random(number) * shares[-1]
    ids = np.searchsorted(shares, draws).clip(0, len(shares) - 1).astype(np.uint16)
    folder.mkdir(parents=True)
    ids.tofile(folder / "train.bin")
    ids[: number // 100].tofile(folder / "val.bin")


def flops_per_token(model: Path, length: int) -> float:
    """Return the FLOPs that a model needs per token, as the log's MFU counts them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from llm.models.sizes import flops_per_token

    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    return flops_per_token(outline, block_size=length)


def our_program(training: Training, folder: Path, flags: Sequence[str]) -> Program:
    """Return our trainer as a user runs it, with log, metrics and TensorBoard.

    Args:
        training: The model in training.
        folder: Its working folder.
        flags: Options of the trainer, precision and compilation among them.
    """
    return Program(
        command=[
            *(sys.executable, "-m", "llm.trainers.gpt"),
            *("--model_name_or_path", str(training.model)),
            *("--data_path", str(training.tokens / "train.bin"), "--split", "100,0,0"),
            *("--block_size", str(training.length)),
            *("--per_device_train_batch_size", str(training.batch_size)),
            *("--max_train_steps", str(_ENDLESS), "--logging_steps", str(LOG_STEPS)),
            *("--learning_rate", "1e-4", "--weight_decay", "0.1", "--seed", "1"),
            *("--output_dir", "run"),
            *flags,
        ],
        folder=folder,
        line=r"^step +(?P<step>\d+)/",
        environment={"PYTHONPATH": search_path(ROOT)},
        peak=_our_peak if training.on_gpu else None,
    )


def _our_peak(folder: Path) -> int | None:
    """Return the largest of the peaks that our log gives for its intervals."""
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines(keepends=True)
    # The last line may be cut, as the trainer was.
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return max((record["memory"] for record in records if "memory" in record), default=None)


def peer_program(name: str, training: Training, folder: Path) -> Program:
    """Return a program of benchmarks/peers."""
    sizes = {
        "steps": _ENDLESS,
        "batch_size": training.batch_size,
        "block_size": training.length,
        "log_steps": LOG_STEPS,
        "warm_up": 0,
    }
    return Program(
        command=[
            *(sys.executable, "-m", f"benchmarks.peers.{name}"),
            *(str(training.model), str(training.tokens / "train.bin"), json.dumps(sizes)),
        ],
        folder=folder,
        line=r"^step (?P<step>\d+) peak (?P<peak>\d+)",
        environment={"PYTHONPATH": search_path(ROOT)},
    )


def nanogpt_program(training: Training, folder: Path, *, checkout: Path, python: str) -> Program:
    """Return nanoGPT's unmodified train.py, with its own vocabulary of 50,304."""
    settings: dict[str, Any] = {
        "device": "cuda" if training.on_gpu else "cpu",
        "dtype": "bfloat16" if training.on_gpu else "float32",
        "compile": training.on_gpu,
        "dataset": training.tokens,  # an absolute path, which its own data folder does not precede
        "out_dir": folder / "out",
        "eval_iters": 1,
        "eval_interval": 10**9,
        "log_interval": LOG_STEPS,
        "gradient_accumulation_steps": 1,
        "batch_size": training.batch_size,
        "block_size": training.length,
        "n_layer": training.shape.layers,
        "n_head": training.shape.heads,
        "n_embd": training.shape.width,
        "bias": True,
        "max_iters": _ENDLESS,
    }
    return Program(
        command=[python, "train.py", *(f"--{key}={value}" for key, value in settings.items())],
        folder=folder,
        line=r"^iter (?P<step>\d+): loss",
        directory=checkout,
    )
