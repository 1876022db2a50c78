"""Random numbers that depend on the seed, the step and the rank, and on nothing else."""

import hashlib
import os
import random

from llm.runtime.world import launch_id


def draw_seed() -> int:
    """A seed that nobody chose, equal on all processes of one launch."""
    launch = launch_id()
    source = os.urandom(8) if launch is None else launch.encode()
    return int.from_bytes(hashlib.blake2b(source, digest_size=4).digest(), "little")


def seed_step(*, seed: int, step: int, rank: int) -> None:
    """Start every generator anew for one step.

    Dropout and every other draw of a step depend on (seed, step, rank) alone, so
    there is no generator state to save, and a resumed step draws what it would have.

    Args:
        seed: Seed of the run.
        step: Number of the step, or a negative number outside of training.
        rank: The same for processes that compute one token's numbers together.
    """
    import numpy as np

    digest = hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=8).digest()
    key = int.from_bytes(digest, "little")
    seed_torch(key)
    random.seed(key)
    np.random.seed(key % 2**32)


def seed_torch(key: int) -> None:
    """Start torch's own generators anew, on the host and on the devices in use.

    `torch.manual_seed` would also note, with a traceback, what devices that nobody has touched
    shall be seeded with one day: milliseconds in each step.
    """
    import torch

    torch.default_generator.manual_seed(key)
    for backend in (torch.cuda, torch.xpu):
        if backend.is_initialized():
            backend.manual_seed_all(key)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(key)
