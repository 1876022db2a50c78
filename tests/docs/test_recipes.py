"""The branches and cooldowns of docs/guides/gpt.md, run in order on an eighth of the tokens."""

import importlib.util
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.support.package import ROOT
from tests.support.programs import run_program
from tests.support.ranks import run_ranks, values


def with_an_eighth(text: str) -> str:
    """A text with an eighth of its tokens, in samples of an eighth: its steps stay the same."""
    text = re.sub(r"\b(\d+)K\b", lambda match: str(int(match[1]) * 125), text)
    return text.replace("block_size = 128", "block_size = 16")


def run_there(folder: Path, command: str) -> int:
    """Run a program of the package, or a script, in a folder."""
    os.chdir(folder)
    if not command.startswith("llm-trainers "):
        exec(command, {})
        return 0
    return run_program(shlex.split(command)[1:])


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="needs the extra tasks (lm_eval)"
)
def test_every_command_of_the_recipes_runs(tmp_path):
    data, page = (
        (ROOT / "docs/guides" / name).read_text(encoding="utf-8") for name in ("data.md", "gpt.md")
    )
    script = re.search(r"^```python\n.*?^```", data, flags=re.DOTALL | re.MULTILINE)
    section = page.split("\n## Branches and cooldowns\n")[1].split("\n## ")[0]
    # The rules have commands of made-up runs.
    section = re.sub(r"\n### Rules of branches\n.*?(?=\n### )", "", section, flags=re.DOTALL)
    page = f"{script[0]}\n{section}"
    blocks = re.findall(r"^```(bash|python)\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    commands = []
    for language, block in blocks:
        joined = with_an_eighth(re.sub(r"\\\n\s*", "", block))
        commands += joined.splitlines() if language == "bash" else [joined]
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    stable = tmp_path / "examples/stable.toml"
    stable.write_text(with_an_eighth(stable.read_text(encoding="utf-8")), encoding="utf-8")
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}

    for command in commands:
        (outcome,) = run_ranks(run_there, 1, tmp_path, command, environment=offline, timeout=600)
        assert values([outcome]) == [0], f"{command}\n{outcome.output}"

    assert len(commands) == 10
    report = (tmp_path / "runs/family.html").read_text(encoding="utf-8")
    assert "branch of stable <small>step 1,036" in report
    assert "mean of stable <small>5 checkpoints, steps 1,114 to 1,270" in report
