"""Files that are written whole, folders that are synced, and the errors of both."""

import errno
import os
import stat
import tempfile

import pytest

from llm.runtime import files
from llm.runtime.files import (
    sync_file,
    sync_folder,
    temporary_folder,
    undo_mkdir_on_error,
    write_whole,
)


class Refuses:
    """A function of the system that refuses every file."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, *args: object) -> None:
        raise OSError(self.number, os.strerror(self.number))


def test_a_file_is_written_for_all_whom_the_umask_allows(tmp_path):
    write_whole(tmp_path / "status.json", "caf\u00e9")

    assert (tmp_path / "status.json").read_bytes() == b"caf\xc3\xa9"
    (tmp_path / "other").touch()
    assert stat.S_IMODE((tmp_path / "status.json").stat().st_mode) == stat.S_IMODE(
        (tmp_path / "other").stat().st_mode
    )
    assert sorted(os.listdir(tmp_path)) == ["other", "status.json"]


def test_a_file_is_never_written_through_a_link_at_its_temporary_name(tmp_path, monkeypatch):
    (tmp_path / "mine").write_text("mine")
    monkeypatch.setattr(files.secrets, "token_hex", lambda size: "0123abcd")
    (tmp_path / ".status.json.0123abcd.tmp").symlink_to("mine")

    with pytest.raises(FileExistsError):
        write_whole(tmp_path / "status.json", "new")

    assert (tmp_path / "mine").read_text() == "mine"


def test_an_error_names_the_file_and_leaves_no_second_one(tmp_path, monkeypatch):
    (tmp_path / "status.json").write_text("old")
    monkeypatch.setattr(os, "fsync", Refuses(errno.EIO))
    monkeypatch.setattr(os, "unlink", Refuses(errno.ESTALE))

    with pytest.raises(OSError, match="Input/output error in fsync") as caught:
        write_whole(tmp_path / "status.json", "new")

    assert caught.value.filename == str(tmp_path / "status.json")
    assert (tmp_path / "status.json").read_text() == "old"


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.ENOSYS])
def test_a_folder_that_cannot_be_synced_is_one_warning(tmp_path, monkeypatch, caplog, number):
    monkeypatch.setattr(files, "_unsynced_devices", set())
    monkeypatch.setattr(os, "fsync", Refuses(number))

    sync_folder(tmp_path)
    sync_folder(tmp_path)

    reason = os.strerror(number)
    warning = f"The file system of {tmp_path} cannot sync folders ({reason} in fsync): after a"
    assert caplog.text.count(warning) == 1


@pytest.mark.parametrize(
    ("sync", "number"),
    [(sync_folder, errno.EIO), (sync_folder, errno.ENOSPC), (sync_file, errno.EINVAL)],
)
def test_a_sync_that_loses_data_is_an_error_with_the_path(tmp_path, monkeypatch, sync, number):
    path = tmp_path if sync is sync_folder else tmp_path / "file"
    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "fsync", Refuses(number))

    with pytest.raises(OSError, match=f"{os.strerror(number)} in fsync") as caught:
        sync(path)

    assert caught.value.filename == str(path)


def fill_temporary_folder() -> None:
    with temporary_folder(), open("/dev/full", "w") as file:
        file.write("text")
        file.flush()


def test_an_error_removes_new_folders(tmp_path):
    (tmp_path / "old").mkdir()

    with pytest.raises(ZeroDivisionError), undo_mkdir_on_error(tmp_path / "old" / "new" / "deep"):
        raise ZeroDivisionError

    assert os.listdir(tmp_path) == ["old"]
    assert os.listdir(tmp_path / "old") == []


def test_an_error_removes_neither_old_folders_nor_new_ones_with_files(tmp_path):
    (tmp_path / "old").mkdir()

    def write_and_fail(folder):
        with undo_mkdir_on_error(folder):
            (tmp_path / "new" / "file").touch()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_and_fail(tmp_path / "new" / "deep")
    with pytest.raises(ZeroDivisionError):
        write_and_fail(tmp_path / "old")

    assert sorted(os.listdir(tmp_path)) == ["new", "old"]
    assert os.listdir(tmp_path / "new") == ["file"]


def test_a_full_folder_for_temporary_files_is_named():
    with pytest.raises(OSError, match="No space left on device") as caught:
        fill_temporary_folder()
    assert caught.value.filename == f"{tempfile.gettempdir()} (TMPDIR)"


def test_a_machine_without_a_folder_for_temporary_files_is_told(monkeypatch):
    monkeypatch.setattr(tempfile, "gettempdir", Refuses(errno.ENOENT))
    with pytest.raises(OSError, match="No such file") as caught, temporary_folder():
        pass
    assert caught.value.filename == "The folder for temporary files (TMPDIR)"
