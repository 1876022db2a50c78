import logging

import pytest

from tests.support.texts import ReadSource
from tests.support.tokenizers import save_tiny_tokenizer


@pytest.fixture
def at_home(tmp_path, monkeypatch):
    """An empty folder with a tokenizer."""
    monkeypatch.chdir(tmp_path)
    save_tiny_tokenizer(tmp_path / "tokenizer")


@pytest.fixture
def fresh_reads(monkeypatch, caplog):
    """No source was read yet, and the log shows all."""
    monkeypatch.setattr(ReadSource, "reads", [])
    caplog.set_level(logging.INFO, "llm.data")
