"""What users of the first edition have and rely on: commands, token files, checkpoints.

Only the programs' `main` is called, so that no other name in the package matters.
"""

import json
import shutil
import tomllib
from pathlib import Path

import pytest

from tests.frozen.commands import FOLDER, PREPARED, RUNS, STEPS, losses, refusal, run, train
from tests.frozen.record import digest_of, prepared

RECORDED = FOLDER / "recorded"
REFUSALS = json.loads((RECORDED / "refusals.json").read_text(encoding="utf-8"))
RESULTS = json.loads((RECORDED / "runs.json").read_text(encoding="utf-8"))


def test_every_flag_and_alias_is_still_read(tmp_path):
    flags = (FOLDER / "flags.txt").read_text(encoding="utf-8").split()
    done = run(tmp_path, "llm.trainers.gpt.main", *flags)

    # A flag that is unknown, or has another kind of value, is refused before rules are checked.
    assert done.code == 2
    assert "--dataset_name and --train_file and --data_path and --train_data_path" in done.output


def test_refusals_have_the_same_exit_code_and_name_the_same_options(tmp_path):
    found = {command: refusal(command.split(), tmp_path) for command in REFUSALS}

    assert found == REFUSALS
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", PREPARED)
def test_prepared_token_files_have_the_same_bytes(name, tmp_path):
    recorded = json.loads((RECORDED / "token_files.json").read_text(encoding="utf-8"))

    assert prepared(tmp_path / name, PREPARED[name]) == recorded[name]


@pytest.fixture(scope="module", params=RUNS)
def recorded(request, tmp_path_factory) -> tuple[str, Path]:
    """A folder with a run as the first edition left it after `STEPS` steps."""
    folder = tmp_path_factory.mktemp(request.param)
    shutil.copytree(RECORDED / "runs" / request.param, folder / "runs" / request.param)
    return request.param, folder


def test_a_checkpoint_of_the_first_edition_loads_bit_for_bit(recorded):
    name, folder = recorded
    done = run(folder, "llm.checkpoints", f"runs/{name}", "--export", "latest", "model")

    assert done.code == 0, done.output
    assert digest_of(folder / "model" / "model.safetensors") == RESULTS[name]["model"]


def test_a_run_of_the_first_edition_goes_on_as_it_would_have(recorded):
    """Tolerance 1e-5 relative: other processors round matrix products differently."""
    name, folder = recorded
    done = train(folder, name, "--max_train_steps", str(2 * STEPS), "--resume_from_checkpoint")
    expected = {int(step): loss for step, loss in RESULTS[name]["losses"].items()}

    assert f"step {STEPS:8d}/" not in done.output, "it has begun afresh"
    assert losses(folder / "runs" / name) == pytest.approx(expected, rel=1e-5)


def test_every_option_keeps_its_key_and_its_default(recorded):
    name, folder = recorded
    before = tomllib.loads((RECORDED / "runs" / name / "config.toml").read_text(encoding="utf-8"))
    train(folder, name, "--output_dir", "runs/again", "--max_train_steps", str(STEPS))
    after = tomllib.loads((folder / "runs" / "again" / "config.toml").read_text(encoding="utf-8"))

    before |= {"output_dir": "runs/again"}
    before["from_scratch"] = before.pop("low_cpu_mem_usage")  # an alias of it now
    assert {key: after.get(key) for key in before} == before
