"""The names of code on the pages for developers exist in the code."""

import re

import pytest

from tests.support.package import ROOT

WORDS = {
    word
    for folder in ("llm", "docs", "tests")
    for path in (ROOT / folder).rglob("*.py")
    for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))
}


@pytest.mark.parametrize(
    ("page", "end"),
    [("CONTRIBUTING.md", "## Style"), ("docs/architecture.md", None), ("docs/extend.md", None)],
)
def test_the_functions_and_constants_that_a_page_names_exist(page, end):
    text = (ROOT / page).read_text(encoding="utf-8").partition(end or "\0")[0]
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    names = re.findall(r"`([A-Za-z_][A-Za-z_.]*)(?:\(\))?`", prose)
    assert len(names) > 30
    code_names = [name for name in names if not re.search(r"\.(py|md|toml|sh|yml)$", name)]
    assert [name for name in code_names if not WORDS.issuperset(name.split("."))] == []
