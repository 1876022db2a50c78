"""The PBS examples under bash, with the nodes and the mpiexec that PBS would give them."""

import socket

import pytest

from tests.cluster.jobs import Submission, run_pbs

pytestmark = pytest.mark.cluster


def check_finished(submission: Submission, done, run: str, ranks: int) -> None:
    """The pre-flight and the training had all ranks, and came to their ends."""
    assert done.returncode == 0, done.stdout
    assert f"preflight: OK: {ranks} ranks on " in done.stdout
    assert f"world: {ranks} ranks" in done.stdout
    assert submission.status(run) == "finished"


def test_polaris_one_node(submission, pbs_hosts):
    script = submission.fill_in("pbs/polaris_single.pbs", run="polaris1", max_train_steps=20)
    done = run_pbs(script, hosts=pbs_hosts[:1], job="7001.polaris-pbs-01", ranks=2)
    check_finished(submission, done, "polaris1", ranks=2)
    assert "module load conda\nconda activate base" in done.stdout


def test_polaris_one_torchrun_on_each_of_two_nodes(submission, pbs_hosts):
    script = submission.fill_in("pbs/pretrain.pbs", run="polaris2", max_train_steps=20)
    done = run_pbs(script, hosts=pbs_hosts[:2], job="7002.polaris-pbs-01", ranks=1)
    check_finished(submission, done, "polaris2", ranks=2)
    assert "on pbs1, pbs2; " in done.stdout


def test_torchruns_meet_at_an_address_that_is_not_the_host_names(
    submission, pbs_hosts, monkeypatch
):
    """The host file has addresses of the fast network, and host names resolve to another one."""
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("203.0.113.7", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no address besides 127.0.0.1")
        monkeypatch.setenv("MASTER_ADDR", probe.getsockname()[0])
    script = submission.fill_in("pbs/pretrain.pbs", run="network", max_train_steps=20)
    done = run_pbs(script, hosts=pbs_hosts[:2], job="7011.polaris-pbs-01", ranks=1)
    check_finished(submission, done, "network", ranks=2)


def test_aurora_one_process_for_each_tile(submission, pbs_hosts):
    script = submission.fill_in("pbs/aurora.pbs", run="aurora", max_train_steps=20)
    # The name that Aurora's first host has in its fast network.
    text = script.read_text()
    assert ".hsn.cm.aurora.alcf.anl.gov" in text
    script.write_text(text.replace(".hsn.cm.aurora.alcf.anl.gov", ""))
    done = run_pbs(script, hosts=pbs_hosts[:2], job="7003.aurora-pbs-0001", ranks=1)
    check_finished(submission, done, "aurora", ranks=2)
    assert "torchrun" not in done.stdout


def test_a_chain_of_jobs_continues_until_training_has_finished(submission, pbs_hosts):
    script = submission.fill_in("pbs/chain.pbs", run="chain", checkpointing_steps=None)
    text = script.read_text()
    assert "--exit_after 165" in (
        submission.example("pbs/chain.pbs").read_text()  # of 180 minutes
    )
    script.write_text(text.replace("\n)\n\ncd", "\n    --exit_after 0.02\n)\n\ncd"))
    first = run_pbs(script, hosts=pbs_hosts[:2], job="7004.polaris-pbs-01", ranks=1)
    assert first.returncode != 0, first.stdout  # so that what depends on it afternotok starts
    assert submission.status("chain") == "preempted"
    script.write_text(text)
    second = run_pbs(script, hosts=pbs_hosts[:2], job="7005.polaris-pbs-01", ranks=1)
    check_finished(submission, second, "chain", ranks=2)
    steps = [record["step"] for record in submission.run("chain").metrics if "loss" in record]
    assert steps == list(range(1, 301))


def test_data_preparation(submission, pbs_hosts):
    script = submission.fill_in_preparation("pbs/prepare_data.pbs", output="pbs")
    done = run_pbs(script, hosts=pbs_hosts[:1], job="7007.polaris-pbs-01", ranks=1)
    assert done.returncode == 0, done.stdout
    assert (submission.folder / "data/pbs_text_document.bin").stat().st_size > 0


def test_data_preparation_on_two_nodes_finishes_after_a_rank_was_killed(submission, pbs_hosts):
    script = submission.preparation_on_nodes("pbs", output="hosts")
    done = run_pbs(script, hosts=pbs_hosts[:2], job="7008.polaris-pbs-01", ranks=1)
    assert done.returncode != 0, done.stdout
    assert not (submission.folder / "data/hosts_text_document.bin").exists()

    done = run_pbs(script, hosts=pbs_hosts[:2], job="7009.polaris-pbs-01", ranks=1)

    assert done.returncode == 0, done.stdout
    assert done.stdout.count("joins the shards\n") == 1
    submission.check_prepared("hosts")


def test_a_spare_node_replaces_one_without_a_device(submission, pbs_hosts):
    script = submission.with_spare_node("pbs", run="spared", broken="pbs1")
    done = run_pbs(script, hosts=pbs_hosts, job="7010.polaris-pbs-01", ranks=1)
    check_finished(submission, done, "spared", ranks=2)
    assert "leaving out pbs1, which has failed the pre-flight" in done.stdout
    assert "on pbs2, pbs3; " in done.stdout
