"""`llm-trainers sweep`: members of a grid are checked, run, interrupted, and repeated."""

import contextlib
import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from llm.checkpoint.run_folder import RunFolder
from llm.errors import ConfigError
from llm.runtime.claims import Claim
from llm.tools.sweep.member_state import read_outcome
from llm.tools.sweep.members import Base, Member, grid_members, option_arguments
from llm.tools.sweep.run_members import MemberRuns
from llm.tools.sweep.slots import Slot
from llm.tools.sweep.sweep import main, make_table
from llm.trainers.gpt.extensions import GPTConfig
from tests.support.processes import wait_until
from tests.support.training import Bench

BASE = """
model_name_or_path = "model"
train_file = "a.txt"
data_cache_dir = "cache"
block_size = 32
per_device_train_batch_size = 4
per_device_eval_batch_size = 4
max_train_steps = 2
logging_steps = 1
report_to = ["none"]
device_peak_tflops = 1
seed = 1
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder with `base.toml`, which is the current one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.toml").write_text(BASE)
    return tmp_path


def names(*grid: str) -> list[str]:
    return [member.name for member in grid_members(grid, max_members=100)]


def test_a_grid_has_a_member_for_each_combination():
    assert names("learning-rate=1e-3,2e-3", "seed=1,2") == [
        "learning_rate=1e-3,seed=1",
        "learning_rate=1e-3,seed=2",
        "learning_rate=2e-3,seed=1",
        "learning_rate=2e-3,seed=2",
    ]


def test_names_of_members_are_names_of_folders_and_different():
    paths = names("data_path=data/a b,data_a_b", "min_learning_rate=-0.0")
    assert [path.partition("-")[0] for path in paths] == [
        "data_path=data_a_b,min_learning_rate=",
        "data_path=data_a_b,min_learning_rate=",
    ]
    assert len(set(paths)) == 2
    [long, other] = names(f"sample_prompt={'king ' * 300},{'king ' * 301}")
    assert long != other
    assert len(long) == len(other) == 100


def test_values_become_arguments_as_the_user_would_type_them():
    [member, _] = grid_members(
        ["config_overrides='n_layer=1,n_embd=8','n_layer=2,n_embd=8'", "betas=0.9 0.95"],
        max_members=2,
    )
    assert option_arguments(member.options) == [
        *("--config_overrides=n_layer=1,n_embd=8", "--betas", "0.9", "0.95")
    ]


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["base.toml"], "Nothing varies: name an option and its values"),
        (["--grid", "seed=1,2"], "first name a TOML file with the trainer's options"),
        (["nowhere.toml", "--grid", "seed=1,2"], "--config nowhere.toml cannot be read"),
        (["base.toml", "--grid", "sead=1,2"], "There is no option --sead. See --help."),
        (["base.toml", "--learning_rate", "1e-3"], "after --, and --grid varies them."),
        (["base.toml", "--grid", "seed=1,two"], "The member seed=two cannot run: --seed expects"),
        (["base.toml", "--grid", "seed"], "expects an option and its values, as in --grid learn"),
        (["base.toml", "--grid", "seed=1,,2"], "expects an option and its values"),
        (["base.toml", "--grid", "seed=1,2\n3"], "expects an option and its values"),
        (["base.toml", "--grid", "sample_prompt='a,b"], "expects an option and its values"),
        (["base.toml", "--grid", "sample_prompt='a'b,c"], "expects an option and its values"),
        (["base.toml", "--grid", "seed=1,2", "--", "--output-dir=a"], "--output_dir follows --, b"),
        (
            ["base.toml", "--grid", "seed=1,2", "--", "--push_to_hub", "--hub_model_id", "me/a"],
            "The members seed=1 and seed=2 would push to the same --hub_model_id me/a",
        ),
        (["base.toml", "--grid", "seed=1,1"], "--grid seed=1,1 has a value twice"),
        (["base.toml", "--grid", "seed=1", "seed=2"], "--grid seed=2 varies seed again"),
        (["base.toml", "--grid", "seed=1", "--grid", "eval_steps=2"], "--grid is given twice"),
        (["base.toml", "--grid", "seed=1,01"], "seed=1 and seed=01 are the same run"),
        (["base.toml", "--grid", "output-dir=a,b"], "--output_dir cannot differ between the mem"),
        (["base.toml", "--grid", "exit_after=1,2"], "--exit_after cannot differ between the mem"),
        (["base.toml", "--grid", "seed=1,2", "--", "--seed", "3"], "--seed follows --, and the"),
        (["base.toml", "--grid", "seed=1,2", "--", "--eval_only"], "--eval_only trains nothing"),
        (["base.toml", "--grid", "seed=1,2,3", "--max_members", "2"], "has 3 members, and --max_"),
        (["base.toml", "--grid", "tensor_parallel_size=1,2"], "do not divide the 1 that there"),
        (["base.toml", "--grid", "seed=1,2", "--nodes", "2"], "this is a single machine without"),
        (["base.toml", "--grid", "seed=1,2", "--output_dir", "base.toml"], "is a file; name a"),
    ],
)
def test_a_sweep_that_cannot_work_starts_nothing(argv, sentence, folder, capsys):
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert sentence in error
    assert error.count("\n") == 1
    assert [path.name for path in folder.iterdir()] == ["base.toml"]


def test_a_file_with_the_name_of_a_member_is_refused(folder, capsys):
    (folder / "sweeps/base").mkdir(parents=True)
    (folder / "sweeps/base/seed=2").touch()
    assert main(["base.toml", "--grid", "seed=1,2"]) == 2
    assert "sweeps/base/seed=2 is a file; name a folder." in capsys.readouterr().err
    assert not (folder / "sweeps/base/seed=1").exists()


def test_a_folder_with_a_run_of_other_options_is_refused(folder, capsys):
    (folder / "sweeps/base/seed=1").mkdir(parents=True)
    (folder / "sweeps/base/seed=1/config.toml").write_text(BASE.replace("32", "64"))
    assert main(["base.toml", "--grid", "seed=1,2"]) == 2
    assert "seed=1 holds a run with other options: block_size was 64 and is 32." in (
        capsys.readouterr().err
    )
    assert main(["base.toml", "--grid", "seed=1", "--output_dir", "sweeps/base/seed=1"]) == 2
    assert "is the folder of a run" in capsys.readouterr().err


@pytest.mark.extended
def test_a_repeated_command_trains_only_the_members_that_failed(folder, capsys):
    bench = Bench(folder, lines=60)
    (folder / "train.txt").rename("a.txt")
    argv = ["base.toml", "--output_dir", "s", "--grid", "train_file=b.txt,a.txt"]

    assert main(argv) == 1
    table = capsys.readouterr().out.splitlines()[-4:]
    assert table[0].split() == ["member", "state", "validation", "loss"]
    assert table[1].split() == ["train_file=b.txt", "failed"]
    assert table[2].split()[:2] == ["train_file=a.txt", "finished"]
    assert table[3].startswith("train_file=b.txt failed: --train_file b.txt ")
    assert table[3].endswith(" Log: s/train_file=b.txt/sweep.log")

    (folder / "b.txt").write_bytes((folder / "a.txt").read_bytes())
    finished_at = (folder / "s/train_file=a.txt/status.json").stat().st_mtime_ns
    assert main(argv) == 0
    assert finished_at == (folder / "s/train_file=a.txt/status.json").stat().st_mtime_ns
    assert main([*argv, "--status"]) == 0
    [first, second] = capsys.readouterr().out.splitlines()[-2:]
    assert first.split()[1:] == second.split()[1:]  # the same text

    run = bench.train_well("run", train_file="a.txt", max_train_steps=2, lr_scheduler_type=None,
                           learning_rate=None)  # fmt: skip
    expected = load_file(run.folder / "model.safetensors")
    for name in ("a.txt", "b.txt"):
        weights = load_file(folder / f"s/train_file={name}/model.safetensors")
        assert all(weights[key].equal(expected[key]) for key in expected)
    assert first.split()[2] == f"{run.metrics[-1]['eval_loss']:.4f}"


TRAINER = """
import json, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
def write(status, **values):
    (folder / "status.json").write_text(json.dumps({"status": status, **values}))
