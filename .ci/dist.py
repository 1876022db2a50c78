"""Build a wheel and an sdist into dist/ that a package index accepts: `make dist`.

An index refuses requirements with a URL, and its pages resolve no relative links. So the release is
built from the unpacked sdist of this tree, in which pyproject.toml has no extra `kfac`, and
README.md links to the project's public address (`repo_url` in mkdocs.yml) or, if it is not set, has
no relative links and pictures.
"""

import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def address(mkdocs: str) -> str:
    """Return the project's public address without a slash at its end, or "".

    It is the variable REPO_URL of the environment, or else its default in mkdocs.yml.
    """
    found = re.search(r'^repo_url: !ENV \[REPO_URL, "(.*)"\]$', mkdocs, flags=re.MULTILINE)
    return os.environ.get("REPO_URL", found[1] if found else "").rstrip("/")


def release_readme(readme: str, repository: str, version: str) -> str:
    """Return README.md for a page on which relative links do not work.

    Args:
        readme: The content of README.md.
        repository: The project's public address, or "".
        version: The version, which has a tag in the repository.
    """
    relative = r"\[([^\]]*)\]\((?!https?://)([^)\s]+)\)"
    readme = runpy.run_path(str(ROOT / "docs" / "hooks.py"))["with_address"](readme, repository)
    if repository:
        tag = f"v{version}"
        readme = re.sub(r'(src|srcset)="(docs/)', rf'\1="{repository}/raw/{tag}/\2', readme)
        readme = re.sub(rf"!{relative}", rf"![\1]({repository}/raw/{tag}/\2)", readme)
        return re.sub(relative, rf"[\1]({repository}/blob/{tag}/\2)", readme)
    # A picture, and the paragraph after it, which is its caption.
    readme = re.sub(r"^<picture>.*?\n\n.*?\n\n", "", readme, flags=re.MULTILINE | re.DOTALL)
    readme = re.sub(rf"^!{relative}\n\n.*?\n\n", "", readme, flags=re.MULTILINE | re.DOTALL)
    return re.sub(relative, r"\1", readme)


def release_pyproject(pyproject: str, repository: str) -> str:
    """Return pyproject.toml without requirements that have a URL, and with the address."""
    pyproject, removed = re.subn(r"^kfac = \[.*@.*\]\n", "", pyproject, flags=re.MULTILINE)
    if removed != 1:
        raise SystemExit("pyproject.toml has no line for the extra kfac; change .ci/dist.py too.")
    urls = f'[project.urls]\nRepository = "{repository}"\n\n' if repository else ""
    return pyproject.replace("[project.scripts]", f"{urls}[project.scripts]", 1)


def main() -> None:
    """Build dist/ and check it."""
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        _build("--sdist", ROOT, Path(folder))
        [archive] = Path(folder).glob("*.tar.gz")
        with tarfile.open(archive) as file:
            file.extractall(folder, filter="data")
        tree = Path(folder) / archive.name.removesuffix(".tar.gz")
        version = tree.name.rpartition("-")[2]
        repository = address((tree / "mkdocs.yml").read_text(encoding="utf-8"))
        readme, pyproject = tree / "README.md", tree / "pyproject.toml"
        readme.write_text(release_readme(readme.read_text("utf-8"), repository, version), "utf-8")
        pyproject.write_text(release_pyproject(pyproject.read_text("utf-8"), repository), "utf-8")
        _build(tree, dist)
    subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *sorted(map(str, dist.iterdir()))],
        check=True,
    )
    if not repository:
        sys.stdout.write("No REPO_URL, and none in mkdocs.yml: the README in dist/ has no links.\n")


def _build(*words: str | Path) -> None:
    """Run `python -m build`, quiet unless it fails; the last word is the folder to write to."""
    *arguments, target = map(str, words)
    command = [sys.executable, "-m", "build", "--outdir", target, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"{done.stdout}\nThe build failed.")


if __name__ == "__main__":
    main()
