"""The sites of `llm-trainers jobs`: what is known of them, files of your own, and the plan."""

import re

import pytest

from llm.tools.jobs import jobs
from llm.tools.jobs.jobs import main
from llm.tools.jobs.sites import FACTS, find_site, known_sites, read_sites
from llm.tools.plan.job import DEVICES

TRAINER = ["--model_name_or_path", "gpt2", "--train_file", "a.txt", "--output_dir", "runs/a"]
PREPARE = ["--input", "a.jsonl", "--tokenizer_name", "gpt2", "--output_prefix", "data/a"]
# Little enough for every device, and too much for an A100.
SMALL = [
    *("--model_type", "gpt2", "--model_size", "124M", "--tokenizer_name", "gpt2"),
    *("--train_file", "a.txt", "--output_dir", "runs/a", "--block_size", "1024"),
    *("--max_train_steps", "9"),
]
LARGE = [*SMALL, "--per_device_train_batch_size", "256", "--global_batch_size", "8192"]
MY_SITE = """
[mine]
schedulers = ["slurm"]
device = "h100-80gb"
gpus_per_node = 8
queues = [
    { name = "short", max_nodes = 2, hours = 1 },
    { name = "idle", hours = 48, preemptable = true, gpus_per_node = 2 },
]
set_up = "module load mine"
"""


@pytest.fixture
def no_plan(monkeypatch):
    """Planning takes seconds."""
    monkeypatch.setattr(jobs, "plan_run", lambda *_: (["Plan: it fits."], None))


def write(capsys, *argv: str, trainer: list[str] = TRAINER) -> tuple[str, str]:
    """Write a script; return it and what the program says about it."""
    code = main([*argv, "--", *trainer])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return printed.out, printed.err


def directives(script: str) -> dict[str, str]:
    return dict(re.findall(r"(?m)^#SBATCH --([\w-]+)=(\S*)$", script))


@pytest.mark.parametrize("name", [name for name in known_sites() if name != "generic"])
def test_a_site_says_where_its_facts_come_from_and_who_ran_it(name):
    site = known_sites()[name]
    assert site.title
    assert re.fullmatch(r"20\d\d-\d\d(-\d\d)?", site.date)
    assert all(address.startswith("https://") for address in site.source)
    assert site.source
    assert site.ran == "nobody yet"
    assert {site.for_queue(queue.name).device for queue in site.queues} <= DEVICES.keys()


