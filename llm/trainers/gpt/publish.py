"""The way of a trained model to the Hugging Face Hub."""

import logging
import re
import shlex
from pathlib import Path

from llm.checkpoint.run_folder import MODEL_FILES
from llm.errors import ConfigError
from llm.models.configuration import one_line
from llm.trainers.gpt.config import GPTConfig

_OF_THE_RUN = ("*/*", "*.toml", "*.jsonl", "log.txt", "status.json", "eval_results.json")
"""Patterns of files that are not uploaded."""

logger = logging.getLogger("llm")


def open_repository(config: GPTConfig, folder: Path) -> str | None:
    """Make sure, before training, that there is a repository to push to; rank 0 calls it.

    Args:
        config: Says whether to push, and where to.
        folder: The run's folder, after which the repository is named unless it has a name.

    Returns:
        The repository's full name; None if nothing shall be pushed.

    Raises:
        ConfigError: Nobody is logged in, the name cannot be used, or the Hub cannot be reached.
    """
    if not config.push_to_hub:
        return None
    import huggingface_hub

    if huggingface_hub.get_token() is None:
        raise ConfigError(
            "--push_to_hub needs you to be known to the Hub: run `hf auth login`, or set HF_TOKEN."
        )
    name = config.hub_model_id or folder.resolve().name
    try:
        url = huggingface_hub.HfApi().create_repo(name, private=True, exist_ok=True)
    except Exception as error:  # of the network, the Hub or the name: the library has many
        raise ConfigError(
            f"--push_to_hub cannot open the repository {name}: {one_line(error)} Check "
            "--hub_model_id, the token's rights and the network, or train without --push_to_hub "
            f"and push with `{_upload_command(name, folder)}`."
        ) from error
    return url.repo_id


def push(folder: Path, repository: str) -> None:
    """Upload an exported model; what goes wrong is said, since the model is safe in its folder."""
    import huggingface_hub

    names = [
        path.name
        for path in folder.iterdir()
        if re.fullmatch(rf"{MODEL_FILES}|all_results\.json", path.name)
    ]
    try:
        huggingface_hub.HfApi().upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message="Pretrained with llm-trainers",
            allow_patterns=names,
            ignore_patterns=["*/*"],
        )
    except Exception as error:
        logger.error(
            f"The model was not pushed to {repository}: {one_line(error)} It lies in {folder}; "
            f"`{_upload_command(repository, folder)}` tries again."
        )
        return
    logger.info(f"model on the Hub: {repository}")


def _upload_command(repository: str, folder: Path) -> str:
    excluded = [word for pattern in _OF_THE_RUN for word in ("--exclude", pattern)]
    return shlex.join(["hf", "upload", repository, str(folder), *excluded])
