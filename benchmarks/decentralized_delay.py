"""Measure the time of a step, and the bytes that a rank sends in it, on links with a delay."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.delayed_link import DelayedNetwork, why_not
from benchmarks.gossip_convergence import link_bytes
from benchmarks.measure import say
from benchmarks.report import Goal, Section, table
from llm.errors import LLMError
from llm.extensions.decentralized.rounds import make_rounds

ROOT = Path(__file__).parent.parent
_ALLOWED = 1.1
_PORT = 29500
_FLOAT = 4


@dataclass(frozen=True, kw_only=True)
class DelaySetting:
    """The settings of the measurement.

    Attributes:
        ranks: Number of ranks, each behind a link of its own.
        ranks_per_node: Ranks of a node, for topologies that depend on it; all links are equal.
        compute: Seconds of the passes of a step.
        delay: Seconds of a packet from rank to rank.
        layers: Layers of the model.
        width: Each layer has width x width float32 weights.
        sync_every: Inner steps of DiLoCo.
        steps: Measured steps of each phase.
        repeats: Number of phases without the delay, which alternate with as many with it.
    """

    ranks: int
    ranks_per_node: int
    compute: float
    delay: float
    layers: int
    width: int
    sync_every: int
    steps: int
    repeats: int

    @property
    def model_bytes(self) -> int:
        """Return the bytes of the weights."""
        return self.layers * self.width**2 * _FLOAT


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The figures of a mode: seconds of a step by phase, and bytes per step and rank."""

    without: list[float]
    delayed: list[float]
    sent: float


def measure_mode(setting: DelaySetting, mode: str) -> Measured:
    """Run the ranks of a mode, with a change of the delay between its phases.

    Raises:
        LLMError: A rank failed.
    """
    period = setting.sync_every if mode == "diloco" else 1
    warmup = max(4, period)
    warmup, steps = (-(-number // period) * period for number in (warmup, setting.steps))
    options = {
        "mode": mode,
        "phases": 2 * setting.repeats,
        "warmup": warmup,
        "steps": steps,
        "layers": setting.layers,
        "width": setting.width,
        "compute": setting.compute,
        "sync_every": setting.sync_every,
        "ranks_per_node": setting.ranks_per_node,
    }
    times: tuple[list[float], list[float]] = ([], [])
    before = 0
    with ExitStack() as stack:
        network = stack.enter_context(DelayedNetwork(setting.ranks).up())
        ranks = [_start(network, rank, setting.ranks, options) for rank in range(setting.ranks)]
        stack.callback(_end, ranks)
        for phase in range(2 * setting.repeats):
            _answer(ranks, "phase")
            before = before or network.carried.total()  # bytes of the rendezvous
            network.delay = setting.delay * (phase % 2)
            assert ranks[0].stdin is not None
            ranks[0].stdin.write("go\n")
            ranks[0].stdin.flush()
            times[phase % 2].append(float(_answer(ranks, "seconds")))
        network.delay = 0.0
        for rank in ranks:
            rank.wait(300)
        # Counted over all phases, since the last message of one arrives in the next.
        sent = network.carried.total() - before
    all_steps = 2 * setting.repeats * (warmup + steps)
    return Measured(without=times[0], delayed=times[1], sent=sent / setting.ranks / all_steps)


def _start(
    network: DelayedNetwork, rank: int, ranks: int, options: dict[str, object]
) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "benchmarks.delayed_step", json.dumps(options)]
    place = {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "MASTER_PORT": str(_PORT),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        network.inside(rank, command),
        env={**os.environ, **network.environment(), **place},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if rank else None,
        text=True,
    )


def _answer(ranks: "Sequence[subprocess.Popen[str]]", name: str) -> Any:
    """Return the next value that rank 0 prints under a name."""
    assert ranks[0].stdout is not None
    for line in ranks[0].stdout:
        if line.startswith("{"):
            said = json.loads(line)
            if name in said:
                return said[name]
    raise LLMError("A rank of the benchmark failed; see above.")


def _end(ranks: "Sequence[subprocess.Popen[str]]") -> None:
    for rank in ranks:
        rank.kill()
        rank.wait()


def theory(setting: DelaySetting, mode: str) -> float:
    """Return the mean bytes of weights or gradients that a rank sends in a step."""
    everyone = (tuple(range(setting.ranks)),)
    if mode in ("allreduce", "diloco"):
        total = sum(link_bytes(everyone, setting.model_bytes).values())
        return total / setting.ranks / (setting.sync_every if mode == "diloco" else 1)
    rounds = make_rounds(mode, num_ranks=setting.ranks, ranks_per_node=setting.ranks_per_node)
    total = sum(sum(link_bytes(groups, setting.model_bytes).values()) for groups in rounds)
    return total / len(rounds) / setting.ranks


def delay_section(setting: DelaySetting, modes: Sequence[str]) -> Section:
    """Measure the modes; the goals are that gossip hides the delay and all-reduce does not."""
    reason = why_not()
    if reason is not None:
        return Section(title="A slow link", lines=[f"Not measured: {reason}."])
    rows, goals = [], []
    for mode in modes:
        found = measure_mode(setting, mode)
        without, delayed = statistics.median(found.without), statistics.median(found.delayed)
        ratio, expected = delayed / without, theory(setting, mode)
        say(f"{mode}: {found}")
        rows.append(
            [
                mode,
                f"{1000 * without:.0f}",
                f"{1000 * delayed:.0f}",
                f"{ratio:.2f}",
                f"{found.sent / 1e6:.3f}",
                f"{expected / 1e6:.3f}",
                f"{found.sent / expected:.3f}",
            ]
        )
        if mode != "diloco":  # it waits only in outer steps
            goals.append(_goal(mode, ratio))
    lines = [
        f"{setting.ranks} gloo ranks, each in a network namespace; a step's passes sleep for "
        f"{1000 * setting.compute:.0f} ms in place of an accelerator, layer by layer. Weights of "
        f"{setting.model_bytes / 1e6:.1f} MB. A packet takes {1000 * setting.delay:.0f} ms from "
        f"rank to rank where there is a delay. Medians of {setting.repeats} phases of "
        f"{setting.steps} steps, with and without the delay in turn. Bytes are those of IP "
        "packets, acknowledgements and the ranks' flags included.",
        "",
        *table(
            (
                *("mode", "ms a step", f"ms at {1000 * setting.delay:.0f} ms", "ratio"),
                *("MB sent a step and rank", "theory", "measured / theory"),
            ),
            rows,
        ),
    ]
    return Section(title="A slow link", lines=lines, goals=goals)


def _goal(mode: str, ratio: float) -> Goal:
    if mode == "allreduce":
        what = f"step of allreduce with the delay: more than {_ALLOWED:g}x that without it"
        return Goal(what=what, measured=f"{ratio:.2f}x", met=ratio > _ALLOWED)
    what = f"step of {mode} with the delay: at most {_ALLOWED:g}x that without it"
    return Goal(what=what, measured=f"{ratio:.2f}x", met=ratio <= _ALLOWED)
