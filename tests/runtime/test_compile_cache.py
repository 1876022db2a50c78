"""The folder of compiled code, which PyTorch executes: no other user may write in it."""

import os
import tempfile
from pathlib import Path

import pytest

from llm.runtime.process_settings import use_private_compile_cache
from tests.support.ranks import run_ranks, values
from tests.support.training import Bench

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture
def temporary(monkeypatch, tmp_path):
    """The folder of temporary files, which all users of a node can write."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv(VARIABLE, "")  # so that what the function sets is undone
    monkeypatch.delenv(VARIABLE)
    return folder


def test_compiled_code_is_kept_in_a_folder_that_only_its_user_can_open(temporary, caplog):
    use_private_compile_cache()

    folder = temporary / f"llm_compiled_{os.geteuid()}"
    assert os.environ[VARIABLE] == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "kernel.py").touch()
    del os.environ[VARIABLE]
    use_private_compile_cache()  # the next run
    assert os.environ[VARIABLE] == str(folder)
    assert caplog.records == []


def choose_after_pytorch(temporary):
    """PyTorch names its default folder when its compiler is imported."""
    tempfile.tempdir = temporary
    os.environ.pop(VARIABLE, None)
    from torch._inductor.runtime.runtime_utils import cache_dir

    default = cache_dir()
    use_private_compile_cache()
    return default, cache_dir()


def test_pytorch_uses_the_folder_even_if_it_has_set_its_default(tmp_path):
    default, folder = values(run_ranks(choose_after_pytorch, 1, str(tmp_path)))[0]

    assert default.startswith(f"{tmp_path}/torchinductor_")
    assert folder == f"{tmp_path}/llm_compiled_{os.geteuid()}"


def train_and_return_folder(argv):
    from llm.trainers.gpt.main import main

    assert main(argv) == 0
    return os.environ[VARIABLE]


def test_a_run_compiles_into_the_private_folder(tmp_path):
    command = Bench(tmp_path).command("run", max_train_steps=1)

    folder = values(run_ranks(train_and_return_folder, 1, command))[0]

    assert Path(folder).name.startswith(f"llm_compiled_{os.geteuid()}")


def plant_open_folder(folder):
    folder.mkdir()
    folder.chmod(0o775)


def plant_link(folder):
    target = folder.parent / "elsewhere"
    target.mkdir(mode=0o700)
    folder.symlink_to(target)


def plant_file(folder):
    folder.touch(mode=0o600)


def plant_folder_of_another_user(folder):
    folder.mkdir(mode=0o700)
    try:
        os.chown(folder, 12345, -1)
    except PermissionError:
        pytest.skip("only root can give a folder to another user")


@pytest.mark.parametrize(
    "plant", [plant_open_folder, plant_link, plant_file, plant_folder_of_another_user]
)
def test_a_folder_that_others_may_have_written_is_not_used(temporary, plant, caplog):
    planted = temporary / f"llm_compiled_{os.geteuid()}"
    plant(planted)

    use_private_compile_cache()

    folder = os.environ[VARIABLE]
    assert folder.startswith(f"{planted}_")
    assert os.stat(folder).st_mode & 0o777 == 0o700
    assert f"may have written in {planted}, so compiled code is kept in {folder}" in caplog.text


def test_a_folder_that_the_user_has_chosen_is_kept(temporary, monkeypatch):
    monkeypatch.setenv(VARIABLE, "/scratch/compiled")

    use_private_compile_cache()

    assert os.environ[VARIABLE] == "/scratch/compiled"
    assert list(temporary.iterdir()) == []
