"""Compiled code in a folder: who may have written it, when it is saved, and what a resume runs."""

import logging
from pathlib import Path

import pytest
import torch
from torch.compiler._cache import CacheInfo

from llm.errors import ConfigError
from llm.extensions.compiled_code.code_file import CodeFile, CodeSaver
from tests.support.recovery import last_hash
from tests.support.training import NO_DROPOUT, Bench, Run, assert_refused


@pytest.fixture
def saved(tmp_path, monkeypatch) -> Path:
    """A folder with code that PyTorch does not know."""
    monkeypatch.setattr("torch.compiler.save_cache_artifacts", lambda: (b"unknown", CacheInfo()))
    CodeFile(tmp_path / "code", rank=0).save()
    return tmp_path / "code"


def test_only_the_user_can_open_the_saved_code(saved):
    assert saved.stat().st_mode & 0o777 == 0o700
    assert (saved / "rank_0.bin").stat().st_mode & 0o777 == 0o600
    assert (saved / "rank_0.bin").read_bytes() == b"unknown"


@pytest.mark.parametrize("name", [".", "rank_0.bin"])
def test_code_that_others_can_write_is_refused(saved, name):
    (saved / name).chmod(0o770)
    with pytest.raises(ConfigError, match="users other than you can write"):
        CodeFile(saved, rank=0).load()


def test_missing_or_unknown_code_is_logged_and_compiled_again(saved, caplog):
    caplog.set_level(logging.INFO, "llm")
    CodeFile(saved.parent / "empty", rank=0).load()
    CodeFile(saved, rank=0).load()
    CodeFile(saved, rank=1).load()  # another rank is silent
    said = [record.getMessage() for record in caplog.records if record.name == "llm"]
    assert said == [
        f"compiled code: none in {saved.parent / 'empty'} yet",
        f"compiled code: 0 graphs from {saved}",
    ]


def test_code_is_saved_after_steps_that_compiled_something(monkeypatch):
    saves: list[int] = []

    class Recorder:
        def save(self) -> None:
            saves.append(step)

    saver = CodeSaver(Recorder())
    for step, num_graphs in enumerate([2, 2, 2, 3, 3]):
        monkeypatch.setitem(torch._dynamo.utils.counters["stats"], "unique_graphs", num_graphs)
        saver.after_step(step, None)
    assert saves == [0, 3]


def test_a_run_that_compiles_nothing_is_refused(tmp_path):
    words = ["--compiled_code keeps what --torch_compile generates"]
    assert_refused(Bench(tmp_path, lines=60), compiled_code=tmp_path / "code", words=words)


def train_compiled(bench: Bench, name: str, cache: str, **options: object) -> Run:
    """Train with Inductor's code in a folder of this start, as on another node."""
    started = bench.start(
        name,
        environment={"TORCHINDUCTOR_CACHE_DIR": str(bench.folder / cache)},
        **{"max_train_steps": 4, "checkpointing_steps": 2, "torch_compile": True},
        **{"deterministic": True, "compiled_code": bench.folder / "code", **options},
    )
    run = Run(bench.folder / name, started.outcomes(timeout=600))
    assert run.codes == [0], run.output
    return run


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_resume_on_another_node_runs_the_same_code_and_has_the_same_bits(tmp_path):
    bench = Bench(tmp_path, lines=60, **NO_DROPOUT)
    straight = train_compiled(bench, "run", "first-node")
    assert "2 graphs saved in" in straight.output
    expected = last_hash(straight)
    for path in (straight.folder / "checkpoints").glob("step_*4"):
        path.rename(tmp_path / path.name)
    resumed = train_compiled(bench, "run", "other-node", resume_from_checkpoint=True)
    assert "2 graphs from" in resumed.output
    assert "at step 2" in resumed.output
    assert last_hash(resumed) == expected
