import errno
import fcntl
import logging
import os
import signal
import socket
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from llm.data.cache import TokenCache
from llm.data.formats.megatron import TokenFile, read_row_bytes
from llm.data.text_identity import make_provenance, provenance_digest
from llm.errors import DataError
from llm.prepare.encoder import Encoding
from llm.prepare.output_files import Output
from llm.prepare.prepare_files import prepare_files
from llm.prepare.text.sources import make_file_source
from llm.prepare.verification import find_token_file_faults
from tests.support.processes import wait_until
from tests.support.ranks import CONTEXT, run_ranks, values
from tests.support.texts import (
    FailingSource,
    ListSource,
    byte_tokenizer,
    error_on_a_full_disk,
    tokens,
    write,
)

OTHER = ["other"]


class WatchedSource(ListSource):
    """Appends a line to `reads` whenever its texts are read, and takes its time."""

    def __init__(self, texts, reads, seconds):
        super().__init__(texts, name="watched")
        self._reads = reads
        self._seconds = seconds

    def batches(self, faults=None):
        with open(self._reads, "a") as file:
            file.write("read\n")
        for text in self._texts:
            yield [text]
            time.sleep(self._seconds / len(self._texts))


def cache_bytes(cache_dir, source=None, **changes):
    """The token files that a cache has of a text, by the tokenizer of bytes; `ab` and `c` if None.

    Args:
        cache_dir: The folder of the cache.
        source: The text.
        changes: To the settings of the cache, the encoding, or `optional`.
    """
    settings = {"tokenizer": byte_tokenizer(), "end_token": 0, "dtype": np.dtype("<u2")}
    encoding = Encoding(**{name: changes.pop(name, value) for name, value in settings.items()})
    text = source or ListSource(["ab", "c"])
    workers, optional = changes.pop("workers", 1), changes.pop("optional", False)

    def prepare(folder):
        """What the process of a run does, in this one."""
        if optional and not text.exists():
            (folder / "absent").touch()
            return
        output = Output(
            prefix=folder / "tokens", overwrite=True, row_bytes=True, option="--data_cache_dir"
        )
        prepare_files([([text], output)], encoding=encoding, workers=workers)

    key = provenance_digest(
        make_provenance(
            [text.identity()],
            tokenizer_fingerprint=encoding.tokenizer.fingerprint,
            end_token=encoding.end_token,
            dtype=encoding.dtype.name,
        )
    )
    cache = TokenCache(**{"folder": cache_dir, "overwrite": False, **changes})
    return cache.get_or_prepare(key, prepare)


def cache_watched(cache_dir, reads, seconds):
    """What a second process does in the tests of the lock."""
    texts = ["some text"] * 20
    cache_bytes(cache_dir, WatchedSource(texts, reads, seconds))


def cache_much(cache_dir):
    """A preparation that writes files of up to 200 kB."""
    cache_bytes(cache_dir, ListSource(["x" * 1000] * 100))


class UnreadableSource(ListSource):
    def batches(self, faults=None):
        raise AssertionError("the text was read")

    def split(self, num_bytes):
        raise AssertionError("the text was opened")


class AbsentSource(ListSource):
    def exists(self):
        return False


def num_tokens(*args, **changes):
    return TokenFile(cache_bytes(*args, **changes)).num_tokens


def folders(cache):
    return sorted(path.name for path in cache.iterdir() if path.is_dir())


def test_a_text_is_cached_as_token_files_with_the_bytes_of_its_rows(tmp_path):
    source = ListSource(["ab", "", "\u00e9a"], one_document=True)

    prefix = cache_bytes(tmp_path, source)

    assert tokens(prefix) == [*(byte + 1 for byte in "ab\u00e9a".encode()), 0]
    assert read_row_bytes(prefix).tolist() == [2, 3]
    assert find_token_file_faults(prefix) == []
    assert sorted(path.name for path in prefix.parent.iterdir()) == [
        f"tokens.{kind}" for kind in ("bin", "bytes", "idx", "json")
    ]


def test_a_second_run_reads_the_cache_instead_of_the_text(tmp_path, caplog):
    caplog.set_level(logging.INFO, "llm.data")
    first = cache_bytes(tmp_path)

    assert cache_bytes(tmp_path, UnreadableSource([])) == first
    assert caplog.messages[-1] == f"using the cached tokens in {first.parent}"


def test_the_absence_of_a_split_is_cached(tmp_path):
    assert cache_bytes(tmp_path, AbsentSource(["v"]), optional=True) is None

    assert cache_bytes(tmp_path, UnreadableSource([]), optional=True) is None


