"""The process that starts itself anew, with settings for the C library's allocator."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from llm.runtime import process_settings

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc"
    or any(map(os.path.exists, process_settings._ACCELERATOR_DEVICES)),
    reason="needs glibc and no accelerator",
)

PROGRAM = """
import json, os, sys
first = os.getpid()
from llm.runtime.process_settings import restart_with_kept_memory
restart_with_kept_memory()
print(json.dumps([os.getpid(), os.environ.get("GLIBC_TUNABLES"), sys.argv[1:], sys.flags.optimize]))
"""


def start(*arguments: str, **environment: str) -> tuple[int, str | None, list[str], int]:
    """What a program that restarts itself finds: its process, its settings, its arguments."""
    plain = {k: v for k, v in os.environ.items() if k not in ("GLIBC_TUNABLES", "LD_PRELOAD")}
    process = subprocess.Popen(
        [sys.executable, "-O", "-c", PROGRAM, *arguments],
        env={**plain, **environment},
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    output, _ = process.communicate()
    number, settings, words, optimize = json.loads(output)
    assert number == process.pid, "a launcher knows it by its number"
    return settings, words, optimize


def test_the_process_restarts_in_place_with_the_allocator_settings():
    settings, words, optimize = start("--text", "two words")
    assert "glibc.malloc.hugetlb=1" in settings
    assert words == ["--text", "two words"]
    assert optimize == 1, "Python's own flags are kept"


def test_settings_of_the_user_are_kept():
    mine = "glibc.malloc.arena_max=2"
    assert start(GLIBC_TUNABLES=mine)[0] == mine


def test_settings_of_other_tunables_are_extended():
    settings = start(GLIBC_TUNABLES="glibc.pthread.rseq=1")[0]
    assert settings.startswith("glibc.pthread.rseq=1:glibc.malloc.hugetlb=1")


def test_another_allocator_is_left_alone():
    assert not process_settings._restart_helps({"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"})


def test_freed_memory_is_reused_without_page_faults():
    work = """
import resource
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def use():
    for _ in range(20):
        activations = [b"x" * (8 * 2**20) for _ in range(5)]
        del activations
use()
before = faults()
use()
print(faults() - before)
"""
    counts = {}
    for name, restart in (("plain", ""), ("kept", "restart_with_kept_memory()")):
        source = (
            f"from llm.runtime.process_settings import restart_with_kept_memory\n{restart}\n{work}"
        )
        plain = {k: v for k, v in os.environ.items() if k not in ("GLIBC_TUNABLES", "LD_PRELOAD")}
        done = subprocess.run(
            [sys.executable, "-c", source],
            env=plain,
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parents[2],
        )
        counts[name] = int(done.stdout)
    assert counts["plain"] > 20_000
    assert counts["kept"] < 100
