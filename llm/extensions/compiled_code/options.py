"""The extension that keeps compiled code."""

from pathlib import Path
from typing import TYPE_CHECKING

from llm.config.options import option, option_group
from llm.errors import ConfigError
from llm.trainers.gpt.config import CoreConfig
from llm.trainers.gpt.seams import Extension, LoopExtension

if TYPE_CHECKING:
    from llm.trainers.gpt.seams import LoopContext, Run


@option_group("Speed and memory", extension=True)
class CompiledCodeOptions(CoreConfig):
    """Where compiled code is kept."""

    compiled_code: str | None = option(
        None,
        "Folder for compiled code, which later starts execute; it must be yours alone.",
        path=True,
        widens_trust=True,
    )


class CompiledCodeExtension(Extension[CompiledCodeOptions]):
    """Loads compiled code before the model is built, and saves it after the first step."""

    def prepare_run(self, run: "Run") -> None:
        """Load the code of this rank, if the folder has any.

        Raises:
            ConfigError: The run compiles nothing, or others can write in the folder.
        """
        if self.options.compiled_code is None or self.options.eval_only:
            return
        if not run.config.torch_compile:
            raise ConfigError(
                "--compiled_code keeps what --torch_compile generates, and this run compiles "
                "nothing; leave it out."
            )
        from llm.extensions.compiled_code.code_file import CodeFile

        self._code_file = CodeFile(Path(self.options.compiled_code), rank=run.world.rank)
        self._code_file.load()

    def make_loop_extension(self, context: "LoopContext") -> LoopExtension | None:
        """Return the object that saves the code of a training."""
        if self.options.compiled_code is None or self.options.eval_only:
            return None
        from llm.extensions.compiled_code.code_file import CodeSaver

        return CodeSaver(self._code_file)
