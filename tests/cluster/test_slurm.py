"""Every Slurm example, through sbatch, on two nodes."""

import time

import pytest

from llm.config.toml import read_toml, to_toml
from llm.trainers.gpt.extensions import GPTConfig
from llm.trainers.gpt.main import parse_args
from tests.cluster.jobs import EXAMPLES, HERE, IN_QUEUE, Slurm, Submission

pytestmark = pytest.mark.cluster

TWO_NODES = ("--nodes=2", "--gpus-per-node=1", "--cpus-per-task=1", "--time=10")


def log(submission: Submission, job: int) -> str:
    found = list(submission.folder.glob(f"*-{job}.log"))
    return found[0].read_text() if found else ""


def check_finished(slurm: Slurm, submission: Submission, job: int, run: str, ranks: int) -> str:
    """The job has completed, its pre-flight and training had all ranks; returns its log."""
    state = slurm.wait(job)
    text = log(submission, job)
    assert state == "COMPLETED", text
    assert submission.status(run) == "finished"
    assert f"preflight: OK: {ranks} ranks on " in text
    assert f"world: {ranks} ranks" in text
    return text


def test_one_node(slurm, submission):
    script = submission.fill_in("slurm/single_node.sh", run="single")
    job = slurm.submit(script, "--gpus-per-node=2", "--cpus-per-task=2")
    check_finished(slurm, submission, job, "single", ranks=2)


def test_one_torchrun_on_each_of_two_nodes(slurm, submission):
    script = submission.fill_in("slurm/multi_node.sh", run="straight")
    job = slurm.submit(script, *TWO_NODES)
    text = check_finished(slurm, submission, job, "straight", ranks=2)
    assert "rank 0 on node" in text
    assert "on node1, node2; " in text


@pytest.mark.parametrize("mode", ["", "-decentralized"], ids=["allreduce", "gossip"])
def test_gpt2_small_in_both_modes(slurm, submission, mode):
    config = read_toml(GPTConfig, EXAMPLES / f"gpt2-small{mode}.toml")
    averaging = {key: config[key] for key in ("data_parallel", "topology") if key in config}
    name = f"small{mode}"
    script = submission.fill_in(
        f"slurm/gpt2_small{mode.replace('-', '_')}.sh", run=name, max_train_steps=20, **averaging
    )
    job = slurm.submit(script, "--nodes=2", "--gpus-per-node=2", "--cpus-per-task=2", "--time=10")
    text = check_finished(slurm, submission, job, name, ranks=4)
    assert ("consensus_distance: " in text) == (mode != "")


def test_parallel_sizes_can_come_from_the_environment(slurm, submission):
    script = submission.fill_in(
        "slurm/tensor_pipeline.sh", run="stages", max_train_steps=20, gradient_accumulation_steps=2
    )
    sizes = "TP_SIZE=2,PP_SIZE=2,NUM_LAYERS=2,HIDDEN_SIZE=32,NUM_ATTENTION_HEADS=2"
    nodes = ("--nodes=2", "--gpus-per-node=2", "--cpus-per-task=2", "--time=10")
    job = slurm.submit(script, *nodes, f"--export=ALL,{sizes}")
    text = check_finished(slurm, submission, job, "stages", ranks=4)
    assert "world: 4 ranks, pipeline 2 x tensor 2" in text


def test_one_task_for_each_gpu_without_torchrun(slurm, submission):
    script = submission.fill_in("slurm/task_per_gpu.sh", run="tasks", max_train_steps=20)
    job = slurm.submit(script, "--ntasks-per-node=2", "--cpus-per-task=1", "--time=10")
    text = check_finished(slurm, submission, job, "tasks", ranks=4)
    assert "torchrun" not in text
    assert "module load rocm rccl-net-plugin" in text


def test_the_container_image_is_passed_to_pyxis(slurm, submission):
    script = submission.fill_in("slurm/container.sh", run="container", max_train_steps=20)
    # The image's PATH and packages, and an srun with pyxis before the plain one.
    setting = f"source {submission.folder}/venv/bin/activate\nPATH={HERE}/pyxis:$PATH\n"
    script.write_text(script.read_text().replace("set -euo pipefail\n", f"{setting}set -eu\n"))
    job = slurm.submit(script, *TWO_NODES)
    text = check_finished(slurm, submission, job, "container", ranks=2)
    assert text.count("pyxis: lab/llm:1") == 2


