"""All options of the trainer: the core's, and options of the extensions listed here.

To delete an extension, remove its folder, its import and its line in the list. The command line,
the TOML file and the configuration page are all generated from `GPTConfig`.

The extension kfac imports matrix_optim: delete kfac first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from llm.extensions.averaging.options import AveragingOptions
from llm.extensions.batch_size.options import BatchSizeOptions
from llm.extensions.bf16_moments.options import MomentOptions
from llm.extensions.decentralized.options import DecentralizedOptions
from llm.extensions.kfac.options import KFACOptions
from llm.extensions.matrix_optim.options import MatrixOptions
from llm.extensions.mup.options import MuPOptions
from llm.extensions.profiler.options import ProfilerOptions
from llm.extensions.spikes.options import SpikeOptions
from llm.extensions.tasks.options import TasksOptions
from llm.trainers.gpt.config import CoreConfig
from llm.trainers.gpt.seams import Extension


@dataclass(frozen=True, kw_only=True)
class GPTConfig(
    AveragingOptions,
    BatchSizeOptions,
    MomentOptions,
    DecentralizedOptions,
    KFACOptions,
    MatrixOptions,
    MuPOptions,
    ProfilerOptions,
    SpikeOptions,
    TasksOptions,
    CoreConfig,
):
    """Options of `python -m llm.trainers.gpt`: the core's and each extension's."""

    @property
    def listed(self) -> Sequence[type[Extension]]:
        """The extensions, in calling order."""
        return [base for base in GPTConfig.__bases__ if issubclass(base, Extension)]
