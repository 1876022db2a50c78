"""Each call of the file system fails in turn: a sentence or success, and the same bits afterwards.

With LLM_TEST_EVERY_CALL=1 no call is left out, which takes about an hour.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.io_faults import IOFault, IOFaultServer, Outcome
from tests.support.hub_server import Hub, serve_hub
from tests.support.training import Bench

EVERY_CALL = bool(os.environ.get("LLM_TEST_EVERY_CALL"))

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(3600 if EVERY_CALL else 900),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc makes the library of the faults"),
]

TRAINING = {
    "max_train_steps": 8,
    "checkpointing_steps": 2,
    "validation_split_percentage": 10,
    "report_to": "tensorboard",
}
Check = Callable[[Outcome], list[str]]


class Campaign:
    """Runs with faults, and what they must equal.

    Args:
        server: Runs the programs.
        bench: Model and text.
        hub: Where `fetch` finds a model.
    """

    def __init__(self, server: IOFaultServer, bench: Bench, hub: Hub) -> None:
        self.server, self.bench, self.hub = server, bench, hub
        self.folder = bench.folder / "case"
        self.target = self.folder / "target"
        lines = bench.text.read_text(encoding="utf-8").splitlines()
        for name in ("one", "two"):
            records = [json.dumps({"text": f"{name} {line}"}) + "\n" for line in lines]
            (bench.folder / f"{name}.jsonl").write_text("".join(records), encoding="utf-8")
        for ranks in (1, 2):
            words = ["train", *bench.command(f"straight-{ranks}", **TRAINING)]
            assert server.run(words, ranks=ranks).codes == [0] * ranks
        self.run = bench.folder / "straight-1"
        self.files: dict[str, bytes] = {}
        """What the program of the present cases writes without a fault."""

    def command(self, program: str) -> list[Any]:
        """The words of a program that writes to the folder of a case."""
        folder = self.bench.folder
        return {
            "prepare": [
                *("prepare", "--input", folder / "one.jsonl", folder / "two.jsonl"),
                *("--tokenizer_name", self.bench.model, "--workers", 2),
                *("--output_prefix", self.target / "text"),
            ],
            "export": ["checkpoints", self.run, "--export", 4, self.target],
            "average": ["checkpoints", "average", self.run, "--last", 3, "--output", self.target],
            "report": ["report", self.run, "--output", self.target / "report.html"],
            "fetch": ["fetch", self.target, "--model_name_or_path", "me/tiny"],
        }[program]

    def training(self, start: str) -> list[Any]:
        """The words of a training in the folder of a case."""
        options: dict[str, Any] = {
            "train": {},
            "two ranks": {},
            "kept": {"keep_checkpoints": 1, "save_top_k": 1, "eval_steps": 2},
            "resume": {"resume_from_checkpoint": True},
            "overwrite": {"overwrite_output_dir": True},
            "text": {"data_cache_dir": self.folder / "cache"},
        }[start]
        return ["train", *self.bench.command("case/target", **TRAINING, **options)]

    def begin(self, start: str) -> None:
        """Make the folder of a case as a start finds it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        if start in ("resume", "overwrite"):
            shutil.copytree(self.run, self.target, symlinks=True)
        if start == "resume":  # as after a kill
            for name in ("checkpoints/step_00000006", "checkpoints/step_00000008"):
                shutil.rmtree(self.target / name)
            (self.target / "model.safetensors").unlink()
        if start == "report":
            self.target.mkdir()

    def cases(
        self, start: str, kind: str, error: int, action: Any, stride: int, check: Check
    ) -> list[str]:
        """Fail one call of a kind after the other; return what was wrong."""
        is_training = start not in ("prepare", "export", "average", "report", "fetch")
        words = self.training(start) if is_training else self.command(start)
        ranks = 2 if start == "two ranks" else 1
        place = self.folder / "cache" if start == "text" else self.folder
        wrong = []
        call = calls = 0
        while call <= calls:
            self.begin(start)
            fault = IOFault(folder=place, kind=kind, call=call, error=error, action=action)
            outcome = self.server.run(words, ranks=ranks, fault=fault)
            if call == 0:  # no call fails: the number of calls
                calls, self.files = outcome.calls, contents(self.target)
                assert calls, f"{start} makes no call of the kind {kind}"
            elif call <= outcome.calls:
                wrong += [f"{kind} {call} of {calls}: {what}" for what in check(outcome)]
            call += 1 if call == 0 or EVERY_CALL else stride
        return wrong

    def check_run(self, start: str, outcome: Outcome) -> list[str]:
        """Return what is wrong with a training, and with the one that resumes it."""
        straight = self.bench.folder / f"straight-{len(outcome.codes)}"
        wrong = problems_of_end(outcome)
        if all(code == 0 for code in outcome.codes):
            wrong += differences(self.target, straight, "the run")
        words = self.training(start)
        if "--overwrite_output_dir" in words:
            words.remove("--overwrite_output_dir")
        if "--resume_from_checkpoint" not in words:
            words.append("--resume_from_checkpoint")
        resumed = self.server.run(words, ranks=len(outcome.codes))
        if any(resumed.codes):
            return [*wrong, f"the resume ends with {resumed.codes}: {resumed.output[-400:]}"]
        wrong += [f"the resume leaves {path.name}" for path in self.target.rglob("*.tmp")]
        return wrong + differences(self.target, straight, "the resume")

    def check_files(self, program: str, outcome: Outcome) -> list[str]:
        """Return what is wrong with the files of a program, and of its repetition."""
        wrong = problems_of_end(outcome)
        repeated = self.server.run(self.command(program))
        if repeated.codes != [0]:
            return [*wrong, f"the repetition ends with {repeated.codes}: {repeated.output[-400:]}"]
        files = contents(self.target)
        names = {name for name, _ in files.items() ^ self.files.items()}
        return wrong + [f"the repetition has another {name}" for name in sorted(names)]


