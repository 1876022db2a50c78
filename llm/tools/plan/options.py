"""Options of `llm-trainers plan`: the trainer's options and the devices of the run."""

from typing import ClassVar, Literal

from llm.config.options import option, option_group
from llm.errors import ConfigError
from llm.parallel.options import PrecisionOptions
from llm.trainers.gpt.config import find_planned_run_problems
from llm.trainers.gpt.extensions import GPTConfig
from llm.trainers.gpt.seams import make_extensions

_FLOAT8_DEVICES = ("h100-80gb", "h100-64gb", "h200-141gb", "gh200-96gb")
"""Devices with matrix products in float8: NVIDIA GPUs of compute capability 8.9 or more."""


@option_group("Plan")
class PlanOptions(GPTConfig):
    """The run to plan: all options of the trainer, and the devices."""

    COMMON: ClassVar[tuple[str, ...]] = (
        *("nodes", "gpus_per_node", "device", "memory_gib", "efficiency", "num_tokens"),
        *("search", "top", "json", "plot"),
        *("model_name_or_path", "model_size", "config_overrides", "block_size"),
        *("per_device_train_batch_size", "gradient_accumulation_steps", "global_batch_size"),
        *("optimizer", "mixed_precision", "activation_checkpointing"),
        *("data_parallel_shard_size", "tensor_parallel_size", "pipeline_parallel_size"),
        "expert_parallel_size",
    )

    nodes: int = option(1, "Nodes.", at_least=1)
    gpus_per_node: int = option(4, "Devices per node; each holds one rank.", at_least=1)
    device: Literal[
        "h100-80gb",
        "h100-64gb",
        "h200-141gb",
        "gh200-96gb",
        "a100-40gb",
        "a100-64gb",
        "a100-80gb",
        "mi250x",
        "pvc",
        "cpu",
    ] = option("h100-80gb", "The device that holds a rank.")
    memory_gib: float | None = option(
        None, "Memory of a device in GiB; by default from the table.", above=0, at_most=1_000_000
    )
    links: tuple[float, ...] = option(
        (),
        "GB/s that one device sends within the node and between nodes, such as 450 50; by default "
        "from the table.",
        above=0,
    )
    efficiency: float | None = option(
        None,
        "Expected fraction of the device's peak for matrix products; by default 0.4, and 0.2 for "
        "mixtures of experts.",
        above=0,
        at_most=1,
    )
    num_tokens: float | None = option(
        None,
        "Tokens to train on, such as 300e9; by default the tokens of max_duration, unless it is in "
        "epochs.",
        above=0,
    )
    disk_gbps: float = option(
        10.0, "Total GB/s of all ranks when they write a checkpoint.", above=0
    )
    search: bool = option(False, "Rank all layouts of these devices.")
    top: int = option(
        10, "Number of layouts that --search shows.", at_least=1, requires=("search",)
    )
    json: bool = option(False, "Print JSON for scripts.")
    plot: str | None = option(
        None, "Plot the memory by kind into this PNG, PDF or SVG file.", path=True
    )


def check(options: PlanOptions) -> None:
    """Refuse options that cannot be planned.

    Raises:
        ConfigError: One message with a sentence for each fault.
    """
    problems = [*find_planned_run_problems(options), *find_float8_problems(options, options.device)]
    for extension in make_extensions(options):
        try:
            extension.bytes_per_parameter()
        except ConfigError as error:
            problems.append(str(error))
    if options.links and len(options.links) != 2:
        problems.append(
            "--links takes two numbers: GB/s in the node and between nodes, such as 450 50."
        )
    if problems:
        raise ConfigError(" ".join(problems))


def find_float8_problems(options: PrecisionOptions, device: str) -> list[str]:
    """Return a sentence for each option that needs float8 products, if a device has none."""
    if device in _FLOAT8_DEVICES:
        return []
    remedy_by_flag = {}
    if options.mixed_precision == "fp8":
        remedy_by_flag["--mixed_precision fp8"] = "use bf16 or no"
    if options.fp8_head:
        remedy_by_flag["--fp8_head"] = "leave it out"
    return [
        f"{flag} needs an NVIDIA GPU of compute capability 8.9 or more, such as an H100, and the "
        f"device is {device}; {remedy}."
        for flag, remedy in remedy_by_flag.items()
    ]
