"""The functions of the package, `llm.train` and others, compared with the commands."""

import json
import math
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from xml.etree import ElementTree

import pytest
from safetensors.torch import load_file

import llm
from llm.errors import CheckpointError, LLMError, ProgramError
from llm.tools.python.child_process import make_program_error
from llm.tools.python.functions import to_arguments
from llm.tools.python.live_curves import draw_curves, make_display
from llm.tools.python.trained_run import Metrics
from llm.trainers.gpt.main import parse_args
from tests.support.processes import is_alive, wait_until
from tests.support.training import Bench

SHORT = {"max_train_steps": 4, "checkpointing_steps": 2}


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"), lines=60)


def options_of(bench: Bench, name: str, **options) -> dict:
    """The options of `bench.command`, as keywords."""
    return {
        "model_name_or_path": bench.model,
        "train_file": bench.text,
        "data_cache_dir": bench.folder / "cache",
        "output_dir": bench.folder / name,
        "block_size": 32,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "seed": 1,
        "logging_steps": 1,
        "report_to": "none",
        "device_peak_tflops": 1,
        **SHORT,
        **options,
    }


def test_importing_the_package_loads_no_library_and_offers_the_functions():
    code = (
        "import sys, llm\n"
        "loaded = {'torch', 'numpy', 'transformers', 'llm.errors'} & sys.modules.keys()\n"
        "assert not loaded, loaded\n"
        "assert all(callable(getattr(llm, name)) for name in {*llm.__all__} - {'__version__'})\n"
        "loaded = {'torch', 'transformers'} & sys.modules.keys()\n"
        "assert not loaded, loaded\n"
        "assert not hasattr(llm, 'tune')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_options_become_the_words_of_a_command():
    assert to_arguments(
        {
            "seed": 3,
            "learning_rate": 1e-3,
            "output_dir": Path("runs/a"),
            "resume_from_checkpoint": True,
            "torch_compile": False,
            "warmup": None,
            "betas": (0.9, 0.95),
            "eval_metrics": [],
            "data_path": ["a b"],
            "sample_prompt": "--- and",
            "optimizer_kwargs": {"betas": [0.9, 0.95]},
        }
    ) == [
        *("--seed=3", "--learning_rate=0.001", "--output_dir=runs/a", "--resume_from_checkpoint"),
        *("--no_torch_compile", "--warmup=none", "--betas", "0.9", "0.95", "--eval_metrics=none"),
        *("--data_path=a b", "--sample_prompt=--- and"),
        '--optimizer_kwargs={"betas": [0.9, 0.95]}',
    ]


def test_a_class_instead_of_its_name_is_refused():
    message = (
        "optimizer does not take the class Lion itself; give its name, such as "
        'optimizer="package.module:Lion".'
    )
    with pytest.raises(ProgramError, match=f"^{re.escape(message)}$"):
        llm.train(optimizer=type("Lion", (), {}))


def test_a_run_from_python_has_the_bits_and_the_metrics_of_the_command(bench, capfd):
    command = bench.train_well("command", **SHORT)

    run = llm.train(**options_of(bench, "function"))

    assert run.status == "finished"
    assert "world: 1 rank, cpu" in capfd.readouterr().out
    expected, weights = (load_file(f / "model.safetensors") for f in (command.folder, run.path))
    assert expected.keys() == weights.keys()
    assert all(expected[name].equal(weights[name]) for name in expected)
    assert [row["loss"] for row in run.metrics] == command.losses
    assert run.metrics.column("eval_loss") == ([4], [command.metrics[-1]["eval_loss"]])
    assert run.results["steps"] == 4
    assert run.metrics.to_pandas().loc[4, "loss"] == command.losses[-1]
    model = run.model()
    assert all(
        parameter.equal(weights[name])
        for name, parameter in model.named_parameters()
        if name in weights
    )
    assert llm.Run(run.path).tokenizer()("to")["input_ids"]
    evaluated = llm.evaluate(
        config=run.path / "config.toml", resume_from_checkpoint=True, show=False
    )
    assert evaluated["loss"] == run.results["eval_loss"]
    [first, second] = llm.generate(
        run, prompt="the", max_new_tokens=4, num_samples=2, temperature=0
    )
    assert first == second
    assert first.startswith("the")


@pytest.mark.parametrize(
    "options",
    [
        {"model_siz": "124M"},
        {"max_steps": 3},
        {"learning_rate": -1.0},
        {"seed": "one"},
        {"no_seed": True},
        {"optimizer": "muon", "momentum": 2.0},
    ],
)
def test_refusals_are_the_sentences_of_the_command(options):
    arguments = [
        f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items()
    ]
    with pytest.raises(LLMError) as expected:
        parse_args(arguments)
    with pytest.raises(ValueError, match=r"^.+\.") as caught:
        llm.train(**options)
    assert isinstance(caught.value, ProgramError)
    assert str(caught.value) == str(expected.value)
    assert caught.value.exit_code == 2


@pytest.mark.extended
def test_refusals_of_inputs_are_raised_and_write_nothing(bench, capfd):
    with pytest.raises(ProgramError, match=r"^There is no token file .*nowhere") as caught:
        llm.train(**options_of(bench, "x", train_file=None, data_path=bench.folder / "nowhere"))
    assert caught.value.exit_code == 2
    assert "error:" not in capfd.readouterr().out  # the exception says it
    assert not (bench.folder / "x").exists()
    for num_processes in (0, "2", 1.0):
        message = f"num_processes must be a whole number of at least 1, not {num_processes!r}"
        with pytest.raises(ProgramError, match=re.escape(message)):
            llm.train(num_processes=num_processes, **options_of(bench, "x"))
    with pytest.raises(ProgramError, match="help is not an option of a function"):
        llm.plan(help=True)
    with pytest.raises(ProgramError, match=r"^RUN .*x is not a folder"):
        llm.generate(bench.folder / "x")
    with pytest.raises(CheckpointError, match="has no model: it has neither finished nor saved"):
        llm.Run(bench.folder / "x").model()
    assert llm.Run(bench.folder / "x").status is None
    assert llm.Run(bench.folder / "x").metrics == []


def test_the_error_of_a_failed_rank_shows_its_lines_not_torchruns_table():
    output = (
        "W1128 23:27:01 torch/distributed/elastic/multiprocessing/redirects.py:35] NOTE: R\n"
        "step 1\nterminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
        "E1128 23:27:13 .venv/torch/distributed/elastic/multiprocessing/api.py:1002] failed "
        "(exitcode: -6) local_rank: 1 (pid: 7) of binary: python\n"
        "Traceback (most recent call last):\n=====\n  exitcode  : -6 (pid: 7)\n"
    )
    shown = str(make_program_error("train", output, 1))
    assert shown.startswith("llm-trainers train ended with exit code 1. Its last lines:\nW1128 ")
    assert shown.endswith("failed (exitcode: -6) local_rank: 1 (pid: 7) of binary: python")
    assert "EnforceNotMet" in shown


@pytest.mark.extended
def test_a_plan_has_the_numbers_of_the_program_and_whether_the_run_fits():
    options = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "block_size": 64}
    options |= {"per_device_train_batch_size": 2, "memory_gib": 0.001}
    planned = llm.plan(**options)
    arguments = [f"--{name}={value}" for name, value in options.items()]
    done = subprocess.run(
        [sys.executable, "-m", "llm", "plan", "--json", *arguments], capture_output=True, text=True
    )
    assert planned == {**json.loads(done.stdout), "fits": False}


