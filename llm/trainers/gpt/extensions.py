"""All options of the trainer: the core's, and options of the extensions.

The list has the extensions of this package, and after them the installed ones. To delete one,
remove its folder, its import and its line in the list. The command line, the TOML file and the
configuration page are all generated from `GPTConfig`.

The extensions custom_optim and kfac import matrix_optim: delete them first.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from llm.extensions.averaging.options import AveragingExtension
from llm.extensions.bf16_moments.options import MomentExtension
from llm.extensions.compiled_code.options import CompiledCodeExtension
from llm.extensions.custom_optim.options import CustomOptimizerExtension
from llm.extensions.decentralized.options import DecentralizedExtension
from llm.extensions.kfac.options import KFACExtension
from llm.extensions.matrix_optim.options import MatrixExtension
from llm.extensions.moe.options import MoEExtension
from llm.extensions.mup.options import MuPExtension
from llm.extensions.norms.options import NormExtension
from llm.extensions.profiler.options import ProfilerExtension
from llm.extensions.spikes.options import SpikeExtension
from llm.extensions.tasks.options import TasksExtension
from llm.trainers.gpt.config import CoreConfig
from llm.trainers.gpt.installed_extensions import load_installed_extensions
from llm.trainers.gpt.seams import Extension, list_option_classes

EXTENSIONS: tuple[type[Extension[Any]], ...] = (
    AveragingExtension,
    MomentExtension,
    CompiledCodeExtension,
    CustomOptimizerExtension,
    DecentralizedExtension,
    KFACExtension,
    MatrixExtension,
    MoEExtension,
    MuPExtension,
    NormExtension,
    ProfilerExtension,
    SpikeExtension,
    TasksExtension,
    *load_installed_extensions(),
)
"""The extensions, in calling order."""


@dataclass(frozen=True, kw_only=True)
class GPTConfig(*list_option_classes(EXTENSIONS), CoreConfig):  # type: ignore[misc]
    """Options of the trainer: the core's and each extension's."""

    EXTENSIONS: ClassVar[tuple[type[Extension[Any]], ...]] = EXTENSIONS
