"""Sets of tasks: one number for each, equal to that of lm-eval's results on the export."""

import json
import math
import os
import re
import shutil
import socket
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from llm.errors import ConfigError
from llm.extensions.tasks import task_files
from llm.extensions.tasks.task_sets import compute_gold_bits_per_byte, read_set
from llm.parallel.dims import ParallelDims
from tests.extensions.tasks.task_data import write_datasets
from tests.extensions.tasks.toy import CHOICE, metric, of_tasks, write_task
from tests.support.hub_server import serve_hub, use_hub
from tests.support.models import tiny_config
from tests.support.ranks import run_ranks, values
from tests.support.recovery import weights_hash, without_times
from tests.support.tokenizers import tiny_tokenizer
from tests.support.training import Bench, Run

lm_eval = pytest.importorskip("lm_eval")

TASKS_OF_LM_EVAL = Path(lm_eval.__file__).parent / "tasks"


def index_folders(monkeypatch, *folders: str) -> None:
    """Let lm-eval know these few of its folders, because it takes ten seconds to read all."""
    from lm_eval.tasks import TaskManager

    paths = [TASKS_OF_LM_EVAL / folder for folder in folders]
    index = TaskManager(include_path=paths, include_defaults=False).task_index
    monkeypatch.setattr(task_files, "_read_task_index", lambda: index)


def write_set(path: Path, name: str, score: str, tasks: dict[str, dict]) -> Path:
    path.write_text(yaml.safe_dump({"set": name, "score": score, "tasks": tasks}))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two tasks with three choices and one that completes a text."""
    folder = tmp_path_factory.mktemp("tasks")
    write_task(folder, "first", **CHOICE)
    write_task(folder, "second", **CHOICE | {"fewshot_split": "test"})
    write_task(
        folder,
        "words",
        output_type="loglikelihood",
        doc_to_target="{{' ' + choices[answer]}}",
        metric_list=[metric("acc")],
    )
    return folder


@pytest.fixture(scope="module")
def sets(folder) -> dict[str, Path]:
    """A set of each score over these tasks."""
    accuracies = {
        "zero": {"include": "first.yaml", "num_fewshot": 0, "metric": "acc", "chance": 1 / 3},
        "shots": {
            "include": "second.yaml",
            "num_fewshot": 2,
            "metric": "acc_norm",
            "chance": 1 / 3,
        },
        "words": {"include": "words.yaml", "num_fewshot": 0, "metric": "acc", "chance": 0},
    }
    bits = {
        "zero": {"include": "first.yaml", "num_fewshot": 0},
        "shots": {"include": "second.yaml", "num_fewshot": 2},
        "words": {"include": "words.yaml", "num_fewshot": 0},
    }
    return {
        "toy": write_set(folder / "toy.yaml", "toy", "centered_accuracy", accuracies),
        "bits": write_set(folder / "bits.yaml", "bits", "answer_bits_per_byte", bits),
    }


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


def expected_results(model: Path, folder: Path, limit: int | None = None) -> dict[str, float]:
    """What lm-eval's own program finds, and the two numbers that follow by their definitions."""
    from lm_eval.tasks import TaskManager

    results = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(model), "dtype": "float32"},
        tasks=[
            {**yaml.safe_load((folder / f"{name}.yaml").read_text()), "num_fewshot": shots}
            for name, shots in (("first", 0), ("second", 2), ("words", 0))
        ],
        task_manager=TaskManager(include_defaults=False),
        device="cpu",
        batch_size=2,
        bootstrap_iters=0,
        limit=limit,
        log_samples=True,
    )
    accuracies = results["results"]
    zero = accuracies["first"]["acc,none"]
    shots = accuracies["second"]["acc_norm,none"]
    words = accuracies["words"]["acc,none"]
    bits = {}
    for name, samples in results["samples"].items():
        per_document = []
        for sample in samples:
            right = sample["doc"]["answer"] if len(sample["arguments"]) == 3 else 0
            text = sample["doc"]["choices"][sample["doc"]["answer"]]
            log_prob = sample["resps"][right][0][0]
            per_document.append(-log_prob / math.log(2) / len(text.encode("utf-8")))
        bits[name] = sum(per_document) / len(per_document)
    suffix = "" if limit is None else f"_first_{limit}"
    return {
        f"task_toy{suffix}/centered_accuracy": ((zero * 3 - 1) / 2 + (shots * 3 - 1) / 2 + words)
        / 3,
        f"task_toy{suffix}/zero": zero,
        f"task_toy{suffix}/shots": shots,
        f"task_toy{suffix}/words": words,
        f"task_bits{suffix}/answer_bits_per_byte": sum(bits.values()) / 3,
        f"task_bits{suffix}/zero": bits["first"],
        f"task_bits{suffix}/shots": bits["second"],
        f"task_bits{suffix}/words": bits["words"],
    }


