"""Keeps the pages true: options, commands, links, file trees, floors, keys."""

import ast
import bz2
import importlib
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args
from xml.etree import ElementTree

import pytest

from llm.__main__ import all_programs
from llm.checkpoints import CheckpointsOptions
from llm.config.command_line import parse
from llm.config.options import fields
from llm.data.inspect import InspectOptions
from llm.data.preparation.options import PrepareConfig
from llm.data.preparation.options import check as check_prepare
from llm.data.train_tokenizer import TrainTokenizerOptions, check_options
from llm.errors import ConfigError
from llm.extensions.decentralized.topology import TopologyOptions
from llm.extensions.mup.coordinate_check import CheckOptions
from llm.fetch import FetchOptions
from llm.generate import GenerateOptions
from llm.jobs.__main__ import main as write_job
from llm.jobs.options import JobOptions, PreparationJobOptions
from llm.plan.options import PlanOptions
from llm.preflight import PreflightOptions
from llm.report.__main__ import ReportOptions
from llm.runtime.health import EXIT_PEER_LOST
from llm.runtime.logging import Kind
from llm.runtime.signals import EXIT_PREEMPTED
from llm.trainers.gpt.extensions import GPTConfig
from llm.trainers.gpt.main import parse_args
from tests.support.package import FLOORS, MODULES, PACKAGE, ROOT

SITE = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *SITE]

GENERATOR = runpy.run_path(str(ROOT / "docs/generate.py"))

PROGRAMS = (
    CheckpointsOptions,
    ReportOptions,
    GenerateOptions,
    PreflightOptions,
    JobOptions,
    FetchOptions,
    TopologyOptions,
)
COMMAND_PROGRAMS = all_programs()
OTHER_PROGRAMS = {
    "checkpoints": (CheckpointsOptions, "run"),
    "extensions.mup.coordinate_check": (CheckOptions, None),
    "fetch": (FetchOptions, "folder"),
    "generate": (GenerateOptions, "run"),
    "extensions.decentralized.topology": (TopologyOptions, None),
    "plan": (PlanOptions, None),
    "preflight": (PreflightOptions, None),
    "report": (ReportOptions, "runs"),
}
DATA_PROGRAMS = {
    "prepare": PrepareConfig,
    "inspect": InspectOptions,
    "train_tokenizer": TrainTokenizerOptions,
}
JOB_SCRIPTS = sorted(ROOT.glob("examples/*/prepare_data.*"))

