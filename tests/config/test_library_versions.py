"""What is installed against what `pyproject.toml` asks for."""

import importlib
import importlib.metadata
import tomllib

import pytest

from llm.__main__ import PROGRAMS
from llm.config.command_line import check_library_versions
from llm.errors import ConfigError
from tests.support.lowest_versions import lowest_versions
from tests.support.package import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TORCH = next(line for line in PROJECT["dependencies"] if line.startswith("torch"))
REQUIRED = [TORCH, "numpy>=2.0", 'wandb>=0.18; extra == "wandb"']

RUN = ["--model_name_or_path", "gpt2", "--train_file", "a.txt", "--output_dir", "run"]


@pytest.fixture
def installed(monkeypatch):
    """Versions of installed libraries, which a test may change."""
    versions = {"torch": "2.10.0+cu128", "numpy": "2.0.0"}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "requires", lambda name: REQUIRED)
    monkeypatch.setattr(importlib.metadata, "version", version)
    check_library_versions.cache_clear()
    yield versions
    check_library_versions.cache_clear()


# The second is in the module `frameworks` of Aurora.
@pytest.mark.parametrize("torch", ["2.10.0+cu128", "2.10.0a0+git449b176", "2.14.1"])
def test_new_enough_libraries_are_accepted_without_the_extras(installed, torch):
    installed["torch"] = torch

    check_library_versions()


def test_an_older_library_is_refused_with_the_version_that_is_needed(installed):
    installed["torch"] = "2.9.1+cu128"

    with pytest.raises(ConfigError, match=r"lacks torch>=2.10.0a0 \(torch is 2.9.1\+cu128\): "):
        check_library_versions()


def test_every_missing_library_is_named_at_once(installed):
    installed.clear()

    with pytest.raises(ConfigError, match=r"torch is missing\), numpy>=2.0 \(numpy is missing\)"):
        check_library_versions()


@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - {"quickstart"}))
def test_every_program_refuses_an_older_library_once_its_options_are_read(name, installed, capfd):
    installed["torch"] = "2.9.1"
    module, _, function = PROGRAMS[name].target.replace(":run", ":main").partition(":")
    words = ["slurm", "--", *RUN] if name == "jobs" else RUN if name in ("train", "plan") else []

    assert getattr(importlib.import_module(module), function)(words) == 2

    printed = "".join(capfd.readouterr())
    assert "error: This environment lacks torch>=2.10.0a0 (torch is 2.9.1): install it" in printed


def test_the_lowest_versions_are_those_of_every_dependency():
    requirements = sum(PROJECT["optional-dependencies"].values(), PROJECT["dependencies"])
    unbounded = [each for each in requirements if ">=" not in each]

    assert "torch==2.10" in lowest_versions()
    assert len(lowest_versions()) == len(requirements) - len(unbounded)
    # The extras that another extra has, and a library without releases.
    assert [each.partition("[")[0].partition(" @")[0] for each in unbounded] == [
        "kfac-pytorch",
        "llm-trainers",
    ]
