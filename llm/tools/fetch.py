"""Downloads a run's inputs from the Hub: `llm-trainers fetch FOLDER --config run.toml`.

Run it on a machine with access to the Hub, such as a login node. It writes `FOLDER/run.toml`; with
this configuration the run reads only local files. If you run it again, it downloads only missing or
changed files.
"""

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

from llm.config.command_line import parse_options, split_config_file
from llm.config.options import fields, non_default, option, option_group
from llm.config.program import program
from llm.config.shell import shell_line
from llm.config.toml import read_toml, values_as_toml
from llm.errors import ConfigError, LLMError, one_line
from llm.runtime.files import write_whole
from llm.runtime.logging import quiet_libraries, set_up_logging
from llm.runtime.offline import find_connection_problem, offline_variable
from llm.runtime.world import ignore_ranks
from llm.trainers.gpt.extensions import EXTENSIONS, GPTConfig
from llm.trainers.gpt.load_trained_model import load_run_tokenizer

# Files at the top level of a model's repository. Weights are read as safetensors if possible.
_MODEL_FILE_SUFFIXES = (".jinja", ".json", ".model", ".py", ".tiktoken", ".txt")
_SAFETENSORS_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")
_PICKLED_WEIGHTS = ("pytorch_model*.bin", "pytorch_model.bin.index.json")

logger = logging.getLogger("llm")


@option_group("Fetch")
class CoreFetchOptions:
    """The folder, and the core's options that may name something on the Hub."""

    folder: str | None = option(None, "Folder to write to.", path=True)
    model_name_or_path: str | None = option(
        None, "Model, with tokenizer and weights.", path=True, aliases=("model",)
    )
    config_name: str | None = option(None, "Configuration, if it is not the model's.", path=True)
    tokenizer_name: str | None = option(
        None, "Tokenizer, if it is not the model's.", path=True, aliases=("tokenizer",)
    )
    from_scratch: bool = option(
        False, "Do not download the model's weights.", aliases=("low_cpu_mem_usage",)
    )
    dataset_name: str | None = option(None, "Data set.", path=True, aliases=("dataset",))
    dataset_config_name: str | None = option(
        None, "Configuration (subset) of dataset_name to download.", requires=("dataset_name",)
    )
    eval_metrics: tuple[str, ...] = option(
        (), "Metrics of the evaluate library.", aliases=("metrics",)
    )
    trust_remote_code: bool = option(
        False, "Run Python code that comes with a model, tokenizer or data set."
    )


