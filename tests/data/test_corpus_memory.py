import resource
import subprocess
import sys

import pytest

from llm.data import corpus
from llm.data.corpus import CorpusSource, TokenStream
from llm.data.formats.flat import open_token_file
from tests.support.token_files import write_pair


@pytest.fixture
def stream(tmp_path):
    file = open_token_file(write_pair(tmp_path / "text", [list(range(50_000))]))
    return TokenStream(file, start=10_000, stop=40_000, num_documents=1)


def hold(stream, weight=1.0):
    corpus.pin_in_memory([CorpusSource("text", weight, stream)])


def locked_kilobytes(code: str) -> int:
    """The pages that a process has pinned after some code, as Linux counts them."""
    script = f"{code}\nprint([l for l in open('/proc/self/status') if l.startswith('VmLck')])"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return int(run.stdout.split("VmLck:\\t")[1].split()[0])


def test_holding_in_memory_logs_the_size_and_keeps_the_tokens(stream, caplog):
    before = stream.tokens.tolist()

    with caplog.at_level("INFO", logger="llm.data"):
        hold(stream)

    assert "in memory: 6e-05 GB of" in caplog.text
    assert stream.tokens.tolist() == before


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux counts pinned pages")
def test_the_pages_of_the_range_are_pinned(tmp_path):
    if 0 <= resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] < 2**20:
        pytest.skip("this user may not pin a megabyte")
    prefix = write_pair(tmp_path / "text", [[1] * 300_000])
    code = f"""
from pathlib import Path
from llm.data.corpus import CorpusSource, TokenStream, pin_in_memory
from llm.data.formats.flat import open_token_file
stream = TokenStream(open_token_file(Path({str(prefix)!r})))
pin_in_memory([CorpusSource("text", 1.0, stream)])
"""
    assert 580 <= locked_kilobytes(code) <= 600  # 300,000 ids of two bytes


def test_the_log_says_when_pinning_is_refused(stream, caplog, monkeypatch):
    monkeypatch.setattr(corpus, "_lock_pages", lambda address, num_bytes: "Cannot allocate memory")

    with caplog.at_level("INFO", logger="llm.data"):
        hold(stream)

    assert "read ahead but not pinned (Cannot allocate memory; see `ulimit -l`)" in caplog.text


def test_an_error_of_mlock_is_logged_in_words(stream):
    assert corpus._lock_pages(16, 4096) is not None  # no page lies there


def test_a_system_without_mlock_reads_ahead_only(monkeypatch):
    monkeypatch.setattr(corpus.ctypes, "CDLL", lambda *_, **__: object())

    assert corpus._lock_pages(0, 4096) == "this system has no mlock"


def test_only_the_range_of_the_split_is_read_and_only_once(stream, monkeypatch):
    monkeypatch.setattr(corpus, "_READ_BYTES", 7000)
    reads = []

    class Counted:
        def __init__(self, *args, **kwargs):
            self.file = open(*args, **kwargs)  # noqa: SIM115
            self.fileno, self.seek = self.file.fileno, self.file.seek

        def readinto(self, buffer):
            reads.append((self.file.tell(), self.file.readinto(buffer)))
            return reads[-1][1]

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

    monkeypatch.setattr(corpus, "open", Counted, raising=False)
    hold(stream)
    hold(stream, weight=0.0)

    assert reads[0][0] == 20_000
    assert sum(size for _, size in reads) == 60_000
    assert [place for place, _ in reads] == [20_000 + 7000 * number for number in range(9)]
