"""Tasks of lm-eval on the model that trains: its own results, in every layout, and no trace."""

import dataclasses
import importlib
import json
import shutil
import sys
from pathlib import Path

import pytest

from llm.errors import ConfigError
from llm.extensions.tasks.options import TasksExtension
from llm.parallel.dims import ParallelDims
from llm.trainers.gpt import seams
from llm.trainers.gpt.extensions import GPTConfig
from tests.extensions.tasks.toy import (
    CHOICE,
    by_lm_eval,
    equal,
    metric,
    needs_library,
    of_tasks,
    write_task,
)
from tests.support.models import tiny_config
from tests.support.ranks import run_ranks, values
from tests.support.recovery import weights_hash, without_times
from tests.support.tokenizers import tiny_tokenizer
from tests.support.training import Bench, Run

ROOT = Path(__file__).parents[3]
CLOZE = ROOT / "examples/tasks/shakespeare_cloze.yaml"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> dict[str, Path]:
    """A task of each kind by name."""
    folder = tmp_path_factory.mktemp("tasks")
    shots = {"num_fewshot": 1, "fewshot_split": "test"}
    likelihood = [metric("perplexity", "perplexity"), metric("acc")]
    rolling = ("word_perplexity", "byte_perplexity", "bits_per_byte")
    aggregations = ("weighted_perplexity", "weighted_perplexity", "bits_per_byte")
    kinds = {
        "choice": CHOICE,
        "shots": CHOICE | shots,
        "cloze": {"output_type": "loglikelihood", "metric_list": likelihood},
        "rolling": {
            "output_type": "loglikelihood_rolling",
            "doc_to_target": "whole",
            "metric_list": [*map(metric, rolling, aggregations)],
        },
        "writing": {
            "output_type": "generate_until",
            "doc_to_text": "{{whole}}",
            "generation_kwargs": {"until": ["e"], "max_gen_toks": 12, "do_sample": False},
            "metric_list": [metric("chrf", "chrf")],
        },
    }
    return {name: write_task(folder, name, **settings) for name, settings in kinds.items()}


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def trained(bench, tasks) -> Run:
    """Six steps with all tasks every second one."""
    options = {"max_train_steps": 6, "learning_rate": 1e-2, "eval_tasks_steps": 2}
    return bench.train_well("trained", eval_tasks=[*tasks.values()], **options)


