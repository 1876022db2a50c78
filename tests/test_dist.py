"""What `make dist` changes for a package index, and files of the release that must agree."""

import re
import runpy
import shutil
import subprocess
import tomllib

import pytest
import yaml

from llm import __version__
from tests.support.package import PACKAGE, ROOT

DIST = runpy.run_path(str(ROOT / ".ci/dist.py"))
README = """
# Title

<!-- badges -->

![Two curves](docs/images/a.png)

Two curves, drawn by
a program.

<picture><source srcset="docs/images/dark.svg"><img src="docs/images/light.svg"></picture>

The same.

See the [guide](docs/guide.md#start) and [PyTorch](https://pytorch.org).
"""


@pytest.mark.parametrize(
    ("mkdocs", "address"),
    [
        ('site_name: x\nrepo_url: !ENV [REPO_URL, ""]\ntheme: y\n', ""),
        ('repo_url: !ENV [REPO_URL, "https://host.test/us/llm/"]\n', "https://host.test/us/llm"),
    ],
)
def test_the_address_is_the_one_of_the_documentations_settings(mkdocs, address, monkeypatch):
    monkeypatch.delenv("REPO_URL", raising=False)
    assert DIST["address"](mkdocs) == address
    monkeypatch.setenv("REPO_URL", "https://other.test/llm/")
    assert DIST["address"](mkdocs) == "https://other.test/llm"


def test_with_an_address_the_readme_links_to_the_files_of_its_version():
    readme = DIST["release_readme"](README, "https://host.test/llm", "0.2.0")
    badges, rest = readme.split("\n\n", maxsplit=2)[1:]
    assert badges.count("[![") == 3
    assert "(https://host.test/llm/releases)" in badges
    expected = README.partition("<!-- badges -->\n\n")[2]
    for start in ("(docs/images", '"docs/images'):
        expected = expected.replace(
            start, f"{start[0]}https://host.test/llm/raw/v0.2.0/docs/images"
        )
    assert rest == expected.replace("(docs/guide", "(https://host.test/llm/blob/v0.2.0/docs/guide")


def test_without_an_address_the_readme_has_no_relative_links_and_pictures():
    assert DIST["release_readme"](README, "", "0.2.0") == (
        "\n# Title\n\nSee the guide and [PyTorch](https://pytorch.org).\n"
    )


def test_only_a_readme_without_an_address_says_so():
    ours = (ROOT / "README.md").read_text("utf-8")

    without_address = DIST["release_readme"](ours, "", "0.2.0")
    with_address = DIST["release_readme"](ours, "https://host.test/llm", "0.2.0")

    assert "git clone URL" in without_address
    assert "has no public value yet" in without_address
    assert "git clone https://host.test/llm llm-trainers" in with_address
    assert "URL`" not in with_address


def test_our_readme_reads_well_without_the_repository():
    readme = DIST["release_readme"]((ROOT / "README.md").read_text("utf-8"), "", "0.2.0")

    assert not re.search(r"\]\((?!https://)|<picture>|badges", readme)
    assert "# llm-trainers" in readme
    assert "## Train your own" in readme


def test_a_release_requires_the_same_packages_except_those_with_a_url():
    ours = (ROOT / "pyproject.toml").read_text("utf-8")
    released = tomllib.loads(DIST["release_pyproject"](ours, "https://host.test/llm"))["project"]
    project = tomllib.loads(ours)["project"]

    [kfac] = project["optional-dependencies"].pop("kfac")
    assert kfac == "kfac-pytorch @ git+https://github.com/gpauloski/kfac-pytorch"
    assert released.pop("urls") == {"Repository": "https://host.test/llm"}
    assert released == project
    assert " @ " not in str(released)


def test_the_wheel_contains_every_file_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["llm"]
    shipped = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    data = {path for path in PACKAGE.rglob("*.*") if path.suffix not in (".py", ".pyc")}
    assert PACKAGE / "trainers/gpt/presets/pretrain.toml" in shipped
    assert data == shipped


def test_the_citation_has_the_version_of_the_package():
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\nversion: {__version__}\n" in citation


def test_both_container_recipes_install_the_same_on_the_same_image():
    container = (ROOT / "Containerfile").read_text("utf-8")
    apptainer = (ROOT / "apptainer.def").read_text("utf-8")

    copied = re.findall(r"^COPY (.*) /opt/llm-trainers/\S*$", container, re.MULTILINE)
    listed = re.findall(r"^    (\S+) /opt/llm-trainers/\1$", apptainer, re.MULTILINE)
    assert " ".join(copied).split() == listed
    assert all((ROOT / name).exists() for name in listed)
    shared = r"BASE=(\S+:\S+-runtime)|(python -c [^\\\n]*torch\.txt)|(-c /opt/\S+torch\.txt \S+)"
    assert re.findall(shared, container) == re.findall(shared, apptainer)
    assert len(re.findall(shared, container)) == 3


def workflow_of(name):
    """A workflow, and the steps of all its jobs."""
    workflow = yaml.safe_load((ROOT / ".github/workflows" / name).read_text("utf-8"))
    return workflow, [step for job in workflow["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("name", ["ci.yml", "release.yml"])
def test_workflows_pin_every_action_by_its_commit(name):
    _, steps = workflow_of(name)
    actions = [step["uses"] for step in steps if "uses" in step]
    assert actions
    assert [action for action in actions if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action)] == []


def test_a_maintainer_starts_the_release_of_wheel_site_and_container():
    workflow, steps = workflow_of("release.yml")
    assert workflow[True] == "workflow_dispatch"  # YAML reads the key `on` as a boolean
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["jobs"].keys() == {"build", "container", "wheel", "site", "notes"}
    assert {"run": "make dist docs"} in steps


@pytest.mark.parametrize(("tag", "exit_code"), [(f"v{__version__}", 0), ("v0.0.9", 1)])
def test_the_release_needs_the_tag_of_the_version_and_its_notes(tag, exit_code, tmp_path):
    _, steps = workflow_of("release.yml")
    [script] = [step["run"] for step in steps if "tag" in step.get("name", "")]
    (tmp_path / "llm").mkdir()
    shutil.copy(PACKAGE / "__init__.py", tmp_path / "llm")
    changelog = (
        f"# Changes\n\n## Unreleased\n\n- Next.\n\n## {__version__}\n\n- This.\n\n## 0.0.9\n"
    )
    (tmp_path / "CHANGELOG.md").write_text(changelog)

    done = subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=tmp_path,
        env={"GITHUB_REF_NAME": tag, "PATH": "/bin:/usr/bin"},
    )

    assert done.returncode == exit_code
    if exit_code == 0:
        assert (tmp_path / "notes/notes.md").read_text() == "\n- This.\n\n"
