"""Shell commands for messages: start, resume, generate, inspect."""

import os
import shutil
import sys
from pathlib import Path

from llm.config.program import COMMAND
from llm.config.shell import shell_line
from llm.runtime.world import task_launcher
from llm.trainers.gpt.config import CoreConfig


def generate_command(config: CoreConfig, folder: Path) -> str:
    """Return the command line that generates text with the model of a run."""
    trust_flags = ["--trust_remote_code"] if config.trust_remote_code else []
    return shell_line([*program_command("generate"), folder, *trust_flags])


def inspect_command(folder: Path, step: int) -> str:
    """Return the command line that shows the text of a step of a run, counted from 1."""
    return shell_line([*program_command("inspect"), folder, "--step", str(step)])


def resume_command(config: CoreConfig, folder: Path, world_size: int) -> str:
    """Return the command line that resumes a run on the same number of ranks."""
    arguments: list[str | Path] = ["--config", folder / "config.toml", "--resume_from_checkpoint"]
    if config.push_to_hub:  # config.toml does not record it, and it has not been done
        arguments += ["--push_to_hub"]
        arguments += [f"--hub_model_id={config.hub_model_id}"] if config.hub_model_id else []
    return start_command(world_size, *arguments)


def start_command(world_size: int, *arguments: str | Path) -> str:
    """Return the command line that starts the trainer, with HOST:PORT to be filled in."""
    if world_size == 1:
        return shell_line([*program_command("train"), *arguments])
    python = python_command()
    trainer = ["-m", "llm.trainers.gpt", *arguments]
    launcher = task_launcher(os.environ)
    if launcher is not None:
        return shell_line([launcher, "-n", str(world_size), python, *trainer])
    torchrun = ["torchrun"] if python == "python" else [python, "-m", "torch.distributed.run"]
    return shell_line([*torchrun, *_torchrun_flags(world_size), *trainer])


def _torchrun_flags(world_size: int) -> list[str]:
    """Return the flags that start as many ranks on each node as this start has."""
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    rendezvous = ["--standalone"]
    if ranks_per_node < world_size:
        num_nodes = str(world_size // ranks_per_node)
        endpoint = ["--rdzv_backend", "c10d", "--rdzv_endpoint", "HOST:PORT"]
        rendezvous = ["--nnodes", num_nodes, *endpoint]
    return [*rendezvous, "--nproc_per_node", str(ranks_per_node)]


def program_command(program: str) -> list[str]:
    """Return the words that start a program of this package in this environment."""
    script = Path(sys.executable).with_name(COMMAND)
    if not script.is_file():  # the package is not installed
        return [python_command(), "-m", "llm", program]
    return [_shortest_command(str(script)), program]


def python_command() -> str:
    """Return the command that starts this Python again."""
    return _shortest_command(sys.executable)


def _shortest_command(executable: str) -> str:
    """Return the name of an executable that a shell finds, otherwise its path."""
    name = Path(executable).name
    if shutil.which(name) == executable:
        return name
    path = os.path.relpath(executable)
    return executable if path.startswith("..") else path
