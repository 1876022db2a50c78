"""`llm-trainers evidence`: what it checks, what it records of failures, and what it leaves out."""

import errno
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import llm
from llm.parallel.dims import make_parallel_dims
from llm.runtime.files import json_safe
from llm.runtime.world import World
from llm.tools.evidence import checks, evidence_file, rank_programs
from llm.tools.evidence import evidence as evidence_program
from llm.tools.evidence.checks import planned_device
from llm.tools.evidence.code_version import find_commit, hash_sources
from llm.tools.evidence.evidence import main
from llm.tools.evidence.evidence_file import EvidenceFile, remove_personal_data
from llm.tools.evidence.layout_cases import expert_parallel_ranks, layout_cases
from llm.tools.evidence.machine import describe_job, site_name
from llm.tools.evidence.rank_programs import Outcome, RankPrograms, describe_failure
from llm.tools.evidence.trainings import CheckFailed, compare_steps, compare_weights
from llm.trainers.gpt.config import check_config
from llm.trainers.gpt.extensions import GPTConfig
from tests.support.forked_programs import ForkedProgram
from tests.support.ranks import run_ranks, values

ALONE = World(rank=0, local_rank=0, world_size=1)


def collect(folder: Path, *words: str) -> int:
    """Run the program on a rank, with programs that are forked."""
    os.chdir(folder)
    rank_programs.start_program = ForkedProgram
    return main(words)


def collect_shards(folder: Path, *words: str) -> int:
    """The same, with FSDP as the only layout."""
    checks.layout_cases = lambda num_ranks: layout_cases(num_ranks)[1:2]
    return collect(folder, *words)


def read_evidence(folder: Path) -> dict:
    return json.loads((folder / "evidence.json").read_text(encoding="utf-8"))


def results(evidence: dict) -> dict[str, str]:
    """The result of each check by its part and name."""
    return {
        f"{part}: {record['check']}": record["result"]
        for part, records in evidence["parts"].items()
        for record in records
    }


def test_one_rank_writes_a_file_in_which_every_check_has_passed(tmp_path):
    [outcome] = run_ranks(collect, 1, tmp_path)

    assert outcome.value == 0, outcome.output
    evidence = read_evidence(tmp_path)
    assert evidence["finished"]
    assert results(evidence) == {
        "machine: versions and devices": "passed",
        "preflight: all ranks": "passed",
        "losses: CPU, fp32": "passed",
        "losses: cpu, fp32": "passed",
        "losses: cpu, bf16": "passed",
        "resume: one rank": "passed",
        "speed: one rank": "passed",
    }, evidence
    assert evidence["machine"]["versions"]["torch"] == torch.__version__
    assert evidence["options"]["minutes"] == 20
    assert evidence["sources_sha256"] == hash_sources(Path(llm.__file__).parent)
    assert "attention: " in evidence["parts"]["speed"][0]["kernels"]
    assert evidence["parts"]["resume"][0]["weight_difference"] == 0
    # Only the file is left, and no name of this user, host or folder is in it.
    assert [path.name for path in tmp_path.iterdir()] == ["evidence.json"]
    text = (tmp_path / "evidence.json").read_text()
    for word in (socket.gethostname(), str(tmp_path), str(Path.home()), sys.prefix):
        assert word not in text


def test_no_other_program_gets_the_port_of_a_program_before_it_starts():
    """Sockets without a port get one from 32,768 on (Linux), or from 49,152 on (other systems)."""
    ports = {rank_programs._free_port() for _ in range(20)}
    assert all(20_000 <= port < 30_000 for port in ports)
    assert len(ports) > 1


@pytest.mark.extended
def test_two_ranks_compare_a_layout_with_one_rank(tmp_path):
    words = ("--parts", "preflight", "layouts", "--site", "testbed")
    outcomes = run_ranks(collect_shards, 2, tmp_path, *words)

    assert values(outcomes) == [0, 0], outcomes[0].output
    evidence = read_evidence(tmp_path)
    assert results(evidence) == {
        "machine: versions and devices": "passed",
        "preflight: all ranks": "passed",
        "layouts: one rank": "passed",
        "layouts: FSDP": "passed",
    }
    assert evidence["site"] == "testbed"
    assert evidence["machine"]["ranks"] == 2
    assert evidence["parts"]["preflight"][0]["all_reduce_ms"] > 0
    assert evidence["parts"]["layouts"][1]["options"] == "--data_parallel_shard_size 2"


