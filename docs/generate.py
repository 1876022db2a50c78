"""Write the parts of docs/ that are generated from the code: `make pages`.

configuration.md: the trainer's options, all below the page's introduction. data-tools.md, cli.md:
a table for each program, between two comments that name it. architecture.md: every package
and the first paragraph of its docstring, between two comments. benchmarks.md: what ran where. api/:
a page for each package.
tutorials/notebook.md: the cells and outputs of the notebook python.ipynb.
"""

import ast
import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from llm.config.options import fields, format_default
from llm.prepare.options import PrepareConfig
from llm.prepare.train_tokenizer import TrainTokenizerOptions
from llm.tools.checkpoints import CheckpointsOptions
from llm.tools.evidence.options import EvidenceOptions
from llm.tools.fetch import FetchOptions
from llm.tools.generate import GenerateOptions
from llm.tools.inspect import InspectOptions
from llm.tools.jobs.options import JobOptions
from llm.tools.preflight import PreflightOptions
from llm.tools.report.report import ReportOptions
from llm.trainers.gpt.extensions import GPTConfig

DOCS = Path(__file__).parent
PACKAGE = DOCS.parent / "llm"
WHAT_RAN = DOCS.parent / "benchmarks" / "results" / "what_ran.json"
PROGRAM_PAGES = {
    "data-tools.md": {
        "tokenizer": TrainTokenizerOptions,
        "prepare": PrepareConfig,
        "inspect": InspectOptions,
    },
    "cli.md": {
        "checkpoints": CheckpointsOptions,
        "report": ReportOptions,
        "generate": GenerateOptions,
        "preflight": PreflightOptions,
        "evidence": EvidenceOptions,
        "jobs": JobOptions,
        "fetch": FetchOptions,
    },
}


def option_tables(options_class: type) -> str:
    """Describe every option of a class, in one Markdown table per group."""
    lines: list[str] = []
    group = ""
    for field in fields(options_class):
        if field.option.group != group:
            group = field.option.group
            lines += ["", f"## {group}", "", "| Option | Default | Meaning |", "|---|---|---|"]
        names = ", ".join(f"`{name}`" for name in field.names)
        default = "" if field.default in (None, (), "") else f"`{format_default(field.default)}`"
        description = field.option.help.replace("|", "\\|")
        if field.choices and field.members == (str,):
            description += " One of " + ", ".join(f"`{choice}`" for choice in field.choices) + "."
        needs = [need.replace("=", " ") for need in field.option.requires]
        if needs and not set(needs[0].split()[-1:]) & set(re.findall(r"[\w-]+", description)):
            description += " Needs " + " or ".join(f"`{need}`" for need in needs) + "."
        if field.option.resume in ("state", "fixed"):
            description += " *Fixed.*"
        if field.option.one_shot:
            description += " *Not recorded.*"
        lines.append(f"| {names} | {default} | {description} |")
    return "\n".join(lines).lstrip("\n") + "\n"


def configuration_page(page: str) -> str:
    """Return the page with the tables of the trainer's options."""
    introduction = page.partition("\n## ")[0].rstrip("\n")
    return f"{introduction}\n\n{option_tables(GPTConfig)}"


def programs_page(page: str, programs: dict[str, type]) -> str:
    """Return the page with the tables of some programs' options."""
    for name, options_class in programs.items():
        start_marker, end_marker = f"<!-- options of {name} -->", "<!-- end of options -->"
        text_before, _, rest = page.partition(start_marker)
        _, _, text_after = rest.partition(end_marker)
        # Help texts name tokens such as <s>, which are not HTML.
        tables = option_tables(options_class).replace("<", "&lt;")
        tables = re.sub(r"^## (.*)", r"**\1**", tables, flags=re.MULTILINE)
        page = f"{text_before}{start_marker}\n\n{tables}\n{end_marker}{text_after}"
    return page


def package_folders(root: Path = PACKAGE) -> Iterator[Path]:
    """Yield a folder of the package and all folders in it, in the order of their names."""
    yield root
    yield from sorted(path.parent for path in root.rglob("*/__init__.py"))


