"""Which files a data set on the Hub consists of, and what is wrong if it cannot be loaded."""

import contextlib
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llm.errors import DataError, one_line
from llm.runtime.offline import offline_if_unreachable, offline_variable

_HUB_URL = re.compile(r"hf://datasets/(?P<repository>[^@]+)@(?P<revision>[^/]+)/(?P<path>.+)")

logger = logging.getLogger("llm.data")


@dataclass(frozen=True, kw_only=True)
class HubFiles:
    """The files of one configuration of a data set on the Hub.

    Attributes:
        name: Name of the repository; an old name without an owner is resolved.
        revision: The commit.
        files: Paths in the repository.
    """

    name: str
    revision: str
    files: list[str]


def find_hub_files(
    dataset_name: str, dataset_config_name: str | None, *, option_name: str = "dataset_name"
) -> HubFiles:
    """List the files of a data set on the Hub without downloading them.

    Args:
        dataset_name: A Hub name.
        dataset_config_name: The configuration; None if the data set has one only.
        option_name: The option that needs the data set, for messages.

    Raises:
        DataError: The data set or the configuration does not exist or cannot be reached, or files
            are not in the data set's repository.
    """
    import datasets

    explain_errors = explain_dataset_errors(
        dataset_name, dataset_config_name, is_local=False, option_name=option_name
    )
    with explain_errors, offline_if_unreachable(dataset_name):
        builder = datasets.load_dataset_builder(find_repository(dataset_name), dataset_config_name)
        urls = [url for split in (builder.config.data_files or {}).values() for url in split]
    foreign_urls = [url for url in urls if _HUB_URL.fullmatch(url) is None]
    if not urls or foreign_urls:
        example = f" ({foreign_urls[0]})" if foreign_urls else ""
        raise DataError(
            f"The data set {dataset_name} is not made of files in its repository{example}: load it "
            "with the datasets library, save it with save_to_disk, and name that folder with "
            "--dataset_name."
        )
    url_matches = [match for match in map(_HUB_URL.fullmatch, urls) if match is not None]
    return HubFiles(
        name=url_matches[0]["repository"],
        revision=url_matches[0]["revision"],
        files=[match["path"] for match in url_matches],
    )


def find_repository(dataset_name: str) -> str:
    """Return the repository of a data set: OWNER/NAME, also for an old name without an owner.

    Newer versions of the Hub's client read no files by an old name, such as wikitext.

    Args:
        dataset_name: A Hub name. Without the network, an old name is looked up in the cache.
    """
    import datasets
    import huggingface_hub

    if "/" in dataset_name:
        return dataset_name
    if offline_variable() is None:
        repository: str = huggingface_hub.HfApi().dataset_info(dataset_name).id
    else:
        cached_folders = Path(datasets.config.HF_DATASETS_CACHE).glob(f"*___{dataset_name}")
        names = [folder.name.replace("___", "/") for folder in cached_folders]
        repository = names[0] if len(names) == 1 else dataset_name
    if repository != dataset_name:
        logger.info(f"the Hugging Face Hub calls {dataset_name} {repository}")
    return repository


@contextlib.contextmanager
def explain_dataset_errors(
    dataset_name: str,
    dataset_config_name: str | None,
    *,
    is_local: bool,
    option_name: str = "dataset_name",
) -> Iterator[None]:
    """Raise the errors of the `datasets` library as a DataError that names the option.

    Args:
        dataset_name: A Hub name, or a folder.
        dataset_config_name: The configuration; or None.
        is_local: Whether `dataset_name` is a folder.
        option_name: The option that needs the data set.
    """
    try:
        yield
    except Exception as error:
        message = str(error)
        if isinstance(error, ValueError) and re.search("BuilderConfig|Config name", message):
            raise _make_configuration_error(dataset_name, dataset_config_name, message) from error
        if message.startswith("Dataset scripts are no longer supported"):
            raise DataError(
                f"--{option_name} {dataset_name} is a Python script, which the datasets library "
                "runs only before version 4: name a data set of files, or the folder to which "
                "save_to_disk of an older version has written this one."
            ) from error
        if is_local:
            reason = one_line(error.__cause__ or error)
            raise DataError(f"--dataset_name {dataset_name} cannot be read: {reason}.") from error
        raise DataError(
            f"--{option_name} {dataset_name} cannot be loaded from the Hugging Face Hub "
            f"({one_line(error)}); check the name and the connection, or name a local folder, "
            "which works too."
        ) from error


def _make_configuration_error(
    dataset_name: str, dataset_config_name: str | None, message: str
) -> DataError:
    """Return the error of a missing or unknown configuration, with the names in a message."""
    name_list = re.search(r"\[(.*?)\]", message)
    fault = "several configurations"
    if dataset_config_name is not None:
        fault = f"no {dataset_config_name!r}"
    return DataError(
        f"The data set {dataset_name} has {fault}; choose a configuration with "
        f"--dataset_config_name from: {name_list[1] if name_list else 'see its page'}."
    )
