"""The Hub's libraries where the Hub cannot be reached."""

import time

import pytest

from llm.errors import ConfigError
from llm.models.configuration import load_config
from llm.models.options import ModelOptions
from llm.runtime.offline import find_connection_problem
from tests.support.hub_server import Hub, use_hub

UNREACHABLE = "http://127.0.0.1:9"


@pytest.fixture
def naps(monkeypatch) -> list[float]:
    """The seconds that the program or the Hub's client waited, although nothing waits."""
    naps: list[float] = []
    start = time.monotonic()
    monkeypatch.setattr(time, "sleep", naps.append)
    monkeypatch.setattr(time, "monotonic", lambda: start + sum(naps))
    return naps


def test_an_unreachable_hub_is_reported_within_seconds(tmp_path, monkeypatch, naps, caplog):
    use_hub(UNREACHABLE, tmp_path, monkeypatch)

    with pytest.raises(ConfigError, match=r"somebody/tiny is not a local .* cannot be reached:"):
        load_config(ModelOptions(model_name_or_path="somebody/tiny"))

    assert naps == [1, 1, 1]
    assert "Connection refused): only its cache is read" in caplog.text


def test_a_hub_that_answers_at_a_later_try_is_reached(hub: Hub, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", UNREACHABLE)
    monkeypatch.setattr(time, "sleep", lambda _: setattr(constants, "ENDPOINT", hub.url))

    assert find_connection_problem() is None
