"""Write the parts of docs/ that are generated from the code: `make pages`.

programs.md: the options of each program, between two comments that name it. architecture.md:
every package and the first paragraph of its docstring, between two comments. benchmarks.md: what
ran where. guides/migration.md: the trainer's answers to names of Hugging Face's. guides/SITE.md:
what sites.toml says about a site. quickstart.md: the cells and outputs of the notebook
tutorials/python.ipynb. images/: the diagrams of pictures.py.
"""

import ast
import json
import re
import runpy
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from llm.config.duration import Duration
from llm.config.options import Field, fields, format_default
from llm.config.other_trainers import HUGGING_FACE, HUGGING_FACE_REMARKS
from llm.prepare.options import PrepareConfig
from llm.prepare.train_tokenizer import TrainTokenizerOptions
from llm.tools.checkpoints import CheckpointsOptions
from llm.tools.evidence.options import EvidenceOptions
from llm.tools.fetch import FetchOptions
from llm.tools.generate import GenerateOptions
from llm.tools.inspect import InspectOptions
from llm.tools.jobs.options import JobOptions
from llm.tools.jobs.sites import known_sites
from llm.tools.preflight import PreflightOptions
from llm.tools.report.report import ReportOptions
from llm.tools.sweep.options import SweepOptions
from llm.trainers.gpt.extensions import GPTConfig

DOCS = Path(__file__).parent
PACKAGE = DOCS.parent / "llm"
SITES = PACKAGE / "tools" / "jobs" / "sites.toml"
# Text of scripts, which the scripts themselves show.
SITE_INTERNALS = (
    *("title", "master_addr", "pals", "numa", "queue_option", "first_cores", "task_cpu_bind"),
    *("gpu_directive", "whole_node_directives", "has_torchrun"),
)
SITE_LABELS = {"ran": "run there by", "preemptable": "can be ended at any time"}
WHAT_RAN = DOCS.parent / "benchmarks" / "results" / "what_ran.json"
PROGRAMS = {
    "tokenizer": TrainTokenizerOptions,
    "prepare": PrepareConfig,
    "inspect": InspectOptions,
    "checkpoints": CheckpointsOptions,
    "report": ReportOptions,
    "generate": GenerateOptions,
    "preflight": PreflightOptions,
    "evidence": EvidenceOptions,
    "jobs": JobOptions,
    "sweep": SweepOptions,
    "fetch": FetchOptions,
}
# Values of options that are off, which have no default on the pages.
_NEUTRAL_DEFAULTS = (None, False, 0, (), "", "none", Duration("0 steps"))
SITE_PAGES = ("polaris", "aurora", "perlmutter", "frontier", "kempner")


def option_list(options_class: type, *, shared_options: Mapping[str, Field] | None = None) -> str:
    """Describe the options of a class, in one Markdown list per group.

    Args:
        options_class: The option class of a program.
        shared_options: Options by name that are described elsewhere. Options of the class that
            have the same name and help are only named, after the lists.
    """
    fields_by_group: dict[str, list[Field]] = {}
    shared_names = []
    for field in fields(options_class):
        shared_option = (shared_options or {}).get(field.name)
        if shared_option is not None and field.option.help == shared_option.option.help:
            aliases = [f"`{name}`" for name in field.names if name not in shared_option.names]
            shared_names.append(" or ".join([f"`{field.name}`", *aliases]))
        else:
            fields_by_group.setdefault(field.option.group, []).append(field)
    lists = []
    for group, (first, *rest) in fields_by_group.items():
        items = [f"{name_option(first)}: {describe_option(first)}"]
        # Name what a whole group needs once.
        if len(rest) > 2 and all(field.option.requires == (first.name,) for field in rest):
            items[0] += " The other options need it."
            rest = [replace(field, option=replace(field.option, requires=())) for field in rest]
        items += [f"{name_option(field)}: {describe_option(field)}" for field in rest]
        lists.append(f"## {group}\n\n" + "\n".join(f"- {item}" for item in items))
    if shared_names:
        lists.append(f"As in [the trainer](#options-of-the-trainer): {', '.join(shared_names)}.")
    return "\n\n".join(lists)


def name_option(field: Field) -> str:
    """Return an option's names with its marks, and its default."""
    name, *aliases = field.names
    text = f"**`{name}`**"
    if field.option.resume in ("state", "fixed"):
        text += r"\*"
    if field.option.one_shot:
        text += "†"
    text += "".join(f", `{alias}`" for alias in aliases)
    if field.default not in _NEUTRAL_DEFAULTS:
        text += f" (`{format_default(field.default)}`)"
    return text


def describe_option(field: Field) -> str:
    """Return an option's help text, with its choices and what it needs unless they are named."""
    description = field.option.help
    words = set(re.findall(r"\w(?:[\w.:-]*\w)?", f"{description} {field.default}"))
    if field.members == (str,) and not set(field.choices) <= words:
        description += " One of " + ", ".join(f"`{choice}`" for choice in field.choices) + "."
    needs = [need.replace("=", " ") for need in field.option.requires]
    if needs and needs[0].split()[-1] not in words:
        description += " Needs " + " or ".join(f"`{need}`" for need in needs) + "."
    return description