@pytest.fixture(scope="module")
def trained(bench, sets) -> Run:
    """Six steps with both sets every second one."""
    options = {"max_train_steps": 6, "learning_rate": 1e-2, "eval_tasks_steps": 2}
    return bench.train_well("trained", eval_tasks=[*sets.values()], **options)


@pytest.mark.extended
def test_the_number_of_a_set_is_that_of_lm_eval_on_the_export(trained, folder):
    expected = expected_results(trained.folder, folder)
    assert len(expected) == 8
    assert of_tasks(trained.read_json("all_results.json")) == pytest.approx(expected, rel=1e-6)
    reported = [(r["step"], of_tasks(r)) for r in trained.metrics if of_tasks(r)]
    assert [step for step, _ in reported] == [2, 4, 6]
    assert reported[-1][1] == of_tasks(trained.read_json("all_results.json"))
    assert reported[0][1] != reported[-1][1]


def test_the_log_has_one_number_for_each_set(trained):
    results = trained.read_json("all_results.json")
    assert "task set toy: toy (3 tasks), centered_accuracy" in trained.output
    number = f"centered_accuracy: {results['task_toy/centered_accuracy']:.6g}"
    assert f"task toy at step 6 | {number}\n" in trained.output
    number = f"answer_bits_per_byte: {results['task_bits/answer_bits_per_byte']:.6g}"
    assert f"task bits at step 6 | {number}\n" in trained.output
    [event] = [e for e in trained.events if e.get("task") == "toy" and e["step"] == 6]
    assert event["zero"] == results["task_toy/zero"]


@pytest.mark.parametrize(
    ("family", "ranks", "options"),
    [
        pytest.param("gpt2", 2, {}, marks=pytest.mark.extended),
        pytest.param("gpt2", 4, {}, marks=pytest.mark.layouts),
        pytest.param("gpt2", 2, {"data_parallel_shard_size": 2}, marks=pytest.mark.layouts),
        pytest.param(
            "llama",
            4,
            {
                "tensor_parallel_size": 2,
                "data_parallel_shard_size": 2,
                "pad_vocab_to_multiple_of": 128,
            },
            marks=pytest.mark.layouts,
        ),
    ],
)
def test_ranks_share_the_documents_of_a_set(tmp_path, folder, sets, family, ranks, options):
    changes = {"num_key_value_heads": 2} if family == "llama" else {}
    bench = Bench(tmp_path, family=family, **changes)
    run = bench.train_well(
        "run",
        ranks=ranks,
        max_train_steps=2,
        learning_rate=1e-2,
        per_device_eval_batch_size=2,
        eval_tasks=[*sets.values()],
        **options,
    )

    expected = expected_results(run.folder, folder)
    assert of_tasks(run.read_json("all_results.json")) == pytest.approx(expected, rel=1e-6)


def test_the_names_of_results_tell_that_documents_are_left_out(bench, trained, sets, folder):
    options = {"eval_tasks": [*sets.values()], "eval_tasks_limit": 4, "eval_only": True}
    run = bench.train("limited", model_name_or_path=trained.folder, **options)

    assert run.codes == [0], run.output
    expected = expected_results(trained.folder, folder, limit=4)
    assert "task_toy_first_4/centered_accuracy" in expected
    assert of_tasks(run.read_json("eval_results.json")) == pytest.approx(expected, rel=1e-6)


@pytest.mark.extended
def test_sets_change_no_bit_of_the_training_and_resume(bench, sets):
    options = {"max_train_steps": 4, "checkpointing_steps": 2}
    plain = bench.train_well("plain", **options)
    options |= {"eval_tasks": [*sets.values()], "eval_tasks_steps": 2}
    straight = bench.train_well("straight", **options)
    cut = bench.train_well("cut", **options)
    shutil.rmtree(cut.folder / "checkpoints" / "step_00000004")
    (cut.folder / "model.safetensors").unlink()
    resumed = bench.train_well("cut", resume_from_checkpoint=True, **options)

    assert weights_hash(straight.folder) == weights_hash(plain.folder)
    assert without_times(resumed) == without_times(straight)


def read_names(*names: str | Path, limit: int | None = None):
    """What a run on one rank makes of the names."""
    from llm.extensions.tasks.tasks import Tasks

    names = [str(name) for name in names]
    return Tasks(names, tiny_tokenizer(), tiny_config("gpt2"), ParallelDims(), limit=limit)


