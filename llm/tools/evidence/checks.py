"""The checks of each part of the evidence, in their order."""

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from llm.tools.evidence.layout_cases import LayoutCase, layout_cases
from llm.tools.evidence.options import PartName
from llm.tools.evidence.rank_programs import RankPrograms, describe_failure
from llm.tools.evidence.trainings import (
    IN_FLOAT32,
    NUM_STEPS,
    CheckFailed,
    Inputs,
    compare_steps,
    compare_weights,
    read_device,
    read_kernels,
    read_steps,
)
from llm.tools.plan.card_names import device_of_card

_ON_CPU = {"ACCELERATE_USE_CPU": "true"}
_TOLERANCE_BY_PRECISION = {"fp32": 1e-5, "tf32": 1e-3, "bf16": 1e-2, "bf16, compiled": 1e-2}
"""Relative difference of a loss from the CPU's in float32: a few of the precision's roundings."""
_LAYOUT_TOLERANCE_ON_CPU, _LAYOUT_TOLERANCE = 1e-5, 1e-4
"""Relative difference of a loss from one rank's. Kernels for other shapes add in another order, and
more so on an accelerator."""
_WEIGHT_TOLERANCE = 1e-4
"""A tenth of the learning rate, which bounds what a step of AdamW changes."""
_RESUME_STEP, _RESUME_LAST_STEP = 3, 6
_LOSS_RUN: dict[str, Any] = {"num_ranks": 4, "num_steps": NUM_STEPS + 1, "is_alone": True}
"""The size of the runs that compare the device with the CPU: one rank on the batch of four."""


@dataclass(frozen=True)
class Check:
    """A check of a part.

    Attributes:
        name: Its name in the file.
        run: Runs it within a number of seconds, and returns its figures by name. Raises
            CheckFailed.
    """

    name: str
    run: Callable[[float], dict[str, Any]]


