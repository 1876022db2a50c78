"""The order of the tests, and what processes that they start inherit."""

import signal

import pytest

# In a shell's background job SIGINT is ignored, and processes inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole runs first: of files that take long, none shall be left for one process at the end."""
    items.sort(key=lambda item: item.path.parent.name != "trainers")