def refusal(*names: str | Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_names(*names)
    return str(caught.value)


def local_core(folder: Path, *left_out: str, **changes: object) -> Path:
    """A copy of the set core whose arc_easy reads a file; its other tasks may be left out."""
    shipped = yaml.safe_load((task_files.SETS_FOLDER / "core.yaml").read_text())["tasks"]
    row = {"choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "B"}
    rows = [row | {"question": f"{number} a"} for number in range(12)]
    (folder / "arc.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data_files = dict.fromkeys(("train", "validation", "test"), str(folder / "arc.jsonl"))
    shipped["arc_easy"] |= {"dataset_path": "json", "dataset_name": None}
    shipped["arc_easy"] |= {"dataset_kwargs": {"data_files": data_files}, **changes}
    tasks = {name: entry for name, entry in shipped.items() if name not in left_out}
    return write_set(folder / "core.yaml", "core", "centered_accuracy", tasks)


def other_tasks() -> list[str]:
    shipped = yaml.safe_load((task_files.SETS_FOLDER / "core.yaml").read_text())["tasks"]
    return [name for name in shipped if name != "arc_easy"]


def test_a_set_of_fewer_tasks_has_another_name(tmp_path, monkeypatch):
    index_folders(monkeypatch, *FOLDERS_OF_THE_SETS)
    file = local_core(tmp_path, "jeopardy", "coqa")
    task_set = read_set(file, task_files.find_task_files([str(file)]))
    assert task_set.name == "core_20_of_22_without_jeopardy_coqa"
    assert task_set.description == "core (20 of 22 tasks: without jeopardy, coqa)"

    tasks = read_names(local_core(tmp_path, *other_tasks()), limit=3)
    [(name, task_set)] = tasks.sets.items()
    assert re.fullmatch(r"core_1_of_22_[0-9a-f]{8}_first_3", name)
    assert task_set.description.startswith("core (1 of 22 tasks: without hellaswag_zeroshot, jeo")


def test_a_changed_set_needs_a_name_of_its_own(tmp_path, monkeypatch):
    index_folders(monkeypatch, "arc")
    said = refusal(local_core(tmp_path, *other_tasks(), num_fewshot=0))

    assert "changes arc_easy of the set core: give the set another name" in said


def test_a_set_runs_with_one_of_its_tasks_and_with_files(tmp_path, monkeypatch, sets, folder):
    index_folders(monkeypatch, "arc")
    tasks = read_names(sets["toy"], folder / "first.yaml", folder / "words.yaml", sets["bits"])

    assert [*tasks.sets] == ["toy", "bits"]
    assert "names the task toy_shots twice" in refusal(sets["toy"], sets["toy"])
    entry = {"a": {"include": str(folder / "words.yaml"), "num_fewshot": 0}}
    twin = write_set(tmp_path / "twin.yaml", "first", "answer_bits_per_byte", entry)
    assert "has a set and a task of the name first" in refusal(folder / "first.yaml", twin)


def test_unknown_names_are_answered_with_close_ones(monkeypatch, tmp_path):
    index_folders(monkeypatch, "arc", "hellaswag", "mmlu/default")
    said = refusal("helaswag")
    assert "--eval_tasks helaswag is neither a YAML file, nor a set (core, easy), nor a" in said
    assert "did you mean hellaswag?" in said
    assert "did you mean easy" in refusal("eas")
    assert "name its tasks one by one: arc_challenge arc_easy." in refusal("ai2_arc")
    assert "mmlu is a group of tasks; name its tasks one by one: mmlu_stem mmlu" in refusal("mmlu")
    tasks = {"a": {"task": "arc_esay", "num_fewshot": 0}}
    said = refusal(write_set(tmp_path / "mine.yaml", "mine", "answer_bits_per_byte", tasks))
    assert "mine.yaml: the task arc_esay is neither" in said
    assert "did you mean arc_easy" in said


def test_a_name_without_its_data_is_answered_with_the_command(monkeypatch):
    index_folders(monkeypatch, *FOLDERS_OF_THE_SETS)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    said = refusal("arc_easy")
    assert "--eval_tasks arc_easy cannot be loaded: Couldn't reach 'allenai/ai2_arc' on the" in said
    assert "Run llm-trainers fetch inputs --tasks arc_easy on a machine with a connection" in said
    assert "use --eval_tasks inputs/tasks/arc_easy.yaml here" in said
    said = refusal("core")
    assert "--eval_tasks core: the task hellaswag_zeroshot cannot be loaded: " in said
    assert "fetch inputs --tasks core on" in said
    assert "inputs/tasks/core.yaml here" in said


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"score": "acc", "tasks": {}}, "is not a set of tasks: it needs the keys set"),
        ({"set": "a/b", "tasks": {}}, "is not a set of tasks: it needs the keys set"),
        ({"set": "a", "score": "answer_bits_per_byte", "tasks": {}}, "the set a has no tasks"),
        ({"tasks": {"a": 1}}, "the task a needs a task of lm-eval (task) or a file (include)"),
        ({"tasks": {"a": {"include": "first.yaml"}}}, "a number of examples (num_fewshot), not No"),
        ({"tasks": {"a": {"include": "first.yaml", "num_fewshot": 0, "metric": "acc"}}},
         "the task a has metric, which bits per byte do not use"),
        ({"score": "centered_accuracy", "tasks": {
            "a": {"include": "first.yaml", "num_fewshot": 0}}},
         "the task a needs the name of an accuracy (metric)"),
        ({"score": "centered_accuracy", "tasks": {
            "a": {"include": "first.yaml", "num_fewshot": 0, "metric": "acc", "chance": 1}}},
         "needs a chance of at least 0 and below 1, not 1"),
        ({"score": "centered_accuracy", "tasks": {
            "a": {"include": "first.yaml", "num_fewshot": 0, "metric": "f1"}}},
         "the task a_a has no metric f1"),
        ({"tasks": {"a": {"include": "absent.yaml", "num_fewshot": 0}}}, "cannot be read"),
    ],
)  # fmt: skip
def test_wrong_sets_are_refused_in_one_sentence(folder, settings, sentence):
    file = folder / "wrong.yaml"
    file.write_text(yaml.safe_dump({"set": "a", "score": "answer_bits_per_byte"} | settings))
    said = refusal(file)

    assert sentence in said
    assert said.startswith("--eval_tasks ")


