"""Extensions of installed packages: the package of the tutorial, and packages with mistakes."""

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from llm.config.options import fields
from llm.errors import ConfigError
from llm.trainers.gpt.config import CoreConfig
from llm.trainers.gpt.installed_extensions import load_installed_extensions
from llm.trainers.gpt.seams import list_option_classes
from tests.support.installed_packages import (
    files_of_page,
    install,
    package_of_one_option,
    write_files,
)
from tests.support.package import ROOT
from tests.support.ranks import run_ranks
from tests.support.trainer_server import TrainerServer, trainer_server
from tests.support.training import NO_DROPOUT, Bench

CALM = files_of_page()
CALM_OPTIONS = {"activation_penalty": 0.1, "halve_rate_at": [2]}


@pytest.fixture(scope="module")
def server() -> Iterator[TrainerServer]:
    with trainer_server() as server:
        yield server


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    # Each rank draws other dropout masks, so that two ranks could not equal one.
    return Bench(tmp_path_factory.mktemp("bench"), lines=60, **NO_DROPOUT)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder with the package of the tutorial."""
    return install(CALM, tmp_path_factory.mktemp("site"))


def read_lines(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def newest_manifest(folder: Path) -> dict:
    path = sorted(folder.glob("checkpoints/step_*"))[-1] / "manifest.json"
    return json.loads(path.read_text())["facts"]


def test_the_package_of_the_tutorial_trains_and_resumes_exactly(bench, server, site):
    options = {**CALM_OPTIONS, "checkpointing_steps": 2, "max_train_steps": 4}

    codes, output = server.run(
        site,
        bench.command("whole", **options),
        bench.command("halves", **options | {"exit_after": 1e-9}),
        bench.command("halves", **options, resume_from_checkpoint=True),
    )

    assert codes == [0, 75, 0], output
    whole, halves = bench.folder / "whole", bench.folder / "halves"
    expected, weights = (load_file(run / "model.safetensors") for run in (whole, halves))
    assert expected.keys() == weights.keys()
    assert all(expected[name].equal(weights[name]) for name in expected)
    lines = [line for line in read_lines(whole) if "penalty" in line]
    assert [line["learning_rate"] for line in lines] == [1e-3, 1e-3, 5e-4, 5e-4]
    assert all(0 < line["penalty"] <= line["largest_penalty"] for line in lines)
    resumed = [line for line in read_lines(halves) if "penalty" in line]
    for name in ("penalty", "largest_penalty", "loss"):
        assert [line[name] for line in resumed] == [line[name] for line in lines]
    # The records name the package and its version.
    assert len(re.findall(r"^versions: .*, llm-calm 0\.1\.0$", output, re.MULTILINE)) == 3
    assert newest_manifest(whole)["packages"] == {"llm-calm": "0.1.0"}
    events = [json.loads(line) for line in (whole / "events.jsonl").read_text().splitlines()]
    assert events[0]["packages"] == {"llm-calm": "0.1.0"}
    assert re.search(r"torch \S+, llm-calm 0\.1\.0", (whole / "README.md").read_text())
    assert "\n# Calm training (llm-calm 0.1.0)\n" in (whole / "config.toml").read_text()


@pytest.mark.extended
def test_a_save_between_two_lines_of_the_log_keeps_the_loss_so_far(bench, server, site):
    options = {"activation_penalty": 0.1, "checkpointing_steps": 1, "max_train_steps": 4}
    options |= {"logging_steps": 4}

    codes, output = server.run(
        site,
        bench.command("interval", **options),
        bench.command("stopped", **options | {"exit_after": 1e-9}),
        bench.command("stopped", **options, resume_from_checkpoint=True),
    )

    assert codes == [0, 75, 0], output
    interval, stopped = (read_lines(bench.folder / name) for name in ("interval", "stopped"))
    assert interval[0]["penalty"] == stopped[0]["penalty"]
    assert interval[0]["loss"] == stopped[0]["loss"]


@pytest.mark.parametrize(
    ("run_name", "attribute"),
    [
        ("each_interval", "def metrics(self): return {'loss': 0.0}, ''"),
        ("every_step", "periodic = Periodic('losses', 1, lambda step: {'loss': 0.0})"),
    ],
)
def test_a_value_with_the_name_of_one_in_the_log_is_refused(
    bench, server, tmp_path, run_name, attribute
):
    code = f"""
from llm.trainers.gpt.seams import LoopExtension, Periodic

class Loss(LoopExtension):
    {attribute}

