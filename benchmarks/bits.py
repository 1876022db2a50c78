"""Find out when a compiled deterministic run has other bits after a resume.

python -m benchmarks.bits [--seconds 150] [--conditions "straight" "resumed, warm"]

A small GPT-2 with dropout trains six steps, straight or from the state after the third, in
processes that differ in one condition. The report names the first step and the tensors with other
bits. On a GPU it decides whether `--deterministic` can be combined with `--torch_compile`. Without
one, `--backend aot_eager` rehearses it in seconds.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.bits_run import CUT, STEPS, Setting
from benchmarks.gpu import find_card
from benchmarks.measure import search_path
from benchmarks.report import (
    Goal,
    ReportOptions,
    Section,
    machine,
    render,
    run_benchmark,
    table,
    write_report,
)
from benchmarks.training import ROOT
from llm.config.options import option
from llm.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A training, compared with another one.

    Attributes:
        reference: Name of the training with the expected bits; itself if it is a reference.
        changes: Attributes of its `Setting`.
        caches: The compiler's caches: emptied before it, as the previous training left them, or
            not used.
        environment: Variables of its process.
    """

    reference: str
    changes: Mapping[str, bool] = field(default_factory=dict)
    caches: Literal["cold", "warm", "off"] = "cold"
    environment: Mapping[str, str] = field(default_factory=dict)


_RESUMED = {"resumed": True}
_REPRODUCIBLE = {"reproducible": True, "keeps_code": True}
_UNCOMPILED = {"compiled": False}
# In the order of their worth, since the time may end. A resumed training follows its reference,
# which is the only one that saves the state.
CONDITIONS = {
    "reproducible, straight": Condition(reference="reproducible, straight", changes=_REPRODUCIBLE),
    "reproducible, resumed with the saved code": Condition(
        reference="reproducible, straight", changes=_REPRODUCIBLE | _RESUMED
    ),
    "reproducible, resumed and compiled again": Condition(
        reference="reproducible, straight", changes={"reproducible": True, **_RESUMED}
    ),
    "straight": Condition(reference="straight"),
    "resumed, warm": Condition(reference="straight", changes=_RESUMED, caches="warm"),
    "resumed, cold": Condition(reference="straight", changes=_RESUMED),
    "straight, state copied on a stream": Condition(reference="straight", changes={"copies": True}),
    "straight, other hash seed": Condition(
        reference="straight", environment={"PYTHONHASHSEED": "1"}
    ),
    "resumed, caches off": Condition(
        reference="straight",
        changes=_RESUMED,
        caches="off",
        environment={"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"},
    ),
    "uncompiled, straight": Condition(reference="uncompiled, straight", changes=_UNCOMPILED),
    "uncompiled, resumed": Condition(
        reference="uncompiled, straight", changes=_UNCOMPILED | _RESUMED
    ),
}


