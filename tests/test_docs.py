"""Keeps the pages true: options, commands, links, file trees, layers, keys."""

import ast
import bz2
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.speed_bars import FOREGROUNDS, draw, read_sections
from llm.__main__ import PROGRAMS, main
from llm.config.command_line import parse_options
from llm.config.options import fields
from llm.prepare.options import PrepareConfig, check_prepare_config
from llm.prepare.train_tokenizer import TrainTokenizerOptions, check_options
from llm.runtime.health import EXIT_PEER_LOST
from llm.runtime.signals import EXIT_PREEMPTED
from llm.tools.checkpoints import CheckpointsOptions
from llm.tools.evidence.options import EvidenceOptions
from llm.tools.fetch import FetchOptions
from llm.tools.generate import GenerateOptions
from llm.tools.inspect import InspectOptions
from llm.tools.jobs.jobs import main as write_job
from llm.tools.jobs.options import JobOptions, PreparationJobOptions
from llm.tools.plan.options import PlanOptions
from llm.tools.preflight import PreflightOptions
from llm.tools.report.report import ReportOptions
from llm.tools.sweep.options import SweepOptions
from llm.trainers.gpt.extensions import GPTConfig
from llm.trainers.gpt.main import parse_args
from tests.support.package import LAYERS, MODULES, ROOT
from tests.support.programs import GENERATOR

SITE = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *SITE]

OPTIONS = {
    "checkpoints": (CheckpointsOptions, "run"),
    "evidence": (EvidenceOptions, None),
    "fetch": (FetchOptions, "folder"),
    "generate": (GenerateOptions, "run"),
    "inspect": (InspectOptions, "path"),
    "plan": (PlanOptions, None),
    "preflight": (PreflightOptions, None),
    "prepare": (PrepareConfig, None),
    "report": (ReportOptions, "runs"),
    "sweep": (SweepOptions, "base"),
    "tokenizer": (TrainTokenizerOptions, None),
}
"""The programs other than the trainer and the jobs: options, and the one that comes first."""
QUICK_START = ["--config", str(ROOT / "examples/quickstart.toml")]
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


def commands_of(page: Path) -> list[tuple[str, list[str]]]:
    """The programs of the package that a page starts, and the words that it gives to them."""
    lines = [line.strip() for block in blocks(page) for line in block.splitlines()]
    launched = r"(?:torchrun .*|accelerate launch |srun .*)-m llm(?:\.| )"
    start = rf"^(?:(?:srun .*)?\S*llm-trainers |{launched})(trainers\.gpt|\w+)(?: (.*))?$"
    found = [re.match(start, line) for line in lines]
    # A file that is read from or written to by the shell is none of the program's words.
    return [
        (
            match[1].replace("trainers.gpt", "train"),
            shlex.split(re.sub(r" [<>|] .*", "", match[2] or ""), comments=True),
        )
        for match in found
        if match and not (match[2] or "").startswith("PROGRAM")
    ]


def without(words: list[str], option: str) -> list[str]:
    """The words without an option and its value."""
    at = words.index(option) if option in words else len(words)
    return words[:at] + words[at + 2 :]


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


def test_the_troubles_show_messages_that_the_program_prints():
    """Blocks without a title are our own words; one with a title shows somebody else's."""
    page = read(ROOT / "docs/guides/recover.md")
    fenced = re.findall(r"^```([^\n]*)\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    shown = [line for head, block in fenced if not head for line in block.splitlines()]
    templates = [template for path in MODULES for template in templates_of(path)]
    unknown = [line for line in shown if not any(t.search(line) for t in templates)]
    assert len(shown) >= 15
    assert not unknown


def test_the_benchmarks_page_shows_the_newest_report_of_each_subject():
    newest = {path.name[11:]: path.name for path in sorted((ROOT / "benchmarks/results").glob("*"))}
    shown = re.findall(r'--8<-- "benchmarks/results/(.*?):', read(ROOT / "docs/benchmarks.md"))
    assert len(set(shown)) >= 8
    assert set(shown) <= set(newest.values())


def test_the_bars_of_the_benchmarks_page_are_those_of_the_newest_reports():
    for scheme, foreground in FOREGROUNDS.items():
        assert read(ROOT / f"docs/images/speed-{scheme}.svg") == draw(foreground)
    ratios = dict(read_sections())
    assert len(ratios) == 4
    assert {"HF Trainer": 1.49, "llm-pytorch": 1.44}.items() <= list(ratios.values())[2].items()


def test_the_dump_of_the_guide_to_wikipedia_is_made_by_its_script(tmp_path):
    page = read(ROOT / "docs/guides/data.md")
    script = page.split('```python title="make_dump.py"\n')[1].split("```")[0]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)
    dump = ElementTree.fromstring(
        bz2.decompress((tmp_path / "toywiki-latest-pages-articles.xml.bz2").read_bytes())
    )
    texts = [text.text or "" for text in dump.iter("text")]
    assert f"wrote {len(texts)} article(s) total" in page
    assert texts[0].startswith("First Citizen:\nBefore we proceed any further")