def test_whatever_changes_the_bytes_has_its_own_cache(tmp_path):
    text = write(tmp_path / "a.txt", "one\n")
    cache = tmp_path / "cache"

    def count(*args, **changes):
        cache_bytes(cache, *args, **changes)
        return len(folders(cache))

    assert count() == 1
    assert count(workers=2) == 1
    assert count(dtype=np.dtype("<i4")) == 2
    assert count(end_token=None) == 3
    assert count(tokenizer=byte_tokenizer(fingerprint="other")) == 4
    for number, keep_linebreaks in enumerate([True, False], 5):
        source = make_file_source(text, text_column=None, keep_linebreaks=keep_linebreaks)
        assert count(source) == number
    write(text, "two more\n")
    assert count(make_file_source(text, text_column=None, keep_linebreaks=True)) == 7


@pytest.mark.parametrize("damage", ["bin", "idx", "json", "bytes"])
@pytest.mark.parametrize("how", ["cut short", "removed"])
def test_a_damaged_cache_is_rebuilt(tmp_path, caplog, damage, how):
    prefix = cache_bytes(tmp_path)
    path = prefix.with_suffix(f".{damage}")
    before = path.read_bytes()
    if how == "removed":
        path.unlink()
    else:
        path.write_bytes(before[:-3])

    assert cache_bytes(tmp_path) == prefix
    assert path.read_bytes() == before
    if damage != "bin" or how != "removed":  # the name of a whole cache
        (_,) = (line for line in caplog.messages if "cannot be used" in line)


def test_concurrent_processes_read_the_text_once(tmp_path):
    processes = [
        CONTEXT.Process(target=cache_watched, args=(tmp_path / "cache", tmp_path / "reads", 0.5))
        for _ in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)

    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert (tmp_path / "reads").read_text() == "read\n"
    assert len(folders(tmp_path / "cache")) == 1


def test_a_killed_preparation_leaves_no_valid_cache(tmp_path):
    cache, reads = tmp_path / "cache", tmp_path / "reads"
    process = CONTEXT.Process(target=cache_watched, args=(cache, reads, 60.0))
    process.start()
    wait_until(reads.exists)
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    assert not list(cache.glob("*/tokens.bin"))

    cache_watched(cache, reads, 0.0)

    assert reads.read_text() == "read\n" * 2
    assert len(list(cache.glob("*/tokens.*"))) == 4


class PartsSource(ListSource):
    """Two parts; the second is broken until the file `mended` is there."""

    def __init__(self, folder, name="both"):
        super().__init__([name], name=name)
        self.folder = folder

    def split(self, num_bytes):
        return [PartsSource(self.folder, "first"), PartsSource(self.folder, "second")]

    def batches(self, faults=None):
        with open(self.folder / "reads", "a") as file:
            print(self.name, file=file)
        if self.name == "second" and not (self.folder / "mended").exists():
            raise DataError("line 9 is broken")
        yield from super().batches(faults)


def test_the_next_start_reuses_finished_shards(tmp_path):
    with pytest.raises(DataError, match="line 9 is broken"):
        cache_bytes(tmp_path / "cache", PartsSource(tmp_path))
    (tmp_path / "mended").touch()

    prefix = cache_bytes(tmp_path / "cache", PartsSource(tmp_path))

    assert (tmp_path / "reads").read_text().split() == ["first", "second", "second"]
    assert find_token_file_faults(prefix) == []


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path):
    with CONTEXT.Pool(1) as pool:
        message = pool.apply(error_on_a_full_disk, (10_000, cache_much, tmp_path))

    assert "cannot be written" in message
    assert str(tmp_path) in message
    assert "--data_cache_dir" in message
    assert folders(tmp_path) == []
    assert num_tokens(tmp_path) == 5


def test_a_cache_without_write_permission_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(DataError, match=r"cannot be written \(.*--data_cache_dir"):
        cache_bytes(tmp_path / "file" / "cache")