def stop(*_):
    write("preempted", reason="SIGTERM")
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
write("running")
while not (folder / "end").exists():
    time.sleep(0.02)
end = (folder / "end").read_text()
if end == "crash":
    write("failed", reason="a reason")
    sys.exit("Traceback\\nerror: The loss is not finite.\\nmore")
if end == "lock":
    from llm.checkpoint.run_folder import RunFolder
    from llm.errors import ConfigError
    try:
        RunFolder(folder).lock().__enter__()
    except ConfigError as error:
        sys.exit(f"error: {error}")
(folder / "all_results.json").write_text(json.dumps({"eval_loss": 3.5}))
write("finished")
"""
"""A program that behaves as the trainer, and ends once its folder has a file `end`."""


class Sweep:
    """Members that run `TRAINER`, in a thread."""

    def __init__(
        self, folder: Path, members: list[Member], monkeypatch, num_slots: int = 1, trials=None
    ):
        def command(slot, arguments, *, nproc_per_node):
            [output_dir] = [word[13:] for word in arguments if word.startswith("--output_dir=")]
            return [sys.executable, "-c", TRAINER, output_dir]

        monkeypatch.setattr(Slot, "command", command)
        self.folder = folder
        slots = [Slot(port=port) for port in range(num_slots)]
        base = Base(arguments=[], folder=folder)
        self.runs = MemberRuns(base, members, slots=slots, nproc_per_node=1, trials=trials)

    def state(self, name: str) -> str:
        return read_outcome(self.folder / name).state

    def end(self, name: str, how: str = "well") -> None:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        (folder / "ending").write_text(how)
        (folder / "ending").rename(folder / "end")  # a trainer that waits for it reads all of it

    def states(self) -> dict[str, str]:
        return {name: outcome.state for name, outcome in self.runs.outcomes.items()}


def members(*names: str, parent: str | None = None) -> list[Member]:
    return [Member(name=name, options={"seed": name}, parent=parent) for name in names]


def test_a_member_that_fails_stops_no_other(tmp_path, monkeypatch, capsys):
    sweep = Sweep(tmp_path, members("a", "b"), monkeypatch)
    sweep.end("a", "crash")
    sweep.end("b")
    sweep.runs.run()
    assert sweep.states() == {"a": "failed", "b": "finished"}
    assert sweep.runs.outcomes["a"].sentence == "The loss is not finite."
    assert "b finished, validation loss 3.5000, after 0.0 minutes" in capsys.readouterr().out
    assert not [*tmp_path.glob("*/.sweep-*")]


def test_the_table_has_a_column_for_each_set_of_tasks(tmp_path):
    core = {"task_core/centered_accuracy": 0.125, "task_core/arc_easy": 0.5}
    for name, results in {"a": core, "b": {}}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "status.json").write_text('{"status": "finished"}')
        (tmp_path / name / "all_results.json").write_text(json.dumps({"eval_loss": 3.5} | results))
    outcomes = {name: read_outcome(tmp_path / name) for name in ("a", "b")}

    table = make_table(Base(arguments=[], folder=tmp_path), outcomes)
    assert [re.split(" {2,}", line) for line in table.splitlines()] == [
        ["member", "state", "validation loss", "core: centered accuracy"],
        ["a", "finished", "3.5000", "0.1250"],
        ["b", "finished", "3.5000"],
    ]


def test_a_branch_waits_for_its_parent_and_is_left_out_without_it(tmp_path, monkeypatch):
    tree = [*members("a", "b"), *members("c", parent="a"), *members("d", parent="b")]
    sweep = Sweep(tmp_path, tree, monkeypatch, num_slots=4)
    sweep.end("a", "crash")
    for name in ("b", "c", "d"):
        sweep.end(name)
    sweep.runs.run()
    assert sweep.states() == {"a": "failed", "b": "finished", "c": "waiting", "d": "finished"}
    assert sweep.runs.outcomes["c"].sentence == "It branches from a, which has not finished."
    order = [(tmp_path / name / "status.json").stat().st_mtime_ns for name in ("b", "d")]
    assert order == sorted(order)


def test_members_run_at_the_same_time_in_several_slots(tmp_path, monkeypatch):
    sweep = Sweep(tmp_path, members("a", "b", "c"), monkeypatch, num_slots=2)
    sweep.end("c")

    def end_both() -> None:
        assert [sweep.state(name) for name in "abc"] == ["running", "running", "waiting"]
        sweep.end("a")
        sweep.end("b")

    call_when(lambda: all((tmp_path / n / "status.json").exists() for n in "ab"), end_both)
    sweep.runs.run()
    assert sweep.states() == {"a": "finished", "b": "finished", "c": "finished"}


def call_when(condition, action) -> None:
    """Call an action in a thread once a condition holds."""

    def wait_and_act() -> None:
        wait_until(condition)
        action()

    threading.Thread(target=wait_and_act, daemon=True).start()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_lets_the_member_save_and_starts_no_other(number, tmp_path, monkeypatch):
    sweep = Sweep(tmp_path, members("a", "b"), monkeypatch)
    is_training = (tmp_path / "a/status.json").exists
    call_when(is_training, lambda: os.kill(os.getpid(), number))
    sweep.runs.run()
    assert sweep.runs.is_stopped
    assert sweep.states() == {"a": "interrupted", "b": "waiting"}
    assert sweep.runs.outcomes["a"].sentence == "It was stopped by SIGTERM, and saved."


def test_a_member_of_another_command_is_left_to_it(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    claim = Claim(tmp_path / "a", ".sweep")
    assert claim.try_acquire()
    sweep = Sweep(tmp_path, members("a", "b"), monkeypatch)
    sweep.end("b")
    sweep.runs.run()
    assert sweep.states() == {"a": "running", "b": "finished"}
    claim.release()


def test_a_member_that_another_command_has_run_meanwhile_is_not_repeated(tmp_path, monkeypatch):
    first = Sweep(tmp_path, members("a"), monkeypatch)
    second = Sweep(tmp_path, members("a"), monkeypatch)
    first.end("a", "crash")
    first.runs.run()
    second.runs.run()
    assert (tmp_path / "a/sweep.log").read_text().count("--- started ") == 1
    third, late = (Sweep(tmp_path, members("a"), monkeypatch) for _ in range(2))
    third.end("a")
    third.runs.run()
    late.runs.run()
    assert third.states() == late.states() == {"a": "finished"}
    assert (tmp_path / "a/sweep.log").read_text().count("--- started ") == 2


def test_a_member_that_a_job_has_finished_meanwhile_is_not_started(tmp_path, monkeypatch):
    sweep = Sweep(tmp_path, members("a"), monkeypatch)
    sweep.end("a")
    (tmp_path / "a/status.json").write_text('{"status": "finished"}')
    sweep.runs.run()
    assert sweep.states() == {"a": "finished"}
    assert not (tmp_path / "a/sweep.log").exists()


def test_a_stopped_command_records_no_end_of_what_another_one_runs(tmp_path, monkeypatch):
    recorded = []

    class Trials:
        def next_member(self) -> None:
            return None

        def record(self, member: Member, outcome) -> None:
            recorded.append(outcome.state)

    sweep = Sweep(tmp_path, members("a"), monkeypatch, trials=Trials())

    def replace_command() -> None:
        (tmp_path / "a/.sweep-2").write_text("1 another-boot pid:[1]")
        sweep.end("a", "crash")

    call_when((tmp_path / "a/status.json").exists, replace_command)
    sweep.runs.run()
    assert (sweep.states(), recorded) == ({"a": "running"}, ["running"])
    assert (tmp_path / "a/.sweep-1").exists()


def test_a_member_whose_command_was_killed_is_taken_over(tmp_path, monkeypatch):
    sweep = Sweep(tmp_path, members("a"), monkeypatch)
    (tmp_path / "a").mkdir()
    script = "import os; from pathlib import Path; from llm.runtime.claims import Claim\n"
    script += f"assert Claim(Path({str(tmp_path / 'a')!r}), '.sweep').try_acquire(); os._exit(9)"
    subprocess.run([sys.executable, "-c", script])
    (tmp_path / "a/status.json").write_text('{"status": "running"}')
    (tmp_path / "a/sweep.log").write_text("--- started \n")
    assert sweep.state("a") == "interrupted"
    sweep.end("a")
    sweep.runs.run()
    assert sweep.states() == {"a": "finished"}


def add_marks(folder: Path, *, age: float) -> None:
    """What a killed command and its run of another machine leave on a file system without locks."""
    folder.mkdir()
    (folder / "status.json").write_text('{"status": "running"}')
    for name in (".sweep-1", ".owner-1"):
        (folder / name).write_text("1 another-boot pid:[1]")
        os.utime(folder / name, (time.time() - age,) * 2)


@pytest.fixture
def no_locks(monkeypatch):
    """A file system without locks, where a process counts as dead after half a second."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    for module in ("llm.runtime.claims", "llm.tools.sweep.run_members"):
        monkeypatch.setattr(f"{module}.HEARTBEAT_TIMEOUT_SECONDS", 0.5)