def problems_of_end(outcome: Outcome) -> list[str]:
    """Return why a program has not ended as it should."""
    if any(code is None for code in outcome.codes):
        return ["it hangs"]
    if any(code is not None and code < 0 for code in outcome.codes):
        return []  # killed
    wrong = []
    if "Traceback" in outcome.output:
        wrong.append("a traceback")
    codes = {*outcome.codes} - ({76} if 2 in outcome.codes else set())  # of a rank that waits
    if not codes <= {0, 2}:
        wrong.append(f"exit codes {outcome.codes}")
    sentences = [line for line in outcome.output.splitlines() if "error: " in line]
    if any(outcome.codes) and not sentences:
        wrong.append(f"no sentence: {outcome.output[-400:]}")
    return wrong


def differences(run: Path, straight: Path, name: str) -> list[str]:
    """Return what is other in a run than in one without faults."""
    wrong = []
    if json.loads((run / "status.json").read_text())["status"] != "finished":
        wrong.append(f"{name} is not finished")
    if (run / "model.safetensors").read_bytes() != (straight / "model.safetensors").read_bytes():
        wrong.append(f"{name} has other weights")
    if losses(run) != losses(straight):
        wrong.append(f"{name} has other metrics: {losses(run)}")
    return wrong


def losses(run: Path) -> list[tuple[int, float]]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return [(record["step"], record["loss"]) for record in records if "loss" in record]


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a program by their path, some without their content, which has the time."""
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*")}
    return {
        name: b"" if path.suffix in (".html", ".md") else path.read_bytes()
        for name, path in paths.items()
        if path.is_file() and ".cache" not in path.parts  # of the Hub's library
    }


@pytest.fixture(scope="module")
def campaign(tmp_path_factory) -> Iterator[Campaign]:
    folder = tmp_path_factory.mktemp("io")
    bench = Bench(folder / "bench", n_layer=1)
    with serve_hub(folder / "hub") as hub:
        for file in bench.model.iterdir():
            shutil.copy(file, hub.folder("me/tiny"))
        variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "home"), "HF_TOKEN": "token"}
        server = IOFaultServer(folder, variables)
        yield Campaign(server, bench, hub)
        server.close()


FULL, BROKEN, STALE, FILES = errno.ENOSPC, errno.EIO, errno.ESTALE, errno.EMFILE


@pytest.mark.parametrize(
    ("start", "kind", "error", "action", "stride"),
    [
        ("train", "rename", BROKEN, "fail", 1),
        ("train", "fsync", BROKEN, "fail", 1),
        ("train", "write", FULL, "fail", 16),
        ("train", "write", FULL, "fail from here", 17),
        ("train", "write", 0, "tear", 19),
        ("train", "open", FILES, "fail", 9),
        ("train", "mkdir", errno.EDQUOT, "fail", 4),
        ("train", "unlink", STALE, "fail", 2),
        ("kept", "rename", 0, "kill", 3),
        ("kept", "unlink", BROKEN, "fail", 4),
        ("resume", "rename", BROKEN, "fail", 2),
        ("resume", "fsync", 0, "kill", 4),
        ("resume", "write", STALE, "fail", 14),
        ("overwrite", "rename", 0, "kill", 2),
        ("overwrite", "unlink", 0, "kill", 6),
        ("text", "rename", BROKEN, "fail", 1),
        ("text", "fsync", BROKEN, "fail", 2),
        ("text", "write", 0, "tear", 3),
        ("two ranks", "rename", BROKEN, "fail", 4),
        ("two ranks", "fsync", BROKEN, "fail", 16),
        ("two ranks", "write", FULL, "fail", 50),
    ],
)
def test_a_run_survives_each_failed_call(campaign, start, kind, error, action, stride):
    def check(outcome: Outcome) -> list[str]:
        return campaign.check_run(start, outcome)

    assert campaign.cases(start, kind, error, action, stride, check) == []


@pytest.mark.parametrize(
    ("program", "kind", "error", "action", "stride"),
    [
        ("prepare", "rename", BROKEN, "fail", 1),
        ("prepare", "rename", 0, "kill", 2),
        ("prepare", "fsync", BROKEN, "fail", 2),
        ("prepare", "write", FULL, "fail", 4),
        ("prepare", "unlink", 0, "kill", 3),
        ("export", "rename", BROKEN, "fail", 1),
        ("export", "rename", 0, "kill", 1),
        ("export", "fsync", BROKEN, "fail", 2),
        ("export", "write", FULL, "fail", 3),
        ("export", "open", FILES, "fail", 2),
        ("average", "rename", BROKEN, "fail", 2),
        ("average", "write", 0, "tear", 4),
        ("report", "rename", BROKEN, "fail", 1),
        ("report", "fsync", BROKEN, "fail", 1),
        ("report", "write", FULL, "fail", 1),
        ("fetch", "rename", BROKEN, "fail", 1),
        ("fetch", "open", FILES, "fail", 3),
        ("fetch", "write", FULL, "fail", 3),
        ("fetch", "write", 0, "tear", 4),
    ],
)
def test_a_program_can_be_repeated_after_each_failed_call(
    campaign, program, kind, error, action, stride
):
    def check(outcome: Outcome) -> list[str]:
        return campaign.check_files(program, outcome)

    assert campaign.cases(program, kind, error, action, stride, check) == []