# The ancestor's guide: its launcher and the OPTIONS of its job script, word for word.
ANCESTORS_LAUNCHER = (
    "torchrun --nnodes=1 --nproc_per_node=auto --standalone -m llm.trainers.gpt {options}"
)
ANCESTORS_OPTIONS = (
    "--low_cpu_mem_usage "
    "--dataset_name wikitext "
    "--dataset_config_name wikitext-2-raw-v1 "
    "--model_name_or_path EleutherAI/gpt-neo-125m "
    "--output_dir runs/gpt-neo-125m-pretraining "
    "--checkpointing_steps 1000 "
    "--resume_from_checkpoint "
    "--max_train_steps 10000 "
    "--per_device_train_batch_size 1 "
    "--per_device_eval_batch_size 1 "
    "--gradient_accumulation_steps 8 "
    "--mixed_precision fp16 "
)
# What the pages show in their place: the ancestor's flag has another meaning in other programs.
SHOWN_OPTIONS = ANCESTORS_OPTIONS.replace("--low_cpu_mem_usage", "--from_scratch")


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def name_of_page(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[str]:
    """The fenced blocks of a page, lines that end in a backslash joined."""
    found = re.findall(r"^```[^\n]*\n(.*?)^```", read(page), flags=re.DOTALL | re.MULTILINE)
    return [re.sub(r"\\\n\s*", "", block) for block in found]


def trainer_commands(page: Path) -> list[str]:
    """The lines of fenced blocks that start the trainer with options that can be read."""
    lines = [line.strip() for block in blocks(page) for line in block.splitlines()]
    starts = r"^(torchrun .*|accelerate launch |\S*python )-m llm\.trainers\.gpt"
    return [line for line in lines if re.match(starts, line)]


def data_commands(page: Path) -> list[tuple[str, list[str]]]:
    """The data programs that a page starts, and the words that it gives to them."""
    lines = [line.strip() for block in blocks(page) for line in block.splitlines()]
    found = [re.match(r"^\S*python -m llm\.data\.(\w+) (.*)", line) for line in lines]
    return [(match[1], shlex.split(match[2], comments=True)) for match in found if match]


def commands_of(page: Path) -> list[tuple[str, list[str]]]:
    """The programs of the package that a page starts, and the words that it gives to them."""
    lines = [line.strip() for block in blocks(page) for line in block.splitlines()]
    starts = r"^(?:torchrun .*|srun |\S*python )-m llm"
    program = r"\.((?:extensions\.\w+\.)?\w+)(?: (.*))?$"
    found = [re.match(starts + program, line) for line in lines]
    commands = [(match[1], match[2] or "") for match in found if match]
    # A file that is read from or written to by the shell is none of the program's words.
    return [
        (name, shlex.split(re.sub(r" [<>|] .*", "", words), comments=True))
        for name, words in commands
    ]


def templates_of(path: Path) -> list[re.Pattern[str]]:
    """What the strings of a module with some words in them look like once they are filled in."""
    found = []
    for node in ast.walk(ast.parse(read(path))):
        if not isinstance(node, ast.JoinedStr | ast.Constant):
            continue
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        filled = "".join(
            part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else "\0"
            for part in parts
        )
        for line in filled.splitlines():
            if len(line.replace("\0", "")) >= 18:
                found.append(re.escape(line).replace("\0", ".*"))
    return [re.compile(pattern) for pattern in found]


def table_keys(page: Path, heading: str) -> set[str]:
    """The names in the first column of the table below a heading."""
    section = read(page).split(f"\n## {heading}\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", section, flags=re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def keys_written_by(path: str, function: str) -> set[str]:
    """The literal keys of the dictionaries that a function makes."""
    tree = ast.parse(read(PACKAGE / path))
    body = next(n for n in ast.walk(tree) if getattr(n, "name", None) == function)
    made = [key for node in ast.walk(body) if isinstance(node, ast.Dict) for key in node.keys]
    stored = [n.slice for n in ast.walk(body) if isinstance(n, ast.Subscript)]
    return {
        key.value
        for key in [*made, *stored]
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    }


@pytest.mark.parametrize("page", PAGES, ids=name_of_page)
def test_every_command_that_a_page_shows_parses(page):
    for command in trainer_commands(page):
        words = shlex.split(command.split("llm.trainers.gpt", 1)[1])
        of_run = "--config" in words and words[words.index("--config") + 1].startswith("runs/")
        if of_run:
            at = words.index("--config")
            del words[at : at + 2]
        # The run that another goes on from, and its options, are not there.
        if of_run or "--branch_from" in words:
            assert parse(GPTConfig, words, prog="gpt", description="")
        elif not set(words) & {"{options}", "..."} and "NAME" not in command:
            assert parse_args(words)


@pytest.mark.parametrize("page", PAGES, ids=name_of_page)
def test_every_data_command_that_a_page_shows_parses(page):
    for program, words in data_commands(page):
        if program == "inspect" and not words[0].startswith("-"):
            words = ["--path", *words]  # whose name can be left out
        options = parse(DATA_PROGRAMS[program], words, prog=program, description="")
        if isinstance(options, PrepareConfig):
            check_prepare(options)
        if isinstance(options, TrainTokenizerOptions):
            check_options(options)


@pytest.mark.parametrize("page", PAGES, ids=name_of_page)
def test_every_other_command_that_a_page_shows_parses(page):
    for program, words in commands_of(page):
        if program in OTHER_PROGRAMS:
            options, positional = OTHER_PROGRAMS[program]
            if program == "plan" and not words[0].startswith("-"):
                del words[:1]  # the file, whose content the page shows
            if program == "fetch" and "--config" in words:
                del words[
                    words.index("--config") : words.index("--config") + 2
                ]  # a file of the trainer's options
            if program == "checkpoints" and words[:1] == ["average"]:
                del words[:1]
            if program == "jobs" and words[:1] == ["prepare"]:
                options = PreparationJobOptions
                del words[:1]
            if positional and words and not words[0].startswith("-"):
                words = [f"--{positional}", *words]  # whose name can be left out
            assert parse(options, words, prog=program, description="")


@pytest.mark.parametrize("page", PAGES, ids=name_of_page)
def test_every_job_command_that_a_page_shows_writes_a_script(page, capsys):
    for program, words in commands_of(page):
        if program == "jobs":
            if "--output" in words:  # a test writes nothing
                del words[words.index("--output") : words.index("--output") + 2]
            assert write_job(words) == 0, capsys.readouterr().err
            assert capsys.readouterr().out.startswith("#!/bin/bash")


@pytest.mark.parametrize("guide", ["slurm", "polaris"])
def test_the_cluster_guides_show_a_job_command_and_the_preflight(guide):
    shown = {program for program, _ in commands_of(ROOT / f"docs/guides/{guide}.md")}
    assert {"jobs", "preflight"} <= shown


def test_the_troubles_show_messages_that_the_program_prints():
    """Blocks without a title are our own words; one with a title shows somebody else's."""
    page = read(ROOT / "docs/troubleshooting.md")
    fenced = re.findall(r"^```([^\n]*)\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    shown = [line for head, block in fenced if not head for line in block.splitlines()]
    templates = [template for path in MODULES for template in templates_of(path)]
    unknown = [line for line in shown if not any(t.search(line) for t in templates)]
    assert len(shown) >= 20
    assert not unknown


def test_the_benchmarks_page_shows_the_newest_report_of_each_subject():
    newest = {path.name[11:]: path.name for path in sorted((ROOT / "benchmarks/results").glob("*"))}
    shown = re.findall(r'--8<-- "benchmarks/results/(.*?):', read(ROOT / "docs/benchmarks.md"))
    assert len(set(shown)) >= 8
    assert set(shown) <= set(newest.values())


def test_the_dump_of_the_guide_to_wikipedia_is_made_by_its_script(tmp_path):
    page = read(ROOT / "docs/guides/wikipedia.md")
    script = page.split('```python title="make_dump.py"\n')[1].split("```")[0]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)
    dump = ElementTree.fromstring(
        bz2.decompress((tmp_path / "toywiki-latest-pages-articles.xml.bz2").read_bytes())
    )
    texts = [text.text or "" for text in dump.iter("text")]
    assert f"wrote {len(texts)} article(s) total" in page
    assert texts[0].startswith("First Citizen:\nBefore we proceed any further")


def test_the_data_guide_shows_every_program():
    shown = {program for program, _ in data_commands(ROOT / "docs/guides/data.md")}
    assert shown == DATA_PROGRAMS.keys()


@pytest.mark.parametrize(
    ("name", "programs"),
    [("data-tools.md", set(DATA_PROGRAMS.values())), ("cli.md", set(PROGRAMS))],
)
def test_the_tables_of_the_programs_options_are_generated_from_them(name, programs):
    page = read(ROOT / "docs" / name)
    described = GENERATOR["PAGES"][name]
    assert set(described) == programs
    for program in programs:
        assert all(f"| `{field.name}`" in page for field in fields(program))


def test_the_page_of_the_command_lines_names_and_shows_every_program():
    page = ROOT / "docs/cli.md"
    rows = re.findall(
        r"^\| `llm-trainers (\w+)` \|(?: `python -m llm\.(\S+)`)? \|", read(page), re.MULTILINE
    )
    shown = {program for program, _ in commands_of(page)}
    shown |= {f"data.{program}" for program, _ in data_commands(page)}
    shown |= {"trainers.gpt"} if trainer_commands(page) else set()
    assert sorted(name for name, _ in rows) == sorted(COMMAND_PROGRAMS)
    for name, module in rows:
        target = COMMAND_PROGRAMS[name].target.replace("gpt.main", "gpt").replace(".__main__", "")
        assert not module or target.startswith(f"llm.{module}:")
    assert shown == {module for _, module in rows if module}


@pytest.mark.parametrize("page", PAGES, ids=name_of_page)
def test_every_program_of_the_command_that_a_page_names_exists(page):
    named = re.findall(r"(?<![\w-])llm-trainers ([a-z]+)(?=`| -)", read(page))
    assert set(named) <= COMMAND_PROGRAMS.keys()


def test_the_page_of_the_command_lines_has_the_exit_codes_of_the_trainer():
    rows = re.findall(r"^\| (\d+) \|.*\|.*the trainer", read(ROOT / "docs/cli.md"), re.MULTILINE)
    assert rows == [str(EXIT_PREEMPTED), str(EXIT_PEER_LOST), "130"]


@pytest.mark.parametrize("script", JOB_SCRIPTS, ids=name_of_page)
def test_a_job_script_asks_to_be_filled_in(script):
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "Fill in __INPUT__ at the top of this script.\n")


@pytest.mark.parametrize("script", JOB_SCRIPTS, ids=name_of_page)
def test_a_job_script_that_is_filled_in_prepares_token_files(script, tmp_path):
    (tmp_path / "venv/bin").mkdir(parents=True)
    activate = f'export PATH={Path(sys.executable).parent}:"$PATH" PYTHONPATH={ROOT}\n'
    (tmp_path / "venv/bin/activate").write_text(activate)
    (tmp_path / "a.jsonl").write_text('{"text": "To be, or not to be"}\n' * 3)
    filled = read(script)
    for name, value in {
        "INPUT": "'*.jsonl'",
        "TOKENIZER": ROOT / "examples/tokenizer",
        "OUTPUT_PREFIX": "data/play",
    }.items():
        filled = filled.replace(f"__{name}__", str(value))
    (tmp_path / "job").write_text(filled)

    done = subprocess.run(
        ["bash", "job"],
        cwd=tmp_path,
        env={
            **os.environ,
            "SLURM_SUBMIT_DIR": str(tmp_path),
            "PBS_O_WORKDIR": str(tmp_path),
            "VENV": "venv",
        },
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    assert "3 documents" in done.stdout + done.stderr
    assert (tmp_path / "data/play_text_document.idx").exists()


@pytest.mark.parametrize("page", PAGES, ids=name_of_page)
def test_a_part_of_a_file_that_a_page_shows_lies_between_blank_lines(page):
    for name, first, last in re.findall(r'--8<-- "(.*?):(\d+):(\d+)"', read(page)):
        lines = ["", *read(ROOT / name).splitlines(), ""]
        assert (lines[int(first) - 1], lines[int(last) + 1]) == ("", "")


@pytest.mark.parametrize("page", PAGES, ids=name_of_page)
def test_what_a_page_gives_to_make_train_parses(page):
    for arguments in re.findall(r'make train ARGS="(.*?)"', read(page)):
        assert parse_args(["--config", str(ROOT / "examples/quickstart.toml"), *arguments.split()])


def test_the_guide_shows_the_command_of_the_original_program():
    launches = [command.split() for command in trainer_commands(ROOT / "docs/guides/gpt.md")]
    assert ANCESTORS_LAUNCHER.replace("{options}", SHOWN_OPTIONS).split() in launches
    assert parse_args(SHOWN_OPTIONS.split()) == parse_args(ANCESTORS_OPTIONS.split())


def test_the_guide_shows_the_launcher_of_the_original_program():
    assert ANCESTORS_LAUNCHER in trainer_commands(ROOT / "docs/guides/gpt.md")


def test_every_section_of_the_original_guide_has_its_counterpart():
    headings = re.findall(r"^##+ (.*)", read(ROOT / "docs/guides/gpt.md"), flags=re.MULTILINE)
    for section in ("Installation", "Running", "Model", "Data set", "Checkpointing", "Limitations"):
        assert section in headings


def test_what_the_pages_list_of_the_code_is_generated_from_it():
    for path, page in GENERATOR["pages"]().items():
        assert read(path) == page, f"{path.name} is not what the code says; run: make pages"


def test_the_drawing_of_the_floors_is_the_one_that_is_tested():
    drawing = next(b for b in blocks(ROOT / "docs/architecture.md") if "0  errors" in b)
    floors: dict[int, set[str]] = {}
    for line in drawing.splitlines():
        words = line.partition("#")[0].split()
        if words[0].isdigit():
            number = int(words.pop(0))
        rooms = {word.rstrip("/") for word in words if "/" not in word.rstrip("/")}
        floors.setdefault(number, set()).update(rooms)
    assert [floors[number] for number in range(len(floors))] == FLOORS


def test_the_verbs_of_a_strategy_are_those_of_the_protocol():
    tree = ast.parse(read(PACKAGE / "parallel/base.py"))
    base = next(n for n in tree.body if getattr(n, "name", "") == "AcceleratedStrategy")
    methods = {node.name for node in base.body if isinstance(node, ast.FunctionDef)}
    verbs = {name for name in methods if not name.startswith("_")}
    rows = re.findall(r"^\| (`.*?\)`) \|", read(ROOT / "docs/architecture.md"), re.MULTILINE)
    assert {verb for row in rows for verb in re.findall(r"(\w+)\(", row)} == verbs


def test_the_page_of_the_runs_folder_explains_every_key_that_is_written():
    page = ROOT / "docs/run-folder.md"
    tracker = "metrics/tracker.py"
    training = keys_written_by(tracker, "log_training") | keys_written_by(tracker, "_interval")
    training |= {"step"}
    written = [
        keys_written_by("trainers/gpt/evaluation.py", f"evaluate_{name}")
        for name in ("source", "sources")
    ]
    evaluation = {f"eval_{key}" for key in set().union(*written)}
    results = keys_written_by("trainers/gpt/results.py", "collect_results")
    assert (
        table_keys(page, "metrics.jsonl")
        - {"eval_accuracy", "eval_NAME", "eval_ema_NAME", "eval_loss/SOURCE", "loss/SOURCE"}
        - {"kfac_NAME", "--eval_metrics", "--log_source_losses", "task_TASK/METRIC", "z_loss"}
        == training | evaluation
    )
    assert results <= table_keys(page, "all_results.json")
    assert table_keys(page, "status.json") == keys_written_by("checkpoint/run_folder.py", "say")
    assert table_keys(page, "events.jsonl") == {"event", *get_args(Kind)}


@pytest.mark.parametrize("page", PAGES, ids=name_of_page)
def test_links_between_the_pages_resolve(page):
    text = re.sub(r"^```.*?^```", "", read(page), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link or link.startswith("llm."):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)", read(target), flags=re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in headings]
            assert anchor in slugs, link


def test_every_page_of_the_site_is_in_its_menu():
    menu = re.findall(r": (\S+\.md)$", read(ROOT / "mkdocs.yml"), flags=re.MULTILINE)
    assert sorted(menu) == sorted(str(page.relative_to(ROOT / "docs")) for page in SITE)


def test_the_test_files_that_the_page_of_guarantees_names_exist():
    witnesses = re.findall(r"`(tests/\S+\.py)`", read(ROOT / "docs/guarantees.md"))
    assert witnesses
    assert all((ROOT / witness).exists() for witness in witnesses)


def test_the_output_on_a_page_is_that_of_the_quick_start_that_ships():
    """Where this fails, run the quick start again and replace the output on the page."""
    shipped = tomllib.loads(read(ROOT / "examples/quickstart.toml"))
    text = read(ROOT / "docs/quickstart.md")
    peak, warmup = shipped["learning_rate"], shipped["num_warmup_steps"]
    rate = f"{peak * 24 / warmup:.1e}".replace("e-0", "e-")
    line = rf"^step  25/{shipped['max_train_steps']}  loss \d\.\d+  lr {re.escape(rate)}  "
    assert re.search(line, text, flags=re.MULTILINE)
    assert f"per step\nlength: {shipped['max_train_steps']} " in text or "length:" not in text


def test_a_page_with_an_unknown_option_is_detected():
    with pytest.raises(ConfigError, match="no option --learning_rat"):
        parse_args(["--learning_rat", "1"])


@pytest.mark.parametrize(
    ("program", "usage", "options"),
    [
        ("llm.report.__main__", "RUNS ... [--config FILE]", ReportOptions),
        ("llm.data.inspect", "PATH [--config FILE]", InspectOptions),
        ("llm.jobs.__main__", "SCHEDULER [--OPTION VALUE ...] -- TRAINER OPTIONS", JobOptions),
        ("llm.plan.__main__", "[CONFIG.toml] [--OPTION VALUE ...]", None),
    ],
)
def test_help_names_what_comes_first_and_shows_a_command(program, usage, options, capsys):
    with pytest.raises(SystemExit):
        importlib.import_module(program).main(["--help"])
    text, command = capsys.readouterr().out, f"python -m {program.removesuffix('.__main__')}"
    assert text.startswith(f"usage: {command} {usage}")
    shown = re.findall(rf"\nexample:\n  {command} (.*)\n$", text)
    assert len(shown) == (options is not None)
    for words in map(shlex.split, shown):
        positional = usage.split()[0].lower()
        own = words[: words.index("--")] if "--" in words else words
        read_options = parse(options, own, prog="", description="", positional=positional)
        assert getattr(read_options, positional)
