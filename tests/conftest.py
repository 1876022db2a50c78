"""The order of the tests, and what processes that they start inherit."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hub_server import Hub, serve_hub, use_hub

_FOREIGN = (
    *("ACCELERATE_", "CUDA_VISIBLE_DEVICES", "DASK_", "GROUP_RANK", "HF_", "HUGGINGFACE_"),
    *("LLM_CACHE_DIR", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_", "MPI_", "OMPI_", "PALS_"),
    *("PBS_", "PMI_", "RANK", "ROLE_", "SBATCH_", "SLURM", "TORCHELASTIC_", "TRANSFORMERS_"),
    *("WANDB_", "WORLD_SIZE"),
)
"""How variables begin that change what the programs do, and that a cluster or a user may set."""

_STARTS_RANKS = {"Bench", "GPUBench", "Ranks", "run_ranks", "Launch"}
"""What a test file imports from `tests/support` to start ranks or the trainer."""

for name in [name for name in os.environ if name.startswith(_FOREIGN)]:
    # `make test-gpu` uses the devices that its caller chose.
    if name != "CUDA_VISIBLE_DEVICES" or os.environ.get("LLM_TEST_DEVICE") != "cuda":
        del os.environ[name]

# So that a failed comparison of two runs shows what differs.
pytest.register_assert_rewrite("tests.support.recovery")

# In a shell's background job SIGINT is ignored, under nohup SIGHUP, and processes inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole runs first: of files that take long, none shall be left for one process at the end.

    Tests are marked as `ranks` where their file has imported a class or function that starts them.
    """
    items.sort(key=lambda item: item.path.parent.name != "trainers")
    for item in items:
        if isinstance(item, pytest.Function) and _STARTS_RANKS & vars(item.module).keys():
            item.add_marker("ranks")


@pytest.fixture(autouse=True)
def package_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's log as Python makes it: programs that run in a test's process change it."""
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    logger = logging.getLogger("llm")
    logger.handlers = []
    logger.propagate = True
    logger.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders of modules, without those that the Hub's libraries append in earlier tests.

    A process that a later test starts inherits them, and would find the modules of another cache.
    """
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub on this machine, used by the libraries in this process; its user `me` is logged in."""
    with serve_hub(tmp_path / "hub") as hub:
        use_hub(hub.url, tmp_path / "hub_cache", monkeypatch)
        yield hub
