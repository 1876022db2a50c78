"""Gossip and DiLoCo beside all-reduce: loss, step time on a slow link, bytes, larger clusters.

python -m benchmarks.decentralized --help.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.report import Section, machine, render
from llm.config.command_line import parse
from llm.config.options import option
from llm.errors import ConfigError, LLMError

Part = Literal["loss", "delay", "simulation"]
Method = Literal["allreduce", "ring", "exp", "alternating-exp-ring", "ring-adamw", "diloco"]


@dataclass(frozen=True, kw_only=True)
class DecentralizedBenchmarkOptions:
    """What to measure."""

    only: tuple[Part, ...] = option(
        ("loss", "delay", "simulation"), "Parts to measure.", group="Parts"
    )
    methods: tuple[Method, ...] = option(
        ("allreduce", "ring", "exp", "alternating-exp-ring", "ring-adamw", "diloco"),
        "Methods to compare the loss of, allreduce first.",
        group="Loss",
    )
    learning_rates: tuple[float, ...] = option(
        (2e-3, 4e-3, 8e-3, 1.6e-2),
        "Peak rates to begin with; where the best is the last, further ones are tried.",
        group="Loss",
        above=0,
    )
    text: str = option("examples/data/shakespeare.txt", "Text, read as characters.", group="Loss")
    ranks: int = option(8, "Simulated ranks.", group="Loss", at_least=2)
    ranks_per_node: int = option(2, "How many of them share a node.", group="Loss", at_least=1)
    steps: int = option(300, "Steps of a training.", group="Loss", at_least=10)
    batch_size: int = option(16, "Samples of a step over all ranks.", group="Loss", at_least=2)
    block_size: int = option(64, "Characters of a sample.", group="Loss", at_least=2)
    width: int = option(64, "Width of the model.", group="Loss", at_least=4)
    layers: int = option(2, "Layers of the model.", group="Loss", at_least=1)
    sync_every: int = option(20, "Inner steps of DiLoCo.", group="Loss", at_least=1)
    seeds: int = option(3, "Trainings of each method at its best rate.", group="Loss", at_least=1)
    delay: float = option(0.05, "Seconds that a packet takes.", group="Delay", at_least=0)
    compute: float = option(0.4, "Seconds that a step's passes take.", group="Delay", above=0)
    delay_ranks: int = option(4, "Ranks on the slow links.", group="Delay", at_least=2)
    delay_width: int = option(
        384, "Each of 8 layers has width x width weights.", group="Delay", at_least=1
    )
    delay_steps: int = option(20, "Steps of a phase.", group="Delay", at_least=1)
    repeats: int = option(3, "Phases with the delay, and without.", group="Delay", at_least=1)
    sizes: tuple[int, ...] = option(
        (4, 16, 64, 256, 1024), "Numbers of ranks to simulate.", group="Simulation", at_least=2
    )
    plot: str | None = option(None, "PNG of the simulation; needs matplotlib.", group="Simulation")
    output: str | None = option(None, "File for the report, besides the console.", group="Run")


def measure(options: DecentralizedBenchmarkOptions) -> list[Section]:
    """The parts that were asked for."""
    sections = []
    if "loss" in options.only:
        sections.append(_loss(options))
    if "delay" in options.only:
        sections.append(_delay(options))
    if "simulation" in options.only:
        from benchmarks.decentralized_simulation import simulation_section

        plot = None if options.plot is None else Path(options.plot)
        sections.append(simulation_section(options.sizes, ranks_per_node=4, plot=plot))
    return sections


def _delay(options: DecentralizedBenchmarkOptions) -> Section:
    from benchmarks.decentralized_delay import DelaySetting, delay_section

    setting = DelaySetting(
        ranks=options.delay_ranks,
        ranks_per_node=1,
        compute=options.compute,
        delay=options.delay,
        layers=8,
        width=options.delay_width,
        sync_every=options.sync_every,
        steps=options.delay_steps,
        repeats=options.repeats,
    )
    modes = [method for method in options.methods if method != "ring-adamw"]
    return delay_section(setting, modes)


def _loss(options: DecentralizedBenchmarkOptions) -> Section:
    import torch
    import transformers

    from benchmarks.decentralized_loss import loss_section
    from benchmarks.simulated_ranks import Setting

    if options.methods[:1] != ("allreduce",):
        raise ConfigError("--methods must begin with allreduce, which the others are compared to.")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    setting = Setting(
        text=options.text,
        ranks=options.ranks,
        ranks_per_node=options.ranks_per_node,
        steps=options.steps,
        batch_size=options.batch_size,
        block_size=options.block_size,
        width=options.width,
        layers=options.layers,
        sync_every=options.sync_every,
        accum_steps=min(8, options.ranks),
    )
    return loss_section(setting, options.methods, options.learning_rates, options.seeds)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    try:
        options = parse(
            DecentralizedBenchmarkOptions,
            sys.argv[1:] if argv is None else argv,
            prog="python -m benchmarks.decentralized",
            description="Gossip and DiLoCo beside all-reduce.",
        )
        sections = measure(options)
    except (LLMError, OSError) as error:  # a network that cannot be made
        print(f"error: {error}", file=sys.stderr)
        return 2
    text = render("Decentralised training", machine(["torch", "transformers"]), sections)
    print(text)
    if options.output is not None:
        Path(options.output).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