class Checks:
    """Makes the checks of a machine.

    Args:
        programs: Starts programs on the ranks.
        job: The machine, see `describe_job`.
    """

    def __init__(self, programs: RankPrograms, job: Mapping[str, Any]) -> None:
        self._programs = programs
        self._num_ranks = programs.world.world_size
        self._num_nodes: int = job["nodes"]
        self._folder = programs.folder
        self._inputs = Inputs(self._folder, self._num_ranks)
        # Ranks with different devices are a fault, which the pre-flight reports.
        self._device, self._card, memory_gib, precision = (
            job[name][0] if isinstance(job[name], list) else job[name]
            for name in ("device", "card", "memory_gib", "default_precision")
        )
        self._memory_gib: float = memory_gib or 0.0
        self._has_bf16 = precision == "bf16" or self._device in ("cpu", "xpu")

    def make_checks(self, part: PartName) -> Iterator[Check]:
        """Yield the checks of a part."""
        make_checks_by_part: dict[PartName, Callable[[], Iterator[Check]]] = {
            "preflight": self._preflight_checks,
            "losses": self._loss_checks,
            "resume": self._resume_checks,
            "layouts": self._layout_checks,
            "speed": self._speed_checks,
        }
        yield from make_checks_by_part[part]()

    def _run_successfully(self, arguments: Sequence[str], seconds: float, **options: Any) -> str:
        """Run a program on the ranks; return what rank 0 printed."""
        outcomes = self._programs.run(arguments, seconds=seconds, **options)
        failure = describe_failure(outcomes, seconds=seconds)
        if failure is not None:
            raise CheckFailed(failure)
        return outcomes[0].output

    def _preflight_checks(self) -> Iterator[Check]:
        """Yield the pre-flight of all ranks."""
        yield Check("all ranks", self._run_preflight)

    def _run_preflight(self, seconds: float) -> dict[str, Any]:
        """Run `llm-trainers preflight`; return the times of its collectives and its warning."""
        timeout = str(max(1, int(seconds / 2 - 5)))
        output = self._run_successfully(["-m", "llm", "preflight", "--timeout", timeout], seconds)
        times = re.search(r"(\d+) MiB: all-reduce ([\d.]+) ms, broadcast ([\d.]+) ms", output)
        if times is None:  # one rank sends nothing
            return {}
        figures: dict[str, Any] = {
            "message_mib": int(times[1]),
            "all_reduce_ms": float(times[2]),
            "broadcast_ms": float(times[3]),
        }
        warning = re.search(r"warning: (.*)", output)
        if warning is not None:
            figures["warning"] = warning[1]
        return figures

    def _loss_checks(self) -> Iterator[Check]:
        """Yield a run on the CPU, and its last steps on the device in each precision.

        The device continues the CPU's checkpoint, so that both begin with the same weights.
        """
        yield Check("CPU, fp32", self._run_on_cpu)
        for precision, flags in self._choose_precision_flags().items():
            run_on_device = partial(self._run_on_device, precision, flags)
            yield Check(f"{self._device}, {precision}", run_on_device)

    def _choose_precision_flags(self) -> dict[str, Sequence[str]]:
        """Return the flags of each precision that the device has."""
        flags_by_precision: dict[str, Sequence[str]] = {"fp32": IN_FLOAT32}
        if self._device == "cuda":
            flags_by_precision["tf32"] = ("--mixed_precision", "no", "--tf32", "--no_torch_compile")
        if self._has_bf16:
            flags_by_precision["bf16"] = ("--mixed_precision", "bf16", "--no_torch_compile")
        if self._has_bf16 and self._device in ("cuda", "rocm"):
            flags_by_precision["bf16, compiled"] = ("--mixed_precision", "bf16", "--torch_compile")
        return flags_by_precision

    def _run_on_cpu(self, seconds: float) -> dict[str, Any]:
        """Train in float32 on the CPU, with a checkpoint after each step."""
        folder = self._folder / "losses-cpu"
        arguments = self._inputs.tiny_trainer_arguments(
            folder, *IN_FLOAT32, "--checkpointing_steps", "1", **_LOSS_RUN
        )
        self._run_successfully(arguments, seconds, is_alone=True, environment=_ON_CPU)
        device = read_device(folder)
        if device != "cpu":
            raise CheckFailed(f"the run that should use the CPU used {device}.")
        return {"losses": [record["loss"] for record in read_steps(folder).values()]}

    def _run_on_device(
        self, precision: str, flags: Sequence[str], seconds: float
    ) -> dict[str, Any]:
        """Continue the run of the CPU on the device, and compare losses and gradient norms."""
        folder = self._folder / f"losses-{precision.replace(', ', '-')}"
        reference = self._folder / "losses-cpu"
        checkpoint = reference / "checkpoints" / "step_00000001"
        resume_flags = ["--change_on_resume", "mixed_precision"]
        resume_flags += ["--resume_from_checkpoint", str(checkpoint)]
        arguments = self._inputs.tiny_trainer_arguments(folder, *flags, *resume_flags, **_LOSS_RUN)
        self._run_successfully(arguments, seconds, is_alone=True)
        device = read_device(folder)
        if device != self._device.replace("rocm", "cuda"):  # torch's name for both
            raise CheckFailed(f"the run that should use {self._device} used {device}.")
        return compare_steps(
            folder,
            reference,
            tolerance=_TOLERANCE_BY_PRECISION[precision],
            steps=range(2, _LOSS_RUN["num_steps"] + 1),
        )

    def _resume_checks(self) -> Iterator[Check]:
        """Yield resumed runs, with the same losses and weights as straight runs."""
        layouts = {"DDP" if self._num_ranks > 1 else "one rank": LayoutCase("DDP", {})}
        layouts |= {case.name: case for case in layout_cases(self._num_ranks)[1:2]}
        for name, layout in layouts.items():
            yield Check(name, partial(self._run_resumed, layout))

    def _run_resumed(self, layout: LayoutCase, seconds: float) -> dict[str, Any]:
        """Train without an interruption, resume from the middle, and compare bit for bit."""
        straight, resumed = (
            self._folder / f"resume-{layout.name}-{kind}" for kind in ("straight", "resumed")
        )
        train = partial(
            self._inputs.tiny_trainer_arguments,
            num_ranks=self._num_ranks,
            num_steps=_RESUME_LAST_STEP,
        )
        dropout = ["--config_overrides", "resid_pdrop=0.1,embd_pdrop=0.1"]
        flags = ["--deterministic", *dropout, *layout.flags()]
        save_flags = ["--checkpointing_steps", str(_RESUME_STEP)]
        self._run_successfully(train(straight, *flags, *save_flags), seconds / 2)
        checkpoint = straight / "checkpoints" / f"step_{_RESUME_STEP:08d}"
        resume_flags = ["--resume_from_checkpoint", str(checkpoint)]
        self._run_successfully(train(resumed, *flags, *resume_flags), seconds / 2)
        steps = range(_RESUME_STEP + 1, _RESUME_LAST_STEP + 1)
        figures = compare_steps(resumed, straight, tolerance=0.0, steps=steps)
        return figures | compare_weights(resumed, straight, tolerance=0.0)

    def _layout_checks(self) -> Iterator[Check]:
        """Yield one rank, then each layout that is compared with it."""
        cases = layout_cases(self._num_ranks)
        if cases:
            yield Check("one rank", partial(self._run_alone, has_experts=False))
        for case in cases:
            if case.has_experts:
                yield Check("one rank, experts", partial(self._run_alone, has_experts=True))
            yield Check(case.name, partial(self._run_layout, case))

    def _run_alone(self, seconds: float, *, has_experts: bool) -> dict[str, Any]:
        """Train on rank 0 alone, on the batch of all ranks."""
        folder = self._alone_folder(has_experts=has_experts)
        train = partial(
            self._inputs.tiny_trainer_arguments, num_ranks=self._num_ranks, is_alone=True
        )
        arguments = train(folder, *IN_FLOAT32, has_experts=has_experts)
        self._run_successfully(arguments, seconds, is_alone=True)
        return {"losses": [record["loss"] for record in read_steps(folder).values()]}

    def _alone_folder(self, *, has_experts: bool) -> Path:
        return self._folder / f"layout-one-rank{'-experts' if has_experts else ''}"

    def _run_layout(self, case: LayoutCase, seconds: float) -> dict[str, Any]:
        """Train in a layout, and compare losses, gradient norms and weights with one rank."""
        folder = self._folder / f"layout-{case.name.replace(' ', '-')}"
        reference = self._alone_folder(has_experts=case.has_experts)
        arguments = self._inputs.tiny_trainer_arguments(
            folder,
            *IN_FLOAT32,
            *case.flags(),
            num_ranks=self._num_ranks,
            has_experts=case.has_experts,
        )
        self._run_successfully(arguments, seconds)
        is_on_cpu = self._device == "cpu"
        tolerance = _LAYOUT_TOLERANCE_ON_CPU if is_on_cpu else _LAYOUT_TOLERANCE
        steps = range(1, NUM_STEPS + 1)
        figures = {"options": " ".join(case.flags())}
        figures |= compare_steps(folder, reference, tolerance=tolerance, steps=steps)
        return figures | compare_weights(folder, reference, tolerance=_WEIGHT_TOLERANCE)

    def _speed_checks(self) -> Iterator[Check]:
        """Yield a larger run with copies of the model, and one with shards."""
        flags_by_name: dict[str, list[str]] = {"DDP" if self._num_ranks > 1 else "one rank": []}
        if self._num_ranks > 1:
            flags_by_name["FSDP"] = ["--data_parallel_shard_size", str(self._num_ranks)]
        for name, flags in flags_by_name.items():
            yield Check(name, partial(self._run_speed, name, flags))

    def _run_speed(self, name: str, flags: Sequence[str], seconds: float) -> dict[str, Any]:
        """Measure tokens per second and memory of a model, and compare them with the plan."""
        deadline = time.monotonic() + seconds
        folder = self._folder / f"speed-{name.replace(' ', '-')}"
        run_flags = [*self._choose_speed_flags(), *flags]
        length_flags = ["--max_train_steps", "60", "--logging_steps", "20"]
        if self._device == "cpu":
            length_flags = ["--max_train_steps", "6", "--logging_steps", "2"]
        self._run_successfully(
            self._inputs.trainer_arguments(folder, *run_flags, *length_flags), seconds
        )
        records = list(read_steps(folder).values())
        kernels = read_kernels(folder)
        shutil.rmtree(folder, ignore_errors=True)  # it holds gigabytes
        figures: dict[str, Any] = {
            "options": " ".join(run_flags),
            "kernels": kernels,
            "tokens_per_second": records[-1]["tokens_per_second"],
            "ms_per_step": records[-1]["ms_per_step"],
            "losses": [record["loss"] for record in records],
        }
        memory = max((record.get("memory", 0) for record in records), default=0)
        if memory:
            figures["resident_bytes" if self._device == "cpu" else "peak_bytes"] = memory
        return figures | self._compare_with_plan(run_flags, deadline - time.monotonic(), figures)

    def _choose_speed_flags(self) -> list[str]:
        """Return model, batch and precision: GPT-2 124M, or a tiny GPT-2 on a CPU."""
        if self._device == "cpu":
            overrides = "n_layer=4,n_embd=128,n_head=4,n_positions=128,vocab_size=2048"
            model = ["--model_type", "gpt2", "--config_overrides", overrides, "--block_size", "128"]
            return [*model, "--per_device_train_batch_size", "4"]
        micro_batch_size = 4
        if self._memory_gib >= 30:
            micro_batch_size = 16 if self._memory_gib >= 60 else 8
        precision = ["--mixed_precision", "bf16" if self._has_bf16 else "no"]
        sizes = ["--model_size", "124M", "--block_size", "1024"]
        return [*sizes, "--per_device_train_batch_size", str(micro_batch_size), *precision]

    def _compare_with_plan(
        self, run_flags: Sequence[str], seconds: float, measured: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the plan of a run, and the measured figures as fractions of it.

        Speed is not compared on a device that the plan does not know, and memory not on a CPU,
        where the libraries count.
        """
        ranks_per_node, num_further_ranks = divmod(self._num_ranks, self._num_nodes)
        if num_further_ranks:
            return {"plan": "the nodes have different numbers of ranks"}
        device = planned_device(self._device, self._card)
        arguments = ["-m", "llm", "plan", "--json", *run_flags]
        arguments += ["--nodes", str(self._num_nodes), "--gpus_per_node", str(ranks_per_node)]
        arguments += ["--device", device or "a100-80gb", "--memory_gib", str(self._memory_gib or 1)]
        outcomes = self._programs.run(arguments, seconds=seconds, is_alone=True)
        output = outcomes[0].output
        if outcomes[0].code not in (0, 1):  # 1: it does not fit
            return {"plan": describe_failure(outcomes, seconds=seconds)}
        plan, _ = json.JSONDecoder().raw_decode(output, output.index("{\n"))
        figures = {"planned_bytes": plan["memory"]["total"]}
        if "peak_bytes" in measured:
            figures["memory_of_plan"] = measured["peak_bytes"] / figures["planned_bytes"]
        if device not in (None, "cpu"):
            figures["planned_tokens_per_second"] = plan["tokens_per_second"]
            speed = measured["tokens_per_second"] / plan["tokens_per_second"]
            figures["tokens_per_second_of_plan"] = speed
        return figures


def planned_device(device: str, card: str) -> str | None:
    """Return the device of the plan that a card is; None if the plan does not know it."""
    if device == "cpu":
        return "cpu"
    return device_of_card(card)
