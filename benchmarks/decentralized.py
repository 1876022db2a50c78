"""Compare gossip and DiLoCo with all-reduce: loss, step time on a slow link, bytes, simulation.

python -m benchmarks.decentralized --help.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.report import (
    ReportOptions,
    Section,
    check_folder,
    machine,
    render,
    run_benchmark,
)
from llm.config.options import option
from llm.errors import ConfigError

Part = Literal["loss", "delay", "simulation"]
DelayMethod = Literal["allreduce", "ring", "exp", "alternating-exp-ring", "diloco"]
METHODS = (
    *("allreduce", "allreduce-accumadamw", "allreduce-accumadamw-power", "allreduce-muon"),
    *("complete", "ring", "exp", "alternating-exp-ring"),
    *("ring-accumadamw", "ring-accumadamw-power", "exp-accumadamw", "exp-accumadamw-power"),
    *("diloco-10", "diloco-30", "diloco-100", "diloco-30-low", "diloco-30-muon"),
)


@dataclass(frozen=True, kw_only=True)
class DecentralizedBenchmarkOptions(ReportOptions):
    """Options of the benchmark."""

    only: tuple[Part, ...] = option(
        ("loss", "delay", "simulation"), "Parts to measure.", group="Parts"
    )
    methods: tuple[str, ...] = option(
        METHODS,
        "Methods whose losses are compared: allreduce, a topology of gossip, or diloco-STEPS, "
        "which may be followed by -low for an outer momentum of 0.5; then nothing for AdamW, or "
        "-accumadamw, -accumadamw-power for betas to the power of its blocks, or -muon.",
        group="Loss",
    )
    lengths: tuple[int, ...] = option(
        (200, 1000), "Steps of the trainings.", group="Loss", at_least=20
    )
    learning_rates: tuple[float, ...] = option(
        (4e-3, 8e-3),
        "Peak rates to begin with; further ones are tried if the best is the largest or smallest.",
        group="Loss",
        above=0,
    )
    embedding_factor: float = option(
        4.0, "Rate of embeddings, gains and biases over it.", group="Loss", above=0
    )
    text: str = option("examples/data/shakespeare.txt", "Text, read as characters.", group="Loss")
    ranks: int = option(4, "Simulated ranks.", group="Loss", at_least=2)
    ranks_per_node: int = option(2, "Ranks of a node.", group="Loss", at_least=1)
    batch_size: int = option(32, "Samples of a step over all ranks.", group="Loss", at_least=2)
    block_size: int = option(64, "Characters of a sample.", group="Loss", at_least=2)
    width: int = option(64, "Width of the model.", group="Loss", at_least=4)
    layers: int = option(2, "Layers of the model.", group="Loss", at_least=1)
    seeds: int = option(2, "Trainings of each method at its best rate.", group="Loss", at_least=1)
    jobs: int | None = option(
        None, "Trainings at once; by default one for each core.", group="Loss", at_least=1
    )
    trainings: str | None = option(
        None,
        "File that keeps the results of finished trainings, from which a benchmark that was "
        "stopped continues; remove it when the code has changed.",
        group="Loss",
    )
    delay_methods: tuple[DelayMethod, ...] = option(
        ("allreduce", "ring", "exp", "alternating-exp-ring", "diloco"),
        "Methods whose steps are timed.",
        group="Delay",
    )
    sync_every: int = option(20, "Inner steps of DiLoCo.", group="Delay", at_least=1)
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
        sections += _losses(options)
    if "delay" in options.only:
        sections.append(_delay(options))
    if "simulation" in options.only:
        from benchmarks.decentralized_simulation import simulation_section

        plot = None if options.plot is None else Path(options.plot)
        sections.append(simulation_section(options.sizes, ranks_per_node=4, plot=plot))
    return render("Decentralized training", machine(["torch", "transformers"]), sections)


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
    return delay_section(setting, options.delay_methods)


def _losses(options: DecentralizedBenchmarkOptions) -> list[Section]:
    from benchmarks.decentralized_loss import Setting
    from benchmarks.decentralized_report import REFERENCE, loss_sections, make_trainings

    if REFERENCE not in options.methods:
        raise ConfigError(f"--methods must have {REFERENCE}, which the others are compared to.")
    check_folder("trainings", options.trainings)
    setting = Setting(
        text=options.text,
        ranks=options.ranks,
        ranks_per_node=options.ranks_per_node,
        batch_size=options.batch_size,
        block_size=options.block_size,
        width=options.width,
        layers=options.layers,
        accum_steps=min(8, options.ranks),
        embedding_factor=options.embedding_factor,
    )
    jobs = options.jobs or len(os.sched_getaffinity(0))
    kept = None if options.trainings is None else Path(options.trainings)
    return loss_sections(
        make_trainings(setting, jobs=jobs, kept=kept),
        setting,
        methods=options.methods,
        lengths=options.lengths,
        rates=options.learning_rates,
        seeds=options.seeds,
    )


if __name__ == "__main__":
    sys.exit(
        run_benchmark(
            "decentralized",
            "Compares gossip and DiLoCo with all-reduce.",
            DecentralizedBenchmarkOptions,
            report,
        )
    )