def test_the_name_of_a_site_with_other_devices_is_refused(tmp_path):
    outcomes = run_ranks(collect, 2, tmp_path, "--site", "kempner")
    assert values(outcomes) == [2, 0]  # a launcher would stop rank 0 if another rank failed
    sentence = r"error: --site kempner has a100-40gb and h100-80gb and h200-141gb, and this machine"
    assert re.search(
        rf"{sentence} .*: start evidence on a node of the site, or leave", outcomes[0].output
    )
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("device", "card", "site"),
    [
        ("cuda", "NVIDIA A100-SXM4-40GB", "polaris"),
        ("cuda", "NVIDIA A100-SXM4-80GB", "perlmutter"),  # in some of its nodes
        ("cuda", "NVIDIA H200", "kempner"),  # in one of its queues
        ("rocm", "AMD Instinct MI250X", "frontier"),
        ("cuda", "NVIDIA A100-SXM4-40GB", "elsewhere"),
        ("cuda", "NVIDIA T4", "polaris"),  # not known to be of another site
    ],
)
def test_the_name_of_a_site_with_these_devices_is_taken(device, card, site):
    evidence_program._check_site(site, {"device": device, "card": card})


@pytest.mark.layouts
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_layout_passes_on_several_ranks(ranks, tmp_path):
    outcomes = run_ranks(collect, ranks, tmp_path, timeout=1200)

    assert values(outcomes) == [0] * ranks, read_evidence(tmp_path)
    names = {record["check"] for record in read_evidence(tmp_path)["parts"]["layouts"]}
    cases = {case.name for case in layout_cases(ranks)}
    assert names == cases | {"one rank", "one rank, experts"}
    assert {"DDP", "FSDP", "TP", "CP", "PP", "EP"} <= cases


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8, 12, 16, 24, 512])
def test_the_trainer_accepts_every_layout(ranks):
    for case in layout_cases(ranks):
        flags = {"sequence_parallel": True} if case.is_sequence_parallel else {}
        config = GPTConfig(
            model_type="gpt2", data_path=("tokens.bin",), tokenizer_name="gpt2",
            **case.sizes, **flags,
        )  # fmt: skip
        check_config(config)
        assert make_parallel_dims(config, ranks).world_size == ranks
        assert (case.name == "DDP") == make_parallel_dims(config, ranks).is_replicated


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (1, []),
        (2, ["DDP", "FSDP", "TP", "CP", "PP", "EP", "SP"]),
        (3, ["DDP", "FSDP", "EP"]),
        (11, ["DDP", "FSDP"]),
    ],
)
def test_the_number_of_ranks_decides_which_layouts_are_compared(ranks, names):
    assert [case.name for case in layout_cases(ranks)] == names


def test_at_most_eight_ranks_divide_the_experts():
    assert [expert_parallel_ranks(ranks) for ranks in (1, 4, 12, 16, 22)] == [1, 4, 6, 8, 2]


def hide(text: str) -> str:
    return remove_personal_data(text, ["x1921c3s25", "alice", "x1921c3s25.site.example"])


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("/home/alice/runs/wiki holds no run", "<path> holds no run"),
        ('File "/home/alice/venv/lib/torch/nn.py", line 3', 'File "<path>/nn.py", line 3'),
        ("rank 1 on x1921c3s25: cuda:0", "rank 1 on <name>: cuda:0"),
        ("connect to x1921c3s25.site.example:29500", "connect to <name>:29500"),
        ("connect to 10.140.57.3:29500", "connect to <address>:29500"),
        ("[fe80::1ff:fe23:4567:890a]", "[<address>]"),
        ("in ~/runs", "in <path>"),
        ("torch 2.13.0+cpu at 12:30:45", "torch 2.13.0+cpu at 12:30:45"),
        ("from fe80::1 to 2001:db8::8a2e", "from <address> to <address>"),
        ("X1921C3S25-hsn0 in alice_runs", "<name>-hsn0 in <name>_runs"),
        ("malice and 3/4 of c10d::send stay", "malice and 3/4 of c10d::send stay"),
    ],
)
def test_names_paths_and_addresses_are_not_written(text, written):
    assert hide(text) == written


def write_run(folder: Path, losses: list[float], weight: float) -> Path:
    folder.mkdir()
    records = [
        {"step": step, "loss": json_safe(loss), "grad_norm": json_safe(2 * loss)}
        for step, loss in enumerate(losses, start=1)
    ]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(lines)
    save_file({"weight": torch.tensor([weight])}, folder / "model.safetensors")
    return folder