def test_the_listing_says_of_each_site_who_ran_it(capsys):
    assert main(["--list_sites"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(known_sites())
    assert re.fullmatch(r"lumi +slurm +8 mi250x +nobody yet +2026-05-19", lines[6])


def test_the_description_of_a_site_names_what_its_pages_do_not_tell(capsys):
    assert main(["--list_sites", "--site", "kempner"]) == 0
    printed = capsys.readouterr().out
    assert "  run there by: nobody yet\n" in printed
    assert "  queue kempner_h200: 1 or more nodes, 48 h, 4 h200-141gb per node\n" in printed
    assert "  not found in the sources: pytorch, driver\n" in printed
    assert "  source: https://github.com/KempnerInstitute/kempner-computing-handbook\n" in printed
    assert set(find_site("kempner").unknown_facts) == {"pytorch", "driver"} < set(FACTS)


@pytest.mark.usefixtures("no_plan")
def test_the_nodes_of_a_queue_may_differ_from_the_others(capsys):
    h100, _ = write(capsys, "--site", "kempner")
    a100, _ = write(capsys, "--site", "kempner", "--partition", "kempner")
    eight, _ = write(capsys, "--site", "delta", "--partition", "gpuA100x8")
    assert directives(h100)["partition"] == "kempner_h100"
    assert [directives(text)["cpus-per-task"] for text in (h100, a100, eight)] == [
        "96",
        "64",
        "128",
    ]
    assert directives(eight)["gpus-per-node"] == "8"


@pytest.mark.usefixtures("no_plan")
def test_vistas_script_has_none_of_the_options_that_tacc_refuses(capsys):
    script, _ = write(capsys, "--site", "vista", "--nodes", "8")
    assert directives(script).keys().isdisjoint({"gres", "mem", "gpus-per-node", "gpus-per-task"})
    assert directives(script)["partition"] == "gh"


@pytest.mark.usefixtures("no_plan")
def test_lumis_masks_bind_the_tasks_of_a_whole_node(capsys):
    whole, _ = write(capsys, "--site", "lumi", "--nodes", "2")
    part, _ = write(capsys, "--site", "lumi", "--gpus_per_node", "2")
    assert '"--cpu-bind=mask_cpu:0x00fe000000000000,0xfe00000000000000,' in whole
    assert directives(whole)["mem"] == "0"
    assert "cpu-bind" not in part
    assert "mem" not in directives(part)


@pytest.mark.usefixtures("no_plan")
def test_a_job_on_some_devices_of_a_node_says_how_many_it_uses(capsys):
    _, half = write(capsys, "--site", "aurora", "--gpus_per_node", "6")
    _, whole = write(capsys, "--site", "aurora")
    _, generic = write(capsys, "pbs", "--gpus_per_node", "2")
    assert "The job uses 6 of the 12 devices of each node.\n" in half
    assert "devices of each node" not in whole + generic


@pytest.mark.usefixtures("no_plan")
def test_juwels_ranks_meet_at_the_infiniband_name_of_a_host(capsys):
    script, _ = write(capsys, "--site", "juwels-booster", "--nodes", "2", "--time", "1:00:00")
    assert directives(script)["gres"] == "gpu:4"
    assert "export MASTER_ADDR=${HOSTS[0]}i\n" in script
    assert "torchrun" not in script


@pytest.mark.usefixtures("no_plan")
def test_a_preemptable_queue_is_named_with_a_warning(capsys):
    argv = ["pbs", "--site", "polaris", "--nodes", "8", "--account", "me", "--time"]
    _, short = write(capsys, *argv, "1:00:00")
    _, long = write(capsys, *argv, "6:00:00")
    assert "The job goes to the queue debug-scaling (1-10 nodes, 1 h, 1 job per user).\n" in short
    assert "ended" not in short
    assert "The job goes to the queue preemptable (1-10 nodes, 72 h).\n" in long
    assert "A job in preemptable can be ended at any time: save often.\n" in long
    assert "Nobody has run llm-trainers on this site yet. Its settings are of 2026-08-19" in long


@pytest.mark.usefixtures("no_plan")
@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        (["slurm"], "--partition"),
        (["pbs"], "--queue"),
        (["--site", "perlmutter", "--nodes", "4000"], "--qos"),
        (["--site", "vista", "--nodes", "100"], "--partition"),
        (["--site", "aurora", "--nodes", "32"], "--queue"),
    ],
)
def test_messages_call_a_queue_as_the_scheduler_does(argv, flag, capsys):
    main([*argv, "--", *TRAINER])
    said = capsys.readouterr().err
    assert set(re.findall(r"--(?:queue|partition|qos)\b", said)) == {flag}


@pytest.mark.parametrize(
    ("argv", "remedy"),
    [
        (["slurm", "--qos", "high"], "--partition, and give --qos to sbatch."),
        (["--site", "kempner", "--qos=high"], "--partition, and give --qos to sbatch."),
        (["--site", "perlmutter", "--partition", "gpu"], "--qos, and give --partition to sbatch."),
        (["--site", "polaris", "--partition", "preemptable"], "--queue."),
    ],
)
def test_a_qos_for_a_partition_and_the_reverse_are_refused(argv, remedy, capsys):
    for program in ([], ["prepare"]):
        trainer = PREPARE if program else TRAINER
        assert main([*program, *argv, "--", *trainer]) == 2
        assert (
            f"does not name the queue of this job; name it by {remedy}" in capsys.readouterr().err
        )