def test_a_cache_in_an_inaccessible_folder_is_one_sentence(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(DataError, match=r"cannot be written \(Permission denied\)"):
        cache_bytes(tmp_path / "cache")


def prepared_by_ranks(folder, kind, **changes):
    """What a rank returns or raises, whose cache is on a file system of its own or a common one."""
    rank = int(os.environ["RANK"])
    cache = folder / ("cache" if kind != "own" else f"cache-{rank % 2}")
    source = WatchedSource(["ab", "c"], folder / "reads", 0.3)
    if kind == "broken":
        source.identity = lambda: {"list": "broken"}
        source.batches = lambda faults=None: FailingSource(["fine"]).batches(faults)
    try:
        return str(cache_bytes(cache, source, **changes))
    except DataError as error:
        return str(error)


@pytest.mark.parametrize(
    ("kind", "reads"), [pytest.param("common", 1, marks=pytest.mark.extended), ("own", 2)]
)
def test_one_rank_of_each_file_system_reads_the_text(tmp_path, kind, reads):
    first = values(run_ranks(prepared_by_ranks, 4, tmp_path, kind))
    again = values(run_ranks(prepared_by_ranks, 4, tmp_path, kind))

    assert first == again
    assert len(set(first)) == reads
    assert (tmp_path / "reads").read_text() == "read\n" * reads


def rank_that_prepares(folder):
    """The rank that has prepared the text; rank 0 is the last to ask for it."""
    rank = int(os.environ["RANK"])

    class ByRank(ListSource):
        def batches(self, faults=None):
            write(folder / "rank", str(rank))
            yield from super().batches(faults)

    time.sleep(0.3 if rank == 0 else 0.0)
    cache_bytes(folder / "cache", ByRank(["ab"]))
    return (folder / "rank").read_text()


def test_rank_0_prepares_the_text_as_its_log_is_read(tmp_path):
    assert values(run_ranks(rank_that_prepares, 2, tmp_path)) == ["0", "0"]


def test_all_ranks_raise_the_error_of_the_one_that_prepares(tmp_path):
    found = values(run_ranks(prepared_by_ranks, 3, tmp_path, "broken"))

    assert found == ["line 9 is broken"] * 3
    assert folders(tmp_path / "cache") == []


def test_overwriting_happens_once_a_launch(tmp_path):
    for times in (1, 2):
        values(run_ranks(partial(prepared_by_ranks, overwrite=True), 3, tmp_path, "common"))

        assert (tmp_path / "reads").read_text() == "read\n" * times


def test_a_single_process_overwrites_when_it_is_asked_to(tmp_path):
    def count(text, **changes):
        return num_tokens(tmp_path, ListSource([text]), **changes)

    assert count("a") == 2
    assert count("ab") == 2  # the cache cannot know
    assert count("ab", overwrite=True) == 3
    assert count("abc", overwrite=True) == 4


def test_replaced_token_files_stay_readable_where_they_are_open(tmp_path):
    first = TokenFile(cache_bytes(tmp_path))
    before = first.tokens.tolist()

    cache_bytes(tmp_path, ListSource(OTHER), overwrite=True)

    assert first.tokens.tolist() == before
    assert len(folders(tmp_path)) == 1


def test_a_valid_cache_is_read_while_another_process_holds_the_lock(tmp_path):
    cache_bytes(tmp_path)
    with open(next(tmp_path.glob("*.lock"))) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        assert num_tokens(tmp_path) == 5


def no_locks(*_):
    raise OSError(95, "Operation not supported")


def test_a_file_system_without_locks_works_too(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("fcntl.flock", no_locks)

    assert num_tokens(tmp_path) == 5

    # A second program has a folder of its own, so that the warning does not forbid it.
    (key,) = folders(tmp_path)
    own = f"{tmp_path}/{key}.{socket.gethostname()}.{os.getpid()}"
    (warning,) = (message for message in caplog.messages if "second program" in message)
    assert warning.endswith(f": start no second program that writes {own}/tokens")


def test_without_locks_the_slower_process_uses_the_files_of_the_faster(tmp_path, monkeypatch):
    monkeypatch.setattr("fcntl.flock", no_locks)

    class Overtaken(ListSource):
        def batches(self, faults=None):
            pid = os.getpid()
            monkeypatch.setattr(os, "getpid", lambda: pid + 1)
            cache_bytes(tmp_path)
            monkeypatch.setattr(os, "getpid", lambda: pid)
            yield from super().batches()

    assert num_tokens(tmp_path, Overtaken(["ab", "c"])) == 5
    assert len(folders(tmp_path)) == 1


def test_files_and_folders_are_synced_before_the_cache_is_valid(tmp_path, monkeypatch):
    synced = set()
    sync = os.fsync

    def record(descriptor):
        synced.add(os.fstat(descriptor).st_ino)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record)

    prefix = cache_bytes(tmp_path)

    paths = [tmp_path, prefix.parent, *prefix.parent.iterdir()]
    assert len(paths) == 6
    assert {path.stat().st_ino for path in paths} <= synced