def test_an_array_trains_one_run_for_each_value(slurm, submission):
    script = submission.fill_in("slurm/array.sh", run="sweep", max_train_steps=20)
    job = slurm.submit(script, "--gpus-per-node=1", "--cpus-per-task=1", "--time=10")
    for task, rate in enumerate(["1e-4", "3e-4", "1e-3"]):
        assert slurm.wait(f"{job}_{task}") == "COMPLETED"
        run = submission.run(f"gpt2/learning_rate={rate}")
        assert run.read_json("status.json")["status"] == "finished"
        assert run.metrics[-2]["learning_rate"] == float(rate)


def test_a_job_signalled_before_its_limit_requeues_to_the_same_weights(slurm, submission):
    if submission.status("straight") != "finished":
        job = slurm.submit(submission.fill_in("slurm/multi_node.sh", run="straight"), *TWO_NODES)
        assert slurm.wait(job) == "COMPLETED"
    script = submission.fill_in("slurm/requeue.sh", run="requeued")
    job = slurm.submit(script, *TWO_NODES)
    submission.wait_for_step("requeued", 20)
    slurm.call("scancel", "--batch", "--signal=USR1", job)  # as --signal=B:USR1@300 does
    text = check_finished(slurm, submission, job, "requeued", ranks=2)
    assert slurm.restarts(job) == 1
    assert "Stopped by SIGUSR1 after step" in text
    assert "requeueing the job" in text
    assert submission.weights("requeued") == submission.weights("straight")
    steps = [record["step"] for record in submission.run("requeued").metrics if "loss" in record]
    assert steps == list(range(1, 301))


def test_the_signal_comes_from_slurm_itself_before_the_time_limit(slurm, submission):
    script = submission.fill_in(
        "slurm/requeue.sh", run="limited", max_train_steps=100_000, logging_steps=50
    )
    # The signal may come a minute early: with three minutes there are at least sixty seconds.
    job = slurm.submit(script, *TWO_NODES[:-1], "--time=3", "--signal=B:USR1@60")
    while "requeueing the job" not in log(submission, job):
        assert slurm.job_info(job)["JobState"] in IN_QUEUE, log(submission, job)
        time.sleep(0.5)
    assert submission.status("limited") == "preempted"
    slurm.call("scancel", job)


def test_a_job_that_is_cancelled_saves_and_does_not_requeue(slurm, submission):
    script = submission.fill_in("slurm/requeue.sh", run="cancelled", max_train_steps=100_000)
    job = slurm.submit(script, *TWO_NODES)
    submission.wait_for_step("cancelled", 20)
    slurm.call("scancel", job)
    assert slurm.wait(job) == "CANCELLED"
    assert submission.status("cancelled") == "preempted"
    assert slurm.restarts(job) == 0


def test_a_job_at_its_time_limit_saves_in_the_remaining_seconds(slurm, submission):
    script = submission.fill_in("slurm/single_node.sh", run="late", max_train_steps=100_000)
    job = slurm.submit(script, "--gpus-per-node=2", "--cpus-per-task=2", "--time=1")
    assert slurm.wait(job) == "TIMEOUT", log(submission, job)
    # Slurm says so as soon as it has sent SIGTERM; SIGKILL follows KillWait later.
    submission.wait_for_status("late", "preempted", timeout=30)


def test_a_node_without_python_is_named_and_nothing_is_trained(slurm, submission):
    script = submission.fill_in("slurm/multi_node.sh", run="broken")
    text = script.read_text()
    broken = '    bash -c \'[[ "$(hostname)" == node1 ]] || sleep 20; exec python "$@"\' python\n'
    text = text.replace("    python\n)", f"{broken})").replace(
        "-m llm preflight", "-m llm preflight --timeout 8"
    )
    script.write_text(text)
    job = slurm.submit(script, *TWO_NODES)
    assert slurm.wait(job) == "FAILED"
    text = log(submission, job)
    assert "preflight: 1 of 2 ranks have not answered within 8 s: 1." in text
    assert "These hosts do not answer: node2." in text
    assert submission.status("broken") == ""


def test_data_preparation(slurm, submission):
    job = slurm.submit(submission.fill_in_preparation("slurm/prepare_data.sh", output="slurm"))
    assert slurm.wait(job) == "COMPLETED", log(submission, job)
    assert (submission.folder / "data/slurm_text_document.bin").stat().st_size > 0