It.make_loop_extension = lambda self, context: Loss()
"""
    package = package_of_one_option("llm-loss", "loss_number", code=code)

    codes, output = server.run(
        install(package, tmp_path), bench.command(run_name, loss_number=1, max_train_steps=1)
    )

    assert codes == [2], output
    assert "error: An extension returns the value loss, which metrics.jsonl has already" in output
    assert "Traceback" not in output


@pytest.mark.parametrize("rate", ["-1.0", "nan"])
def test_a_learning_rate_that_cannot_be_is_refused(bench, server, tmp_path, rate):
    code = f"It.change_schedule = lambda *_, **__: lambda step: float('{rate}')"
    package = package_of_one_option("llm-rate", "rate_number", code=code)

    codes, output = server.run(
        install(package, tmp_path), bench.command(f"rate{rate}", rate_number=1, max_train_steps=1)
    )

    assert codes == [2], output
    assert f"error: The learning rate after 0 steps is {rate}, as an extension has" in output


@pytest.mark.parametrize(
    ("name", "code", "sentence"),
    [
        (
            "problems-text",
            "It.find_problems = lambda self: 'one'",
            "llm_wrong:It returns a value of the type str from find_problems; let it return a list",
        ),
        (
            "problems-none",
            "It.find_problems = lambda self: None",
            "llm_wrong:It returns a value of the type NoneType from find_problems; let it return",
        ),
        (
            "problems-numbers",
            "It.find_problems = lambda self: [1]",
            "llm_wrong:It returns a value of the type list from find_problems; let it return a "
            "list of strings, a sentence for each problem.",
        ),
        (
            "schedule-none",
            "It.change_schedule = lambda *_, **__: None",
            "llm_wrong:It returns a value of the type NoneType from change_schedule; let it "
            "return a function from steps done to a learning rate",
        ),
        (
            "metrics-none",
            "Loop.metrics = lambda self: None",
            "llm_wrong:Loop returns a value of the type NoneType from metrics; let it return a "
            "dictionary of values and a string",
        ),
        (
            "metrics-values",
            "Loop.metrics = lambda self: {'a': 1.0, 'b': 2.0}",
            "llm_wrong:Loop returns a value of the type dict from metrics; let it return a",
        ),
    ],
)
def test_a_hook_that_returns_the_wrong_type_is_refused_with_its_extension(
    bench, server, tmp_path, name, code, sentence
):
    loop = """
from llm.trainers.gpt.seams import LoopExtension

class Loop(LoopExtension):
    pass

