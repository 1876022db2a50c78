"""The notebook of the quick start runs from its first cell to its last."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.package import ROOT

NOTEBOOK = ROOT / "docs" / "tutorials" / "python.ipynb"


def test_the_outputs_of_the_notebook_name_no_folder_of_a_machine():
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert "llm-trainers train --model_name_or_path runs/notebook" in text
    assert re.findall(r"\S*/(?:bin|home|root|tmp|work|Users)/\S*", text) == []


@pytest.mark.extended
def test_the_cells_of_the_notebook_run_one_after_another(tmp_path: Path):
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    (tmp_path / "examples").symlink_to(ROOT / "examples")

    done = subprocess.run(
        [sys.executable, "-c", "\n".join(code)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    assert len(code) >= 8
    assert "\nfinished 60 " in done.stdout
    assert "\nROMEO:" in done.stdout
    assert "There is no option --learnig_rate; did you mean learning_rate?" in done.stdout
    assert "\n124439808 True " in done.stdout