def test_without_locks_a_member_of_a_dead_node_is_taken_over(tmp_path, monkeypatch, no_locks):
    add_marks(tmp_path / "a", age=0)
    sweep = Sweep(tmp_path, members("a"), monkeypatch)
    sweep.end("a")
    sweep.runs.run()
    assert sweep.states() == {"a": "finished"}


def test_without_locks_a_living_job_keeps_its_member(tmp_path, monkeypatch, no_locks):
    monkeypatch.setattr("llm.runtime.claims.HEARTBEAT_SECONDS", 0.05)
    add_marks(tmp_path / "a", age=1000)
    job = Claim(tmp_path / "a", ".owner")
    wait_until(job.try_acquire)
    sweep = Sweep(tmp_path, members("a"), monkeypatch)
    sweep.runs.run()
    job.release()
    assert sweep.states() == {"a": "running"}
    assert sweep.runs.outcomes["a"].sentence == ""


def test_marks_without_a_sign_of_life_expire_and_are_named_until_then(tmp_path, no_locks):
    for name, age in (("a", 0), ("b", 100), ("c", 301)):
        add_marks(tmp_path / name, age=age)
    outcomes = [read_outcome(tmp_path / name) for name in ("a", "b", "c")]
    assert [outcome.state for outcome in outcomes] == ["running", "running", "interrupted"]
    assert outcomes[0].sentence == ""
    sentence = (
        r"Its last sign of life is 10\d seconds old. If its process or its node is dead, delete "
        rf"{tmp_path}/b/.owner-1 and {tmp_path}/b/.sweep-1, or wait until it is 300 seconds old\."
    )
    assert re.fullmatch(sentence, outcomes[1].sentence)


