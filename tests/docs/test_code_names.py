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


def test_the_files_of_the_folders_that_readme_lists_exist():
    listing = (ROOT / "README.md").read_text(encoding="utf-8").split("```\nllm/trainers/gpt/")[1]
    lines = ("llm/trainers/gpt/" + listing.partition("```")[0]).splitlines()
    folder, missing, num_files = ROOT, [], 0
    for line in lines[:-1]:  # the last one is about files of most folders
        folder = ROOT / line.split()[0] if line.startswith("llm/") else folder
        files = re.findall(r"[\w/]+\.(?:py|toml)", line.removeprefix(folder.name))
        num_files += len(files)
        missing += [f"{folder.name}/{file}" for file in files if not (folder / file).exists()]
    assert num_files > 10
    assert missing == []
