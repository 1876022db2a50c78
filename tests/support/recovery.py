"""What must be the same of a run that was cut and went on, and of one that was not."""

import hashlib
import json
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from llm.checkpoint.load import find_newest_checkpoint
from tests.support.faults import Fault
from tests.support.training import Bench, Run

TIMES = (
    *("tokens_per_second", "ms_per_step", "seconds", "data_wait", "mfu", "memory"),
    *("kfac_factor_update_ms", "kfac_inv_update_ms"),
    *("data_ms_median", "data_ms_slowest", "data_slowest_rank"),
    *("compute_ms_median", "compute_ms_slowest", "compute_slowest_rank"),
    *("save_ms_median", "save_ms_slowest", "save_slowest_rank"),
)


def saved_hash(checkpoint: Path) -> str:
    """SHA-256 over the names, types and bytes of all tensors of a checkpoint."""
    tensors = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, "np") as file:
            tensors.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    assert any("/optimizer/" in name for name in tensors)
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode() + tensor.tobytes())
    return digest.hexdigest()


def last_hash(run: Run) -> str:
    """The same of the newest checkpoint of a run, and the step that it is of."""
    newest = find_newest_checkpoint(run.folder / "checkpoints")
    assert newest is not None
    return f"step {newest.step}: {saved_hash(newest.path)}"


def last_counts(run: Run) -> dict[str, Any]:
    """What the newest checkpoint holds besides tensors, without what the clock says."""
    newest = find_newest_checkpoint(run.folder / "checkpoints")
    assert newest is not None
    counts = json.loads((newest.path / "state.json").read_text(encoding="utf-8"))
    del counts["train"]["seconds"]
    return counts


def without_times(run: Run) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without what the clock says."""
    return [{k: v for k, v in record.items() if k not in TIMES} for record in run.lines]


def curves(run: Run) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows: step and value by name, without what the clock says."""
    board = EventAccumulator(str(run.folder / "tensorboard"), {"scalars": 0})
    board.Reload()
    return {
        tag: [(event.step, event.value) for event in board.Scalars(tag)]
        for tag in board.Tags()["scalars"]
        if tag.rpartition("/")[2] not in TIMES
    }


def check_same(run: Run, straight: Run) -> None:
    """Compare state, metrics, curves and model with those of an uninterrupted run, bit by bit."""
    assert last_hash(run) == last_hash(straight)
    assert last_counts(run) == last_counts(straight)
    assert without_times(run) == without_times(straight)
    assert curves(run) == curves(straight)
    model = "model.safetensors"
    assert (run.folder / model).read_bytes() == (straight.folder / model).read_bytes()
    assert run.read_json("status.json")["status"] == "finished"


def check_resume(bench: Bench, name: str, **options: Any) -> Run:
    """Train, cut the run back to its last checkpoint but one, and expect the same of a resume.

    Args:
        bench: Where to run.
        name: Tells these two runs from others.
        options: Of the trainer; they give two checkpoints, the second at the end.

    Returns:
        The resumed run.
    """
    straight = bench.train_well(f"straight-{name}", **options)
    cut = shutil.copytree(straight.folder, bench.folder / f"cut-{name}")
    # As after a kill: the end of the run is missing, and so is what was written of it.
    *_, kept, last = sorted((cut / "checkpoints").glob("step_*"))
    shutil.rmtree(last)
    (cut / "model.safetensors").unlink()
    resumed = bench.train_well(cut.name, resume_from_checkpoint=True, **options)
    assert f"at step {int(kept.name.removeprefix('step_'))}" in resumed.output
    assert without_times(resumed) == without_times(straight)
    assert weights_hash(cut) == weights_hash(straight.folder)
    return resumed


def kill_and_go_on(
    bench: Bench,
    name: str,
    kills: Sequence[Fault],
    *,
    together: bool,
    ranks: int = 2,
    **options: Any,
) -> Run:
    """Start the same command again and again; each but the last start is killed.

    Args:
        bench: Where to run.
        name: Of the run.
        kills: One for each start.
        together: Whether all ranks die with the one that is killed, as when a machine fails;
            else the others are left to end themselves.
        ranks: Number of ranks.
        options: Of the trainer.
    """
    options = {"resume_from_checkpoint": True, **options}
    for kill in kills:
        started = bench.start(name, ranks=ranks, faults=[kill], **options)
        started.wait_for_death()
        happened = any(process.exitcode == -signal.SIGKILL for process in started.processes)
        if together:
            started.kill()
        outcomes = started.outcomes(timeout=30)
        assert happened, f"{kill} did not happen\n{outcomes[0].output}"
    return bench.train_well(name, ranks=ranks, **options)


def weights_hash(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