def start_script(bench: Bench, name: str, **options) -> subprocess.Popen:
    """A process that calls `llm.train` for a long run, once the run has made some steps."""
    folder = bench.folder / name
    texts = {key: str(value) for key, value in options_of(bench, name).items()}
    texts |= {"max_train_steps": 3000, "checkpointing_steps": None, **options}
    script = "import json, sys, llm\nllm.train(**json.loads(sys.argv[1]))"
    process = subprocess.Popen(
        [sys.executable, "-c", script, json.dumps(texts)], stdout=subprocess.PIPE, text=True
    )
    wait_until(lambda: llm.Run(folder).status == "running" and len(llm.Run(folder).metrics) > 2)
    return process


@pytest.mark.extended
@pytest.mark.parametrize("num_processes", [1, 2])
def test_an_interruption_lets_the_run_save_and_is_raised(num_processes, bench):
    name = f"interrupted-{num_processes}"
    run = llm.Run(bench.folder / name)
    process = start_script(bench, name, num_processes=num_processes)

    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)

    assert process.returncode == -signal.SIGINT  # an uncaught KeyboardInterrupt
    assert run.status == "preempted", output
    [checkpoint] = run.path.glob("checkpoints/step_*")
    assert int(checkpoint.name[5:]) == run.metrics[-1]["step"]
    weights = run.model().state_dict()  # of the checkpoint
    saved = {}
    for file in checkpoint.glob("*.safetensors"):
        saved |= load_file(file)
    names = [name for name in weights if f"strategy/model/{name}" in saved]
    assert len(names) > 20
    assert all(weights[name].equal(saved[f"strategy/model/{name}"]) for name in names)