def test_the_page_of_the_command_lines_names_and_shows_every_program():
    page = ROOT / "docs/programs.md"
    listed = re.findall(r"^- `llm-trainers (\w+)` ", read(page), re.MULTILINE)
    shown = {program for program, _ in commands_of(page)}
    assert sorted(listed) == sorted(PROGRAMS)
    assert shown == PROGRAMS.keys() - {"quickstart"}


def test_the_options_of_jobs_end_with_those_of_jobs_prepare():
    page = read(ROOT / "docs/programs.md")
    [listed] = re.findall(r"<!--options-of-jobs-->(.*?)<!--end-of-options-->", page, re.DOTALL)
    names = re.findall(r"^- \*\*`(\w+)`", listed, re.MULTILINE)
    prepare_names = {field.name for field in fields(PreparationJobOptions)}
    assert {"name", *names[names.index("scheduler") :]} == prepare_names


def test_pages_and_messages_start_programs_by_the_command():
    """Only launchers take a module: `torchrun ... -m llm.trainers.gpt`."""
    shown = [*PAGES[:2], *SITE, *(path for path in MODULES if path.stem != "sentencepiece_model")]
    shown += [path for path in (ROOT / "examples").rglob("*") if path.suffix in (".sh", ".pbs")]
    lines = [(path.name, line) for path in shown for line in read(path).splitlines()]
    assert [(name, line) for name, line in lines if re.search(r"python3? -m llm\.", line)] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of_page)
def test_every_program_of_the_command_that_a_page_names_exists(page):
    named = re.findall(r"(?<![\w-])llm-trainers ([a-z]+)(?=`| -)", read(page))
    assert set(named) <= PROGRAMS.keys()