@needs_library
def test_results_are_those_of_lm_eval_on_the_export(trained, tasks):
    run = trained
    reported = [(r["step"], of_tasks(r)) for r in run.metrics if of_tasks(r)]
    assert [step for step, _ in reported] == [2, 4, 6]
    expected = by_lm_eval(run.folder, [*tasks.values()])
    assert len(expected) == 12
    assert equal(reported[-1][1], expected)
    assert not equal(reported[0][1], expected)
    assert of_tasks(run.read_json("all_results.json")) == reported[-1][1]
    assert "task choice at step 6 | acc: " in run.output
    events = (run.folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    last = [e for e in map(json.loads, events) if e["event"] == "task" and e["step"] == 6]
    assert [event["task"] for event in last] == [*tasks]
    assert last[0]["acc"] == expected["task_choice/acc"]


@needs_library
@pytest.mark.parametrize(
    ("family", "ranks", "options"),
    [
        pytest.param("gpt2", 2, {}, marks=pytest.mark.extended),
        pytest.param("gpt2", 2, {"data_parallel_shard_size": 2}, marks=pytest.mark.layouts),
        pytest.param(
            "llama",
            2,
            {"tensor_parallel_size": 2, "pad_vocab_to_multiple_of": 128},
            marks=pytest.mark.layouts,
        ),
        pytest.param(
            "gpt2",
            2,
            {"pipeline_parallel_size": 2, "gradient_accumulation_steps": 2},
            marks=pytest.mark.layouts,
        ),
        pytest.param("llama", 2, {"context_parallel_size": 2}, marks=pytest.mark.layouts),
        pytest.param("gpt2", 2, {"data_parallel": "gossip"}, marks=pytest.mark.layouts),
        pytest.param(
            "llama",
            4,
            {"tensor_parallel_size": 2, "data_parallel_shard_size": 2},
            marks=pytest.mark.layouts,
        ),
    ],
)
def test_every_layout_has_the_results_of_its_export(tmp_path, tasks, family, ranks, options):
    changes = {"num_key_value_heads": 2} if family == "llama" else {}
    bench = Bench(tmp_path, family=family, **changes)
    names = ["choice", "cloze", "rolling", *([] if options else ["writing"])]
    files = [tasks[name] for name in names]
    run = bench.train_well(
        "run", ranks=ranks, max_train_steps=2, learning_rate=1e-2, eval_tasks=files, **options
    )

    found = of_tasks(run.read_json("all_results.json"))
    assert equal(found, by_lm_eval(run.folder, files))
    assert sum("task cloze at step 2" in outcome.output for outcome in run.outcomes) == 1


@needs_library
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.layouts)])
def test_tasks_change_no_bit_of_the_training(bench, tasks, ranks):
    """Dropout is on, and a task draws what it writes."""
    drawing = write_task(
        tasks["writing"].parent,
        "drawing",
        output_type="generate_until",
        doc_to_text="{{whole}}",
        generation_kwargs={"until": ["e"], "max_gen_toks": 9, "do_sample": True, "temperature": 1},
        metric_list=[metric("chrf", "chrf")],
    )
    options = {"ranks": ranks, "max_train_steps": 3, "checkpointing_steps": 2, "eval_steps": 2}
    plain = bench.train_well(f"plain-{ranks}", **options)
    with_tasks = bench.train_well(
        f"tasks-{ranks}", eval_tasks=[*tasks.values(), drawing], eval_tasks_steps=1, **options
    )

    rest = [line for line in without_times(with_tasks) if not of_tasks(line)]
    assert rest == without_times(plain)
    assert len(rest) == len(with_tasks.lines) - 3
    assert weights_hash(with_tasks.folder) == weights_hash(plain.folder)


@pytest.mark.extended
@needs_library
def test_a_resumed_run_makes_up_for_the_tasks_of_its_stop(bench, tasks):
    options = {"max_train_steps": 4, "eval_tasks": tasks["cloze"], "checkpointing_steps": 2}
    straight = bench.train_well("straight", eval_tasks_steps=2, **options)
    # Its stop at step 2 left no time for the tasks.
    first = bench.train_well("cut", eval_tasks_steps=4, **options)
    shutil.rmtree(first.folder / "checkpoints" / "step_00000004")
    (first.folder / "model.safetensors").unlink()
    resumed = bench.train_well("cut", resume_from_checkpoint=True, eval_tasks_steps=2, **options)

    assert without_times(resumed) == without_times(straight)


@needs_library
def test_an_evaluation_without_training_runs_tasks_too(bench, trained, tasks):
    options = {"model_name_or_path": trained.folder, "eval_tasks": tasks["choice"]}
    run = bench.train("evaluated", eval_only=True, **options)

    assert run.codes == [0], run.output
    results = trained.read_json("all_results.json")
    expected = {key: value for key, value in results.items() if key.startswith("task_choice/")}
    assert equal(of_tasks(run.read_json("eval_results.json")), expected)
    assert "task_choice/acc: " in run.output


def refusal(*files: Path, **sizes: int) -> str:
    """The sentence by which tasks are refused, of the tiny model on so many ranks."""
    from llm.extensions.tasks.tasks import Tasks

    config, layout = tiny_config("gpt2"), ParallelDims(**sizes)
    with pytest.raises(ConfigError) as caught:
        Tasks([str(file) for file in files], tiny_tokenizer(), config, layout)
    return str(caught.value)


@needs_library
def test_files_that_are_no_tasks_are_named(tmp_path):
    file = tmp_path / "file.yaml"
    for text, word in (
        ("- a", "is not the YAML file of a task"),
        ("a: b", "a"),
        ("task: [\na", "cannot be read: while parsing"),
        ("task: a", "a key that it needs is missing"),
    ):
        file.write_text(text)
        said = refusal(file)
        assert str(file) in said
        assert word in said


