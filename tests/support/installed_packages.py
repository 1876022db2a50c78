"""Packages with extensions: read from a page of the site, written, and installed into a folder."""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

from tests.support.package import ROOT

TUTORIAL = ROOT / "docs" / "extend.md"


def files_of_page(page: Path = TUTORIAL) -> dict[str, str]:
    """The files that a page shows, by path: its blocks with a title."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r'^```\w+ title="(.*?)"\n(.*?)^```', text, re.DOTALL | re.MULTILINE)
    return dict(blocks)


def write_files(files: Mapping[str, str], folder: Path) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def install(files: Mapping[str, str], site: Path) -> Path:
    """Install a package as `pip install --no-deps --target SITE` does, without a build or network.

    Args:
        files: The package: pyproject.toml, with a name, a version and entry points, and modules.
        site: The folder to install into.
    """
    project = tomllib.loads(files["pyproject.toml"])["project"]
    name, version = project["name"], project["version"]
    metadata = f"{name.replace('-', '_')}-{version}.dist-info"
    groups = "".join(
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in points.items())
        for group, points in project["entry-points"].items()
    )
    modules = {path: text for path, text in files.items() if path.endswith(".py")}
    written = {
        f"{metadata}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{metadata}/entry_points.txt": groups,
    }
    return write_files(modules | written, site)


def package_of_one_option(
    name: str,
    option: str,
    *,
    version: str = "1.0",
    heading: str = "Other",
    code: str = "",
    target: str | None = None,
) -> dict[str, str]:
    """A package with an extension of one option, and further code at the end of its module."""
    module = name.replace("-", "_")
    return {
        "pyproject.toml": f'[project]\nname = "{name}"\nversion = "{version}"\n'
        f'[project.entry-points."llm_trainers.extensions"]\nit = "{target or f"{module}:It"}"\n',
        f"{module}.py": f"""
from llm.config.options import option, option_group
from llm.trainers.gpt.config import CoreConfig
from llm.trainers.gpt.seams import Extension

@option_group("{heading}", extension=True)
class Options(CoreConfig):
    {option}: int = option(0, "A number.")

class It(Extension[Options]):
    pass

{code}
""",
    }