def replace_between(page: str, start_marker: str, end_marker: str, text: str) -> str:
    """Return the page with another text between two comments."""
    text_before, _, rest = page.partition(start_marker)
    _, _, text_after = rest.partition(end_marker)
    return f"{text_before}{start_marker}\n\n{text}\n\n{end_marker}{text_after}"


def programs_page(page: str) -> str:
    """Return the page with the lists of the programs' options."""
    shared_options = {field.name: field for field in fields(GPTConfig)}
    for name, options_class in PROGRAMS.items():
        # Help texts name tokens such as <s>, which are not HTML.
        options = option_list(options_class, shared_options=shared_options).replace("<", "&lt;")
        # A single heading says what the section's title says.
        has_groups = options.count("## ") > 1
        options = re.sub(r"## (.*)\n\n", r"**\1**\n\n" if has_groups else "", options)
        page = replace_between(page, f"<!--options-of-{name}-->", "<!--end-of-options-->", options)
    options = re.sub("^## ", "### ", option_list(GPTConfig), flags=re.MULTILINE)
    return replace_between(page, "<!--options-of-trainer-->", "<!--end-of-options-->", options)


def package_folders(root: Path = PACKAGE) -> Iterator[Path]:
    """Yield a folder of the package and all folders in it, in the order of their names."""
    yield root
    yield from sorted(path.parent for path in root.rglob("*/__init__.py"))


def docstring_summary(path: Path) -> str:
    """Return the first paragraph of a module's docstring in one line."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.split("\n\n")[0].split())


def architecture_page(page: str) -> str:
    """Return the page with an up-to-date list of packages."""
    lines = [
        f"{f'{folder.relative_to(PACKAGE.parent)}/':<34}{docstring_summary(folder / '__init__.py')}"
        for folder in package_folders()
    ]
    text = "\n".join(["```", *lines, "```"])
    return replace_between(page, "<!-- packages -->", "<!-- end of packages -->", text)


def benchmarks_page(page: str) -> str:
    """Return the page with the table of what ran where, from benchmarks/results/what_ran.json."""
    rows = json.loads(WHAT_RAN.read_text(encoding="utf-8"))
    devices = {match[1] for row in rows if (match := re.search(r"\((.+)\)$", row["gpu"]))}
    if len(devices) == 1:  # stated once, since wide tables scroll on a phone
        rows = [row | {"gpu": re.sub(r" \(.+\)$", "", row["gpu"])} for row in rows]
    title_by_column = {"cpu": "CPU", "made_up": "made up", "gpu": "GPU"}
    ran_on_several = not {row["gpus"] for row in rows} <= {"never run", "-"}
    if ran_on_several:
        title_by_column["gpus"] = "several GPUs"
    lines = [f"GPU: one {device}." for device in devices if len(devices) == 1]
    for group in dict.fromkeys(row["group"] for row in rows):
        header = f"| {' | '.join([group, *title_by_column.values()])} |"
        lines += ["", header, "|---" * (1 + len(title_by_column)) + "|"]
        subjects_by_cells: dict[str, list[str]] = {}
        for row in rows:
            if row["group"] == group:
                cells = " | ".join(row[column] for column in title_by_column)
                subjects_by_cells.setdefault(cells, []).append(row["what"])
        lines += [
            f"| {';<br>'.join(subjects)} | {cells} |"
            for cells, subjects in subjects_by_cells.items()
        ]
    if not ran_on_several:
        lines += ["", "Nothing has run on several GPUs."]
    markers = "<!-- what ran where -->", "<!-- end of what ran where -->"
    return replace_between(page, *markers, "\n".join(lines).lstrip("\n"))


def migration_page(page: str) -> str:
    """Return the page with what the trainer answers to the names of Hugging Face's Trainer.

    Names with the same option or remark share a row.
    """
    names_by_option: dict[str, list[str]] = {}
    values_by_option: dict[str, list[str]] = {}
    for name, equivalent in HUGGING_FACE.items():
        option, _, value = equivalent.partition(" ")
        names_by_option.setdefault(option, []).append(name)
        values = values_by_option.setdefault(option, [])
        if value and value not in values:
            values.append(value)
    answers = {}
    for option, names in names_by_option.items():
        first_value, *further_values = values_by_option[option] or [""]
        cell = [f"--{option} {first_value}".rstrip(), *further_values]
        answers[", ".join(f"`{value}`" for value in cell)] = names
    for name, remark in HUGGING_FACE_REMARKS.items():
        answer = re.sub(r"^is (not an option: )?", "", remark)
        answer = re.sub(
            r"llm-trainers \w+(?: RUN --\w+ \w+ DIR)?|--\w+(?: 1)?|[A-Z]+_[A-Z_]+=?|hf auth login",
            r"`\g<0>`",
            answer,
        )
        answer = answer.replace("Extend it, in the documentation", "[Extend it](../extend.md)")
        answers.setdefault(answer, []).append(name)
    lines = []
    for answer, names in answers.items():
        lines.append(f"- {', '.join(f'`{name}`' for name in names)}: {answer}")
    markers = "<!-- Hugging Face -->", "<!-- end of Hugging Face -->"
    return replace_between(page, *markers, "\n".join(lines))


def format_site_value(value: Any) -> str:
    """Return a value of sites.toml for a cell of a table."""
    if isinstance(value, dict):
        return "; ".join(f"{name} {format_site_value(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(format_site_value, value))
    if value is True:
        return "yes"
    text = str(value).replace("|", "\\|").replace("<", "&lt;")
    return f"<{text}>" if text.startswith("https://") else text


def site_tables(name: str) -> str:
    """Return the tables of a site's facts and queues, whatever fields sites.toml has for it."""
    toml = SITES.read_text(encoding="utf-8")
    site = tomllib.loads(toml).get(name)
    if site is None:
        return f"`llm-trainers jobs` has no `--site {name}` yet; set the site's values by options."
    queues, notes = site.pop("queues", []), site.pop("notes", [])
    modules = re.findall(r"^module load (.*)", site.pop("set_up", ""), flags=re.MULTILINE)
    facts = {**site, "modules": None if "module" in site else modules}
    facts["not found in the sources"] = known_sites()[name].unknown_facts
    lines = [f"| `--site {name}` | |", "|---|---|"]
    lines += [
        f"| {SITE_LABELS.get(label, label.replace('_', ' '))} | {format_site_value(value)} |"
        for label, value in facts.items()
        if value and label not in SITE_INTERNALS
    ]
    if queues:
        lines += ["", "| Queue | Nodes | Hours |", "|---|---:|---:|"]
    for queue in queues:
        first, last = queue.pop("min_nodes", 1), queue.pop("max_nodes", None)
        nodes = f"{first:,} to {last:,}" if last else f"from {first:,}"
        name, hours = f"`{queue.pop('name')}`", queue.pop("hours", "")
        if (max_jobs := queue.pop("max_jobs", None)) is not None:
            queue["jobs"] = f"{max_jobs} job{'s' if max_jobs > 1 else ''} per user"
        remarks = [
            SITE_LABELS.get(label, label) if value is True else str(value)
            for label, value in queue.items()
        ]
        lines.append(f"| {', '.join([name, *remarks])} | {nodes} | {hours} |")
    if notes:
        lines += ["", *(f"- {note}" for note in notes)]
    return "\n".join(lines)