def test_a_lock_without_a_command_is_named(tmp_path, monkeypatch):
    for module in ("llm.runtime.claims", "llm.tools.sweep.run_members"):
        monkeypatch.setattr(f"{module}.HEARTBEAT_TIMEOUT_SECONDS", 0.5)
    sweep = Sweep(tmp_path, members("a"), monkeypatch)
    with RunFolder(tmp_path / "a").lock():  # of an array's job
        sweep.runs.run()
    assert sweep.states() == {"a": "running"}
    assert re.fullmatch(
        rf"{tmp_path}/a/\.lock is locked by process {os.getpid()} on .* since .*; if that process "
        r"or its node is dead, delete the file\.",
        sweep.runs.outcomes["a"].sentence,
    )


def test_a_member_that_a_job_starts_first_is_left_to_it(tmp_path, monkeypatch):
    """The job locks the folder after the command has looked, and before its trainer does."""
    sweep = Sweep(tmp_path, members("a", "b"), monkeypatch)
    sweep.end("b")
    with contextlib.ExitStack() as job:

        def start_job() -> None:
            job.enter_context(RunFolder(tmp_path / "a").lock())
            (tmp_path / "a/status.json").unlink()
            sweep.end("a", "lock")

        call_when((tmp_path / "a/status.json").exists, start_job)
        sweep.runs.run()
    assert sweep.states() == {"a": "running", "b": "finished"}
    sentence = rf"--output_dir {tmp_path}/a is in use by process {os.getpid()} on .*; wait for it, "
    assert re.match(sentence, sweep.runs.outcomes["a"].sentence)
    assert sweep.state("a") == "interrupted"  # without the job, a later command resumes it


