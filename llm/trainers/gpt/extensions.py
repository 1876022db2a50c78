"""All options of the trainer: the core's, and those of the extensions that are listed here.

The command line, the TOML file and the configuration page of the documentation are all made from
[GPTConfig][llm.trainers.gpt.extensions.GPTConfig].
"""

from dataclasses import dataclass

from llm.trainers.gpt.config import CoreConfig


@dataclass(frozen=True, kw_only=True)
class GPTConfig(
    CoreConfig,
):
    """Options of `python -m llm.trainers.gpt`: those of the core and of each extension."""
