"""The order of the tests."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole runs first: of files that take long, none shall be left for one process at the end."""
    items.sort(key=lambda item: item.path.parent.name != "trainers")