@pytest.mark.extended
def test_the_refused_resume_of_a_stopped_run_is_raised(bench):
    options = options_of(bench, "stopped", per_device_train_batch_size=2)
    run = llm.train(num_processes=2, show=False, exit_after=1e-4, **options)
    assert run.status == "preempted"

    with pytest.raises(ProgramError, match="learning_rate"):
        llm.train(
            num_processes=2,
            show=False,
            resume_from_checkpoint=True,
            **{**options, "learning_rate": 0.5},
        )


@pytest.mark.faults
def test_a_run_stops_and_saves_when_the_process_that_called_it_dies(bench):
    folder = bench.folder / "orphan"
    process = start_script(bench, "orphan")
    trainer = json.loads((folder / "status.json").read_text())["pid"]

    process.kill()
    process.communicate()

    wait_until(lambda: not is_alive(trainer))
    status = json.loads((folder / "status.json").read_text())
    assert status["status"] == "preempted"
    assert status["reason"] == "the death of its launcher"
    assert len([*folder.glob("checkpoints/step_*")]) == 1


@pytest.mark.extended
def test_several_processes_train_one_model(bench):
    run = llm.train(
        num_processes=2, show=False, **options_of(bench, "two", per_device_train_batch_size=2)
    )
    assert run.status == "finished"
    events = [json.loads(line) for line in (run.path / "events.jsonl").read_text().splitlines()]
    assert events[0]["ranks"] == 2
    with pytest.raises(ProgramError, match=r"^--tensor_parallel_size 3 is 3 ranks, which do not"):
        llm.train(num_processes=2, show=False, **options_of(bench, "x", tensor_parallel_size=3))


@pytest.fixture
def notebook(monkeypatch):
    """IPython as in a notebook; returns what it shows, the present state last."""
    shown: list[str] = []
    handle = SimpleNamespace(update=shown.append)
    ipython, display = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=None)
    display.HTML, display.display = str, lambda html, display_id: handle
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return shown


def test_a_notebook_shows_a_bar_the_curves_and_the_log(notebook, tmp_path, capsys):
    old_event = {"event": "start", "step": 0, "total_steps": 7}
    (tmp_path / "events.jsonl").write_text(json.dumps(old_event) + "\n")
    show = make_display(tmp_path)
    show("weights: <random>\n")
    assert "&lt;random&gt;" in notebook[-1]
    assert "<progress" not in notebook[-1]

    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(json.dumps({**old_event, "total_steps": 1200}) + "\n")
    rows = [{"step": step, "loss": 8 - step} for step in (1, 2, 3)] + [{"step": 3, "eval_loss": 4}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    show("Saved\n")

    assert '<progress value="3" max="1200"' in notebook[-1]
    assert "step 3 of 1,200" in notebook[-1]
    assert "<code>Saved</code>" in notebook[-1]
    assert notebook[-1].count("<polyline") == 2
    assert capsys.readouterr().out == ""
    for _ in range(9):
        show("step 4\n")  # at most twice a second
    assert len(notebook) <= 3


def test_curves_have_a_point_for_each_finite_loss():
    rows = [{"step": 10, "loss": 4.0}, {"step": 20, "loss": math.nan}, {"step": 30, "loss": 2.0}]
    image = ElementTree.fromstring(draw_curves(Metrics(rows)))
    [curve] = image.iter("polyline")
    assert curve.get("points") == "44.0,8.0 552.0,156.0"
    assert [text.text for text in image.iter("text")] == [
        *("training loss", "4", "2", "step 10", "step 30")
    ]
    assert draw_curves(Metrics(rows[:1])) == ""


def test_a_long_curve_is_drawn_with_at_most_a_thousand_points():
    metrics = Metrics({"step": step, "loss": 1.0 / step} for step in range(1, 5002))
    [curve] = ElementTree.fromstring(draw_curves(metrics)).iter("polyline")
    points = curve.get("points").split()
    assert 800 <= len(points) <= 1000
    assert points[-1].startswith("552.0,")
