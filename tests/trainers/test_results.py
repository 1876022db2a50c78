"""The way to the Hub, against a stand-in for its client."""

import re
import shlex
from types import SimpleNamespace

import huggingface_hub
import pytest

from llm.errors import ConfigError
from llm.trainers.gpt.config import GPTConfig
from llm.trainers.gpt.results import open_repository, push
from llm.trainers.gpt.rules import check


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


def test_a_private_repository_named_after_the_run_is_created_at_the_start(hub, tmp_path):
    assert open_repository(GPTConfig(push_to_hub=True), tmp_path / "tiny") == "someone/tiny"
    assert hub.asked == [("tiny", {"private": True, "exist_ok": True})]


def test_no_repository_is_created_by_default(hub, tmp_path):
    assert open_repository(GPTConfig(), tmp_path) is None
    assert hub.asked == []


def test_a_missing_login_is_reported_before_training(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(ConfigError, match="`hf auth login`"):
        open_repository(GPTConfig(push_to_hub=True), tmp_path)


def test_an_unreachable_hub_is_reported_before_training(hub, tmp_path):
    hub.error = ConnectionError("no route to host")
    with pytest.raises(ConfigError, match=r"cannot open the repository mine: no route to host"):
        open_repository(GPTConfig(push_to_hub=True, hub_model_id="mine"), tmp_path)


def test_the_model_and_its_card_are_pushed_and_nothing_of_the_run(hub, tmp_path):
    for name in (
        "model.safetensors", "config.json", "README.md", "all_results.json",
        "status.json", "metrics.jsonl", "config.toml", "log.txt", "eval_results.json", "notes.txt",
    ):  # fmt: skip
        (tmp_path / name).touch()
    (tmp_path / "checkpoints").mkdir()
    push(tmp_path, "someone/tiny")
    (asked,) = hub.asked
    assert asked["repo_id"] == "someone/tiny"
    assert sorted(asked["allow_patterns"]) == [
        "README.md", "all_results.json", "config.json", "model.safetensors"
    ]  # fmt: skip
    assert asked["ignore_patterns"] == ["*/*"]


def test_a_failed_push_keeps_the_model_and_explains_how_to_retry(hub, tmp_path, caplog):
    hub.error = ConnectionError("no route to host")
    (tmp_path / "with späces").mkdir()
    push(tmp_path / "with späces", "someone/tiny")
    command = re.search("`(.*)` tries again", caplog.text)[1]
    words = shlex.split(command)
    assert words[:4] == ["hf", "upload", "someone/tiny", f"{tmp_path}/with späces"]
    assert {"--exclude"} == set(words[4::2])
    assert {"*/*", "log.txt", "status.json"} < set(words[5::2])


def test_a_name_without_push_to_hub_is_refused():
    with pytest.raises(ConfigError, match="--hub_model_id needs --push_to_hub"):
        check(GPTConfig(model_type="gpt2", train_file="a.txt", hub_model_id="mine"))
