"""Fetching a run's inputs from a Hub, which a local server replaces, and training without it."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.hub_server import Hub, serve_hub
from tests.support.package import ROOT

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
EACH = """
import contextlib, io, json, sys
from llm.fetch import main

done = []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        done.append((main(words), stderr.getvalue()))
print(json.dumps(done))
"""
TRAIN = """
import sys
from llm.trainers.gpt.main import main

sys.exit(main(sys.argv[1:]))
"""
TRAIN_WITHOUT_NETWORK = f"""
import socket

def refuse(self, address, *rest):
    raise AssertionError(f"a connection to {{address}}")

socket.socket.connect = socket.socket.connect_ex = refuse
{TRAIN}
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


def fetch(hub: Hub, cwd: Path, *commands: list[str]) -> list[tuple[int, str]]:
    """Run the program in one process; return the exit code and stderr of each command."""
    run = subprocess.run(
        [sys.executable, "-c", EACH, json.dumps(commands)],
        env=hub.environment(cwd / "cache") | {"PYTHONPATH": str(ROOT)},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0, run.stderr
    return [tuple(each) for each in json.loads(run.stdout.splitlines()[-1])]


def train(hub: Hub, cwd: Path, program: str, toml: str, *words: str) -> dict[str, float]:
    run = subprocess.run(
        [sys.executable, "-c", program, "--config", toml, *words],
        env=hub.environment(cwd / "cache" / toml) | {"PYTHONPATH": str(ROOT), "HF_TOKEN": "token"},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return json.loads((cwd / "run" / "all_results.json").read_text())


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
    assert local["max_train_steps"] == 2
    assert not (tmp_path / "offline" / "datasets" / "me" / "text" / "large").exists()
    assert {path.name for path in (tmp_path / "offline" / "models" / "me" / "tiny").iterdir()} == {
        *("config.json", "tokenizer.json", "tokenizer_config.json", ".cache")
    }

    by_name = train(hub, tmp_path, TRAIN, "run.toml", "--push_to_hub")
    requests = len(hub.requests)
    from_files = train(
        hub, tmp_path, TRAIN_WITHOUT_NETWORK, "offline/run.toml", "--overwrite_output_dir"
    )
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
        'preset = "pretrain"\nlr_scheduler_type = "linear"\nnum_warmup_steps = 0\n'
        "weight_decay = 0.0\nmax_train_steps = 2\n"
    )
    (tmp_path / "run.toml").write_text('model_name_or_path = "me/tiny"\n' + written)
    command = ["offline", "--config", "run.toml", "--from_scratch"]
    assert fetch(hub, tmp_path, command) == [(0, "")]
    assert tomllib.loads((tmp_path / "offline" / "run.toml").read_text()) == {
        "model_name_or_path": str(tmp_path / "offline" / "models" / "me" / "tiny"),
        "from_scratch": True,
        **tomllib.loads(written),
    }


def test_names_that_cannot_be_fetched_are_refused_in_one_sentence(hub, tmp_path):
    (hub.folder("me/closed") / "config.json").write_text("{}")
    hub.gated = {"me/closed"}
    (tmp_path / "far.yaml").write_text(
        "task: far\ndataset_path: json\ndataset_kwargs: {data_files: 'https://a.example/b'}\n"
    )
    refused = {
        "--model me/nowhere": "--model_name_or_path me/nowhere is not on the Hub",
        "--model me/closed": "me/closed is gated: accept its terms on its page",
        "--config_name ./models/cfg": "cfg is neither a path that exists nor a name on the Hub",
        "--dataset me/text": "several configurations; choose a configuration with",
        "--dataset me/nowhere": "--dataset_name me/nowhere cannot be loaded",
        "--metrics nowhere": "--eval_metrics nowhere is not on the Hub",
        "--tasks nowhere": "nowhere is neither a YAML file nor a task",
        "--tasks ai2_arc": "ai2_arc is a group of tasks; name its tasks one by one",
        "--tasks far.yaml": "reads https://a.example/b: download the file",
        "--metrics accuracy": "There is nothing to fetch",
        "--config": "--config needs the path of a TOML file",
        "--config absent.toml": "absent.toml cannot be read",
    }
    done = fetch(hub, tmp_path, *(["offline", *words.split()] for words in refused), [])
    assert [code for code, _ in done] == [2] * (len(refused) + 1)
    for (_, stderr), sentence in zip(done, [*refused.values(), "No folder is named"], strict=True):
        assert sentence in stderr
        assert stderr.count("\n") == 1
    assert not (tmp_path / "offline" / "run.toml").exists()