def docstring_summary(path: Path) -> str:
    """Return the first paragraph of a module's docstring in one line."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.split("\n\n")[0].split())


def api_page(title: str, folders: list[Path]) -> str:
    """Return a page on which mkdocstrings describes the modules of some folders.

    Modules that only declare options are not included: configuration.md and cli.md list them.
    """
    lines = [f"# {title}", ""]
    for folder in folders:
        modules = [
            path
            for path in sorted(folder.glob("*.py"))
            if path.name[0] != "_" and path.stem not in ("options", "config")
        ]
        if modules:
            lines += [docstring_summary(folder / "__init__.py"), ""] if len(folders) == 1 else []
            lines += [f"## {folder.relative_to(PACKAGE.parent)}", ""] if len(folders) > 1 else []
        for path in modules:
            module_name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
            lines += [f"::: {module_name}", ""]
    return "\n".join(lines)


def api_pages() -> dict[Path, str]:
    """Return the pages of the API reference: the errors, and a page for each package."""
    pages = {"errors.md": api_page("llm", [PACKAGE])}
    for init in sorted(PACKAGE.glob("*/__init__.py")):
        folder = init.parent
        pages[f"{folder.name}.md"] = api_page(f"llm.{folder.name}", list(package_folders(folder)))
    return {DOCS / "api" / name: page for name, page in pages.items()}


def architecture_page(page: str) -> str:
    """Return the page with an up-to-date table of packages."""
    lines = ["", "| Package | Content |", "|---|---|"]
    for folder in package_folders():
        name = f"{folder.relative_to(PACKAGE.parent)}/"
        lines.append(f"| `{name}` | {docstring_summary(folder / '__init__.py')} |")
    start_marker, end_marker = "<!-- packages -->", "<!-- end of packages -->"
    text_before, _, rest = page.partition(start_marker)
    _, _, text_after = rest.partition(end_marker)
    table = "\n".join(lines)
    return f"{text_before}{start_marker}\n{table}\n\n{end_marker}{text_after}"


def benchmarks_page(page: str) -> str:
    """Return the page with the table of what ran where, from benchmarks/results/what_ran.json."""
    rows = json.loads(WHAT_RAN.read_text(encoding="utf-8"))
    lines: list[str] = []
    group = ""
    for row in rows:
        if row["group"] != group:
            group = row["group"]
            header = f"| {group} | CPU | made-up GPU | one GPU | several GPUs |"
            lines += ["", header, "|---|---|---|---|---|"]
        cells = [row["what"], *(row[name] for name in ("cpu", "made_up", "gpu", "gpus"))]
        lines.append(f"| {' | '.join(cells)} |")
    start_marker, end_marker = "<!-- what ran where -->", "<!-- end of what ran where -->"
    text_before, _, rest = page.partition(start_marker)
    _, _, text_after = rest.partition(end_marker)
    tables = "\n".join(lines)
    return f"{text_before}{start_marker}\n{tables}\n\n{end_marker}{text_after}"


def notebook_page(page: str) -> str:
    """Return the cells and outputs of the notebook as a page, instead of the given one."""
    notebook = json.loads((DOCS / "tutorials" / "python.ipynb").read_text(encoding="utf-8"))
    blocks = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            blocks.append(source)
            continue
        blocks.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "text/html" in data:
                blocks.append("".join(data["text/html"]))
            else:
                text = "".join(output.get("text", data.get("text/plain", ""))).rstrip("\n")
                blocks.append(f"```text\n{text}\n```")
    blocks.append("This page is a notebook: [python.ipynb](python.ipynb).")
    return "\n\n".join(blocks) + "\n"


def pages() -> dict[Path, str]:
    """Return every page with generated parts, up to date."""
    update_by_page = {
        "configuration.md": configuration_page,
        "architecture.md": architecture_page,
        "benchmarks.md": benchmarks_page,
        "tutorials/notebook.md": notebook_page,
        **{
            name: partial(programs_page, programs=programs)
            for name, programs in PROGRAM_PAGES.items()
        },
    }
    updated_pages = {
        DOCS / name: update((DOCS / name).read_text(encoding="utf-8"))
        for name, update in update_by_page.items()
    }
    return updated_pages | api_pages()


def main() -> None:
    """Write all pages."""
    for path, page in pages().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
