import logging

import pytest

from tests.support.preparation import ReadSource
from tests.support.tokenizers import save_tiny_tokenizer


@pytest.fixture
def at_home(tmp_path, monkeypatch):
    """A folder of its own with a tokenizer, and a log that is as it was before."""
    monkeypatch.chdir(tmp_path)
    logger = logging.getLogger("llm")
    before = logger.handlers, logger.level, logger.propagate
    save_tiny_tokenizer(tmp_path / "tokenizer")
    yield
    logger.handlers, logger.level, logger.propagate = before


@pytest.fixture
def fresh_reads(monkeypatch, caplog):
    """No source was read yet, and the log shows all."""
    monkeypatch.setattr(ReadSource, "reads", [])
    caplog.set_level(logging.INFO, "llm.data")