@needs_library
def test_a_task_whose_data_are_missing_is_refused_before_training(bench, tmp_path):
    lost = write_task(tmp_path, "lost", **CHOICE)
    (tmp_path / "lost.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"--eval_tasks.*lost\.jsonl"):
        bench.read(eval_tasks=lost)


@needs_library
def test_a_task_whose_data_are_on_the_hub_is_refused_without_it(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    far = write_task(tmp_path, "far", **CHOICE | {"dataset_path": "a/b", "dataset_kwargs": {}})
    said = refusal(far)
    assert "far.yaml cannot be loaded" in said
    assert "'a/b' on the Hub" in said
    assert f"llm-trainers fetch inputs --tasks {far} on a machine with a connection" in said
    assert "use --eval_tasks inputs/tasks/far.yaml here" in said


@needs_library
def test_tasks_that_do_not_fit_their_data_or_the_model_are_refused(tmp_path, tasks):
    def wrong(**changes) -> Path:
        return write_task(tmp_path, "wrong", **CHOICE | changes)

    assert "'question' is undefined" in refusal(wrong(doc_to_text="{{question}}"))
    assert "64 can be scored" in refusal(wrong(doc_to_choice="{{[whole * 9, 'a', 'b']}}"))
    assert "unsafe" in refusal(wrong(unsafe_code=True))
    assert "no results by its metrics (akk)" in refusal(wrong(metric_list=[metric("akk")]))
    writing = {"output_type": "generate_until", "metric_list": [metric("chrf", "chrf")]}
    assert "max_gen_toks is 256" in refusal(wrong(**writing))
    writing["generation_kwargs"] = {"max_gen_toks": 9, "until": ["a"]}
    assert "a prompt is empty" in refusal(wrong(**writing))
    assert "names the task cloze twice" in refusal(tasks["cloze"], tasks["cloze"])
    said = refusal(tasks["writing"], shard=2, tensor=2)
    assert "the task writing generates text" in said
    assert "tensor 2" in said


def test_tasks_at_steps_without_tasks(bench):
    with pytest.raises(ConfigError, match="--eval_tasks_steps needs --eval_tasks"):
        bench.read(eval_tasks_steps=5)


def test_tasks_without_the_library_print_its_pip_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "llm.extensions.tasks.tasks", raising=False)
    config = GPTConfig(eval_tasks=("task.yaml",))
    fields = dataclasses.fields(seams.Run)
    run = seams.Run(**dict.fromkeys(field.name for field in fields))
    with pytest.raises(ConfigError, match=r"pip install 'llm-trainers\[tasks\]'"):
        TasksExtension(config).prepare_run(run)


def modules_of_a_run(argv: list[str]) -> bool:
    from llm.trainers.gpt.main import main

    assert main(argv) == 0
    return any(name.partition(".")[0] in ("lm_eval", "sacrebleu") for name in sys.modules)


def test_a_run_without_tasks_does_not_load_the_library(bench):
    command = bench.command("without", max_train_steps=1)
    assert values(run_ranks(modules_of_a_run, 1, command)) == [False]


def test_the_script_makes_the_questions_that_ship(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    importlib.import_module("make_cloze").main(tmp_path)
    made, shipped = (folder / "shakespeare_cloze.jsonl" for folder in (tmp_path, CLOZE.parent))
    assert made.read_bytes() == shipped.read_bytes()


@pytest.mark.slow
@needs_library
def test_the_quick_starts_model_beats_chance_at_the_cloze(tmp_path, monkeypatch):
    """Four words to choose from, 200 times: 0.25 +- 0.031 by chance."""
    monkeypatch.chdir(ROOT)
    options = {"config": "examples/quickstart.toml", "output_dir": tmp_path / "run"}
    options |= {"max_train_steps": 200, "eval_tasks": CLOZE, "data_cache_dir": tmp_path / "cache"}
    argv = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    outcomes = run_ranks(run_quick_start, 1, [*argv, "--report_to", "none"], timeout=280)
    assert values(outcomes) == [0]
    results = Run(tmp_path / "run", outcomes).read_json("all_results.json")

    assert results["task_shakespeare_cloze/acc"] > 0.25 + 3 * 0.031


def run_quick_start(argv: list[str]) -> int:
    from llm.trainers.gpt.main import main

    return main(argv)
