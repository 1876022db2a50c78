"""Fetching a run's inputs from a Hub, which a local server replaces, and training without it."""

import contextlib
import functools
import io
import json
import os
import re
import shutil
import socket
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

import llm.tools.fetch
import llm.trainers.gpt.main
from llm.errors import DataError
from llm.trainers.gpt.extensions import GPTConfig
from tests.support.hub_server import Hub, serve_hub, use_hub
from tests.support.package import ROOT
from tests.support.ranks import run_ranks, values

METRIC = """
import datasets
import evaluate


class Agreement(evaluate.Metric):
    def _info(self):
        kinds = {name: datasets.Value("int64") for name in ("predictions", "references")}
        return evaluate.MetricInfo(
            description="", citation="", inputs_description="", features=datasets.Features(kinds)
        )

    def _compute(self, predictions, references):
        pairs = zip(predictions, references)
        return {"agreement": sum(p == r for p, r in pairs) / len(references)}
"""
CARD = """---
configs:
- config_name: small
  data_files:
  - split: train
    path: small/train*
  - split: validation
    path: small/valid*
- config_name: large
  data_files: large/*
---
"""
TASK = """
task: which_word
dataset_path: me/choices
output_type: multiple_choice
test_split: test
doc_to_text: context
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    with serve_hub(tmp_path_factory.mktemp("hub")) as hub:
        model = hub.folder("me/tiny")
        shutil.copy(ROOT / "examples" / "gpt-tiny" / "config.json", model)
        for file in (ROOT / "examples" / "tokenizer").iterdir():
            shutil.copy(file, model)
        (model / "pytorch_model.bin").write_bytes(b"of another format")
        (model / "picture.png").write_bytes(b"not needed")
        lines = (ROOT / "examples" / "data" / "shakespeare.txt").read_text().splitlines()[:400]
        text = hub.folder("me/text", "datasets")
        (text / "README.md").write_text(CARD)
        records = [json.dumps({"text": line}) + "\n" for line in lines]
        for name, part in {
            "small/train-0": records[:200],
            "small/train-1": records[200:300],
            "small/valid": records[300:],
            "large/train": records,
        }.items():
            (text / f"{name}.jsonl").parent.mkdir(exist_ok=True)
            (text / f"{name}.jsonl").write_text("".join(part))
        choice = {"context": "To be or not to", "choices": [" be", " go"], "answer": 0}
        choices = hub.folder("me/choices", "datasets")
        (choices / "test.jsonl").write_text(json.dumps(choice) + "\n")
        (hub.folder("evaluate-metric/agreement", "spaces") / "agreement.py").write_text(METRIC)
        yield hub


def fetch_there(folder: Path, url: str, commands: Sequence[list[str]]) -> list[tuple[int, str]]:
    os.chdir(folder)
    done = []
    with pytest.MonkeyPatch.context() as patch:
        use_hub(url, folder / "cache", patch)
        if any("--tasks" in words for words in commands):
            from lm_eval import tasks

            # Of its thousands of files, read these few.
            arc = {"include_path": Path(tasks.__file__).parent / "arc", "include_defaults": False}
            patch.setattr(tasks, "TaskManager", functools.partial(tasks.TaskManager, **arc))
        for words in commands:
            with contextlib.redirect_stderr(io.StringIO()) as stderr:
                done.append((llm.tools.fetch.main(words), stderr.getvalue()))
    return done


def fetch(hub: Hub, folder: Path, *commands: list[str]) -> list[tuple[int, str]]:
    """Run the program in one process; return the exit code and stderr of each command."""
    variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "cache")}
    arguments = (folder, hub.url, commands)
    return values(run_ranks(fetch_there, 1, *arguments, environment=variables, timeout=200))[0]


def train_there(folder: Path, url: str, network: bool, words: list[str]) -> int:
    def refuse(self: socket.socket, address: object, *rest: object) -> None:
        raise AssertionError(f"a connection to {address}")

    os.chdir(folder)
    with pytest.MonkeyPatch.context() as patch:
        use_hub(url, folder / f"cache-{network}", patch)
        for name in () if network else ("connect", "connect_ex"):
            patch.setattr(socket.socket, name, refuse)
        return llm.trainers.gpt.main.main(words)


def train(hub: Hub, folder: Path, toml: str, option: str, *, network: bool) -> dict[str, float]:
    variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / f"home-{network}")}
    arguments = (folder, hub.url, network, ["--config", toml, option])
    [done] = run_ranks(train_there, 1, *arguments, environment=variables, timeout=200)
    assert done.value == 0, f"{done.error}\n{done.output}"
    return json.loads((folder / "run" / "all_results.json").read_text())


@pytest.mark.parametrize("name", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"])
def test_a_variable_that_forbids_downloads_is_named(name, monkeypatch, capsys):
    monkeypatch.setenv(name, "1")

    assert llm.tools.fetch.main(["inputs", "--model", "me/tiny"]) == 2

    assert f"error: {name}=1 in the environment forbids downloads" in capsys.readouterr().err


def test_fetched_files_train_without_a_connection_as_the_names_do(hub, tmp_path):
    (tmp_path / "task.yaml").write_text(TASK)
    (tmp_path / "run.toml").write_text(
        'model_name_or_path = "me/tiny"\nlow_cpu_mem_usage = true\n'
        'dataset_name = "me/text"\ndataset_config_name = "small"\n'
        'eval_metrics = ["agreement"]\neval_tasks = ["task.yaml"]\n'
        'max_train_steps = 2\nblock_size = 32\nseed = 1\noutput_dir = "run"\n'
    )
    assert fetch(hub, tmp_path, ["offline", "--config", "run.toml"]) == [(0, "")]
    local = tomllib.loads((tmp_path / "offline" / "run.toml").read_text())
    assert local["dataset_name"] == str(tmp_path / "offline" / "datasets" / "me" / "text")
    assert local["max_duration"] == "2 steps"
    assert not (tmp_path / "offline" / "datasets" / "me" / "text" / "large").exists()
    assert {path.name for path in (tmp_path / "offline" / "models" / "me" / "tiny").iterdir()} == {
        *("config.json", "tokenizer.json", "tokenizer_config.json", ".cache")
    }

    by_name = train(hub, tmp_path, "run.toml", "--push_to_hub", network=True)
    requests = len(hub.requests)
    from_files = train(hub, tmp_path, "offline/run.toml", "--overwrite_output_dir", network=False)
    assert by_name["eval_loss"] == from_files["eval_loss"]
    assert by_name["eval_agreement"] == from_files["eval_agreement"]
    assert len(hub.requests) == requests
    assert (hub.root / "models" / "me" / "run" / "model.safetensors").is_file()


def test_an_interrupted_download_continues_with_what_is_missing(hub, tmp_path):
    (tmp_path / "run.toml").write_text(
        'dataset_name = "me/text"\nresume_from_checkpoint = true\nnum_layers = 2\n'
    )
    command = ["offline", "--config", "run.toml", "--dataset_config_name", "large"]
    hub.refused = {"large/train.jsonl"}
    [(code, stderr)] = fetch(hub, tmp_path, command)
    hub.refused = set()
    assert code == 2
    assert "--dataset_name me/text was not downloaded completely (" in stderr

    hub.requests.clear()
    assert fetch(hub, tmp_path, command, command) == [(0, ""), (0, "")]
    downloads = [path for path in hub.downloads() if re.search("/[0-9a-f]{40}/", path)]
    assert [Path(path).name for path in downloads] == ["train.jsonl"]
    file = "datasets/me/text/large/train.jsonl"
    assert (tmp_path / "offline" / file).read_bytes() == (hub.root / file).read_bytes()
    assert tomllib.loads((tmp_path / "offline" / "run.toml").read_text()) == {
        "num_layers": 2,
        "dataset_name": str(tmp_path / "offline" / "datasets" / "me" / "text"),
        "dataset_config_name": "large",
        "resume_from_checkpoint": True,
    }


def test_the_written_file_keeps_defaults_that_override_the_preset(hub, tmp_path):
    written = (
        'preset = "pretrain"\nlr_scheduler_type = "linear"\nwarmup = "0 steps"\n'
        'weight_decay = 0.0\nmax_duration = "2 steps"\n'
    )
    (tmp_path / "run.toml").write_text('model_name_or_path = "me/tiny"\n' + written)
    command = ["offline", "--config", "run.toml", "--from_scratch"]
    assert fetch(hub, tmp_path, command) == [(0, "")]
    assert tomllib.loads((tmp_path / "offline" / "run.toml").read_text()) == {
        "model_name_or_path": str(tmp_path / "offline" / "models" / "me" / "tiny"),
        "from_scratch": True,
        **tomllib.loads(written),
    }


def test_a_data_set_that_a_run_cannot_read_is_refused(tmp_path):
    (tmp_path / "data-00000-of-00001.arrow").write_bytes(b"x")

    with pytest.raises(DataError, match="is a folder without any file of a known kind"):
        llm.tools.fetch.check_downloads(GPTConfig(dataset_name=str(tmp_path)))


def test_names_that_cannot_be_fetched_are_refused_in_one_sentence(hub, tmp_path):
    (hub.folder("me/closed") / "config.json").write_text("{}")
    hub.gated = {"me/closed"}
    (tmp_path / "far.yaml").write_text(
        "task: far\ndataset_path: json\ndataset_kwargs: {data_files: 'https://a.example/b'}\n"
    )
    (tmp_path / "absent.yaml").write_text("task: absent\ndataset_path: me/absent\n")
    (hub.folder("me/broken", "datasets") / "dataset_infos.json").write_text('{"a": ')
    (hub.folder("me/broken", "datasets") / "a.jsonl").write_text('{"text": "a"}\n')
    refused = {
        "--dataset me/broken": "Hugging Face Hub (malformed JSON at line 1, column 7); check the",
        "--model me/nowhere": "--model_name_or_path me/nowhere is not on the Hub",
        "--model me/closed": "me/closed is gated: accept its terms on its page",
        "--config_name ./models/cfg": "cfg is neither a path that exists nor a name on the Hub",
        "--dataset me/text": "several configurations; choose a configuration with",
        "--dataset me/nowhere": "--dataset_name me/nowhere cannot be loaded",
        "--metrics nowhere": "--eval_metrics nowhere is not on the Hub",
        "--tasks nowhere": "nowhere is neither a YAML file, nor a set (core, easy),",
        "--tasks ai2_arc": "ai2_arc is a group of tasks; name its tasks one by one",
        "--tasks absent.yaml": "--eval_tasks me/absent cannot be loaded from the Hugging Face Hub",
        "--tasks far.yaml": "reads https://a.example/b: download the file",
        "--metrics accuracy": "Give --model_name_or_path, --config_name, --tokenizer_name, --dat",
        "--config": "--config expected one argument",
        "--config absent.toml": "absent.toml cannot be read",
    }
    done = fetch(hub, tmp_path, *(["offline", *words.split()] for words in refused), [])
    assert [code for code, _ in done] == [2] * (len(refused) + 1)
    for (_, stderr), sentence in zip(done, [*refused.values(), "No folder is named"], strict=True):
        assert sentence in stderr
        assert stderr.count("\n") == 1
    assert not (tmp_path / "offline" / "run.toml").exists()
