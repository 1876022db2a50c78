"""The device that the tests in `tests/gpu` run on, and the trainer on it.

LLM_TEST_DEVICE names the device: cuda unless it is set, or cpu to rehearse the tests without a GPU.
Importing this module must not ask for GPUs: a process would no longer heed CUDA_VISIBLE_DEVICES.
"""

import os
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.support.models import tiny_model
from tests.support.ranks import Ranks
from tests.support.training import Bench

CPU = torch.device("cpu")
DEVICE = torch.device(os.environ.get("LLM_TEST_DEVICE", "cuda"))

gpu = [pytest.mark.gpu, pytest.mark.timeout(900)]  # the first compilation takes minutes
"""Marks of a module of these tests."""

only_on_a_gpu = pytest.mark.skipif(DEVICE == CPU, reason="a CPU cannot rehearse it")


class GPUBench(Bench):
    """Runs the trainer on the tested device, as one process without a launcher."""

    def write_weights(self) -> "GPUBench":
        """Write initial weights into the model's folder: a GPU draws other ones than a CPU."""
        tiny_model(AutoConfig.from_pretrained(self.model)).save_pretrained(self.model)
        return self

    def start(self, name: str = "run", *, device: torch.device = DEVICE, **options: Any) -> Ranks:
        """Start the trainer.

        Args:
            name: Folder of the run.
            device: Where it trains.
            options: Of the trainer, and the `ranks` and `faults` of a `Bench`, which has none here.
        """
        assert (options.pop("ranks"), options.pop("faults")) == (1, ())
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == CPU else {}
        return Ranks(_train, 1, self.command(name, **options), environment=hidden)


def _train(argv: list[str]) -> int:
    from llm.trainers.gpt.main import main

    # With these even one rank has DistributedDataParallel.
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    return main(argv)
