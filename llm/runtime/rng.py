"""Random numbers that depend only on the seed, the step and the rank."""

import hashlib
import os
import random

from llm.runtime.agreement import on_rank0


def draw_seed() -> int:
    """Draw a seed for a run without one, the same on all ranks."""
    return on_rank0(lambda: int.from_bytes(os.urandom(4), "little"))


def seed_step(*, seed: int, step: int, rank: int) -> None:
    """Seed every generator for one step.

    Dropout and all other random numbers of a step depend only on (seed, step, rank). A checkpoint
    therefore contains no generator state, and a resumed step draws the same numbers.

    Args:
        seed: Seed of the run.
        step: Number of the step, or a negative number outside of training.
        rank: Equal on ranks that process the same tokens.
    """
    import numpy as np

    digest = hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=8).digest()
    key = int.from_bytes(digest, "little")
    seed_torch(key)
    random.seed(key)
    np.random.seed(key % 2**32)


def seed_torch(key: int) -> None:
    """Seed torch's generators on the host and on the devices in use.

    `torch.manual_seed` would also queue a seeding call for every uninitialized device. It records a
    traceback for each, which takes milliseconds per step.
    """
    import torch

    torch.default_generator.manual_seed(key)
    for backend in (torch.cuda, torch.xpu):
        if backend.is_initialized():
            backend.manual_seed_all(key)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(key)
