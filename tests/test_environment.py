"""Tests do not depend on the variables of their caller, such as those of a Slurm job."""

import json
import os
import subprocess
import sys

from tests.support.package import ROOT

FOREIGN = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "MASTER_PORT": "taken",
    "PBS_NODEFILE": "nodes",
    "RANK": "1",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "WANDB_PROJECT": "mine",
    "WORLD_SIZE": "4",
}
PRINT = "import json, os, tests.conftest; print(json.dumps(dict(os.environ)))"


def variables_of_tests(**others: str) -> dict[str, str]:
    environment = {**os.environ, **FOREIGN, "LLM_TEST_DEVICE": "cpu", **others}
    run = subprocess.run(
        [sys.executable, "-c", PRINT], cwd=ROOT, env=environment, capture_output=True, check=True
    )
    return json.loads(run.stdout)


def test_tests_drop_the_variables_of_a_job_and_of_the_hubs_libraries():
    found = variables_of_tests(GLOO_SOCKET_IFNAME="lo")

    assert FOREIGN.keys().isdisjoint(found)
    assert found["GLOO_SOCKET_IFNAME"] == "lo"  # the machine needs it


def test_tests_on_a_gpu_keep_the_choice_of_the_gpu():
    assert variables_of_tests(LLM_TEST_DEVICE="cuda")["CUDA_VISIBLE_DEVICES"] == ""
