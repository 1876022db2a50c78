"""What `llm-trainers jobs` says about a script, and what its scripts refuse when they start."""

import gzip
import os
import re
import subprocess

import pytest

from llm.tools.jobs import jobs
from llm.tools.jobs.jobs import main
from tests.support.token_files import write_pair

TRAINER = ["--model_name_or_path", "gpt2", "--train_file", "a.txt", "--output_dir", "runs/a"]
PREPARE = ["--input", "a.jsonl", "--tokenizer_name", "gpt2", "--output_prefix", "data/web"]
POLARIS = ["--site", "polaris", "--time", "1:00:00", "--account", "me"]


@pytest.fixture(autouse=True)
def plan(monkeypatch):
    """Planning takes seconds."""
    monkeypatch.setattr(jobs, "plan_run", lambda *_: (["Plan: it fits."], None))


def write(capsys, *argv: str, trainer: list[str] = TRAINER) -> tuple[str, str]:
    """Write a script; return it and what the program says about it."""
    assert main([*argv, "--", *trainer]) == 0
    printed = capsys.readouterr()
    return printed.out, printed.err


def refuse(capsys, *argv: str, trainer: list[str] = TRAINER) -> str:
    assert main([*argv, "--", *trainer]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("program", [[], ["prepare"]], ids=["a run", "a preparation"])
def test_a_queue_that_the_table_lacks_is_written_with_a_warning(program, capsys):
    options = PREPARE if program else TRAINER
    script, said = write(capsys, *program, *POLARIS, "--queue", "new", trainer=options)
    assert "\n#PBS -q new\n" in script
    assert (
        "The table of polaris, of 2026-08-19, has no --queue new, so its limits have not been "
        "checked. It has debug, debug-scaling, prod, preemptable, capacity.\n" in said
    )
    _, said = write(capsys, "slurm", "--partition", "gpu")  # the generic site has no table
    assert "The table of" not in said


@pytest.mark.parametrize("site", ["polaris", "perlmutter", "aurora", "frontier"])
@pytest.mark.parametrize("options", ["--mixed_precision fp8", "--fp8_head"])
def test_float8_is_refused_on_a_site_without_it(site, options, capsys):
    argv = ["--site", site, "--time", "1:00:00", "--skip_plan"]
    error = refuse(capsys, *argv, trainer=[*TRAINER, *options.split()])
    assert error.startswith(f"error: {options} needs an NVIDIA GPU of compute capability 8.9")
    assert error.count("\n") == 1


def test_float8_depends_on_the_device_of_the_queue(capsys):
    argv = ["--site", "kempner", "--partition"]
    trainer = [*TRAINER, "--mixed_precision", "fp8"]
    write(capsys, *argv, "kempner_h100", trainer=trainer)
    assert "the device is a100-40gb" in refuse(capsys, *argv, "kempner", trainer=trainer)
    write(capsys, "slurm", trainer=trainer)  # of an unknown device


def test_inputs_on_the_hub_are_named_with_the_command_that_fetches_them(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    trainer = [
        *("--model_name_or_path", "gpt2", "--from_scratch", "--dataset_name", "wikitext"),
        *("--dataset_config_name", "wikitext-2-raw-v1", "--eval_metrics", "accuracy"),
        *("--output_dir", "runs/a"),
    ]
    _, said = write(capsys, "slurm", trainer=trainer)
    assert (
        "Nodes load --model_name_or_path gpt2 and --dataset_name wikitext from the Hub. If they do "
        "not reach it, first run llm-trainers fetch offline --model_name_or_path gpt2 "
        "--from_scratch --dataset_name wikitext --dataset_config_name wikitext-2-raw-v1 "
        "--eval_metrics accuracy and give the paths in offline/run.toml.\n" in said
    )
    _, said = write(capsys, "prepare", "slurm", trainer=PREPARE)
    assert "Nodes load --tokenizer_name gpt2 from the Hub." in said

    (tmp_path / "gpt2").mkdir()
    _, said = write(capsys, "prepare", "slurm", trainer=PREPARE)
    assert "from the Hub" not in said


def test_a_name_that_the_hub_cannot_have_is_a_missing_path(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = "offline/models/EleutherAI/gpt-neox-20b"
    prepare = ["--input", "a.jsonl", "--tokenizer_name", path, "--output_prefix", "data/web"]
    _, said = write(capsys, "prepare", "slurm", trainer=prepare)
    assert f"--tokenizer_name {path} is not on this machine; the job needs it.\n" in said
    assert "from the Hub" not in said
    _, said = write(capsys, "slurm", trainer=[*TRAINER, "--tokenizer_name", path])
    assert "first run llm-trainers fetch offline --model_name_or_path gpt2 and give" in said


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.csv"])
def test_a_preparation_without_its_text_column_is_refused(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = "body,n\nA text,1\n" if name == "a.csv" else '{"body": "A text", "n": 1}\n'
    with (gzip.open if name.endswith(".gz") else open)(name, "wt") as file:
        file.write(text)
    prepare = [*PREPARE, "--input", "absent.jsonl", name, "--text_column"]
    argv = ["prepare", "slurm", "--output", "job.sh"]
    error = refuse(capsys, *argv, trainer=[*prepare, "bodi"])
    sentence = "a.csv has no column 'bodi'; choose one with --text_column from: body, n."
    if name != "a.csv":
        sentence = f"{name}, line 1: the record has no key 'bodi', only 'body', 'n'; mend the line"
    assert error.startswith(f"error: {sentence}")
    assert error.count("\n") == 1
    # Without the option, the column is `text`, as for `llm-trainers prepare`.
    assert "'text'" in refuse(capsys, *argv, trainer=prepare[:-1])
    assert not (tmp_path / "job.sh").exists()
    write(capsys, *argv, trainer=[*prepare, "body"])


def test_what_a_configuration_has_is_not_announced_as_added(tmp_path, capsys):
    (tmp_path / "run.toml").write_text("resume_from_checkpoint = true\n")
    script, said = write(
        capsys, "slurm", trainer=["--config", str(tmp_path / "run.toml"), *TRAINER]
    )
    assert "--resume_from_checkpoint\n" in script
    assert "Added" not in said


def test_more_epochs_of_the_token_files_than_a_run_allows_are_refused(tmp_path, capsys):
    web = str(write_pair(tmp_path / "web", [[1] * 6401]))  # 100 samples of 64 tokens
    trainer = ["--model_name_or_path", "gpt2", "--block_size", "64", "--output_dir", "runs/a"]
    trainer += ["--split", "1,0,0", "--max_epochs", "4", "--max_duration"]
    write(capsys, "slurm", trainer=[*trainer, "25600 tokens", "--data_path", web])
    write(capsys, "slurm", trainer=[*trainer, "22B tokens", "--data_path", str(tmp_path / "no")])
    for argv in (["slurm"], ["--site", "perlmutter"]):
        error = refuse(capsys, *argv, trainer=[*trainer, "22B tokens", "--data_path", web])
        assert error.startswith(
            "error: --max_epochs is 4 for the source web, which has 100 samples"
        )
        assert error.count("\n") == 1


def test_a_job_with_token_files_is_written_in_the_shell_of_a_rank(tmp_path, monkeypatch, capsys):
    """`srun --pty bash` sets the variables of a rank, and no other rank would answer."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "::1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    web = str(write_pair(tmp_path / "web", [[1] * 6401]))
    trainer = ["--model_name_or_path", "gpt2", "--block_size", "64", "--output_dir", "runs/a"]
    trainer += ["--split", "1,0,0", "--max_epochs", "4", "--data_path", web]
    script, said = write(capsys, "slurm", trainer=[*trainer, "--max_duration", "25600 tokens"])
    assert f"--data_path {web}" in script
    assert "waits for rank" not in said


@pytest.mark.parametrize("program", [[], ["prepare"]], ids=["a run", "a preparation"])
def test_a_pbs_script_sets_the_folders_that_qsub_does_not_pass(
    program, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", "/eagle/it's mine")
    monkeypatch.setenv("LLM_CACHE_DIR", "cache")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    options = PREPARE if program else TRAINER

    pbs, said = write(capsys, *program, "pbs", trainer=options)
    assert "The script sets HF_HOME and LLM_CACHE_DIR to the folders of this shell.\n" in said
    assert "qsub does not pass HF_TOKEN to the job; run `hf auth login` once.\n" in said
    assert "hf_secret" not in pbs + said
    lines = "".join(re.findall(r"(?m)^export (?:HF|LLM)_.*\n", pbs))
    shown = 'echo "$HF_HOME|$LLM_CACHE_DIR"'
    environment = {"PATH": os.environ["PATH"]}
    for chosen, folder in ({}, "/eagle/it's mine"), ({"HF_HOME": "/other"}, "/other"):
        done = subprocess.run(
            ["bash", "-euc", lines + shown],
            env=environment | chosen,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == f"{folder}|{tmp_path}/cache\n"

    slurm, said = write(capsys, *program, "slurm", trainer=options)  # sbatch passes them
    assert "HF_" not in slurm + said


def test_the_hint_to_plan_never_leads_to_a_default_device(capsys):
    _, generic = write(capsys, "slurm")
    _, polaris = write(capsys, *POLARIS, "--skip_plan")
    assert "llm-trainers plan --nodes 1 --gpus_per_node 4 --device DEVICE --model_n" in generic
    assert "llm-trainers plan --nodes 1 --gpus_per_node 4 --device a100-40gb --model_n" in polaris


def test_spare_nodes_are_counted_in_what_the_job_requests(capsys):
    script, said = write(capsys, *POLARIS, "--nodes", "2", "--spare_nodes", "1")
    assert "#PBS -l select=3:system=polaris\n" in script
    assert "The job requests 3 nodes, 1 of them spare.\n" in said


def test_torchrun_is_refused_where_it_does_not_work_and_remarked_elsewhere(capsys):
    argv = ["--launcher", "torchrun", "--time", "1:00:00", "--site"]
    error = refuse(capsys, *argv, "aurora")
    assert error == (
        "error: --launcher torchrun does not work with the settings of --site aurora, which need "
        "task_per_gpu; leave it out.\n"
    )
    assert "does not work" in refuse(capsys, *argv, "juwels-booster")
    _, said = write(capsys, *argv, "frontier")
    assert "The pages of frontier start a task per device, without torchrun.\n" in said


def test_an_environment_that_is_not_here_is_named(tmp_path, capsys):
    _, said = write(capsys, "slurm", "--venv", str(tmp_path))
    assert f"--venv {tmp_path} has no bin/python on this machine; the job needs it.\n" in said
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").touch()
    _, said = write(capsys, "slurm", "--venv", str(tmp_path))
    assert "bin/python" not in said


@pytest.mark.parametrize(
    ("line", "minutes"),
    [("", "342"), ("exit_after = 20\n", "20"), ("  exit-after=20.5\n", "20"),
     ("exit_after = 1_000\n", "342")],
)  # fmt: skip
def test_a_configuration_may_end_a_pbs_run_earlier_but_not_later(line, minutes, tmp_path, capsys):
    """`qsub -v CONFIG=my.toml`, in the lines before the environment is activated."""
    script, _ = write(capsys, "pbs", "--time", "6:00:00")
    (tmp_path / "my.toml").write_text(f"seed = 1\n{line}")
    lines = script.partition("# The scripts of modules")[0] + 'echo "${OPTIONS[*]}"'
    done = subprocess.run(
        ["bash", "-c", lines],
        env={"PATH": os.environ["PATH"], "CONFIG": "my.toml"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    expected = f"--resume_from_checkpoint --exit_after {minutes} --config my.toml\n"
    assert (done.stdout, done.stderr) == (expected, "")


def test_a_pbs_script_refuses_more_devices_than_it_was_written_for(tmp_path, capsys):
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/activate").touch()
    script, _ = write(capsys, "pbs")
    done = subprocess.run(
        ["bash", "-c", script],
        env={"PATH": os.environ["PATH"], "GPUS": "8"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr == (
        "GPUS=8 is more than the 4 devices per node of this script; write another one by "
        "--gpus_per_node.\n"
    )
