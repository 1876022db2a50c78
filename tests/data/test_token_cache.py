import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from llm.data import token_cache
from llm.errors import ConfigError, DataError
from tests.support.corpora import (
    ListSource,
    byte_tokenizer,
    error_on_a_full_disk,
    prepare_bytes,
    prepare_much,
    prepare_watched,
)

SPAWN = multiprocessing.get_context("spawn")
OTHER = ["other"]


class FailingSource(ListSource):
    def batches(self, faults=None):
        yield "fine"
        raise DataError("line 2 is broken")


def folders(cache):
    return sorted(path.name for path in cache.iterdir() if path.is_dir())


def wait_for(path):
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end, f"{path} does not appear"
        time.sleep(0.02)


def test_processes_that_come_at_once_read_the_text_once(tmp_path):
    processes = [
        SPAWN.Process(target=prepare_watched, args=(tmp_path / "cache", tmp_path / "reads", 0.5, n))
        for n in ("launch", "launch", "another launch")
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)

    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert (tmp_path / "reads").read_text() == "read\n"
    assert len(folders(tmp_path / "cache")) == 1


def test_a_killed_preparation_leaves_nothing_that_counts(tmp_path):
    cache, reads = tmp_path / "cache", tmp_path / "reads"
    process = SPAWN.Process(target=prepare_watched, args=(cache, reads, 60.0, None))
    process.start()
    wait_for(reads)
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    (leftover,) = folders(cache)
    assert leftover.endswith(f".tmp.{socket.gethostname()}.{process.pid}")

    prepare_watched(cache, reads, 0.0, None)

    (folder,) = folders(cache)
    assert leftover.startswith(folder)
    assert (tmp_path / "reads").read_text() == "read\n" * 2


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path):
    with SPAWN.Pool(1) as pool:
        message = pool.apply(error_on_a_full_disk, (10_000, prepare_much, tmp_path))

    assert "cannot be written" in message
    assert str(tmp_path) in message
    assert "--data_cache_dir" in message
    assert folders(tmp_path) == []
    assert prepare_bytes(tmp_path).train.num_tokens == 5


def test_a_cache_that_may_not_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(DataError, match=r"cannot be written \(.*--data_cache_dir"):
        prepare_bytes(tmp_path / "file" / "cache")


def test_the_other_ranks_of_a_launch_repeat_the_error_and_not_the_work(tmp_path):
    with pytest.raises(DataError, match="line 2 is broken") as first:
        prepare_bytes(tmp_path, train=FailingSource([]), launch="a")
    assert not first.value.reported
    assert folders(tmp_path) == []

    with pytest.raises(DataError, match="line 2 is broken") as second:
        prepare_bytes(tmp_path, train=ListSource(OTHER), launch="a")

    assert second.value.reported


def test_the_repeated_error_is_of_the_same_class(tmp_path):
    for reported in (False, True):
        with pytest.raises(ConfigError, match="--no_append_eos") as error:
            prepare_bytes(tmp_path, tokenizer=byte_tokenizer(eos_token_id=None), launch="a")
        assert error.value.reported is reported


@pytest.mark.parametrize("launch", ["b", None])
def test_another_launch_tries_again(tmp_path, launch):
    with pytest.raises(DataError):
        prepare_bytes(tmp_path, train=FailingSource([]), launch="a")

    assert prepare_bytes(tmp_path, train=ListSource(OTHER), launch=launch).train.num_tokens == 6
    assert not list(tmp_path.glob("*.failed"))


def test_an_earlier_launch_of_the_same_name_does_not_count(tmp_path, monkeypatch):
    with pytest.raises(DataError):
        prepare_bytes(tmp_path, train=FailingSource([]), launch="none")
    monkeypatch.setattr(token_cache, "_STARTED", time.time())

    assert prepare_bytes(tmp_path, train=ListSource(OTHER), launch="none").train.num_tokens == 6

    monkeypatch.setattr(token_cache, "_STARTED", time.time())
    again = prepare_bytes(tmp_path, train=ListSource(["new"]), launch="none", overwrite_cache=True)
    assert again.train.num_tokens == 4


