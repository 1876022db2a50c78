"""Runs the trainer as a user would, in processes of its own, and reads what it wrote."""

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm.runtime.logging import counted
from tests.support.faults import Fault, install
from tests.support.models import tiny_config
from tests.support.ranks import Outcome, Ranks
from tests.support.tokenizers import tiny_tokenizer

WORDS = ["the", "king", "said", "to", "a", "queen", "and", "walked", "into", "old", "house", "rain"]


def write_text(path: Path, *, lines: int, seed: int = 0) -> Path:
    """A text of short sentences, the same for the same seed."""
    draw = random.Random(seed)
    text = [" ".join(draw.choices(WORDS, k=draw.randint(4, 12))).capitalize() for _ in range(lines)]
    path.write_text(".\n".join(text) + ".\n", encoding="utf-8")
    return path


def write_model_folder(path: Path, family: str = "gpt2", **changes: Any) -> Path:
    """A folder with a tiny configuration and a tokenizer, and no weights."""
    config = tiny_config(family)
    config.update(changes)
    config.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@dataclass
class Run:
    """A finished command: its folder and what each rank returned and printed."""

    folder: Path
    outcomes: list[Outcome]

    @property
    def codes(self) -> list[Any]:
        return [outcome.value for outcome in self.outcomes]

    @property
    def output(self) -> str:
        return "\n".join(outcome.output for outcome in self.outcomes)

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        lines = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    @property
    def events(self) -> list[dict[str, Any]]:
        """The lines of events.jsonl."""
        lines = (self.folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """A record for each step: its training and its evaluation, neither of them twice."""
        by_step: dict[int, dict[str, Any]] = {}
        for line in self.lines:
            record = by_step.setdefault(line["step"], {"step": line["step"]})
            assert record.keys() & line.keys() == {"step"}, f"a second line of it: {line}"
            record.update(line)
        return list(by_step.values())

    @property
    def losses(self) -> list[float]:
        return [record["loss"] for record in self.metrics if "loss" in record]

    @property
    def saved_steps(self) -> list[int]:
        """The steps of its checkpoints."""
        return sorted(int(path.name[5:]) for path in self.folder.glob("checkpoints/step_*"))

    def read_json(self, name: str) -> dict[str, Any]:
        return json.loads((self.folder / name).read_text(encoding="utf-8"))


class Bench:
    """A place to run the trainer in: model folder, text, cache, runs.

    Args:
        folder: Where everything lies.
        lines: Lines of the training text.
        family: Architecture of the model.
        changes: Changes to the model's configuration.
    """

    def __init__(self, folder: Path, *, lines: int = 300, family: str = "gpt2", **changes: Any):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.model = write_model_folder(folder / "model", family, **changes)
        self.text = write_text(folder / "train.txt", lines=lines)

    def command(self, name: str, **options: Any) -> list[str]:
        """The trainer's arguments: small defaults, changed by options (None leaves one out)."""
        settings: dict[str, Any] = {
            "model_name_or_path": self.model,
            "train_file": self.text,
            "data_cache_dir": self.folder / "cache",
            "output_dir": self.folder / name,
            "block_size": 32,
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 4,
            "max_train_steps": 20,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "constant",
            "seed": 1,
            "logging_steps": 1,
            "report_to": "none",
            "device_peak_tflops": 1,  # else each run measures it, which takes longer than training
            **options,
        }
        argv = []
        for key, value in settings.items():
            if value is True:
                argv.append(f"--{key}")
            elif value is False:
                argv.append(f"--no_{key}")
            elif isinstance(value, list | tuple):
                argv += [f"--{key}", *map(str, value)]
            elif value is not None:
                argv += [f"--{key}", str(value)]
        return argv

    def read(self, name: str = "unread", *, ranks: int = 1, **options: Any) -> Any:
        """Read in this process what a run, or an evaluation, reads before it starts."""
        from llm.config.command_line import split_config_file
        from llm.runtime.world import World
        from llm.trainers.gpt.inputs import read_evaluation, read_training
        from llm.trainers.gpt.main import parse_args

        words = self.command(name, **options)
        config, world = parse_args(words), World(rank=0, local_rank=0, world_size=ranks)
        if config.eval_only:
            return read_evaluation(config, world)
        return read_training(config, world, config_file=split_config_file(words)[0])

    def start(
        self,
        name: str = "run",
        *,
        ranks: int = 1,
        faults: Sequence[Fault] = (),
        environment: dict[str, str] | None = None,
        **options: Any,
    ) -> Ranks:
        """Start the trainer on some ranks, to which something shall happen."""
        command = self.command(name, **options)
        return Ranks(_main, ranks, command, faults, environment=environment)

    def train(
        self,
        name: str = "run",
        *,
        ranks: int = 1,
        timeout: float = 120,
        faults: Sequence[Fault] = (),
        **options: Any,
    ) -> Run:
        """Run the trainer on some ranks."""
        started = self.start(name, ranks=ranks, faults=faults, **options)
        return Run(self.folder / name, started.outcomes(timeout))

    def train_well(self, name: str = "run", **options: Any) -> Run:
        """Run the trainer and expect it to end well on every rank."""
        run = self.train(name, **options)
        assert all(code == 0 for code in run.codes), _report(run)
        # Ranks that do not know of one another would each train alone, and agree.
        assert f"world: {counted(len(run.codes), 'rank')}, " in run.output
        return run


def assert_refused(bench: Bench, *, ranks: int = 1, words: list[str], **options: Any) -> None:
    """Expect exit code 2, one sentence with the words, no traceback, no run folder."""
    run = bench.train("refused", ranks=ranks, **options)
    assert run.codes == [2] * ranks, run.output
    said = re.findall(r"^(\[rank \d\] )?error: (.*)", run.output, flags=re.MULTILINE)
    # A rank that is still alive seconds later, as none is under a launcher, repeats it.
    assert len({sentence for _, sentence in said}) == 1, run.output
    assert len([prefix for prefix, _ in said if not prefix]) <= 1, run.output
    sentence = run.output[run.output.index("error:") :]
    for word in words:
        assert word in sentence
    assert sentence.rstrip().endswith((".", ")", "?"))
    assert "Traceback" not in run.output
    assert not run.folder.exists()


def _main(argv: list[str], faults: Sequence[Fault]) -> int:
    from llm.checkpoint import save
    from llm.trainers.gpt import main

    main.GRACE_SECONDS = 0.5  # no launcher here kills the failing rank
    save._RETRY_DELAYS = (0.05, 0.1)
    install(faults)
    return main.main(argv)


def _report(run: Run) -> str:
    return "\n".join(f"{outcome.error}\n{outcome.output}" for outcome in run.outcomes)


FROM_PARENT = dict.fromkeys(
    [
        *("model_name_or_path", "train_file", "block_size", "learning_rate", "lr_scheduler_type"),
        *("per_device_train_batch_size", "per_device_eval_batch_size", "max_train_steps", "seed"),
        *("data_cache_dir", "logging_steps", "report_to", "device_peak_tflops"),
    ]
)
"""None of the options of `Bench`, for a branch that takes them from its parent."""

NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