_FETCHES = [extension.fetch for extension in EXTENSIONS if extension.fetch is not None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FetchOptions(CoreFetchOptions, *(extension.options for extension in _FETCHES)):  # type: ignore[misc]
    """The options of this program, including extensions' options."""


@program
def main(argv: Sequence[str]) -> int:
    """Run the program; return the exit code."""
    ignore_ranks()
    # The TOML file may have any option of the trainer, more than this program has.
    config_file, arguments = split_config_file(argv)
    options = parse_options(
        FetchOptions,
        arguments,
        prog="llm-trainers fetch",
        description="Download a run's inputs from the Hub into a folder. --config names the run's "
        "TOML file; options of this program override it.",
        positional="folder",
    )
    if options.folder is None:
        raise ConfigError("No folder is named: write llm-trainers fetch FOLDER --config run.toml.")
    option_values = non_default(options)
    folder = Path(option_values.pop("folder")).absolute()
    if config_file is not None:
        option_values = read_toml(GPTConfig, config_file) | option_values
    _check_online()
    set_up_logging(rank=0)
    quiet_libraries()
    config = GPTConfig(**option_values)
    local_config = fetch_inputs(config, folder)
    # Write defaults too: they override the options of a preset or of a branch's parent.
    values = {name: getattr(local_config, name) for name in option_values}
    write_whole(folder / "run.toml", values_as_toml(values))
    check_downloads(local_config)
    logger.info(f"train without a network: {shell_line(['--config', folder / 'run.toml'])}")
    return 0


def fetch_inputs(config: GPTConfig, folder: Path) -> GPTConfig:
    """Download what the options name on the Hub.

    Args:
        config: The trainer's options.
        folder: An absolute path. Repositories go into `models/`, `datasets/` and `metrics/` by
            name.

    Returns:
        The options with local paths instead of names.

    Raises:
        ConfigError: The options name nothing on the Hub; or a repository is gated, missing,
            unreachable, or has no usable file.
    """
    changes: dict[str, Any] = _fetch_models(config, folder)
    if _is_on_hub(config.dataset_name):
        changes["dataset_name"] = _fetch_dataset(
            "dataset_name", config.dataset_name, config.dataset_config_name, folder
        )
    metrics = tuple(_fetch_metric(name, folder) for name in config.eval_metrics)
    if metrics != config.eval_metrics:
        changes["eval_metrics"] = metrics
    changes |= _fetch_for_extensions(config, folder)
    if not changes:
        raise ConfigError(
            "There is nothing to fetch: the options name nothing on the Hub. Give "
            "--model_name_or_path, --config_name, --tokenizer_name, --dataset_name, "
            f"{_extension_flags()}or --eval_metrics, or a "
            "--config with one of them."
        )
    return dataclasses.replace(config, **changes)


def _fetch_models(config: GPTConfig, folder: Path) -> dict[str, str]:
    """Download the model, configuration and tokenizer; return the options with local paths."""
    from llm.models.configuration import find_weights

    path_by_option = {}
    weights_name = find_weights(config)
    for option_name in ("model_name_or_path", "config_name", "tokenizer_name"):
        name = getattr(config, option_name)
        if _is_on_hub(name):
            target = folder / "models" / name
            with _explain_hub_errors(option_name, name):
                _fetch_model(name, target, with_weights=name == weights_name)
            path_by_option[option_name] = str(target)
    return path_by_option


def _fetch_for_extensions(config: GPTConfig, folder: Path) -> dict[str, Any]:
    """Download the data of extensions; return their options that change to local paths."""
    changes = {}
    for extension_fetch in _FETCHES:
        local_paths = extension_fetch.download(
            config, folder, partial(_fetch_dataset, folder=folder)
        )
        for name, path in local_paths.items():
            if path != getattr(config, name):
                changes[name] = path
    return changes


def _extension_flags() -> str:
    """Return the flags of extensions that name something on the Hub, each with a comma."""
    names = (
        field.name for extension_fetch in _FETCHES for field in fields(extension_fetch.options)
    )
    return "".join(f"--{name}, " for name in names)


def check_downloads(config: GPTConfig) -> None:
    """Load the downloads, except weights and text, so that missing parts show before the run.

    Raises:
        ConfigError: A part is missing, or a metric needs a Python package.
        DataError: The data set is not made of text files.
    """
    from llm.data.dataset_folder import open_dataset_folder
    from llm.data.text_identity import check_text_file
    from llm.models.configuration import load_config
    from llm.trainers.gpt.evaluation import load_metrics

    if config.config_name or config.model_name_or_path:
        load_config(config)
    if config.tokenizer_name or config.model_name_or_path:
        load_run_tokenizer(config)
    if config.dataset_name is not None:
        name, subset = config.dataset_name, config.dataset_config_name
        folder = open_dataset_folder(name, subset, file_option="--train_file")
        for file in folder.list_files("train") if folder is not None else ():
            check_text_file(file, "--dataset_name")
    load_metrics(config.eval_metrics)


def _check_online() -> None:
    """Refuse to start if a variable forbids the Hub's libraries to use the network."""
    name = offline_variable()
    if name is not None:
        raise ConfigError(
            f"{name}={os.environ[name]} in the environment forbids downloads, and this program "
            f"downloads: unset {name}, and run it again."
        )


def _is_on_hub(name: str | None) -> TypeGuard[str]:
    return name is not None and not Path(name).exists()


@contextlib.contextmanager
def _explain_hub_errors(option_name: str, name: str) -> Iterator[None]:
    """Raise errors of the Hub's client as a ConfigError of one sentence."""
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    if (problem := find_connection_problem()) is not None:
        raise _make_download_error(option_name, name, problem)
    try:
        yield
    except LLMError:
        raise
    except HFValidationError as error:
        raise ConfigError(
            f"--{option_name} {name} is neither a path that exists nor a name on the Hub, such as "
            "OWNER/NAME: check it."
        ) from error
    except GatedRepoError as error:
        raise ConfigError(
            f"--{option_name} {name} is gated: accept its terms on its page, log in with `hf auth "
            "login`, and run this again."
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"--{option_name} {name} is not on the Hub, and is not a local path: check the name; a "
            "private repository needs `hf auth login`."
        ) from error
    except Exception as error:  # the client raises many types: network, Hub, disk
        reason = one_line(error.__cause__ or error)
        raise _make_download_error(option_name, name, reason) from error


def _make_download_error(option_name: str, name: str, reason: str) -> ConfigError:
    return ConfigError(
        f"--{option_name} {name} was not downloaded completely ({reason}); check the network "
        "and the disk, and run this again: it downloads only the missing files."
    )


def _download_files(
    name: str, target: Path, *, files: Sequence[str], kind: str, revision: str | None = None
) -> None:
    """Download files of a repository; unchanged files are not downloaded again.

    Args:
        name: The repository.
        target: The folder to write to.
        files: Paths in the repository.
        kind: `model`, `dataset` or `space`.
        revision: Branch, tag or commit; by default the main branch.
    """
    import huggingface_hub

    huggingface_hub.snapshot_download(
        name, repo_type=kind, revision=revision, local_dir=target, allow_patterns=list(files)
    )
    num_bytes = sum(path.stat().st_size for path in map(target.joinpath, files) if path.is_file())
    logger.info(f"{name}: {len(files)} files, {num_bytes / 1e6:,.1f} MB in {target}")


def _fetch_model(name: str, target: Path, *, with_weights: bool) -> None:
    """Download the configuration and the tokenizer of a model, and its weights if asked for."""
    import huggingface_hub

    repository_files = huggingface_hub.HfApi().list_repo_files(name)
    top_level_files = [file for file in repository_files if "/" not in file]
    safetensors_files = _matching_files(top_level_files, _SAFETENSORS_WEIGHTS)
    pickled_files = _matching_files(top_level_files, _PICKLED_WEIGHTS)
    files = {file for file in top_level_files if file.endswith(_MODEL_FILE_SUFFIXES)}
    files -= {*safetensors_files, *pickled_files}  # indices of weights are JSON files, too
    if with_weights:
        files |= set(safetensors_files or pickled_files)
    if not files:
        raise ConfigError(f"{name} has no model or tokenizer files at its top level.")
    _download_files(name, target, files=sorted(files), kind="model")


def _matching_files(files: Sequence[str], patterns: Sequence[str]) -> list[str]:
    return [file for file in files if any(Path(file).match(pattern) for pattern in patterns)]


def _fetch_dataset(option_name: str, name: str, config_name: str | None, folder: Path) -> str:
    """Download the files of one configuration of a data set; return their folder."""
    from llm.data.hub_files import find_hub_files

    repository = find_hub_files(name, config_name, option_name=option_name)
    target = folder / "datasets" / name
    with _explain_hub_errors(option_name, name):
        # The card defines the configurations. Without configurations, it is left out.
        _download_files(
            repository.name,
            target,
            files=["README.md", *repository.files],
            kind="dataset",
            revision=repository.revision,
        )
    return str(target)


def _fetch_metric(name: str, folder: Path) -> str:
    """Download the code of a metric.

    Returns:
        The folder of the code, or the name of the metric if it is available without a download.
    """
    import evaluate
    import huggingface_hub
    from huggingface_hub.errors import RevisionNotFoundError

    if name == "accuracy" or not _is_on_hub(name):
        return name
    repository = name if "/" in name else f"evaluate-metric/{name}"
    target = folder / "metrics" / name
    with _explain_hub_errors("eval_metrics", name):
        api, revision = huggingface_hub.HfApi(), f"v{evaluate.__version__}"
        try:
            files = api.list_repo_files(repository, repo_type="space", revision=revision)
        except RevisionNotFoundError:  # a metric that is not part of the library's release
            revision = "main"
            files = api.list_repo_files(repository, repo_type="space", revision=revision)
        code_files = [file for file in files if file.endswith(".py")]
        _download_files(repository, target, files=code_files, kind="space", revision=revision)
    return str(target)
