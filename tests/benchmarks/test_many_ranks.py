"""The program that counts what ranks open and send."""

import json
import shutil
import subprocess
import sys

import pytest

from benchmarks import many_ranks
from benchmarks.training import ROOT

CALLS = """\
7 1.0 openat(AT_FDCWD, "/usr/lib/python3/os.py", O_RDONLY|O_CLOEXEC) = 3
7 1.1 access("/many_ranks/start", F_OK) = -1 ENOENT (No such file or directory)
7 1.2 openat(AT_FDCWD, "/data/tokens.idx", O_RDONLY|O_CLOEXEC) = 3
8 1.3 openat(AT_FDCWD, "/data/tokens.bin", O_RDONLY <unfinished ...>
7 1.4 newfstatat(AT_FDCWD, "/data/tokens.json", 0x7ffd, 0) = -1 ENOENT (No such file or directory)
8 1.5 <... openat resumed>) = 4
7 1.6 openat(AT_FDCWD, "/data/tokens.json", O_RDONLY) = -1 ENOENT (No such file or directory)
7 1.7 openat(AT_FDCWD, "/database", O_RDONLY) = 5
7 1.8 openat(AT_FDCWD, "/proc/cpuinfo", O_RDONLY) = 5
7 1.9 access("/many_ranks/save 1", F_OK) = -1 ENOENT (No such file or directory)
7 2.0 openat(AT_FDCWD, "/run/shard-00001.safetensors", O_WRONLY|O_CREAT|O_TRUNC, 0666) = 3
7 2.1 mkdir("/run/step_1", 0777) = 0
"""


def test_system_calls_are_counted_by_phase_and_folder(tmp_path):
    path = tmp_path / "calls.txt"
    path.write_text(CALLS)

    phases = many_ranks.count_calls(path, ("/data", "/run"))

    assert {phase: +counts for phase, counts in phases.items()} == {
        "start": {"opened": 2, "lookups": 2, "imports": 1, "others": 1},
        "save 1": {"opened": 1, "written": 1, "lookups": 1},
    }


@pytest.mark.slow
@pytest.mark.timeout(900)  # three starts of a training under strace, with up to 4 processes
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_the_files_of_a_start_a_save_and_a_resume_do_not_grow(tmp_path):
    output = tmp_path / "many_ranks.md"
    command = [sys.executable, "-m", "benchmarks.many_ranks", "--ranks", "2", "4"]
    subprocess.run([*command, "--output", str(output)], cwd=ROOT, check=True)

    assert "## Each resume, median rank" in output.read_text()
    figures = json.loads(output.with_suffix(".json").read_text())
    for phase, growth in (("start", 0), ("save", 0), ("resume", 2)):
        two, four = (figures[ranks][phase] for ranks in ("2", "4"))
        assert four[-1]["opened"] <= two[-1]["opened"] + growth
    assert figures["4"]["start"][-1]["opened"] <= 9
