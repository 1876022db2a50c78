"""The order of the tests, and what processes that they start inherit."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hub_server import Hub, serve_hub

# In a shell's background job SIGINT is ignored, and processes inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole runs first: of files that take long, none shall be left for one process at the end."""
    items.sort(key=lambda item: item.path.parent.name != "trainers")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub on this machine, used by the libraries in this process; its user `me` is logged in."""
    import huggingface_hub.constants as constants

    with serve_hub(tmp_path / "hub") as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", hub.url)
        monkeypatch.setattr("datasets.config.HF_ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub_cache"))
        monkeypatch.setenv("HF_TOKEN", "token")
        yield hub
