"""The coordinate check of muP, which shows what would be wrong with it."""

from pathlib import Path

import pytest

from benchmarks.coordinate_check import activation_sizes, main
from llm.tools.plan.plan import main as plan
from llm.trainers.gpt.extensions import GPTConfig

SMALL = [
    *("--mup", "--mup_base_width", "32", "--num_attention_heads", "2", "--hidden_size", "32"),
    *("--num_layers", "2", "--config_overrides", "vocab_size=256", "--learning_rate", "0.01"),
]


def powers(printed: str) -> dict[str, dict[str, float]]:
    """By part of the table, the power of the width with which each activation grows."""
    found: dict[str, dict[str, float]] = {}
    for line in printed.splitlines():
        if line.startswith("with"):
            found[" ".join(line.split()[:2])] = rows = {}
        elif "width^" in line:
            rows[line.split()[0]] = float(line.partition("width^")[2])
    return found


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        ("gpt2", "adamw"),
        pytest.param("llama", "muon", marks=pytest.mark.slow),
        pytest.param("gpt2", "muon", marks=pytest.mark.slow),
        pytest.param("llama", "adamw", marks=pytest.mark.slow),
    ],
)
def test_with_mup_no_activation_grows_with_the_width(model, optimizer, tmp_path, capsys):
    picture = tmp_path / "check.png"
    arguments = [*SMALL, "--model_type", model, "--optimizer", optimizer]
    assert main([*arguments, "--plot", str(picture)]) == 0
    found = powers(capsys.readouterr().out)
    assert found["without --mup"]["logits"] > 0.4
    assert max(found["with --mup"].values()) < 0.2
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_at_the_base_width_activations_are_those_without_mup():
    shape = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2}
    small = {**shape, "config_overrides": "vocab_size=256", "learning_rate": 0.01}
    plain = activation_sizes(GPTConfig(**small))
    assert activation_sizes(GPTConfig(**small, mup=True, mup_base_width=32)) == plain
    assert len(plain["logits"]) == 5
    assert plain["logits"][4] > plain["logits"][0]


def test_the_picture_lies_in_the_working_folder_unless_it_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*SMALL, "--widths", "32", "64"]) == 0
    assert Path("coordinate_check.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--model_size", "124M"], "The coordinate check is of --mup; give it, and"),
        (["--model_size", "124M", "--mup"], "--mup needs --mup_base_width"),
        ([*SMALL, "--widths", "64"], "--widths takes two or more widths"),
        ([*SMALL, "--widths", "32", "40"], "width 40 cannot be divided"),
        ([*SMALL, "--plot", "x.jpg"], "must end in .png, .pdf or .svg"),
        ([*SMALL, "--model_type", "opt"], "this model is opt"),
    ],
)
def test_what_cannot_be_checked_is_refused_in_a_sentence(arguments, complaint, capsys):
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert said.count("\n") == 1


def test_the_plan_names_the_program_that_checks(capsys):
    assert plan([*SMALL, "--coordinate_check"]) == 2
    assert "python -m benchmarks.coordinate_check" in capsys.readouterr().err