def test_runs_are_compared_by_losses_norms_and_weights(tmp_path):
    reference = write_run(tmp_path / "reference", [4.0, 2.0], 1.0)
    other = write_run(tmp_path / "other", [4.0, 2.002], 1.25)

    figures = compare_steps(other, reference, tolerance=1e-2, steps=[1, 2])
    assert figures["loss_difference"] == pytest.approx(1e-3)
    assert figures["grad_norm_difference"] == pytest.approx(1e-3)
    with pytest.raises(CheckFailed, match=r"losses differ by 0\.001 .* tolerance of 0\.0001") as e:
        compare_steps(other, reference, tolerance=1e-4, steps=[1, 2])
    assert e.value.figures["losses"] == [4.0, 2.002]
    with pytest.raises(CheckFailed, match="has not logged step 3"):
        compare_steps(other, reference, tolerance=1, steps=[3])
    assert compare_weights(other, reference, tolerance=0.25) == {"weight_difference": 0.25}
    with pytest.raises(CheckFailed, match=r"weights differ by up to 0\.25"):
        compare_weights(other, reference, tolerance=0.0)


def test_a_loss_that_is_not_a_number_fails(tmp_path):
    nan = float("nan")
    reference = write_run(tmp_path / "reference", [4.0, 2.0], 1.0)
    diverged = write_run(tmp_path / "diverged", [4.5, nan], nan)
    with pytest.raises(CheckFailed, match="losses differ by nan"):
        compare_steps(diverged, reference, tolerance=1.0, steps=[1, 2])
    with pytest.raises(CheckFailed, match="weights differ by up to nan"):
        compare_weights(diverged, reference, tolerance=1.0)


def run_code(folder: Path, code: str, seconds: float = 30.0) -> list[Outcome]:
    return RankPrograms(ALONE, None, folder).run(["-c", code], seconds=seconds)


def test_a_program_that_fails_or_hangs_is_described_by_its_last_lines(tmp_path):
    failed = run_code(tmp_path, "print('about to fail'); raise SystemExit(7)")
    assert failed == [Outcome(code=7, output="about to fail\n")]
    sentence = "the program ended with code 7\nabout to fail"
    assert describe_failure(failed, seconds=30) == sentence

    late = run_code(tmp_path, "import time; time.sleep(3600)", seconds=2)
    assert late[0].code is None
    assert "the program had not ended after 2 s" in str(describe_failure(late, seconds=2))

    assert describe_failure(run_code(tmp_path, ""), seconds=30) is None


def test_of_several_ranks_the_one_that_failed_by_itself_is_described():
    outcomes = [Outcome(code=None, output="waits"), Outcome(code=1, output="no memory")]
    sentence = "rank 1 ended with code 1\nno memory"
    assert describe_failure(outcomes, seconds=30) == sentence


FAILS_ON_RANK_1 = """
import os, time
if os.environ["RANK"] == "1":
    raise SystemExit("rank 1 has no device")
time.sleep(3600)
"""


def run_on_two_ranks(folder: Path) -> list[Outcome] | None:
    from llm.runtime.world import world_from_environment
    from llm.tools.preflight import open_board

    rank_programs._GRACE_SECONDS = 0.5
    world = world_from_environment()
    board = open_board(world, timeout=30, program_name="evidence")
    programs = RankPrograms(world, board, folder)
    if not world.is_main:
        programs.serve(deadline=time.monotonic() + 3600)
        return None
    assert programs.run(["-c", ""], seconds=50, is_alone=True)[0].code == 0
    outcomes = programs.run(["-c", FAILS_ON_RANK_1], seconds=3600)
    outcomes += programs.run(["-c", "print('fine')"], seconds=50)
    programs.finish()
    return outcomes


def test_a_rank_that_fails_ends_the_program_of_the_others_and_not_the_next(tmp_path):
    # Otherwise it would take longer than the limit of the ranks.
    [outcomes, nothing] = values(run_ranks(run_on_two_ranks, 2, tmp_path))
    assert outcomes == [
        Outcome(code=None, output=""),
        Outcome(code=1, output="rank 1 has no device\n"),
        Outcome(code=0, output="fine\n"),
        Outcome(code=0, output="fine\n"),
    ]
    assert nothing is None


