"""Publishing a trained model on a Hub, which runs on this machine."""

import re
import shlex

import pytest

from llm.errors import ConfigError
from llm.trainers.gpt.config import check_config
from llm.trainers.gpt.extensions import GPTConfig
from llm.trainers.gpt.results import open_repository, push_model


def test_a_private_repository_named_after_the_run_is_created_at_the_start(hub, tmp_path):
    for _ in range(2):  # a resumed run finds it
        assert open_repository(GPTConfig(push_to_hub=True), tmp_path / "tiny") == "me/tiny"
    assert hub.private == {"me/tiny"}


def test_no_repository_is_created_by_default(hub, tmp_path):
    assert open_repository(GPTConfig(), tmp_path) is None
    assert hub.requests == []


def test_a_missing_login_is_reported_before_training(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ConfigError, match="`hf auth login`"):
        open_repository(GPTConfig(push_to_hub=True), tmp_path)
    assert hub.requests == []


def test_a_repository_that_cannot_be_opened_is_reported_before_training(hub, tmp_path):
    config = GPTConfig(push_to_hub=True, hub_model_id="somebody/else")
    with pytest.raises(ConfigError, match=r"cannot open the repository somebody/else: .*403"):
        open_repository(config, tmp_path)


def test_the_model_and_its_card_are_pushed_and_nothing_of_the_run(hub, tmp_path):
    run = tmp_path / "run"
    pushed = {"model.safetensors", "config.json", "README.md", "all_results.json"}
    own = {"status.json", "metrics.jsonl", "config.toml", "log.txt", "notes.txt"}
    pushed |= {"additional_chat_templates/tool_use.jinja"}
    own |= {"checkpoints/config.json", "notes/config.json"}
    for name in pushed | own:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(name)
    target = hub.folder("me/tiny")
    push_model(run, "me/tiny")
    files = [path for path in target.rglob("*") if path.is_file()]
    assert {str(path.relative_to(target)): path.read_text() for path in files} == {
        name: name for name in pushed
    }


def test_a_failed_push_keeps_the_model_and_explains_how_to_retry(hub, tmp_path, caplog):
    run = tmp_path / "with späces"
    run.mkdir()
    (run / "config.json").write_text("{}")
    push_model(run, "somebody/else")
    command = re.search("`(hf .*)` tries again", caplog.text)[1]
    words = shlex.split(command)
    assert words[:4] == ["hf", "upload", "somebody/else", f"{tmp_path}/with späces"]
    assert {"--exclude"} == set(words[4::2])
    assert {"*/*", "log.txt", "status.json"} < set(words[5::2])
    assert (run / "config.json").exists()


def test_a_name_without_push_to_hub_is_refused():
    with pytest.raises(ConfigError, match="--hub_model_id needs --push_to_hub"):
        check_config(GPTConfig(model_type="gpt2", train_file="a.txt", hub_model_id="mine"))