def slurm_page(page: str) -> str:
    """Return the page on Slurm with a line for each site."""
    lines = [
        f"{name:<16}{site.title:<46}{site.gpus_per_node:>2} {site.device:<12}{site.ran}"
        for name, site in known_sites().items()
        if site.device is not None
    ]
    text = "\n".join(["```", *lines, "```"])
    return replace_between(page, "<!-- sites -->", "<!-- end of sites -->", text)


def site_page(page: str, name: str) -> str:
    """Return the page of a site with the tables of its facts and queues."""
    markers = f"<!-- site {name} -->", "<!-- end of site -->"
    return replace_between(page, *markers, site_tables(name))


def quickstart_page(page: str) -> str:
    """Return the page with the cells and outputs of the notebook, as a section."""
    notebook = json.loads((DOCS / "tutorials" / "python.ipynb").read_text(encoding="utf-8"))
    blocks = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            blocks.append(re.sub("^#", "##", source, flags=re.MULTILINE))
            continue
        blocks.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "text/html" in data:
                # Markdown keeps the elements of a picture together in one block.
                blocks.append(f"<div>{''.join(data['text/html'])}</div>")
            else:
                text = "".join(output.get("text", data.get("text/plain", ""))).rstrip("\n")
                blocks.append(f"```text\n{text}\n```")
    blocks.append("This section is a notebook: [python.ipynb](tutorials/python.ipynb).")
    markers = "<!-- notebook -->", "<!-- end of notebook -->"
    return replace_between(page, *markers, "\n\n".join(blocks))


def pages() -> dict[Path, str]:
    """Return every page with generated parts and every diagram, up to date."""
    update_by_page = {
        "architecture.md": architecture_page,
        "benchmarks.md": benchmarks_page,
        "programs.md": programs_page,
        "guides/migration.md": migration_page,
        "quickstart.md": quickstart_page,
        "guides/slurm.md": slurm_page,
        **{f"guides/{name}.md": partial(site_page, name=name) for name in SITE_PAGES},
    }
    updated_pages = {
        DOCS / name: update((DOCS / name).read_text(encoding="utf-8"))
        for name, update in update_by_page.items()
    }
    return updated_pages | runpy.run_path(str(DOCS / "pictures.py"))["diagrams"]()


def main() -> None:
    """Write all pages."""
    for path, page in pages().items():
        path.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
