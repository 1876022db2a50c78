"""A disk that has no room for a checkpoint: training goes on, and older checkpoints load."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.faults import Fault
from tests.support.recovery import last_hash, saved_hash, without_times
from tests.support.training import Bench, Run

pytestmark = pytest.mark.faults

OPTIONS = {"ranks": 2, "max_train_steps": 16, "checkpointing_steps": 4}
ON_SMALL_DISK = {"max_train_steps": 108, "checkpointing_steps": 12}
ROOM = 100_000  # bytes; more than a log takes, less than the tensors of a rank


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("full"))


@pytest.fixture(scope="module")
def straight(bench) -> Run:
    return bench.train_well("straight", **OPTIONS)


@pytest.fixture(scope="module")
def roomy(bench) -> Run:
    """The run that the small disk has no room for."""
    return bench.train_well("roomy", **ON_SMALL_DISK)


@pytest.fixture
def small_disk(bench, roomy) -> Iterator[Path]:
    """The folder of a run on a disk with room for three and a half of its checkpoints."""
    checkpoint = roomy.folder / "checkpoints" / "step_00000012"
    pages = sum(-(-path.stat().st_size // 4096) for path in checkpoint.rglob("*") if path.is_file())
    folder = bench.folder / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={int(3.5 * pages) * 4096}", "none", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode:
        folder.rmdir()
        pytest.skip(f"only root can mount a small disk ({mounted.stderr.strip()})")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
    folder.rmdir()


def fill(path: Path) -> None:
    """Give a file all the room that its disk has left."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def checkpoints(run: Run) -> list[str]:
    return sorted(path.name for path in (run.folder / "checkpoints").iterdir())


@pytest.mark.parametrize("rank", [None, 0], ids=["all ranks", "one rank"])
def test_a_save_on_a_full_disk_is_skipped_and_training_is_unchanged(bench, straight, rank):
    name = f"two-left-out-{rank}"
    faults = [
        Fault(
            at="llm.checkpoint.save:Saver._save_snapshot",
            what="small files",
            call=2,
            amount=ROOM,
            rank=rank,
        ),
        Fault(at="llm.checkpoint.save:Saver._save_snapshot", what="large files", call=4, rank=rank),
    ]

    run = bench.train(name, faults=faults, **OPTIONS)

    assert run.codes == [0, 0], run.output
    for step in (8, 12):
        assert f"The checkpoint of step {step} could not be written" in run.output
    assert "File too large" in run.output
    assert "trying again in 0.05 seconds" in run.output
    assert checkpoints(run) == ["step_00000004", "step_00000016"]
    assert last_hash(run) == last_hash(straight)
    first = "checkpoints/step_00000004"
    assert saved_hash(run.folder / first) == saved_hash(straight.folder / first)
    assert without_times(run) == without_times(straight)
    model = "model.safetensors"
    assert (run.folder / model).read_bytes() == (straight.folder / model).read_bytes()


def test_a_run_on_a_full_disk_ends_and_resumes_from_the_old_checkpoint(bench, straight):
    save = "llm.checkpoint.save:Saver._save_snapshot"
    full = Fault(at=save, what="small files", call=2, amount=ROOM)

    run = bench.train("full", faults=[full], **OPTIONS)

    assert run.codes == [2, 2]
    assert (
        run.outcomes[0].output.count("error: The checkpoint of step 16 could not be written") == 1
    )
    assert "Traceback" not in run.output
    assert run.read_json("status.json")["status"] == "failed"
    assert checkpoints(run) == ["step_00000004"]
    resumed = bench.train("full", resume_from_checkpoint=True, **OPTIONS)
    assert resumed.codes == [0, 0]
    assert "at step 4" in resumed.output
    assert last_hash(resumed) == last_hash(straight)


def test_training_stops_after_four_failed_saves_in_a_row(bench):
    full = Fault(
        at="llm.checkpoint.save:Saver._save_snapshot", what="small files", call=1, amount=ROOM
    )

    run = bench.train("impatient", faults=[full], **OPTIONS | {"checkpointing_steps": 2})

    assert run.codes == [2, 2]
    assert "error: The checkpoint of step 8 could not be written" in run.output
    assert run.metrics[-1]["step"] < 16


def test_a_disk_that_saves_fill_ends_the_run_after_four_failed_saves(bench, small_disk):
    run = bench.train("small", **ON_SMALL_DISK)

    assert run.codes == [2]
    assert "error: The checkpoint of step 84 could not be written" in run.output
    assert "No space left on device" in run.output
    assert run.read_json("status.json")["status"] == "failed"
    # Nothing of a failed save is left, and every step until then is reported once.
    assert checkpoints(run) == [f"step_{step:08d}" for step in (12, 24, 36)]
    steps = [line["step"] for line in run.lines if "loss" in line]
    assert steps[:72] == [*range(1, 73)]
    assert len(set(steps)) == len(steps)


def test_a_run_on_a_small_disk_continues_with_fewer_checkpoints(bench, roomy, small_disk):
    bench.train("small", **ON_SMALL_DISK)
    killed_save = small_disk / "checkpoints" / ".step_00000048.tmp"
    killed_save.mkdir()
    fill(killed_save / "shard")

    run = bench.train_well(
        "small", resume_from_checkpoint=True, keep_checkpoints=1, **ON_SMALL_DISK
    )

    assert checkpoints(run) == ["step_00000108"]
    assert last_hash(run) == last_hash(roomy)
    assert without_times(run) == without_times(roomy)


def test_a_resume_removes_the_checkpoints_that_it_shall_not_keep(bench):
    options = {"max_train_steps": 12, "checkpointing_steps": 4}
    bench.train_well("fewer", **options)

    run = bench.train_well("fewer", resume_from_checkpoint=True, keep_checkpoints=2, **options)

    assert "All 12 steps are already done" in run.output
    assert checkpoints(run) == ["step_00000008", "step_00000012"]
