"""The tokenizer of a run that names none: the one that has made its token files."""

import dataclasses
import logging
from pathlib import Path
from typing import TypeVar

from llm.data.options import training_paths
from llm.errors import DataError
from llm.trainers.gpt.config import CoreConfig

_ConfigT = TypeVar("_ConfigT", bound=CoreConfig)

logger = logging.getLogger("llm")


def use_tokenizer_of_data(config: _ConfigT) -> _ConfigT:
    """Return options with the tokenizer that the sidecar of the token files names.

    Nothing changes if the options name a tokenizer, or the first token file has no sidecar. The
    fingerprint of the tokenizer is compared when the data are opened.

    Raises:
        DataError: The first token file does not exist.
    """
    if config.tokenizer_name or config.vocab_file or config.model_name_or_path:
        return config
    paths = training_paths(config) or [
        path for path in config.valid_data_path if isinstance(path, str)
    ]
    if not paths:
        return config
    from llm.data.formats.flat import locate_token_file  # imports numpy
    from llm.data.formats.sidecar import read_sidecar

    prefix = paths[0].removesuffix(".bin")
    try:
        sidecar = read_sidecar(Path(prefix))
    except DataError:  # no tokenizer is named then, which `check_config` refuses
        return config
    if sidecar is None:
        locate_token_file(Path(paths[0]))
        return config
    logger.info(f"tokenizer: {sidecar.tokenizer}, which {prefix}.json names")
    return dataclasses.replace(config, tokenizer_name=sidecar.tokenizer)
