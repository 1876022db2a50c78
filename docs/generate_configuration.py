"""Writes the tables of options in docs/ from the code: `make configuration-page`.

configuration.md is all tables below its introduction; data-tools.md and cli.md have a table for
each program between two comments that name its module.
"""

import re
from pathlib import Path

from llm.checkpoints import CheckpointOptions
from llm.config.options import to_markdown
from llm.data.inspect import InspectOptions
from llm.data.prepare.__main__ import PrepareConfig
from llm.data.train_tokenizer import TrainTokenizerOptions
from llm.generate import GenerateOptions
from llm.jobs.options import JobOptions
from llm.parallel.topology import TopologyOptions
from llm.preflight import PreflightOptions
from llm.report.__main__ import ReportOptions
from llm.trainers.gpt.config import GPTConfig

DOCS = Path(__file__).parent
PAGES = {
    "data-tools.md": (TrainTokenizerOptions, PrepareConfig, InspectOptions),
    "cli.md": (
        CheckpointOptions,
        ReportOptions,
        GenerateOptions,
        PreflightOptions,
        JobOptions,
        TopologyOptions,
    ),
}


def configuration_page(page: str) -> str:
    """The page with the tables of the trainer's options."""
    introduction = page.partition("\n## ")[0].rstrip("\n")
    return f"{introduction}\n\n{to_markdown(GPTConfig)}"


def programs_page(page: str, programs: tuple[type, ...]) -> str:
    """The page with the tables of some programs' options, a word in bold above each."""
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


def main() -> None:
    """Write all of them."""
    path = DOCS / "configuration.md"
    path.write_text(configuration_page(path.read_text(encoding="utf-8")), encoding="utf-8")
    for name, programs in PAGES.items():
        path = DOCS / name
        page = programs_page(path.read_text(encoding="utf-8"), programs)
        path.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
