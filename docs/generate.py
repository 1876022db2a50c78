"""Write the parts of docs/ that are generated from the code: `make pages`.

configuration.md: the trainer's options, all below the page's introduction. data-tools.md, cli.md:
a table for each program, between two comments that name it. architecture.md: every package
and the first paragraph of its docstring, between two comments. api/: a page for each package.
"""

import ast
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from llm.config.options import fields, format_default
from llm.prepare.options import PrepareConfig
from llm.prepare.train_tokenizer import TrainTokenizerOptions
from llm.tools.checkpoints import CheckpointsOptions
from llm.tools.fetch import FetchOptions
from llm.tools.generate import GenerateOptions
from llm.tools.inspect import InspectOptions
from llm.tools.jobs.options import JobOptions
from llm.tools.preflight import PreflightOptions
from llm.tools.report.report import ReportOptions
from llm.trainers.gpt.extensions import GPTConfig

DOCS = Path(__file__).parent
PACKAGE = DOCS.parent / "llm"
PAGES = {
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
        "jobs": JobOptions,
        "fetch": FetchOptions,
    },
}


def to_markdown(cls: type) -> str:
    """Describe every option, in one Markdown table per group."""
    lines: list[str] = []
    group = ""
    for field in fields(cls):
        if field.option.group != group:
            group = field.option.group
            lines += ["", f"## {group}", "", "| Option | Default | Meaning |", "|---|---|---|"]
        names = ", ".join(f"`{name}`" for name in field.names)
        default = "" if field.default in (None, (), "") else f"`{format_default(field.default)}`"
        text = field.option.help.replace("|", "\\|")
        if field.choices and field.members == (str,):
            text += " One of " + ", ".join(f"`{choice}`" for choice in field.choices) + "."
        needs = [need.replace("=", " ") for need in field.option.requires]
        if needs and not set(needs[0].split()[-1:]) & set(re.findall(r"[\w-]+", text)):
            text += " Needs " + " or ".join(f"`{need}`" for need in needs) + "."
        if field.option.resume in ("state", "fixed"):
            text += " *Fixed.*"
        if field.option.one_shot:
            text += " *Not recorded.*"
        lines.append(f"| {names} | {default} | {text} |")
    return "\n".join(lines).lstrip("\n") + "\n"


def configuration_page(page: str) -> str:
    """Return the page with the tables of the trainer's options."""
    introduction = page.partition("\n## ")[0].rstrip("\n")
    return f"{introduction}\n\n{to_markdown(GPTConfig)}"


def programs_page(page: str, programs: dict[str, type]) -> str:
    """Return the page with the tables of some programs' options."""
    for name, program in programs.items():
        begin, end = f"<!-- options of {name} -->", "<!-- end of options -->"
        before, _, rest = page.partition(begin)
        after = rest.partition(end)[2]
        # Help texts name tokens such as <s>, which are no HTML.
        tables = to_markdown(program).replace("<", "&lt;")
        tables = re.sub(r"^## (.*)", r"**\1**", tables, flags=re.MULTILINE)
        page = f"{before}{begin}\n\n{tables}\n{end}{after}"
    return page


def packages(root: Path = PACKAGE) -> Iterator[Path]:
    """Yield a folder of the package and all folders in it, in the order of their names."""
    yield root
    yield from sorted(path.parent for path in root.rglob("*/__init__.py"))


def summary_of(path: Path) -> str:
    """Return the first paragraph of a module's docstring in one line."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.split("\n\n")[0].split())


def api_page(title: str, folders: list[Path]) -> str:
    """Return a page on which mkdocstrings describes the modules of some folders.

    Modules that only declare options are left out: configuration.md and cli.md list those.
    """
    lines = [f"# {title}", ""]
    for folder in folders:
        modules = [
            path
            for path in sorted(folder.glob("*.py"))
            if path.name[0] != "_" and path.stem not in ("options", "config")
        ]
        if modules:
            lines += [summary_of(folder / "__init__.py"), ""] if len(folders) == 1 else []
            lines += [f"## {folder.relative_to(PACKAGE.parent)}", ""] if len(folders) > 1 else []
        for path in modules:
            dotted = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
            lines += [f"::: {dotted}", ""]
    return "\n".join(lines)


def api_pages() -> dict[Path, str]:
    """Return the pages of the API reference: the errors, and a page for each package."""
    pages = {"errors.md": api_page("llm", [PACKAGE])}
    for init in sorted(PACKAGE.glob("*/__init__.py")):
        folder = init.parent
        pages[f"{folder.name}.md"] = api_page(f"llm.{folder.name}", list(packages(folder)))
    return {DOCS / "api" / name: page for name, page in pages.items()}


def architecture_page(page: str) -> str:
    """Return the page with its list of packages."""
    lines = ["", "| Package | Content |", "|---|---|"]
    for folder in packages():
        name = f"{folder.relative_to(PACKAGE.parent)}/"
        lines.append(f"| `{name}` | {summary_of(folder / '__init__.py')} |")
    before, begin, rest = page.partition("<!-- packages -->")
    after = rest.partition("<!-- end of packages -->")[2]
    return f"{before}{begin}\n" + "\n".join(lines) + f"\n\n<!-- end of packages -->{after}"


def pages() -> dict[Path, str]:
    """Return every page with generated parts, up to date."""
    made = {
        "configuration.md": configuration_page,
        "architecture.md": architecture_page,
        **{name: partial(programs_page, programs=programs) for name, programs in PAGES.items()},
    }
    filled = {
        DOCS / name: make((DOCS / name).read_text(encoding="utf-8")) for name, make in made.items()
    }
    return filled | api_pages()


def main() -> None:
    """Write all pages."""
    for path, page in pages().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
