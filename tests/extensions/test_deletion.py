"""Every extension can be deleted, and another one added: a folder, and two lines in the list."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.package import PACKAGE, ROOT, USES
from tests.support.trainer_server import TrainerServer, trainer_server
from tests.support.training import Bench, Run

EXTENSIONS = sorted(path.parent.name for path in PACKAGE.glob("extensions/*/__init__.py"))
CLOZE = ROOT / "examples" / "tasks" / "shakespeare_cloze.yaml"
MADE_WITH = {
    "averaging": ({"ema_decay": 0.9}, 0, "also holds ema, which this run does not continue"),
    "bf16_moments": ({"moment_dtype": "bf16"}, 2, "was trained with --moment_dtype"),
    "compiled_code": ({"compiled_code": "code", "torch_compile": True}, 0, ""),
    "custom_optim": (
        {"optimizer": "torch.optim:Adamax"},
        2,
        "optimizer was 'torch.optim:Adamax' and is 'adamw'",
    ),
    "decentralized": ({"data_parallel": "gossip"}, 2, "was trained with --data_parallel"),
    "kfac": ({"kfac": True}, 2, "was trained with --kfac,"),
    "matrix_optim": ({"optimizer": "muon"}, 2, "optimizer was 'muon' and is 'adamw'"),
    "moe": ({"router_balancing": "none"}, 2, "was trained with --router_balancing,"),
    "mup": ({"mup": True, "mup_base_width": 16}, 2, "was trained with --mup and --mup_base_width"),
    "norms": (
        {"log_norms": 1},
        0,
        "also holds norms, which this run does not continue",
    ),
    "profiler": ({"profile": "0:1"}, 0, ""),
    "spikes": (
        {"on_loss_spike": "stop"},
        0,
        "also holds spikes, which this run does not continue",
    ),
    "tasks": ({"eval_tasks": CLOZE}, 0, ""),
}
"""Options of a run that uses the extension; exit code and log of a resume without them."""
MARKS = {"matrix_optim": (), "compiled_code": pytest.mark.slow}  # it compiles for a minute
REFUSED = {
    "custom_optim": "not 'torch.optim:Adamax'",
    "matrix_optim": "not 'muon'",
}
"""What a command with these options is answered without the extension, if it has no own option."""
SHORT = {"checkpointing_steps": 1, "per_device_train_batch_size": 1}


def copy_of_package(folder: Path) -> Path:
    shutil.copytree(PACKAGE, folder / "llm", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def listed_in(package: Path) -> Path:
    return package / "llm" / "trainers" / "gpt" / "extensions.py"


def delete(name: str, package: Path) -> None:
    """Remove an extension's folder, its import and its line in the list; its users first."""
    for user, used in USES.items():
        if name in used and (package / "llm" / "extensions" / user).exists():
            delete(user, package)
    shutil.rmtree(package / "llm" / "extensions" / name)
    source = listed_in(package).read_text(encoding="utf-8")
    imported = re.compile(rf"^from llm\.extensions\.{name}\.options import (\w+)\n", re.MULTILINE)
    [extension] = imported.findall(source)
    source, removed = re.subn(
        rf"^    {extension},\n", "", imported.sub("", source), flags=re.MULTILINE
    )
    assert removed == 1
    listed_in(package).write_text(source, encoding="utf-8")


def add_counter(package: Path) -> None:
    """Add the counter of docs/extend.md: its folder, its import and its line in the list."""
    folder = package / "llm" / "extensions" / "counter"
    folder.mkdir()
    (folder / "__init__.py").write_text('"""Counts updates."""\n')
    shutil.copy(Path(__file__).parent / "counter.py", folder / "options.py")
    source = listed_in(package).read_text(encoding="utf-8")
    line = "from llm.trainers.gpt.config import CoreConfig\n"
    source = source.replace(
        line, f"from llm.extensions.counter.options import CounterExtension\n{line}"
    )
    source = source.replace(", ...] = (\n", ", ...] = (\n    CounterExtension,\n")
    listed_in(package).write_text(source, encoding="utf-8")


@pytest.fixture(scope="module")
def server() -> Iterator[TrainerServer]:
    with trainer_server() as server:
        yield server


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"), lines=60)


@pytest.fixture(scope="module")
def plain(bench) -> Run:
    """A run without any extension, of the whole package."""
    return bench.train_well("plain", max_train_steps=2, **SHORT)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=MARKS.get(name, pytest.mark.extended)) for name in EXTENSIONS],
)
def test_runs_continue_without_an_extension_that_they_do_not_use(
    name, bench, plain, server, tmp_path
):
    options, code, said = MADE_WITH[name]
    if name == "tasks" and importlib.util.find_spec("lm_eval") is None:
        pytest.skip("needs the extra tasks (lm_eval)")
    bench.train_well(f"with-{name}", max_train_steps=1, **SHORT | options)
    package = copy_of_package(tmp_path)
    delete(name, package)
    run = bench.folder / f"without-{name}"
    shutil.copytree(plain.folder, run)
    longer = {"resume_from_checkpoint": True, "max_train_steps": 3, **SHORT}

    codes, output = server.run(
        package,
        bench.command(run.name, **longer),
        bench.command(run.name, eval_only=True, resume_from_checkpoint=True),
        bench.command(f"new-{name}", max_train_steps=1, **SHORT),
        bench.command(f"with-{name}", **longer | options),
        bench.command(f"with-{name}", **longer),
    )

    assert codes == [0, 0, 0, 2, code], output
    assert f"Resumed from {run}/checkpoints/step_00000002 at step 2" in output
    assert (run / "model.safetensors").exists()
    assert (run / "eval_results.json").exists()
    assert REFUSED.get(name, f"There is no option --{next(iter(options))}") in output
    assert said in output


def test_an_extension_of_one_file_counts_saves_and_resumes(bench, server, tmp_path):
    package = copy_of_package(tmp_path)
    add_counter(package)
    options = {**SHORT, "count_every": 2}

    codes, output = server.run(
        package,
        bench.command("counted", max_train_steps=3, **options),
        bench.command("counted", max_train_steps=4, resume_from_checkpoint=True, **options),
        bench.command("uncounted", max_train_steps=2, **SHORT),
        bench.command("uncounted", max_train_steps=5, resume_from_checkpoint=True, **options),
    )

    assert codes == [0, 0, 0, 0], output
    assert re.findall(r"counted (\d+) updates", output) == ["2", "3", "4", "0", "2", "3"]
    metrics = (bench.folder / "counted" / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in metrics.splitlines()]
    assert [line["updates"] for line in lines if "updates" in line] == [2, 3, 4]
    assert "has no count of updates: it begins here" in output


@pytest.mark.extended
def test_the_example_of_the_page_is_the_extension_that_is_tested():
    source = (Path(__file__).parent / "counter.py").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert "\n\n".join(blocks) == source.partition("\n\n")[2]


@pytest.mark.slow
def test_the_core_has_sound_types_without_any_extension(tmp_path):
    package = copy_of_package(tmp_path)
    for name in EXTENSIONS:
        if (package / "llm" / "extensions" / name).exists():
            delete(name, package)
    shutil.copy(ROOT / "pyproject.toml", package)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "llm"], cwd=package, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
