"""Writes the tables of docs/configuration.md from GPTConfig: `make configuration-page`."""

from pathlib import Path

from llm.config import GPTConfig
from llm.options import to_markdown

page = Path(__file__).with_name("configuration.md")
introduction = page.read_text(encoding="utf-8").partition("\n## ")[0].rstrip("\n")
page.write_text(f"{introduction}\n\n{to_markdown(GPTConfig)}", encoding="utf-8")
