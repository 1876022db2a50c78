"""Trains a small GPT on the text that ships with the package: `llm-trainers quickstart`."""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from llm.config.program import program
from llm.errors import ConfigError
from llm.trainers.gpt import main as trainer

FOLDER = Path("examples")
"""Folder of the quick start's files, relative to the current folder, as in a clone."""

_CONFIG_NAME = "quickstart.toml"


@program
def main(argv: Sequence[str]) -> int:
    """Copy the examples into the current folder if they are not there, and train.

    Args:
        argv: Options of the trainer, which override `examples/quickstart.toml`.

    Returns:
        The exit code of the trainer.
    """
    config_path = FOLDER / _CONFIG_NAME
    if not config_path.exists():
        source = shipped_examples()
        try:
            trainer.parse_args(["--config", str(source / _CONFIG_NAME), *argv])  # --help ends here
        except ConfigError:
            config_path = source / _CONFIG_NAME  # nothing is copied; the trainer reports the error
        else:
            copy_examples(source)
    sys.argv[1:] = ["--config", str(config_path), *argv]
    return trainer.main()


def shipped_examples() -> Path:
    """Return the folder of the examples: in the installed package or in a clone."""
    package = Path(__file__).parent.parent
    installed_examples = package / FOLDER  # setup.py copies them there
    return installed_examples if installed_examples.exists() else package.parent / FOLDER


def copy_examples(source: Path) -> None:
    """Copy the examples to `examples/` in the current folder, completely or not at all.

    Raises:
        ConfigError: `examples` exists with other content, or cannot be written.
    """
    temporary_folder = Path(f".{FOLDER}-{os.getpid()}")
    try:
        shutil.copytree(source, temporary_folder, ignore=shutil.ignore_patterns("__pycache__"))
        temporary_folder.rename(FOLDER)
    except OSError as error:
        if (FOLDER / _CONFIG_NAME).exists():
            return  # another rank was faster
        if FOLDER.exists():
            raise ConfigError(
                f"{FOLDER} exists here without {_CONFIG_NAME}, so nothing is written into it; "
                "start the quick start in another folder."
            ) from error
        reason = error.args[0][0][2] if isinstance(error, shutil.Error) else error.strerror
        raise ConfigError(f"{FOLDER} cannot be written here: {reason}.") from error
    finally:
        shutil.rmtree(temporary_folder, ignore_errors=True)
    sys.stdout.write(f"Copied text, tokenizer and configuration to {FOLDER}/.\n")