def test_data_preparation_on_two_nodes_finishes_after_a_rank_was_killed(slurm, submission):
    script = submission.preparation_on_nodes("slurm", output="nodes")
    job = slurm.submit(script)
    assert slurm.wait(job) == "FAILED", log(submission, job)
    # The other rank has finished its share.
    assert (submission.folder / "data/nodes_text_document.parts/rank-0-of-2").exists()
    assert not (submission.folder / "data/nodes_text_document.bin").exists()

    job = slurm.submit(script)

    assert slurm.wait(job) == "COMPLETED", log(submission, job)
    assert "rank 1 of 2 joins the shards" in log(submission, job)
    submission.check_prepared("nodes")


def test_data_preparation_with_dask(slurm, submission):
    pytest.importorskip("distributed", reason="pip install 'llm-trainers[dask]'")
    submission.preparation_on_nodes("slurm", output="dask")  # makes the text
    script = submission.folder / "prepare_dask.sh"
    text = submission.example("slurm/prepare_dask.sh").read_text()
    script.write_text(text.replace("__ALLOCATION__", "science").replace("__QUEUE__", "debug"))
    few = ("--time=10", "--export=ALL,WORKERS=1")
    job = slurm.submit(script, *few, then=submission.preparation("dask"))
    assert slurm.wait(job) == "COMPLETED", log(submission, job)
    submission.check_prepared("dask")


def test_a_script_that_is_not_filled_in_says_so(slurm, submission):
    script = submission.folder / "empty.sh"
    text = submission.example("slurm/single_node.sh").read_text()
    script.write_text(text.replace("__QUEUE__", "debug"))
    job = slurm.submit(script)
    assert slurm.wait(job) == "FAILED"
    assert log(submission, job) == (
        "Fill in __ALLOCATION__ at the top of this script, or give --account and --partition to "
        "sbatch.\n"
    )


def test_a_shipped_example_takes_account_partition_and_configuration(slurm, submission):
    script = submission.folder / "shipped.sh"
    script.write_text(submission.example("slurm/gpt2_small.sh").read_text())
    options = submission.bench.command("shipped", max_train_steps=20, output_dir="runs/shipped")
    config = parse_args(options)
    (submission.folder / "mine.toml").write_text(to_toml(config))
    job = slurm.submit(script, "--account=me", "--partition=debug", *TWO_NODES, then=["mine.toml"])
    check_finished(slurm, submission, job, "shipped", ranks=2)


def test_python_in_a_batch_script_is_one_process_and_in_a_step_a_rank(slurm, submission):
    ask = "from llm.runtime.world import world_from_environment as w; print(w())"
    script = submission.folder / "ranks.sh"
    script.write_text(
        "#!/bin/bash\n#SBATCH --output=%x-%j.log\n"
        f'. {submission.folder}/venv/bin/activate\npython -c "{ask}"\n'
        f"srun --nodes=1 --ntasks=1 --ntasks-per-node=1 python -c '{ask}'\n"
        f"srun python -c '{ask}' | sort\n"
    )
    # As if sbatch had been called within a step of another job.
    stale = ("SLURM_STEP_ID=0", "SLURM_STEP_NUM_TASKS=8", "SLURM_STEP_NODELIST=node1")
    printed = slurm.call(
        "env", *stale, "sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=2", script.name,
        cwd=script.parent,
    )  # fmt: skip
    assert slurm.wait(int(printed)) == "COMPLETED"
    alone = "World(rank=0, local_rank=0, world_size=1)"
    lines = log(submission, int(printed)).splitlines()
    assert lines[:2] == [alone, alone]
    assert lines[2:] == [
        f"World(rank={rank}, local_rank={rank % 2}, world_size=4)" for rank in range(4)
    ]


def test_a_spare_node_replaces_one_without_a_device(slurm, submission):
    script = submission.with_spare_node("slurm", run="spare", broken="node1")
    job = slurm.submit(script)
    text = check_finished(slurm, submission, job, "spare", ranks=2)
    assert "leaving out node1, which has failed the pre-flight" in text
    assert "on node2, node3; " in text
    again = slurm.submit(script)  # the run has finished
    text = check_finished(slurm, submission, again, "spare", ranks=2)
    assert text.count("preflight: ") == 1