def test_the_bytes_of_an_answer_are_those_of_its_text_in_utf_8():
    class Request(NamedTuple):
        doc_id: int
        doc: dict
        idx: int
        args: tuple[str, str]
        resps: list

    class Task:
        OUTPUT_TYPE = "multiple_choice"
        multiple_input = 0
        instances = (
            Request(0, {"gold": 1}, 0, ("?", " no"), [(-9.0, False)]),
            Request(0, {"gold": 1}, 1, ("?", " größe"), [(-7 * math.log(2), False)]),
            Request(1, {"gold": 0}, 0, ("?", " a"), [(-3 * math.log(2), True)]),
            Request(1, {"gold": 0}, 1, ("?", " b"), [(-9.0, False)]),
        )

        def doc_to_target(self, document):
            return document["gold"]

        def doc_to_choice(self, document):
            return ["no", "größe"]

    assert compute_gold_bits_per_byte(Task()) == pytest.approx((7 / 7 + 3 / 1) / 2)


FOLDERS_OF_THE_SETS = (
    *("agieval", "arc", "bigbench", "hellaswag", "lambada", "openbookqa", "piqa", "siqa"),
    *("super_glue", "winogrande", "wsc273"),
)


def fetch_sets(folder: Path, url: str) -> int:
    import llm.tools.fetch

    os.chdir(folder)
    with pytest.MonkeyPatch.context() as patch:
        use_hub(url, folder / "cache", patch)
        index_folders(patch, *FOLDERS_OF_THE_SETS)
        return llm.tools.fetch.main(["inputs", "--tasks", "core", "easy", "lambada_openai"])


def train_without_network(command: list[str]) -> int:
    import llm.trainers.gpt.main

    def refuse(self: socket.socket, address: object, *rest: object) -> None:
        raise AssertionError(f"a connection to {address}")

    with pytest.MonkeyPatch.context() as patch:
        index_folders(patch)
        patch.setattr(socket.socket, "connect", refuse)
        return llm.trainers.gpt.main.main(command)


@pytest.mark.extended
def test_fetched_sets_and_tasks_run_without_a_connection(bench, tmp_path):
    with serve_hub(tmp_path / "hub") as hub:
        write_datasets(hub)
        variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
        [code] = values(run_ranks(fetch_sets, 1, tmp_path, hub.url, environment=variables))
        assert code == 0
    toml = tomllib.loads((tmp_path / "inputs" / "run.toml").read_text())
    tasks = [
        tmp_path / "inputs" / "tasks" / f"{n}.yaml" for n in ("core", "easy", "lambada_openai")
    ]
    assert toml["eval_tasks"] == [*map(str, tasks)]

    variables = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "home2")}
    command = bench.command("fetched", max_train_steps=1, eval_tasks=tasks)
    outcomes = run_ranks(train_without_network, 1, command, environment=variables, timeout=200)
    assert values(outcomes) == [0], outcomes[0].output
    results = of_tasks(Run(bench.folder / "fetched", outcomes).read_json("all_results.json"))
    assert len([name for name in results if name.startswith("task_core/")]) == 23
    assert len([name for name in results if name.startswith("task_easy/")]) == 8