@pytest.mark.usefixtures("no_plan")
def test_a_file_of_yours_describes_a_site(tmp_path, capsys):
    path = tmp_path / "mine.toml"
    path.write_text(MY_SITE)
    short, _ = write(capsys, "--site", str(path), "--time", "1:00:00")
    idle, said = write(capsys, "--site", str(path), "--nodes", "40")
    assert (directives(short)["partition"], directives(short)["gpus-per-node"]) == ("short", "8")
    assert (directives(idle)["partition"], directives(idle)["gpus-per-node"]) == ("idle", "2")
    assert "module load mine\n" in short
    assert "The job goes to the partition idle (1 or more nodes, 48 h).\n" in said
    assert "A job in idle can be ended at any time" in said
    assert "on this site yet" not in said
    assert "settings are of" not in said


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "mine.toml cannot be read: "),
        ("[mine", "mine.toml cannot be read: "),
        ("", "has 0 tables; keep the one of your site."),
        ("[a]\nschedulers = ['slurm']\n[b]\nschedulers = ['slurm']\n", "has 2 tables"),
        ("schedulers = ['slurm']", "[schedulers] is not a table of a site"),
        ("[mine]\n", "[mine] has no key schedulers."),
        ("[mine]\nschedulers = ['lsf']\n", "schedulers = ['lsf'] has the wrong type, or is not"),
        ("[mine]\nschedulers = []\n", "[mine] schedulers is empty; name slurm or pbs."),
        ("[mine]\nschedulers = ['slurm']\ngpus_per_node = 0\n", "= 0 must be greater than 0."),
        (
            "[mine]\nschedulers = ['slurm']\ngpu_directive = '--gres=gpu:{n}'\n",
            "gpu_directive = '--gres=gpu:{n}' has braces around other text than gpus",
        ),
        ("[mine]\nschedulers = ['slurm']\ngpus = 4\n", "has a key gpus, which is none of sched"),
        ("[mine]\nschedulers = ['slurm']\ngpus_per_node = '4'\n", "gpus_per_node = '4' has the"),
        ("[mine]\nschedulers = ['slurm']\nqueues = [{hours = 1}]\n", "queues[0] has no key name."),
        ("[mine]\nschedulers = ['slurm']\nqueues = ['gpu']\n", "queues[0] is not a table"),
        ("[mine]\nschedulers = ['slurm']\ndevice = 'h100'\n", "device = 'h100' is not a device of"),
        ("[mine]\nschedulers = ['slurm']\nfirst_cores = [0, 8, 16]\n", "names 3 sockets, which do"),
        (
            "[mine]\nschedulers = ['slurm']\ndirectives = [\"--x\\nrm -r runs\"]\n",
            "directives = ['--x\\nrm -r runs'] has a line break, which ends a directive.",
        ),
    ],
)
def test_a_file_that_is_no_site_is_refused_in_one_sentence(text, sentence, tmp_path, capsys):
    path = tmp_path / "mine.toml"
    if text is not None:
        path.write_text(text)
    assert main(["--site", str(path), "--", *TRAINER]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert sentence in error
    assert error.count("\n") == 1


def test_trainer_options_without_the_two_dashes_are_explained(capsys):
    assert main(["slurm", "--config", "run.toml"]) == 2
    assert "options are missing: write them after --." in capsys.readouterr().err


def test_an_unknown_site_is_refused_with_the_known_names(capsys):
    assert main(["--site", "fugaku", "--", *TRAINER]) == 2
    assert "--site fugaku is not known. There are generic, polaris," in capsys.readouterr().err


def test_a_run_that_does_not_fit_the_sites_device_gets_no_script(tmp_path, capsys):
    script = tmp_path / "job.pbs"
    argv = ["--site", "polaris", "--nodes", "8", "--output", str(script)]
    assert main([*argv, "--", *LARGE]) == 2
    error = capsys.readouterr().err
    assert "on 8 nodes of 4 a100-40gb: 32 ranks. " in error
    assert re.search(r"It does not fit, by .* GiB\. It fits with --per_device_train_batch_s", error)
    assert error.endswith(" To write the script all the same, add --skip_plan.\n")
    assert not script.exists()

    assert main([*argv, "--skip_plan", "--", *LARGE]) == 0
    said = capsys.readouterr().err
    assert "have not been checked" in said
    assert "plan --nodes 8 --gpus_per_node 4 --device a100-40gb --model_type gpt2" in said
    assert script.exists()


def test_a_script_for_a_site_comes_with_the_plan_of_its_run(capsys):
    _, said = write(capsys, "--site", "frontier", "--time", "2:00:00", trainer=SMALL)
    assert "Plan: gpt2 124M, 124,439,808 parameters, on 1 node of 8 mi250x: 8 ranks\n" in said
    assert re.search(r"Plan: .* GiB of 60\.80 GiB on a rank\. It fits: .* GiB are left\.\n", said)
    assert re.search(r"Plan: .* tokens take .* hours, .* node-hours, at 40% of the peak\n", said)
    assert "--device" not in said


def test_a_plan_longer_than_the_time_of_a_job_is_announced_with_a_remedy(capsys):
    long = [*SMALL[:-1], "1000000"]
    polaris = ["--site", "polaris", "--time", "1:00:00"]
    sweep = ["sweep", *polaris, "--queue", "prod", "--nodes", "10", "--", "--output_dir", "s"]
    members = [*SMALL[:8], *SMALL[10:-1], "1000000"]
    _, single = write(capsys, *polaris, trainer=long)
    _, array = write(capsys, *sweep, "--grid", "seed=1,2", trainer=members)
    _, chain = write(capsys, *polaris, "--chain", trainer=long)
    _, short = write(capsys, *polaris, trainer=SMALL)
    sentence = r"The plan of [\d,.]+ hours is longer than --time 1:00:00: {}, or choose a longer"
    assert re.search(sentence.format("add --chain"), single)
    assert re.search(sentence.format("submit the script again"), array)
    assert "is longer than --time" not in chain + short


def test_a_run_that_cannot_be_planned_here_gets_its_script_and_the_command(capsys):
    model = ["--model_name_or_path", "./no-such-model", *TRAINER[2:]]
    _, said = write(
        capsys, "--site", "polaris", "--nodes", "10", "--time", "1:00:00", trainer=model
    )
    assert "Memory and time have not been planned: --model_name_or_path ./no-such-model " in said
    assert "plan them by: llm-trainers plan --nodes 10 --gpus_per_node 4 --device a100-40gb" in said


def test_a_preparation_names_the_inputs_that_are_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "gpt2").mkdir()
    options = ["--tokenizer_name", "gpt2", "--output_prefix", "data/web", "--input", "a.jsonl"]
    argv = ["prepare", "slurm", "--account", "me", "--partition", "cpu"]
    assert main([*argv, "--", *options]) == 0
    assert capsys.readouterr().err == ""

    assert main([*argv, "--output", "job.sh", "--", *options, "/text/web", "b/*.jsonl"]) == 0
    assert capsys.readouterr().err == (
        "--input /text/web is not on this machine; the job needs it.\n"
        "--input b/*.jsonl is not on this machine; the job needs it.\n"
        "Submit it: sbatch job.sh\n"
    )


def test_no_two_queues_with_one_name_have_different_nodes():
    for site in known_sites().values():
        nodes = {(queue.name, queue.device, queue.gpus_per_node) for queue in site.queues}
        assert len(nodes) == len({queue.name for queue in site.queues})


def test_the_shipped_file_is_read_like_one_of_yours(tmp_path):
    path = tmp_path / "sites.toml"
    path.write_text(MY_SITE)
    [(name, site)] = read_sites(path).items()
    assert (name, site.queues[1].preemptable, site.queues[0].max_nodes) == ("mine", True, 2)
