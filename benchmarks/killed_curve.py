"""Train twice, once in parts that are killed and resumed, and compare the curves.

python -m benchmarks.killed_curve --output killed_curve.md [--steps 800] [--kills 3]

GPT-2 124M trains on a text: by default source code of this machine, so that nothing needs to be
carried to it. Both runs are deterministic by default, so all losses must be equal. The report, and
`OUTPUT.tsv` with both curves, are written after each start.
"""

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.corpus import make_corpus
from benchmarks.gpu import Card, find_card
from benchmarks.measure import CaseFailed, say, search_path
from benchmarks.report import (
    Goal,
    ReportOptions,
    Section,
    check_folder,
    machine,
    render,
    run_benchmark,
    table,
    write_report,
)
from benchmarks.training import ROOT
from llm.config.options import option
from llm.errors import ConfigError
from llm.runtime.files import read_json_lines

_CHECKPOINTS = 12
"""Checkpoints of a run, at most."""
_LOOK_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class CurveOptions(ReportOptions):
    """Options of the benchmark."""

    size: Literal["124M", "toy"] = option(
        "124M", "Size of the GPT-2; toy rehearses on a CPU.", group="Run"
    )
    steps: int = option(800, "Steps of a run.", group="Run", at_least=2)
    kills: int = option(3, "How often the second run is killed.", group="Run", at_least=1)
    batch_size: int = option(64, "Samples of 1,024 tokens in a step.", group="Run", at_least=1)
    seconds: float = option(
        560.0, "After this time the run in progress is ended.", group="Run", above=0
    )
    text: str | None = option(
        None, "A file to train on; by default source code of this machine.", group="Data"
    )
    megabytes: int = option(100, "Size of the source code.", group="Data", at_least=1)
    tokenizer: str = option(
        str(ROOT / "examples" / "tokenizer"), "Folder of the tokenizer.", group="Data"
    )
    deterministic: bool = option(
        True, "Use deterministic kernels, and so compile nothing on a GPU.", group="Run"
    )


@dataclass(frozen=True, kw_only=True)
class Part:
    """One start of a run.

    Attributes:
        first_step: The step that it resumed from.
        last_step: The last step that it logged.
        end: How it ended.
    """

    first_step: int
    last_step: int
    end: Literal["finished", "killed", "out of time"]