@dataclass(frozen=True, kw_only=True)
class BitsOptions(ReportOptions):
    """Options of the benchmark."""

    conditions: tuple[str, ...] = option((), "Trainings to run; by default all.", group="Run")
    repeats: int = option(1, "Runs of each training.", group="Run", at_least=1)
    seconds: float = option(600.0, "No training starts after this time.", group="Run", above=0)
    layers: int = option(4, "Blocks of the GPT-2.", group="Run", at_least=1)
    width: int = option(128, "Its width, a multiple of 32.", group="Run", at_least=32)
    backend: Literal["inductor", "aot_eager"] = option(
        "inductor", "Compiler of the blocks.", group="Run"
    )


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first step in which two trainings differ.

    Attributes:
        step: The step, counted from 1.
        is_loss_equal: Whether its losses have the same bits.
        tensors: Names of the gradients with other bits.
        norms: Norms of the two gradients.
    """

    step: int
    is_loss_equal: bool
    tensors: Sequence[str]
    norms: tuple[float, float]


def first_difference(expected: Mapping[str, Any], found: Mapping[str, Any]) -> Difference | None:
    """Return the first difference of two trainings, from their digests; None if they are equal."""
    for number, step in found["steps"].items():
        other = expected["steps"][number]
        tensors = [
            name for name, digest in step["gradients"].items() if other["gradients"][name] != digest
        ]
        is_loss_equal = step["loss"] == other["loss"]
        if tensors or not is_loss_equal:
            return Difference(
                step=int(number) + 1,
                is_loss_equal=is_loss_equal,
                tensors=tensors,
                norms=(other["norm"], step["norm"]),
            )
    return None


def report(options: BitsOptions, folder: Path) -> str:
    """Run all trainings and return the report.

    Raises:
        ConfigError: A condition is unknown.
    """
    unknown = [name for name in options.conditions if name not in CONDITIONS]
    if unknown:
        raise ConfigError(f"--conditions {unknown[0]} is none of: {'; '.join(CONDITIONS)}.")
    start = time.monotonic()
    card = find_card()
    facts = [
        *machine(("torch", "transformers", "triton")),
        f"GPU: {card.name if card else 'none, so that the figures say nothing about one'}",
        f"GPT-2 with {options.layers} layers, width {options.width}, dropout, bf16; {STEPS} steps, "
        f"resumed after step {CUT}; blocks compiled by {options.backend}",
    ]
    rows: list[list[str]] = []
    text, num_resumed, num_different = "", 0, 0
    for _ in range(options.repeats):
        digests: dict[str, dict[str, Any]] = {}
        for name, condition in CONDITIONS.items():
            if options.conditions and name not in options.conditions:
                continue
            result: dict[str, Any] | str = "no time left"
            if time.monotonic() - start < options.seconds:
                result = _train(options, condition, folder, device="cuda" if card else "cpu")
            if isinstance(result, str):
                rows.append([name, result, "", ""])
            else:
                digests[name] = result
                expected = digests.get(condition.reference)
                rows.append(_compare(name, result, expected))
                if expected is not None and name.startswith("reproducible, resumed"):
                    num_resumed += 1
                    num_different += first_difference(expected, result) is not None
            print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
            section = _make_section(rows, num_different=num_different, num_resumed=num_resumed)
            text = render("Bits", facts, [section])
            write_report(options, text)
    return text


def _make_section(rows: list[list[str]], *, num_different: int, num_resumed: int) -> Section:
    """Return the table of all trainings so far, and the goal if one was resumed.

    Args:
        rows: The rows of the table.
        num_different: Number of resumed reproducible trainings with other bits.
        num_resumed: Number of resumed reproducible trainings.
    """
    goals = []
    if num_resumed:
        goals = [
            Goal(
                what="Resumed reproducible runs with other bits: at most 0",
                measured=f"{num_different} of {num_resumed}",
                met=num_different == 0,
            )
        ]
    header = ["training", "first step with other bits", "what differs", "generated code"]
    return Section(title="Bits after a resume", lines=table(header, rows), goals=goals)


def _train(
    options: BitsOptions, condition: Condition, folder: Path, *, device: str
) -> dict[str, Any] | str:
    """Return the digests of a training, or how it failed, with its last words."""
    caches = folder / "caches"
    if condition.caches != "warm":
        shutil.rmtree(caches, ignore_errors=True)
    is_reference = CONDITIONS[condition.reference] is condition
    if is_reference:
        shutil.rmtree(folder / "code", ignore_errors=True)
    setting = Setting(
        folder=str(folder),
        device=device,
        layers=options.layers,
        width=options.width,
        backend=options.backend,
        saves_state=is_reference,
        **condition.changes,
    )
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.bits_run", json.dumps(asdict(setting))],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": search_path(ROOT),
            "TORCHINDUCTOR_CACHE_DIR": str(caches),
            "TRITON_CACHE_DIR": str(caches / "triton"),
            **condition.environment,
        },
        capture_output=True,
        text=True,
    )
    if done.returncode:
        return f"failed: {' '.join(done.stderr.split())[-300:]}"
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _compare(name: str, result: Mapping[str, Any], expected: Mapping[str, Any] | None) -> list[str]:
    """Return the row of a training.

    Args:
        name: Its name.
        result: Its digests.
        expected: The digests of its reference; None if that has failed.
    """
    if expected is None:
        return [name, "nothing to compare with", "", ""]
    difference = first_difference(expected, result)
    code = ""
    if result["code"]:
        code = "the same" if {*result["code"]} <= {*expected["code"]} else "other"
    if difference is None:
        return [name, "none", "", code]
    count = len(difference.tensors)
    loss = "the loss is equal" if difference.is_loss_equal else "the loss differs"
    expected_norm, norm = difference.norms
    text = f"{loss}; {count} gradients, the last {', '.join(difference.tensors[-3:])}"
    return [name, str(difference.step), f"{text}; norm {norm:.8g} for {expected_norm:.8g}", code]


if __name__ == "__main__":
    sys.exit(run_benchmark("bits", "Finds other bits after a resume.", BitsOptions, report))