def test_a_member_that_the_scheduler_stops_first_is_interrupted(tmp_path, monkeypatch):
    sweep = Sweep(tmp_path, members("a"), monkeypatch)
    status = tmp_path / "a/status.json"

    def kill_member() -> None:
        processes = [start.process for start in sweep.runs._start_by_slot.values()]
        status.unlink()
        processes[0].send_signal(signal.SIGHUP)  # which ends it without a word

    call_when(status.exists, kill_member)
    sweep.runs.run()
    assert not sweep.runs.is_stopped
    assert sweep.states() == {"a": "interrupted"}


RANGES = ["learning_rate=1e-4..1e-2:log", "num_layers=2..8", "weight_decay=0..1"]


def test_a_search_has_integers_numbers_and_choices():
    pytest.importorskip("optuna", reason="pip install optuna, the extra `optuna`")
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    from llm.tools.sweep.optuna_trials import end_members, read_search

    distributions = read_search([*RANGES, "optimizer=adamw,muon"])
    assert distributions == {
        "learning_rate": FloatDistribution(1e-4, 1e-2, log=True),
        "num_layers": IntDistribution(2, 8),
        "weight_decay": FloatDistribution(0, 1),
        "optimizer": CategoricalDistribution(["adamw", "muon"]),
    }
    first, *others = [member.options for member in end_members(distributions)]
    assert first == {
        "learning_rate": "0.0001", "num_layers": "2", "weight_decay": "0.0", "optimizer": "adamw"
    }  # fmt: skip
    assert others == [
        {**first, "learning_rate": "0.01"},
        {**first, "num_layers": "8"},
        {**first, "weight_decay": "1.0"},
        {**first, "optimizer": "muon"},
    ]


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--search", "learning_rate=1e-2..1e-4"], "expects an option with a range or values"),
        (["--search", "learning_rate=0..1:log"], "a range with :log begins above 0"),
        (["--search", "learning_rate=1"], "expects an option with a range or values"),
        (["--search", "seed=1..2", "seed=3..4"], "--search seed=3..4 names seed again"),
        (["--search", "sead=1..2"], "There is no option --sead"),
        (["--search", "learning_rate=-1..1"], "--learning_rate must be at least 0, not -1.0"),
        (["--search", "seed=1..2", "--grid", "seed=1,2"], "leave --grid and --ladder out"),
        ([], "--sampler needs a range"),
    ],
)
def test_a_search_that_cannot_work_starts_nothing(argv, sentence, folder, capsys):
    pytest.importorskip("optuna", reason="pip install optuna, the extra `optuna`")
    assert main(["base.toml", "--sampler", "optuna", *argv]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
    assert [path.name for path in folder.iterdir()] == ["base.toml"]


def test_a_sampler_without_its_package_is_refused(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert main(["base.toml", "--sampler", "optuna", "--search", "seed=1..2"]) == 2
    assert "install optuna; it is the extra `optuna`." in capsys.readouterr().err
    assert main(["base.toml", "--search", "seed=1..2"]) == 2
    assert "--search needs --sampler optuna" in capsys.readouterr().err


def test_a_killed_trial_is_repeated_and_a_failed_one_counts(tmp_path, monkeypatch):
    pytest.importorskip("optuna", reason="pip install optuna, the extra `optuna`")
    from llm.tools.sweep.optuna_trials import Trials

    def open_trials(num_trials: int) -> Trials:
        search = ["learning_rate=1e-4..1e-2:log"]
        return Trials(tmp_path, search, GPTConfig(), num_ranks=1, num_trials=num_trials)

    stopped = Sweep(tmp_path, [], monkeypatch, trials=open_trials(2))
    call_when(
        lambda: any(tmp_path.glob("trial=0*/status.json")),
        lambda: os.kill(os.getpid(), signal.SIGTERM),
    )
    stopped.runs.run()
    [name] = stopped.states()
    assert stopped.states() == {name: "interrupted"}

    repeated = Sweep(tmp_path, [], monkeypatch, trials=open_trials(2))
    repeated.end(name)

    def end_second() -> None:
        [folder] = tmp_path.glob("trial=1*")
        repeated.end(folder.name, "crash")

    call_when(lambda: any(tmp_path.glob("trial=1*/status.json")), end_second)
    repeated.runs.run()
    assert [*repeated.states().values()] == ["finished", "failed"]
    assert next(iter(repeated.states())) == name

    study = open_trials(2)._study
    assert [(t.state.name, t.value) for t in study.trials] == [("COMPLETE", 3.5), ("FAIL", None)]
    assert f"learning_rate={study.trials[0].params['learning_rate']:.3g}" in name
    assert open_trials(2).next_member() is None
    assert open_trials(3).next_member().name.startswith("trial=2,")
    with pytest.raises(ConfigError, match=r"searches learning_rate=1e-4\.\.1e-2:log, not seed=1"):
        Trials(tmp_path, ["seed=1..2"], GPTConfig(), num_ranks=1, num_trials=2)


def test_a_trial_whose_values_a_kill_has_cut_short_is_not_a_member(tmp_path):
    pytest.importorskip("optuna", reason="pip install optuna, the extra `optuna`")
    from llm.tools.sweep.optuna_trials import Trials

    search = ["learning_rate=1e-4..1e-2:log", "weight_decay=0..1"]
    trials = Trials(tmp_path, search, GPTConfig(), num_ranks=1, num_trials=1)
    trials._study.ask({"learning_rate": trials._distributions["learning_rate"]})
    assert trials.members() == []
    assert trials.next_member().options.keys() == {"learning_rate", "weight_decay"}
    assert trials.next_member() is None


def test_a_study_that_another_command_has_locked_is_one_sentence(tmp_path, monkeypatch):
    pytest.importorskip("optuna", reason="pip install optuna, the extra `optuna`")
    from llm.tools.sweep.optuna_trials import Trials

    monkeypatch.setattr("llm.tools.sweep.optuna_trials._LOCK_SECONDS", 0.0)
    trials = Trials(tmp_path, ["weight_decay=0..1"], GPTConfig(), num_ranks=1, num_trials=1)
    with trials._hold_lock(), pytest.raises(ConfigError, match=r"has locked .*/\.study\.lock for"):
        trials.next_member()


def test_the_status_of_a_search_that_has_not_begun_creates_nothing(folder, capsys):
    pytest.importorskip("optuna", reason="pip install optuna, the extra `optuna`")
    argv = ["base.toml", "--sampler", "optuna", "--search", "weight_decay=0..1", "--status"]
    assert main(argv) == 0
    assert capsys.readouterr().out.split() == ["member", "state", "validation", "loss"]
    assert [path.name for path in folder.iterdir()] == ["base.toml"]


def test_a_trial_that_was_killed_on_another_machine_is_resumed(tmp_path, monkeypatch):
    pytest.importorskip("optuna", reason="pip install optuna, the extra `optuna`")
    from llm.tools.sweep.optuna_trials import Trials

    monkeypatch.setattr("llm.runtime.claims.HEARTBEAT_TIMEOUT_SECONDS", 0.5)

    def open_trials() -> Trials:
        search = ["learning_rate=1e-4..1e-2:log"]
        return Trials(tmp_path, search, GPTConfig(), num_ranks=1, num_trials=1)

    name = open_trials().next_member().name
    (tmp_path / name).mkdir()
    (tmp_path / name / ".sweep-1").write_text("1 another-boot pid:[1]")
    (tmp_path / name / "status.json").write_text('{"status": "running"}')

    sweep = Sweep(tmp_path, [], monkeypatch, trials=open_trials())
    sweep.end(name)
    sweep.runs.run()
    assert sweep.states() == {name: "finished"}


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_member_resumes_to_the_bits_of_a_straight_run(number, folder):
    bench = Bench(folder, lines=60)
    (folder / "train.txt").rename("a.txt")
    text = BASE.replace("max_train_steps = 2", "max_train_steps = 60\ncheckpointing_steps = 20")
    (folder / "base.toml").write_text(text)
    argv = [sys.executable, "-m", "llm", "sweep", "base.toml", "--output_dir", "s"]
    argv += ["--grid", "seed=1,2"]
    metrics = folder / "s/seed=1/metrics.jsonl"

    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 2)
    process.send_signal(number)
    process.communicate(timeout=120)
    assert process.returncode == (75 if number == signal.SIGINT else -signal.SIGKILL)
    wait_until(lambda: json.loads((metrics.parent / "status.json").read_text())["status"] == (
        "preempted"
    ))  # fmt: skip
    assert subprocess.run(argv, timeout=200).returncode == 0

    for seed in (1, 2):
        run = bench.train_well(
            f"run{seed}", train_file="a.txt", max_train_steps=60, lr_scheduler_type=None,
            learning_rate=None, seed=seed,
        )  # fmt: skip
        expected = load_file(run.folder / "model.safetensors")
        weights = load_file(folder / f"s/seed={seed}/model.safetensors")
        assert all(weights[key].equal(expected[key]) for key in expected)
