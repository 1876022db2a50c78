"""What is left, and what goes on, when processes of a preparation are killed."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llm.prepare.verification import find_token_file_faults
from tests.support.processes import is_alive, wait_until
from tests.support.texts import expected_pair, json_lines, names, pair, write

TEXTS = [f"document {number}: " + "the dog sleeps, " * (number % 9) for number in range(44)]
GOOD = ["--input", "a.jsonl", "--tokenizer_name", "tokenizer", "--output_prefix", "out"]


pytestmark = pytest.mark.usefixtures("at_home")


# Each part of the work takes some time, and leaves a line in a file.
SLOW = """
import os, sys, time
from llm.prepare import prepare_files, tokenize_shards
from llm.prepare.prepare import main
prepare_files.SHARD_BYTES = 200
write_shard = tokenize_shards.write_shard
def slow(source, stem, *how, **options):
    with open("begun", "a") as file:
        print(os.getpid(), stem.name, file=file)
    time.sleep({seconds})
    write_shard(source, stem, *how, **options)
tokenize_shards.write_shard = slow
sys.exit(main(sys.argv[1:]))
"""


def start_slow(*argv, seconds=0.05):
    return subprocess.Popen(
        [sys.executable, "-c", SLOW.format(seconds=seconds), *GOOD, *map(str, argv)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def begun():
    """The processes and parts of which the work has begun."""
    if not Path("begun").exists():
        return []
    lines = [line.split() for line in Path("begun").read_text().splitlines()]
    return [(int(pid), part) for pid, part in lines]


def parts_done():
    return {path.stem for path in Path("out_text_document.parts").glob("[0-9]*.json")}


def kill_after(num_parts, workers):
    """Kills the first process when so many more parts are done; all that are done by then."""
    Path("begun").unlink(missing_ok=True)
    before = len(parts_done())
    process = start_slow("--workers", workers)
    wait_until(lambda: len(parts_done()) >= before + num_parts)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    wait_until(lambda: not any(is_alive(pid) for pid, _ in begun()))
    assert names(".").count("out_text_document.bin") == 0
    return parts_done()


def check_killed(tmp_path, kills, workers):
    write(tmp_path / "a.jsonl", json_lines(TEXTS))
    done = set()
    for number in kills:
        before = done
        done = kill_after(number, workers)
        assert before <= done
        assert before.isdisjoint(part for _, part in begun())
    Path("begun").unlink()

    process = start_slow("--workers", workers)
    output, _ = process.communicate(timeout=60)

    assert process.returncode == 0
    assert f"resuming in out_text_document.parts: {len(done)} of " in output
    assert done.isdisjoint(part for _, part in begun())
    assert pair("out_text_document") == expected_pair(tmp_path / "e", TEXTS)
    assert not Path("out_text_document.parts").exists()


def test_a_killed_preparation_resumes_to_the_same_bytes_without_rework(tmp_path):
    check_killed(tmp_path, [3], workers=2)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_preparation_killed_many_times_resumes_to_the_same_bytes(tmp_path, workers):
    check_killed(tmp_path, [1, 1, 1, 1], workers)


@pytest.mark.slow
def test_a_preparation_killed_at_any_time_resumes_to_the_same_bytes(tmp_path):
    write(tmp_path / "a.jsonl", json_lines(TEXTS))
    draw = random.Random(0)
    kills = 0

    while True:
        process = start_slow("--workers", draw.choice([1, 2, 3]))
        try:
            output, _ = process.communicate(timeout=draw.uniform(0.1, 0.4 + 0.1 * kills))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            kills += 1
            wait_until(lambda: not any(is_alive(pid) for pid, _ in begun()))
            assert kills < 100
            continue
        break

    assert kills > 0
    assert process.returncode == 0 or "exists already" in output
    assert pair("out_text_document") == expected_pair(tmp_path / "e", TEXTS)
    assert find_token_file_faults(Path("out_text_document")) == []


def test_an_interruption_ends_all_processes_with_a_sentence(tmp_path):
    write(tmp_path / "a.jsonl", json_lines(TEXTS))
    process = start_slow("--workers", 2, seconds=0.5)
    wait_until(lambda: len({pid for pid, _ in begun()}) == 2)

    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)

    assert process.returncode == 130
    assert output == "Interrupted.\n"  # no shard is done, so nothing is said to be kept
    assert not any(is_alive(pid) for pid, _ in begun())
