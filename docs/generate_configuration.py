"""Writes the tables of options in docs/ from the code: `make configuration-page`.

configuration.md is all tables below its introduction; data-tools.md has a table for each program
between two comments that name its module.
"""

import re
from pathlib import Path

from llm.config import GPTConfig
from llm.data.inspect import InspectOptions
from llm.data.prepare import PrepareConfig
from llm.data.train_tokenizer import TrainTokenizerOptions
from llm.options import to_markdown

DOCS = Path(__file__).parent
PROGRAMS = (TrainTokenizerOptions, PrepareConfig, InspectOptions)


def configuration_page(page: str) -> str:
    """The page with the tables of the trainer's options."""
    introduction = page.partition("\n## ")[0].rstrip("\n")
    return f"{introduction}\n\n{to_markdown(GPTConfig)}"


def tools_page(page: str) -> str:
    """The page with the tables of the data programs' options, a word in bold above each."""
    for program in PROGRAMS:
        begin, end = f"<!-- options of {program.__module__} -->", "<!-- end of options -->"
        before, _, rest = page.partition(begin)
        after = rest.partition(end)[2]
        # Help texts name tokens such as <s>, which are no HTML.
        tables = to_markdown(program).replace("<", "&lt;")
        tables = re.sub(r"^## (.*)", r"**\1**", tables, flags=re.MULTILINE)
        page = f"{before}{begin}\n\n{tables}\n{end}{after}"
    return page


def main() -> None:
    """Write both pages."""
    for name, written in (
        ("configuration.md", configuration_page),
        ("data-tools.md", tools_page),
    ):
        path = DOCS / name
        path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
