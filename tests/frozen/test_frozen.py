"""What users rely on: flags, refusals, token files.

Only the programs' `main` is called, so that no other name in the package matters.
"""

import json

import pytest

from tests.frozen.commands import FOLDER, PREPARED, refusals, run
from tests.frozen.record import prepared

RECORDED = FOLDER / "recorded"
REFUSALS = json.loads((RECORDED / "refusals.json").read_text(encoding="utf-8"))


def test_every_flag_and_alias_is_still_read(tmp_path):
    flags = (FOLDER / "flags.txt").read_text(encoding="utf-8").split()
    done = run(tmp_path, "llm.trainers.gpt.main", *flags)

    # A flag that is unknown, or has another kind of value, is refused before rules are checked.
    assert done.code == 2
    assert "--dataset_name and --train_file and --data_path and --train_data_path" in done.output


def test_refusals_have_the_same_exit_code_and_name_the_same_options(tmp_path):
    assert refusals(list(REFUSALS), tmp_path) == REFUSALS
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", PREPARED)
def test_prepared_token_files_have_the_same_bytes(name, tmp_path):
    recorded = json.loads((RECORDED / "token_files.json").read_text(encoding="utf-8"))

    assert prepared(tmp_path / name, PREPARED[name]) == recorded[name]
