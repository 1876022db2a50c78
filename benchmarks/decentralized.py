"""Compare gossip and DiLoCo with all-reduce: loss, step time on a slow link, bytes, simulation.

python -m benchmarks.decentralized --help.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.report import ReportOptions, Section, machine, render, run_benchmark
from llm.config.options import option
from llm.errors import ConfigError

Part = Literal["loss", "delay", "simulation"]
Method = Literal["allreduce", "ring", "exp", "alternating-exp-ring", "ring-adamw", "diloco"]


@dataclass(frozen=True, kw_only=True)
class DecentralizedBenchmarkOptions(ReportOptions):
    """Options of the benchmark."""

    only: tuple[Part, ...] = option(
        ("loss", "delay", "simulation"), "Parts to measure.", group="Parts"
    )
    methods: tuple[Method, ...] = option(
        ("allreduce", "ring", "exp", "alternating-exp-ring", "ring-adamw", "diloco"),
        "Methods whose losses are compared, allreduce first.",
        group="Loss",
    )
    learning_rates: tuple[float, ...] = option(
        (2e-3, 4e-3, 8e-3, 1.6e-2),
        "Peak rates to begin with; further ones are tried if the best is the largest or smallest.",
        group="Loss",
        above=0,
    )
    text: str = option("examples/data/shakespeare.txt", "Text, read as characters.", group="Loss")
    ranks: int = option(8, "Simulated ranks.", group="Loss", at_least=2)
    ranks_per_node: int = option(2, "Ranks of a node.", group="Loss", at_least=1)
    steps: int = option(300, "Steps of a training.", group="Loss", at_least=10)
    batch_size: int = option(16, "Samples of a step over all ranks.", group="Loss", at_least=2)
    block_size: int = option(64, "Characters of a sample.", group="Loss", at_least=2)
    width: int = option(64, "Width of the model.", group="Loss", at_least=4)
    layers: int = option(2, "Layers of the model.", group="Loss", at_least=1)
    sync_every: int = option(20, "Inner steps of DiLoCo.", group="Loss", at_least=1)
    seeds: int = option(3, "Trainings of each method at its best rate.", group="Loss", at_least=1)
    delay: float = option(0.05, "Delay of a packet in seconds.", group="Delay", at_least=0)
    compute: float = option(0.4, "Seconds of a step's passes.", group="Delay", above=0)
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


def report(options: DecentralizedBenchmarkOptions, _: Path) -> str:
    """Measure all chosen parts and return the report."""
    sections = []
    if "loss" in options.only:
        sections.append(_loss(options))
    if "delay" in options.only:
        sections.append(_delay(options))
    if "simulation" in options.only:
        from benchmarks.decentralized_simulation import simulation_section

        plot = None if options.plot is None else Path(options.plot)
        sections.append(simulation_section(options.sizes, ranks_per_node=4, plot=plot))
    return render("Decentralised training", machine(["torch", "transformers"]), sections)


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

    from benchmarks.decentralized_loss import Setting, loss_section

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


if __name__ == "__main__":
    sys.exit(
        run_benchmark(
            "decentralized",
            "Compares gossip and DiLoCo with all-reduce.",
            DecentralizedBenchmarkOptions,
            report,
        )
    )
