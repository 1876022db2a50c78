"""The families of a test of all of them."""

import pytest

from tests.support.models import FAMILIES

_IN_SHORT = ("gpt2", "llama", "mamba", "mixtral")

every_family = pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in _IN_SHORT else pytest.mark.extended)
        for name in FAMILIES
    ],
)
"""`make test` runs a test for four of them, and `make test-extended` for the others."""
