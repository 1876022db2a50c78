"""The code that torch.compile has generated, in a file for each rank.

The file has PyTorch's format (`torch.compiler.save_cache_artifacts`), which contains pickles and
code. Code for another version of PyTorch or another device is ignored.
"""

import logging
import os
import stat
from pathlib import Path

import torch
from torch._dynamo.utils import counters

from llm.data.loader import StepBatch
from llm.errors import ConfigError
from llm.runtime.files import write_whole
from llm.runtime.logging import counted
from llm.trainers.gpt.seams import LoopExtension

logger = logging.getLogger("llm")


class CodeFile:
    """The compiled code of one rank.

    Args:
        folder: The folder of all ranks; created when the first code is saved.
        rank: Rank of this process.
    """

    def __init__(self, folder: Path, *, rank: int) -> None:
        self._folder, self._path = folder, folder / f"rank_{rank}.bin"
        self._is_main = rank == 0

    def load(self) -> None:
        """Let the compiler find the code of the file, if it exists.

        Raises:
            ConfigError: Other users can write in the folder, or into the file.
        """
        if not self._path.exists():
            self._log(f"compiled code: none in {self._folder} yet")
            return
        self._check_writers()
        cache_info = torch.compiler.load_cache_artifacts(self._path.read_bytes())
        num_graphs = 0 if cache_info is None else len(cache_info.artifacts.get("inductor", ()))
        self._log(f"compiled code: {counted(num_graphs, 'graph')} from {self._folder}")

    def _check_writers(self) -> None:
        """Refuse to execute code that other users could have written."""
        for path in (self._folder, self._path):
            status = path.stat()
            if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise ConfigError(
                    f"--compiled_code {self._folder} holds code to execute, and users other than "
                    f"you can write {path}; remove the folder, or change its owner and mode."
                )

    def save(self) -> None:
        """Replace the file by all code that this process has compiled or loaded.

        Raises:
            OSError: The file cannot be written.
        """
        artifacts = torch.compiler.save_cache_artifacts()
        if artifacts is None:  # nothing was compiled
            return
        content, info = artifacts
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(self._path, content)
        self._path.chmod(0o600)
        num_graphs = len(info.artifacts.get("inductor", ()))
        self._log(f"compiled code: {counted(num_graphs, 'graph')} saved in {self._folder}")

    def _log(self, text: str) -> None:
        if self._is_main:
            logger.info(text)


class CodeSaver(LoopExtension):
    """Saves the code after each step that was the first to run some of it.

    Args:
        code_file: The file.
    """

    def __init__(self, code_file: CodeFile) -> None:
        self._code_file = code_file
        self._num_saved_graphs = 0

    def after_step(self, step: int, batch: StepBatch) -> None:
        """Save the code if a graph was added since the last save."""
        num_graphs = counters["stats"]["unique_graphs"]
        if num_graphs > self._num_saved_graphs:
            self._code_file.save()
            self._num_saved_graphs = num_graphs