def test_an_existing_file_is_never_replaced(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    EvidenceFile(Path("evidence.json"), options={}, site=None)
    content = Path("evidence.json").read_bytes()

    assert main([]) == 2

    assert "--output evidence.json exists, and evidence never replaces" in capsys.readouterr().err
    assert Path("evidence.json").read_bytes() == content
    assert os.listdir() == ["evidence.json"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["--output", "missing/file.json"],
            "--output missing/file.json cannot be written: No such",
        ),
        (["--minutes", "0"], "--minutes"),
        (["--parts", "everything"], "--parts"),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(
    words, sentence, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert sentence in capsys.readouterr().err
    assert os.listdir() == []


def test_the_working_folder_of_another_run_is_not_touched(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("evidence.json.work").mkdir()
    assert main([]) == 2
    assert "evidence.json.work, cannot be made: File exists" in capsys.readouterr().err
    assert os.listdir() == ["evidence.json.work"]


def test_all_that_a_killed_run_leaves_is_named_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    EvidenceFile(Path("evidence.json"), options={}, site=None)
    Path("evidence.json.work").mkdir()
    assert main([]) == 2
    sentence = (
        "--output evidence.json and evidence.json.work exist: another run writes them, or was"
    )
    assert sentence in capsys.readouterr().err


def test_a_folder_as_the_file_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["--output", "."]) == 2
    assert "--output . is a folder; name a file in it." in capsys.readouterr().err


def test_a_full_disk_leaves_no_empty_file(tmp_path, monkeypatch, capsys):
    def fail(path: Path, content: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evidence_file, "write_whole", fail)
    assert main([]) == 2
    sentence = "evidence.json cannot be written: No space left on device; free some space."
    assert sentence in capsys.readouterr().err
    assert os.listdir() == []


def test_values_of_tokens_and_passwords_are_not_written(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_AbCdEfGhIj")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    words = evidence_file.secret_words()
    assert remove_personal_data("false: Bearer hf_AbCdEfGhIj", words) == "false: Bearer <name>"


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=tests", "-c", "user.email=tests@example.com"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()


def test_the_commit_of_a_clone_and_its_changes_are_recorded(tmp_path):
    clone, installed = tmp_path / "llm", tmp_path / "venv" / "llm"
    for package in (clone, installed):
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
    assert find_commit(clone) is None
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "llm")
    git(tmp_path, "commit", "--quiet", "-m", "Begin")
    commit = git(tmp_path, "rev-parse", "HEAD")

    assert find_commit(clone) == commit
    assert find_commit(installed) is None
    sources = hash_sources(clone)
    assert hash_sources(installed) == sources
    (clone / "__init__.py").write_text("x = 1\n")
    assert find_commit(clone) == f"{commit}-dirty"
    assert hash_sources(clone) != sources


def make_checks(folder: Path, *, ranks: int = 1, **job: object) -> checks.Checks:
    world = World(rank=0, local_rank=0, world_size=ranks)
    machine = {"nodes": 1, "device": "cuda", "memory_gib": 40.0, "default_precision": "bf16"}
    programs = RankPrograms(world, None, folder)
    return checks.Checks(programs, {**machine, "card": "NVIDIA A100-SXM4-40GB", **job})


def test_a_card_without_bf16_is_not_checked_in_bf16(tmp_path):
    def precisions(**job: object) -> list[str]:
        return [check.name for check in make_checks(tmp_path, **job).make_checks("losses")]

    in_float32 = ["CPU, fp32", "cuda, fp32", "cuda, tf32"]
    assert precisions() == [*in_float32, "cuda, bf16", "cuda, bf16, compiled"]
    assert precisions(default_precision="no") == in_float32  # V100, T4


def test_speed_on_uneven_nodes_is_not_compared_with_a_plan(tmp_path):
    machine = make_checks(tmp_path, ranks=3, nodes=2)
    assert machine._compare_with_plan([], 1.0, {}) == {
        "plan": "the nodes have different numbers of ranks"
    }


def describe(**values: object) -> dict:
    machine = {"device": "cuda", "card": "NVIDIA A100-SXM4-40GB", "memory_gib": 39.4}
    machine |= {"default_precision": "bf16", "processor": "x86_64"}
    return {**machine, "versions": {"torch": "2.13.0"}, "host": "node1", **values}


def test_a_machine_is_described_by_the_values_of_its_ranks():
    job = describe_job([describe(), describe(host="node2"), describe(host="node2")])
    assert (job["ranks"], job["nodes"], job["card"]) == (3, 2, "NVIDIA A100-SXM4-40GB")
    assert "host" not in job
    differing = describe_job([describe(), describe(versions={"torch": "2.10.0"})])
    assert differing["versions"] == [{"torch": "2.13.0"}, {"torch": "2.10.0"}]


def test_the_site_is_what_the_system_calls_itself():
    assert site_name({"NERSC_HOST": "perlmutter"}) == "perlmutter"
    assert site_name({"SLURM_CLUSTER_NAME": "frontier", "NERSC_HOST": ""}) == "frontier"
    assert site_name({"HOSTNAME": "x1921c3s25"}) is None


@pytest.mark.parametrize(
    ("card", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H200", "h200-141gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("AMD Instinct MI250X", "mi250x"),
        ("Intel(R) Data Center GPU Max 1550", "pvc"),
        ("NVIDIA L40S", None),
    ],
)
def test_a_card_is_compared_with_the_plan_of_its_own_kind(card, name):
    assert planned_device("cuda", card) == name