def test_the_page_of_the_command_lines_has_the_exit_codes_of_the_trainer():
    page = read(ROOT / "docs/programs.md")
    codes = re.findall(r"^- (\d+): .*\(the trainer", page, re.MULTILINE)
    assert codes == [str(EXIT_PREEMPTED), str(EXIT_PEER_LOST), "130"]


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
    (tmp_path / "profile").write_text("module() { :; }\nconda() { :; }\n")

    unfilled = subprocess.run(["bash", str(script)], capture_output=True, text=True)
    assert unfilled.returncode == 2
    assert unfilled.stderr == "Fill in __INPUT__ at the top of this script.\n"

    done = subprocess.run(
        ["bash", "job"],
        cwd=tmp_path,
        env={
            **os.environ,
            "BASH_ENV": str(tmp_path / "profile"),
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


def check_training(words: list[str]) -> None:
    # Of a run that another goes on from, and of its options, nothing is there.
    of_run = "--config" in words and words[words.index("--config") + 1].startswith("runs/")
    if of_run or "--branch_from" in words:
        words = without(words, "--config") if of_run else words
        assert parse_options(GPTConfig, words, prog="gpt", description="")
    elif not set(words) & {"{options}", "..."} and not any("NAME" in word for word in words):
        assert parse_args(words)


def check_program(program: str, words: list[str]) -> None:
    options_class, positional = OPTIONS[program]
    if program == "plan" and not words[0].startswith("-"):
        words = words[1:]  # the file, whose content the page shows
    if program == "fetch":
        words = without(words, "--config")  # a file of the trainer's options
    if program == "sweep" and "--" in words:
        separator = words.index("--")
        check_training(words[separator + 1 :])
        words = words[:separator]
    if program == "checkpoints" and words[:1] == ["average"]:
        words = words[1:]
    options = parse_options(
        options_class, words, prog=program, description="", positional=positional
    )
    if isinstance(options, PrepareConfig):
        check_prepare_config(options)
    if isinstance(options, TrainTokenizerOptions):
        check_options(options)


@pytest.mark.parametrize("page", PAGES, ids=name_of_page)
def test_every_command_that_a_page_shows_parses(page, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # plans ask the Hub
    for program, words in commands_of(page):
        if program in ("train", "quickstart"):
            check_training(words if program == "train" else QUICK_START + words)
        elif program == "jobs" and set(words) & {"--detect", "--list_sites"}:  # asks this machine
            assert parse_options(JobOptions, words, prog=program, description="")
        elif program == "jobs":  # a test writes nothing
            assert write_job(without(words, "--output")) == 0, capsys.readouterr().err
            assert capsys.readouterr().out.startswith("#!/bin/bash")
        else:
            check_program(program, words)


@pytest.mark.parametrize("page", PAGES, ids=name_of_page)
def test_what_a_page_gives_to_make_train_parses(page):
    for arguments in re.findall(r'make train ARGS="(.*?)"', read(page)):
        assert parse_args(["--config", str(ROOT / "examples/quickstart.toml"), *arguments.split()])


def test_the_guide_shows_the_command_of_the_original_program():
    page = ROOT / "docs/guides/gpt.md"
    launches = [line.split() for block in blocks(page) for line in block.splitlines()]
    assert ANCESTORS_LAUNCHER.replace("{options}", SHOWN_OPTIONS).split() in launches
    assert parse_args(SHOWN_OPTIONS.split()) == parse_args(ANCESTORS_OPTIONS.split())


def test_what_the_pages_list_of_the_code_is_generated_from_it():
    for path, page in GENERATOR["pages"]().items():
        assert read(path) == page, f"{path.name} is not what the code says; run: make pages"


def test_the_drawing_of_the_layers_is_the_one_that_is_tested():
    drawing = next(b for b in blocks(ROOT / "docs/architecture.md") if "0  errors" in b)
    layers: dict[int, set[str]] = {}
    for line in drawing.splitlines():
        words = line.partition("#")[0].split()
        if words[0].isdigit():
            number = int(words.pop(0))
        packages = {word.rstrip("/") for word in words if "/" not in word.rstrip("/")}
        layers.setdefault(number, set()).update(packages)
    assert [layers[number] for number in range(len(layers))] == LAYERS


@pytest.mark.parametrize("page", PAGES, ids=name_of_page)
def test_links_between_the_pages_resolve(page):
    text = re.sub(r"^```.*?^```", "", read(page), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link or link.startswith("llm."):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":  # a picture has one for its color scheme
            headings = re.findall(r"^#+ (.*)", read(target), flags=re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in headings]
            assert anchor in slugs, link


def test_every_page_of_the_site_is_in_its_menu_or_for_developers():
    menu = re.findall(r": (\S+\.md)$", read(ROOT / "mkdocs.yml"), flags=re.MULTILINE)
    pages = sorted(str(page.relative_to(ROOT / "docs")) for page in SITE)
    assert len(menu) == 24
    assert sorted([*menu, "architecture.md"]) == pages
    assert "](architecture.md)" in read(ROOT / "docs/extend.md")


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


@pytest.mark.parametrize(
    ("program", "usage", "options"),
    [
        ("report", "RUNS ... [--config FILE]", ReportOptions),
        ("inspect", "PATH [--config FILE]", InspectOptions),
        ("jobs", "SCHEDULER [--OPTION VALUE ...] -- TRAINER OPTIONS", JobOptions),
        ("sweep", "BASE.toml [--OPTION VALUE ...] [-- TRAINER OPTIONS]", SweepOptions),
        ("plan", "[CONFIG.toml] [--OPTION VALUE ...]", None),
    ],
)
def test_help_names_what_comes_first_and_shows_a_command(program, usage, options, capsys):
    with pytest.raises(SystemExit):
        main([program, "--help"])
    text, command = capsys.readouterr().out, f"llm-trainers {program}"
    assert text.startswith(f"usage: {command} {usage}")
    shown = re.findall(rf"\nexample:\n  {command} (.*)\n$", text)
    assert len(shown) == (options is not None)
    for words in map(shlex.split, shown):
        positional = usage.split()[0].removesuffix(".toml").lower()
        own = words[: words.index("--")] if "--" in words else words
        read_options = parse_options(options, own, prog="", description="", positional=positional)
        assert getattr(read_options, positional)


def test_pages_that_start_from_the_sample_text_make_different_files():
    """A reader may follow one after the other in one folder."""
    made = {"data.md": set(), "gpt.md": set()}
    for page, names in made.items():
        text = (ROOT / "docs/guides" / page).read_text(encoding="utf-8")
        names.update(re.findall(r'Path\("(\S+)"\)\.mkdir\(\)', text))
        names.update(re.findall(r"--output_(?:prefix|dir) (\S+)", text))

    assert {"text", "data/plays"} <= made["data.md"]
    assert "data/speeches/plays" in made["gpt.md"]
    assert made["data.md"].isdisjoint(made["gpt.md"])


def test_the_page_of_the_installation_lists_every_extra_of_a_user():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].keys() - {"dev", "docs", "release"}
    page = (ROOT / "docs/quickstart.md").read_text(encoding="utf-8")

    section = page.partition("[report]'")[0]
    assert extras == set(re.findall(r"^- `(\w+)`: ", section, flags=re.MULTILINE))
