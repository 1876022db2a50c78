import pytest

from llm.runtime.process_settings import allocator_settings, expand_segments

NAMES = ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"]


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in NAMES:
        # Set first, so that what a test sets is undone after it.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_segments_expand_where_the_user_has_set_nothing():
    assert allocator_settings() == "defaults"
    expand_segments()
    assert allocator_settings() == "expandable_segments:True"


@pytest.mark.parametrize("name", NAMES)
def test_the_users_settings_of_the_allocator_stay(name, monkeypatch):
    monkeypatch.setenv(name, "max_split_size_mb:256")
    expand_segments()
    assert allocator_settings() == "max_split_size_mb:256"