def test_a_process_knows_when_it_started(tmp_path):
    code = "from llm.data import token_cache; print(token_cache._STARTED)"
    before = time.time()
    started = float(subprocess.check_output([sys.executable, "-c", code], text=True))

    # A clock tick is a hundredth of a second.
    assert before - 0.05 <= started <= time.time()


def test_a_single_process_leaves_no_note(tmp_path):
    with pytest.raises(DataError):
        prepare_bytes(tmp_path, train=FailingSource([]))

    assert not list(tmp_path.glob("*.failed"))


def test_overwriting_happens_once_a_launch(tmp_path):
    def num_tokens(text, **changes):
        return prepare_bytes(tmp_path, train=ListSource([text]), **changes).train.num_tokens

    assert num_tokens("a") == 2
    assert num_tokens("ab") == 2  # the cache cannot know
    assert num_tokens("ab", overwrite_cache=True, launch="x") == 3
    assert num_tokens("abc", overwrite_cache=True, launch="x") == 3
    assert num_tokens("abcd", overwrite_cache=True, launch="y") == 5
    assert num_tokens("abcde", overwrite_cache=True) == 6
    assert num_tokens("abcdef", overwrite_cache=True) == 7


def test_tokens_that_are_replaced_stay_readable_where_they_are_open(tmp_path):
    first = prepare_bytes(tmp_path)
    before = first.train.tokens.tolist()

    prepare_bytes(tmp_path, train=ListSource(OTHER), overwrite_cache=True)

    assert first.train.tokens.tolist() == before
    assert len(folders(tmp_path)) == 1


def test_leftovers_of_the_living_and_of_other_hosts_stay(tmp_path):
    prepare_bytes(tmp_path)
    (key,) = folders(tmp_path)
    host = socket.gethostname()
    alive = [f"{key}.tmp.{host}.{os.getppid()}", f"{key}.tmp.elsewhere.5"]
    dead = [f"{key}.tmp.{host}.{os.getpid()}", f"{key}.tmp.{host}.{2**22 + 1}.old"]
    for name in (*alive, *dead):
        (tmp_path / name).mkdir()

    prepare_bytes(tmp_path, overwrite_cache=True)

    assert folders(tmp_path) == sorted([key, *alive])


def test_a_valid_cache_is_read_while_somebody_holds_the_lock(tmp_path):
    import fcntl

    prepare_bytes(tmp_path)
    with open(next(tmp_path.glob("*.lock"))) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        assert prepare_bytes(tmp_path).train.num_tokens == 5


def test_a_file_system_without_locks_works_too(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", no_locks)

    assert prepare_bytes(tmp_path).train.num_tokens == 5


def test_without_locks_the_slower_of_two_takes_what_the_faster_one_wrote(tmp_path, monkeypatch):
    monkeypatch.setattr("fcntl.flock", lambda *_: None)

    class Overtaken(ListSource):
        def batches(self, faults=None):
            pid = os.getpid()
            monkeypatch.setattr(os, "getpid", lambda: pid + 1)
            prepare_bytes(tmp_path)
            monkeypatch.setattr(os, "getpid", lambda: pid)
            yield from super().batches()

    assert prepare_bytes(tmp_path, train=Overtaken(["ab", "c"])).train.num_tokens == 5
    assert len(folders(tmp_path)) == 1


def test_a_note_that_is_cut_short_is_ignored(tmp_path):
    prepare_bytes(tmp_path)
    (key,) = folders(tmp_path)
    (tmp_path / f"{key}.failed").write_text(json.dumps({"launch": "a"})[:-3])

    assert prepare_bytes(tmp_path, overwrite_cache=True, launch="a").train.num_tokens == 5


def test_all_files_and_both_folders_are_on_the_disk_before_the_tokens_count(tmp_path, monkeypatch):
    synced = set()
    sync = os.fsync

    def record(descriptor):
        synced.add(os.fstat(descriptor).st_ino)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record)

    prepare_bytes(tmp_path)

    (key,) = folders(tmp_path)
    paths = [tmp_path, tmp_path / key, *(tmp_path / key).iterdir()]
    assert len(paths) == 6
    assert {path.stat().st_ino for path in paths} == synced
