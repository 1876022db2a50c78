"""The file for Prometheus has its text format, is replaced whole, and replaces no other file."""

import logging
import math
import os
import re
from pathlib import Path

import pytest

from llm.errors import ConfigError
from llm.metrics.prometheus import PrometheusFile, check_metrics_file
from llm.trainers.gpt.config import check_config
from llm.trainers.gpt.extensions import GPTConfig
from tests.support.training import Bench, assert_refused

SAMPLE = re.compile(
    r'[a-z_]\w*\{\w+="(?:[^"\\\n]|\\[\\"n])*"(?:,\w+="(?:[^"\\\n]|\\[\\"n])*")*\} \S+'
)


@pytest.fixture(autouse=True)
def no_job(monkeypatch):
    for name in ("SLURM_JOB_ID", "PBS_JOBID"):
        monkeypatch.delenv(name, raising=False)


def test_the_file_has_the_last_value_of_each_metric(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    path = tmp_path / "run.prom"
    file = PrometheusFile(path, output_dir=Path("/runs/tiny"))
    file.update({"step": 1, "loss": 4.5, "loss/web": 4.25, "loss/code-2": 5.0})
    file.update({"step": 2, "eval_loss": math.inf, "grad_norm": math.nan})
    file.update({"step": 3, "loss": -math.inf})

    labels = 'run="tiny",output_dir="/runs/tiny",job_id="77"'
    assert path.read_text() == (
        "# Written by llm-trainers.\n"
        "# TYPE llm_step gauge\n"
        f"llm_step{{{labels}}} 3\n"
        "# TYPE llm_loss gauge\n"
        f"llm_loss{{{labels}}} -Inf\n"
        f'llm_loss{{{labels},part="web"}} 4.25\n'
        f'llm_loss{{{labels},part="code-2"}} 5.0\n'
        "# TYPE llm_eval_loss gauge\n"
        f"llm_eval_loss{{{labels}}} +Inf\n"
        "# TYPE llm_grad_norm gauge\n"
        f"llm_grad_norm{{{labels}}} NaN\n"
    )
    assert os.listdir(tmp_path) == ["run.prom"]


def test_names_and_labels_with_any_characters_keep_to_the_format(tmp_path):
    path = tmp_path / "run.prom"
    file = PrometheusFile(path, output_dir=tmp_path / 'a "b" \\ c\nd é')
    file.update({"kfac.damping-1": 1, 'loss/a"b\\\n': 2})
    lines = path.read_text(encoding="utf-8").splitlines()
    samples = [line for line in lines if not line.startswith("#")]
    assert len(samples) == 2
    assert all(SAMPLE.fullmatch(line) for line in samples), samples
    assert samples[0].startswith("llm_kfac_damping_1{")


def test_a_file_that_cannot_be_written_is_reported_once(tmp_path, caplog):
    folder = tmp_path / "metrics"
    folder.mkdir()
    file = PrometheusFile(folder / "run.prom", output_dir=tmp_path)
    folder.rmdir()
    with caplog.at_level(logging.WARNING, logger="llm"):
        file.update({"step": 1})
        file.update({"step": 2})
    [message] = caplog.messages
    assert "run.prom cannot be written (No such file or directory). Training continues" in message
    folder.mkdir()
    file.update({"step": 3})
    assert "} 3\n" in (folder / "run.prom").read_text()


def test_a_path_that_cannot_work_is_refused(tmp_path):
    (tmp_path / "other.prom").write_text("# HELP node_disk ...\n")
    (tmp_path / "folder.prom").mkdir()
    (tmp_path / "bytes.prom").write_bytes(b"\xff")
    for name in ("other.prom", "folder.prom", "bytes.prom"):
        with pytest.raises(ConfigError, match=f"{name} exists and was not written by a run"):
            check_metrics_file(tmp_path / name)
    with pytest.raises(ConfigError, match="missing is not a folder on the host of rank 0"):
        check_metrics_file(tmp_path / "missing" / "run.prom")
    PrometheusFile(tmp_path / "run.prom", output_dir=tmp_path).update({"step": 1})
    check_metrics_file(tmp_path / "run.prom")  # of an earlier start


def test_a_name_that_the_node_exporter_does_not_read_is_refused():
    with pytest.raises(ConfigError, match=r"--metrics_file run\.txt must end in \.prom"):
        check_config(GPTConfig(model_type="gpt2", train_file="a.txt", metrics_file="run.txt"))


def test_a_bad_path_is_refused_in_one_sentence_before_training(tmp_path):
    bench = Bench(tmp_path, lines=60)
    path = tmp_path / "missing" / "run.prom"
    assert_refused(bench, words=["--metrics_file", "missing"], metrics_file=path)


def test_a_run_writes_its_last_numbers(tmp_path):
    path = tmp_path / "run.prom"
    run = Bench(tmp_path, lines=60).train_well(max_train_steps=2, metrics_file=path)
    text = path.read_text(encoding="utf-8")
    labels = f'{{run="run",output_dir="{run.folder}"}}'
    *_, training, evaluation = run.lines
    assert f"\nllm_step{labels} 2\n" in text
    assert f"\nllm_total_steps{labels} 2\n" in text
    assert f"\nllm_loss{labels} {training['loss']!r}\n" in text
    assert f"\nllm_eval_loss{labels} {evaluation['eval_loss']!r}\n" in text
    assert re.search(rf"^llm_goodput{re.escape(labels)} 0\.\d+$", text, flags=re.MULTILINE)
