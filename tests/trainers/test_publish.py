"""The way to the Hub, against a stand-in for its client."""

from types import SimpleNamespace

import huggingface_hub
import pytest

from llm.config import GPTConfig
from llm.errors import ConfigError
from llm.rules import check
from llm.trainers.gpt.publish import open_repository, push


@pytest.fixture
def hub(monkeypatch):
    """What the client was asked for; it knows one user, and fails if told to."""
    calls = SimpleNamespace(asked=[], error=None)

    class Client:
        def create_repo(self, name, **options):
            if calls.error:
                raise calls.error
            calls.asked.append((name, options))
            return SimpleNamespace(repo_id=f"someone/{name}")

        def upload_folder(self, **options):
            if calls.error:
                raise calls.error
            calls.asked.append(options)

    monkeypatch.setattr(huggingface_hub, "HfApi", Client)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "token")
    return calls


def test_a_private_repository_is_opened_before_training_and_named_after_the_run(hub, tmp_path):
    assert open_repository(GPTConfig(push_to_hub=True), tmp_path / "tiny") == "someone/tiny"
    assert hub.asked == [("tiny", {"private": True, "exist_ok": True})]


def test_nothing_is_opened_unless_asked(hub, tmp_path):
    assert open_repository(GPTConfig(), tmp_path) is None
    assert hub.asked == []


def test_who_is_not_logged_in_hears_so_before_training(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(ConfigError, match="`hf auth login`"):
        open_repository(GPTConfig(push_to_hub=True), tmp_path)


def test_a_hub_out_of_reach_is_one_sentence_before_training(hub, tmp_path):
    hub.error = ConnectionError("no route to host")
    with pytest.raises(ConfigError, match=r"cannot open the repository mine: no route to host"):
        open_repository(GPTConfig(push_to_hub=True, hub_model_id="mine"), tmp_path)


def test_the_model_and_its_card_are_pushed_and_nothing_of_the_run(hub, tmp_path):
    for name in ("model.safetensors", "config.json", "README.md", "status.json", "metrics.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "checkpoints").mkdir()
    push(tmp_path, "someone/tiny")
    (asked,) = hub.asked
    assert asked["repo_id"] == "someone/tiny"
    assert sorted(asked["allow_patterns"]) == ["README.md", "config.json", "model.safetensors"]
    assert asked["ignore_patterns"] == ["*/*"]


def test_a_push_that_fails_leaves_the_model_and_says_how_to_try_again(hub, tmp_path, caplog):
    hub.error = ConnectionError("no route to host")
    push(tmp_path, "someone/tiny")
    assert f"`hf upload someone/tiny {tmp_path}` tries again" in caplog.text


def test_a_name_without_push_to_hub_is_refused():
    with pytest.raises(ConfigError, match="--hub_model_id needs --push_to_hub"):
        check(GPTConfig(model_type="gpt2", train_file="a.txt", hub_model_id="mine"))
