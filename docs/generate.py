"""Write the parts of docs/ that are generated from the code: `make pages`.

configuration.md: the trainer's options, all below the page's introduction. data-tools.md, cli.md:
a table for each program, between two comments that name its module. api.md: every module, below
the introduction. architecture.md: every module and the first paragraph of its docstring, between
two comments.
"""

import ast
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from llm.checkpoints import CheckpointsOptions
from llm.config.options import to_markdown
from llm.data.inspect import InspectOptions
from llm.data.prepare import PrepareConfig
from llm.data.train_tokenizer import TrainTokenizerOptions
from llm.fetch import FetchOptions
from llm.generate import GenerateOptions
from llm.jobs.options import JobOptions
from llm.parallel.topology import TopologyOptions
from llm.preflight import PreflightOptions
from llm.report.__main__ import ReportOptions
from llm.trainers.gpt.extensions import GPTConfig

DOCS = Path(__file__).parent
PACKAGE = DOCS.parent / "llm"
PAGES = {
    "data-tools.md": (TrainTokenizerOptions, PrepareConfig, InspectOptions),
    "cli.md": (
        CheckpointsOptions,
        ReportOptions,
        GenerateOptions,
        PreflightOptions,
        JobOptions,
        FetchOptions,
        TopologyOptions,
    ),
}


def configuration_page(page: str) -> str:
    """Return the page with the tables of the trainer's options."""
    introduction = page.partition("\n## ")[0].rstrip("\n")
    return f"{introduction}\n\n{to_markdown(GPTConfig)}"


def programs_page(page: str, programs: tuple[type, ...]) -> str:
    """Return the page with the tables of some programs' options."""
    for program in programs:
        name = program.__module__.removesuffix(".__main__").removesuffix(".options")
        begin, end = f"<!-- options of {name} -->", "<!-- end of options -->"
        before, _, rest = page.partition(begin)
        after = rest.partition(end)[2]
        # Help texts name tokens such as <s>, which are no HTML.
        tables = to_markdown(program).replace("<", "&lt;")
        tables = re.sub(r"^## (.*)", r"**\1**", tables, flags=re.MULTILINE)
        page = f"{before}{begin}\n\n{tables}\n{end}{after}"
    return page


def rooms() -> Iterator[tuple[Path, list[Path]]]:
    """Yield each folder of the package, the root first, and its modules."""
    for folder in [PACKAGE, *sorted(path.parent for path in PACKAGE.rglob("*/__init__.py"))]:
        yield folder, [path for path in sorted(folder.glob("*.py")) if path.name[0] != "_"]


def summary_of(path: Path) -> str:
    """Return the first paragraph of a module's docstring in one line."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.split("\n\n")[0].split())


def api_page(page: str) -> str:
    """Return the page by which mkdocstrings describes every module, with a heading a folder."""
    lines = [page.partition("\n## ")[0].rstrip("\n"), ""]
    for folder, modules in rooms():
        if modules:
            lines += [f"## {folder.relative_to(PACKAGE.parent)}", ""]
        for path in modules:
            dotted = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
            lines += [f"::: {dotted}", ""]
    return "\n".join(lines)


def architecture_page(page: str) -> str:
    """Return the page with its list of files."""
    lines = []
    for folder, modules in rooms():
        name = f"{folder.relative_to(PACKAGE.parent)}/"
        lines += ["", f"**`{name}`** {summary_of(folder / '__init__.py')}", ""]
        lines += ["| File | Its job |", "|---|---|"] if modules else []
        lines += [
            f"| `{path.name}` | {summary_of(path)} |".replace("<", "&lt;") for path in modules
        ]
    before, begin, rest = page.partition("<!-- files -->")
    after = rest.partition("<!-- end of files -->")[2]
    return f"{before}{begin}\n" + "\n".join(lines) + f"\n\n<!-- end of files -->{after}"


def pages() -> dict[Path, str]:
    """Return every page with generated parts, up to date."""
    made = {
        "configuration.md": configuration_page,
        "api.md": api_page,
        "architecture.md": architecture_page,
        **{name: partial(programs_page, programs=programs) for name, programs in PAGES.items()},
    }
    return {
        DOCS / name: make((DOCS / name).read_text(encoding="utf-8")) for name, make in made.items()
    }


def main() -> None:
    """Write all pages."""
    for path, page in pages().items():
        path.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
