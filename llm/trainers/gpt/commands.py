"""Command lines that a run prints for you to paste."""

import os
import shlex
import shutil
import sys

from llm.checkpoint.run_folder import RunFolder
from llm.runtime.world import task_launcher
from llm.trainers.gpt.config import CoreConfig


def generate_command(run: RunFolder) -> str:
    """Return the command line that generates text with the model of a run."""
    return shlex.join([python_command(), "-m", "llm.generate", str(run.path)])


def inspect_command(run: str, step: int) -> str:
    """Return the command line that shows the text of a step, counted from 1."""
    return shlex.join([python_command(), "-m", "llm.data.inspect", run, "--step", str(step)])


def resume_command(config: CoreConfig, run: RunFolder, world_size: int) -> str:
    """Return the command line that resumes a run on the same number of ranks."""
    words = ["--config", str(run.path / "config.toml"), "--resume_from_checkpoint"]
    if config.push_to_hub:  # config.toml does not record it, and it has not been done
        words += ["--push_to_hub"]
        words += ["--hub_model_id", config.hub_model_id] if config.hub_model_id else []
    return start_command(world_size, *words)


def start_command(world_size: int, *words: str) -> str:
    """Return the command line that starts the trainer, with HOST:PORT to be filled in.

    Args:
        world_size: Number of ranks.
        words: The trainer's arguments.
    """
    python = python_command()
    module = ["-m", "llm.trainers.gpt", *words]
    if world_size == 1:
        return shlex.join([python, *module])
    launcher = task_launcher(os.environ)
    if launcher is not None:
        return shlex.join([launcher, "-n", str(world_size), python, *module])
    torchrun = ["torchrun"] if python == "python" else [python, "-m", "torch.distributed.run"]
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    where = ["--standalone"]
    if local < world_size:
        nodes = str(world_size // local)
        where = ["--nnodes", nodes, "--rdzv_backend", "c10d", "--rdzv_endpoint", "HOST:PORT"]
    return shlex.join([*torchrun, *where, "--nproc_per_node", str(local), *module])


def python_command() -> str:
    """Return the command that starts this Python again."""
    if shutil.which("python") == sys.executable:
        return "python"
    near = os.path.relpath(sys.executable)
    return sys.executable if near.startswith("..") else near