It.make_loop_extension = lambda self, context: Loop()
"""
    package = package_of_one_option("llm-wrong", "number", code=f"{loop}\n{code}")

    codes, output = server.run(
        install(package, tmp_path), bench.command(name, number=1, max_train_steps=1)
    )

    assert codes == [2], output
    assert f"error: The extension {sentence}" in output
    assert "Traceback" not in output


def test_a_resume_names_a_package_that_is_missing_or_has_changed(bench, server, site, tmp_path):
    options = {"checkpointing_steps": 1, "max_train_steps": 2}
    longer = {**options, "max_train_steps": 2, "resume_from_checkpoint": True}
    first = {**options, **CALM_OPTIONS, "max_train_steps": 2, "halve_rate_at": None}
    codes, output = server.run(site, bench.command("used", **first))
    assert codes == [0], output
    other = tmp_path / "other"
    install({**CALM, "pyproject.toml": CALM["pyproject.toml"].replace("0.1.0", "0.2.0")}, other)

    (tmp_path / "none").mkdir()
    config = str(bench.folder / "used" / "config.toml")
    codes, missing = server.run(
        tmp_path / "none",
        bench.command("used", **longer),
        ["--config", config, "--resume_from_checkpoint"],
    )
    changed_codes, changed = server.run(
        other, bench.command("used", **first | {"resume_from_checkpoint": True})
    )

    assert codes == [2, 2]
    assert (
        "step_00000002 was trained with --activation_penalty, which this installation does not "
        "have. Install llm-calm 0.1.0, or start another run" in missing
    )
    assert (
        "There is no option activation_penalty. The file has options of llm-calm 0.1.0, which this "
        "installation does not have; install it." in missing
    )
    assert changed_codes == [0], changed
    assert "the package llm-calm was 0.1.0 and is 0.2.0" in changed
    assert "Traceback" not in missing + changed


def test_a_run_that_uses_no_option_of_a_package_needs_and_records_none(
    bench, server, site, tmp_path
):
    options = {"checkpointing_steps": 1, "max_train_steps": 1}
    codes, output = server.run(
        site,
        bench.command("unused", **options),
        bench.command("refused", halve_rate_at=[1, 1], **options),
        bench.command("refused", halve_rate_at=[1], **options),
    )

    assert codes == [0, 2, 2], output
    assert "--halve_rate_at names a step twice; name each step once." in output
    assert "--halve_rate_at 1 is not below the 1 steps of the run" in output
    assert not (bench.folder / "refused").exists()
    assert "packages" not in newest_manifest(bench.folder / "unused")
    assert "Calm" not in (bench.folder / "unused" / "config.toml").read_text()


def test_a_missing_package_with_free_options_leaves_a_line_in_the_log(bench, server, tmp_path):
    option = package_of_one_option("llm-free", "free_number")
    options = {"checkpointing_steps": 1, "max_train_steps": 1}
    command = bench.command("free", free_number=3, **options)
    codes, output = server.run(install(option, tmp_path / "site"), command)
    assert codes == [0], output

    (tmp_path / "none").mkdir()
    codes, output = server.run(
        tmp_path / "none", bench.command("free", resume_from_checkpoint=True, **options)
    )

    assert codes == [0], output
    assert "the package llm-free was 1.0 and is not used" in output


def _train(site: str, argv: list[str]) -> int:
    sys.path.insert(0, site)
    for name in ("extensions", "recorded_config"):  # a fork server imports them without the site
        sys.modules.pop(f"llm.trainers.gpt.{name}", None)
    from llm.trainers.gpt.main import main

    return main(argv)


@pytest.mark.extended
@pytest.mark.parametrize("shard", [1, 2])
def test_the_penalty_is_the_same_on_replicas_and_on_shards(shard, bench, server, site):
    options = {"activation_penalty": 0.1, "max_train_steps": 3, "train_file": bench.text}
    if not (bench.folder / "one").exists():
        command = bench.command("one", per_device_train_batch_size=4, **options)
        codes, output = server.run(site, command)
        assert codes == [0], output
    command = bench.command(
        f"two-{shard}",
        per_device_train_batch_size=2,
        data_parallel_shard_size=shard,
        **options,
    )

    outcomes = run_ranks(_train, 2, str(site), command)

    assert [outcome.value for outcome in outcomes] == [0, 0], outcomes
    one, two = (read_lines(bench.folder / name) for name in ("one", f"two-{shard}"))
    for expected, line in zip(one, two, strict=True):
        for name in expected.keys() & {"loss", "penalty", "largest_penalty", "grad_norm"}:
            assert line[name] == pytest.approx(expected[name], rel=1e-5)
    expected, weights = (
        load_file(bench.folder / name / "model.safetensors") for name in ("one", f"two-{shard}")
    )
    for name in expected:
        assert (expected[name] - weights[name]).abs().max() < 1e-5


def run_help(site: Path, *words: str) -> tuple[str, list[str]]:
    code = (
        "import json, sys\nfrom llm.__main__ import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'numpy', 'transformers', 'llm_calm.penalty'}\n"
        "print(json.dumps(sorted(heavy & sys.modules.keys())))"
    )
    environment = os.environ | {"PYTHONPATH": f"{site}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    text, _, loaded = done.stdout.rstrip("\n").rpartition("\n")
    return text, json.loads(loaded)


@pytest.mark.parametrize("program", ["train", "plan"])
def test_help_shows_the_options_of_a_package_and_loads_no_library(program, site):
    text, loaded = run_help(site, program, "--help", "calm")
    page = (ROOT / "docs/extend.md").read_text()
    [shown] = re.findall(r"^```text\n(Calm training .*?)^```", page, re.DOTALL | re.MULTILINE)
    assert shown in text
    assert loaded == []


def test_a_broken_package_is_refused_by_every_program_in_one_sentence(tmp_path):
    broken = package_of_one_option("llm-broken", "number", code="import a_module_that_is_nowhere")
    environment = os.environ | {"PYTHONPATH": f"{install(broken, tmp_path)}:{ROOT}"}
    sentence = (
        "error: The extension llm_broken:It of the installed package llm-broken 1.0 cannot be "
        "loaded (No module named 'a_module_that_is_nowhere'); update the package, or uninstall "
        "it.\n"
    )
    for command in (["llm", "train"], ["llm", "plan", "--help"], ["llm.trainers.gpt", "--help"]):
        done = subprocess.run(
            [sys.executable, "-m", *command], capture_output=True, text=True, env=environment
        )
        assert (done.returncode, done.stdout + done.stderr) == (2, sentence), command


def load(site: Path, monkeypatch, *packages: dict[str, str]) -> tuple[type, ...]:
    """What a program loads whose Python finds the packages."""
    for package in packages:
        install(package, site)
    monkeypatch.syspath_prepend(str(site))
    modules = {name.partition(".")[0] for package in packages for name in package}
    try:
        return load_installed_extensions()
    finally:
        # No others: a library that was loaded meanwhile must not be loaded a second time.
        for name in modules & sys.modules.keys():
            del sys.modules[name]


def test_extensions_come_in_the_order_of_the_names_of_their_packages(tmp_path, monkeypatch):
    names = ["llm-zebra", "LLM-Ant", "llm-mole"]
    packages = [package_of_one_option(name, f"{name[4:].lower()}_number") for name in names]
    loaded = load(tmp_path, monkeypatch, *packages)
    assert [str(extension.package) for extension in loaded] == [
        "LLM-Ant 1.0",
        "llm-mole 1.0",
        "llm-zebra 1.0",
    ]


def test_an_option_with_a_name_of_the_core_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, monkeypatch, package_of_one_option("llm-greedy", "seed"))
    assert str(caught.value) == (
        "The extension llm_greedy:It of the installed package llm-greedy 1.0 cannot be loaded (The "
        "option seed of RunOptions is declared again by Options in llm-greedy 1.0; give it another "
        "name there, or uninstall the package); update the package, or uninstall it."
    )


@pytest.mark.parametrize(
    ("second", "sentence"),
    [
        (
            "number",
            "The option number of Options in llm-b 1.0 is declared again by Options in llm-a 1.0; "
            "give it another name there, or uninstall the package.",
        ),
        (
            "no_number",
            "The name no_number belongs to the options number of llm-a 1.0 and no_number of llm-b "
            "1.0; give one of them another name or alias.",
        ),
    ],
)
def test_two_packages_with_one_name_of_an_option_are_refused(
    second, sentence, tmp_path, monkeypatch
):
    first = package_of_one_option("llm-a", "number")
    first["llm_a.py"] = first["llm_a.py"].replace("number: int", "number: bool")
    loaded = load(tmp_path, monkeypatch, first, package_of_one_option("llm-b", second))
    bases = (*list_option_classes(loaded), CoreConfig)
    config = dataclasses.dataclass(frozen=True, kw_only=True)(type("Config", bases, {}))
    with pytest.raises(ConfigError) as caught:
        fields(config)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("It = 3", "is not a class with the base Extension[OPTIONS]; update"),
        ("class It(Extension[CoreConfig]): pass", "declares no options, so that no run could"),
        ("class It(Extension[int]): pass", "has a class of options without the base CoreConfig"),
        (
            "import dataclasses\n@dataclasses.dataclass(frozen=True, kw_only=True)\n"
            "class Bare(CoreConfig):\n    size: int = 3\nclass It(Extension[Bare]): pass",
            "has size without @option_group(..., extension=True) and option(...)",
        ),
        ("del It", "cannot be loaded (module 'llm_wrong' has no attribute 'It')"),
        (
            "Options.__annotations__['number'] = 'Nowhere'",
            "cannot be loaded (name 'Nowhere' is not defined)",
        ),
    ],
)
def test_an_extension_with_a_mistake_is_refused(code, words, tmp_path, monkeypatch):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, monkeypatch, package_of_one_option("llm-wrong", "number", code=code))
    assert words in str(caught.value)
    assert "llm_wrong:It of the installed package llm-wrong 1.0" in str(caught.value)


def test_two_extensions_with_one_class_of_options_are_refused(tmp_path, monkeypatch):
    again = package_of_one_option("llm-b", "number", target="llm_a:It")
    with pytest.raises(ConfigError, match=r"of the installed package llm-b 1\.0 shares its"):
        load(tmp_path, monkeypatch, package_of_one_option("llm-a", "other_number"), again)


@pytest.mark.extended
def test_without_packages_the_metadata_of_libraries_are_not_imported():
    code = (
        "import sys, llm.trainers.gpt.extensions as e\n"
        "assert {each.package for each in e.EXTENSIONS} == {None}\n"
        "assert 'importlib.metadata' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_pip_installs_the_package_of_the_tutorial(tmp_path):
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("needs setuptools, which builds the package without a network")
    if int(importlib.metadata.version("setuptools").partition(".")[0]) < 77:
        pytest.skip("needs setuptools 77")
    source = write_files(CALM, tmp_path / "llm-calm")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--target", str(tmp_path / "site"), str(source)]
    subprocess.run(command, check=True)
    text, _ = run_help(tmp_path / "site", "train", "--help", "calm")
    assert "Calm training (llm-calm 0.1.0):" in text