class _Runs:
    """Starts the trainer.

    Args:
        options: The options.
        folder: Folder of the runs.
        text: The file to train on.
        deadline: When the run in progress is ended, on the clock of `time.monotonic`.
    """

    def __init__(self, options: CurveOptions, folder: Path, text: Path, *, deadline: float) -> None:
        self._options, self._folder, self._text = options, folder, text
        self._deadline = deadline

    def train(self, name: str, kill_at: Sequence[int] = ()) -> Iterator[Part]:
        """Train to the end; kill a start once it has logged each of the steps.

        Yields each start when it has ended; none if the time is over.

        Raises:
            CaseFailed: A start ended with an error.
        """
        for target in (*kill_at, None):
            if time.monotonic() > self._deadline:
                return
            part = self._start(name, target)
            say(f"{name}: {part}")
            yield part
            if part.end != "killed":
                return

    def curve(self, name: str) -> dict[int, float]:
        """Return the losses of a run by step."""
        return {int(record["step"]): record["loss"] for record in self._records(name, "loss")}

    def last_validation_loss(self, name: str) -> float | None:
        """Return the validation loss of a run's last evaluation."""
        losses = [record["eval_loss"] for record in self._records(name, "eval_loss")]
        return losses[-1] if losses else None

    def weights_digest(self, name: str) -> str | None:
        """Return a digest of a finished run's weights."""
        path = self._folder / name / "model.safetensors"
        if not path.exists():
            return None
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]

    def _records(self, name: str, key: str) -> list[dict[str, float]]:
        records = read_json_lines(self._folder / name / "metrics.jsonl")
        return [record for record in records if record is not None and key in record]

    def _start(self, name: str, kill_at: int | None) -> Part:
        log = self._folder / f"{name}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                self._command(name),
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": search_path(ROOT), "HF_HUB_OFFLINE": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            end = self._wait(process, name, kill_at)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        steps = self.curve(name)
        if end == "finished" and process.returncode:
            raise CaseFailed(f"{name}: ...{log.read_text(errors='replace').strip()[-600:]}")
        return Part(first_step=_resumed_step(log), last_step=max(steps, default=0), end=end)

    def _wait(
        self, process: "subprocess.Popen[bytes]", name: str, kill_at: int | None
    ) -> Literal["finished", "killed", "out of time"]:
        """Wait until a start ends by itself, has logged a step, or the time is over."""
        while process.poll() is None:
            if time.monotonic() > self._deadline:
                return "out of time"
            if kill_at is not None and max(self.curve(name), default=0) >= kill_at:
                return "killed"
            time.sleep(_LOOK_SECONDS)
        return "finished"

    def _command(self, name: str) -> list[str]:
        options = self._options
        interval = max(1, options.steps // _CHECKPOINTS)
        is_toy = options.size == "toy"
        toy_flags = ["--config_overrides", "n_layer=2,n_embd=32,n_head=2,n_positions=64"]
        return [
            *(sys.executable, "-m", "llm.trainers.gpt", "--model_type", "gpt2"),
            *(toy_flags if is_toy else ()),
            *("--tokenizer_name", options.tokenizer, "--train_file", str(self._text)),
            *("--validation_split_percentage", "2", "--block_size", "64" if is_toy else "1024"),
            *("--data_cache_dir", str(self._folder / "cache")),
            *("--per_device_train_batch_size", str(options.batch_size)),
            *("--max_train_steps", str(options.steps), "--logging_steps", "1"),
            *("--learning_rate", "6e-4", "--lr_scheduler_type", "cosine"),
            *("--num_warmup_steps", str(options.steps // 10), "--weight_decay", "0.1"),
            *("--eval_steps", str(max(1, options.steps // 4)), "--max_eval_steps", "8"),
            *("--checkpointing_steps", str(interval), "--keep_checkpoints", "1"),
            *("--seed", "1", "--report_to", "none", "--output_dir", str(self._folder / name)),
            "--resume_from_checkpoint",
            *(("--deterministic",) if options.deterministic else ()),
        ]


def _resumed_step(log: Path) -> int:
    """Return the step that the last start of a log resumed from."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if "at step " in line]
    resumed = [line for line in lines if "Resumed from " in line]
    return int(resumed[-1].rpartition("at step ")[2].rstrip(".")) if resumed else 0


def kill_steps(steps: int, kills: int) -> list[int]:
    """Return the steps after which a run is killed: one in each equal part, at a random place."""
    generator = random.Random(0)
    length = steps / (kills + 1)
    return [round((part + 0.4 + 0.6 * generator.random()) * length) for part in range(kills)]


def compare(straight: dict[int, float], killed: dict[int, float]) -> tuple[float, int | None]:
    """Return the largest difference of two curves, and their first step with another loss."""
    common = sorted(straight.keys() & killed.keys())
    differences = [abs(straight[step] - killed[step]) for step in common]
    first = next((s for s, off in zip(common, differences, strict=True) if off > 0), None)
    return max(differences, default=0.0), first


def report(options: CurveOptions, folder: Path) -> str:
    """Train both runs and return the report.

    Raises:
        ConfigError: The text does not exist.
        CaseFailed: A run ended with an error.
    """
    deadline = time.monotonic() + options.seconds
    if options.text is not None and not Path(options.text).is_file():
        raise ConfigError(f"--text {options.text} is not a file.")
    card = find_card()
    if options.size != "toy" and card is None:
        raise ConfigError("--size 124M needs a GPU, and torch sees none; use --size toy.")
    check_folder("output", options.output)
    text = folder / "source_code.jsonl" if options.text is None else Path(options.text).resolve()
    if options.text is None:
        make_corpus(text, options.megabytes)
    runs = _Runs(options, folder, text, deadline=deadline)
    parts_by_run: dict[str, list[Part]] = {"straight": [], "killed": []}
    for name, kill_at in (
        ("straight", ()),
        ("killed", kill_steps(options.steps, options.kills)),
    ):
        for part in runs.train(name, kill_at):
            parts_by_run[name].append(part)
            write_report(options, _render_curves(options, card, text, runs, parts_by_run))
    return _render_curves(options, card, text, runs, parts_by_run)


def _render_curves(
    options: CurveOptions,
    card: Card | None,
    text: Path,
    runs: _Runs,
    parts_by_run: Mapping[str, Sequence[Part]],
) -> str:
    """Return the report of the starts so far, and write both curves.

    Args:
        options: The options.
        card: The GPU, if there is one.
        text: The file that the runs train on.
        runs: The runs.
        parts_by_run: The starts of each run that have ended.
    """
    straight, killed = runs.curve("straight"), runs.curve("killed")
    if options.output is not None:
        lines = [f"{step}\t{straight[step]}\t{killed.get(step, '')}\n" for step in sorted(straight)]
        Path(f"{options.output}.tsv").write_text("step\tstraight\tkilled\n" + "".join(lines))
    largest, first = compare(straight, killed)
    num_compared = len(straight.keys() & killed.keys())
    rows = [
        [name, str(part.first_step), str(part.last_step), part.end]
        for name, parts in parts_by_run.items()
        for part in parts
    ]
    digests = runs.weights_digest("straight"), runs.weights_digest("killed")
    is_complete = None not in digests
    facts = [
        *machine(("torch", "transformers", "accelerate")),
        f"GPU: {card.name if card else 'none'}",
        f"GPT-2 {options.size} on {text.name}, {text.stat().st_size / 1e6:.1f} MB; {options.steps} "
        f"steps of {options.batch_size} samples"
        + ("; deterministic, not compiled on a GPU" if options.deterministic else ""),
    ]
    sections = [
        Section(
            title="Starts",
            lines=table(["run", "from step", "last logged step", "end"], rows),
        ),
        Section(
            title="Curves",
            lines=[
                *table(
                    ["run", "first loss", "last loss", "validation loss", "digest of the weights"],
                    [
                        [
                            name,
                            *(f"{curve[at]:.6f}" for at in (min(curve), max(curve))),
                            str(runs.last_validation_loss(name)),
                            digest or "not finished",
                        ]
                        for name, curve, digest in zip(
                            ("straight", "killed"), (straight, killed), digests, strict=True
                        )
                        if curve
                    ],
                ),
                "",
                f"Of {num_compared} steps that both runs logged, the first with another loss is "
                f"{first or 'none'}.",
            ],
            goals=[
                Goal(
                    what="Largest difference of two losses: at most 0",
                    measured=f"{largest:.3g}",
                    met=num_compared > 0 and largest == 0,
                ),
                Goal(
                    what="Bits of the final weights: equal",
                    measured=("equal" if digests[0] == digests[1] else "different")
                    if is_complete
                    else "not finished",
                    met=is_complete and digests[0] == digests[1],
                ),
            ],
        ),
    ]
    return render("A curve of a killed run", facts, sections)


if __name__ == "__main__":
    sys.exit(
        run_benchmark(
            "killed_curve", "Compares a killed run with an uninterrupted one.", CurveOptions, report
        )
    )
