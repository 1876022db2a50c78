"""Prints the lowest version of each dependency in pyproject.toml, as constraints for pip."""

import re
import tomllib
from pathlib import Path


def lowest_versions() -> list[str]:
    """One `name==version` for each requirement `name>=version`, extras included.

    Package indexes have the release, not the builds before it (`.0a0`).
    """
    path = Path(__file__).parent.parent.parent / "pyproject.toml"
    project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    requirements = sum(project["optional-dependencies"].values(), project["dependencies"])
    bounds = [
        re.fullmatch(r"([\w-]+)(?:\[[\w,]+\])?>=([\d.]+?)(?:\.0a0)?(?:;.*)?", each)
        for each in requirements
    ]
    return [f"{bound[1]}=={bound[2]}" for bound in bounds if bound]


if __name__ == "__main__":
    print("\n".join(lowest_versions()))
