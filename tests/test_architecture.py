"""Keeps docs/architecture.md true: floors, imports, sizes."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "llm"
MODULES = sorted(PACKAGE.rglob("*.py"))

# From the ground up. A module imports lower floors, or its own room (folder) on its own floor.
FLOORS = [
    {
        "errors",
        "",
        "trainers",
        "trainers.gpt",
        "data",
        "models",
        "optim",
        "optim.kfac",
        "parallel",
        "report",
        "jobs",
        "plan",
    },
    {"options", "events", "files", "allocator", "launcher"},
    {"toml"},
    {"command_line", "config"},
    {"layout_rules"},
    {"rules"},
    {"runtime", "state", "sentencepiece_model", "strategy", "health"},
    {"tokenizer"},
    {"text_tokenizer"},
    {
        "data.*",
        "models.*",
        "optim.*",
        "optim.kfac.*",
        "parallel.*",
        "checkpoint",
        "device_peak",
        "evaluation",
        "next_token_accuracy",
        "profiling",
        "run_folder",
        "tracking",
    },
    {"report.*"},
    {"checkpoint_folder", "snapshot"},
    {"saving"},
    {"trainers.gpt.loop"},
    {"trainers.gpt.corpora", "trainers.gpt.start", "trainers.gpt.kfac", "trainers.gpt.replicas"},
    {"trainers.gpt.inputs"},
    {"trainers.gpt.publish", "trainers.gpt.reporting"},
    {"trainers.gpt.build"},
    {"trainers.gpt.results", "trainers.gpt.trained_model"},
    {"trainers.gpt.main"},
    {
        "trainers.gpt.__main__",
        "checkpoints",
        "generate",
        "jobs.*",
        "plan.*",
        "preflight",
        "report.__main__",
        "data.prepare",
        "data.inspect",
        "data.train_tokenizer",
    },
]

READ_CONFIG = {
    "plan.options",
    "layout_rules",
    "rules",
    "trainers.gpt.corpora",
    "trainers.gpt.start",
    "trainers.gpt.replicas",
    "trainers.gpt.inputs",
    "trainers.gpt.kfac",
    "trainers.gpt.build",
    "trainers.gpt.publish",
    "trainers.gpt.reporting",
    "trainers.gpt.results",
    "trainers.gpt.main",
    "trainers.gpt.trained_model",
}

# A table of options grows by a row with every option.
LONG = {"config"}


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def floor_of(name: str) -> int:
    room = f"{name.rpartition('.')[0]}.*"
    # A program lies in its room's folder, and stands above all rooms.
    for wanted in (name, room):
        for number, names in enumerate(FLOORS):
            if wanted in names:
                return number
    raise AssertionError(f"llm.{name} stands on no floor; give it one in this test")


def imports_of(path: Path) -> set[str]:
    """Modules of this package that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    known = {f"llm.{name_of(module)}".rstrip(".") for module in MODULES}
    return {name.removeprefix("llm").lstrip(".") for name in found & known} - {""}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_imports_only_lower_floors_and_its_own_room(path):
    name = name_of(path)
    for imported in imports_of(path):
        same_room = "." in name and name.rpartition(".")[0] == imported.rpartition(".")[0]
        lower = floor_of(imported) < floor_of(name)
        assert lower or (same_room and floor_of(imported) == floor_of(name)), (
            f"llm.{name} imports llm.{imported}"
        )


def test_no_modules_import_one_another_in_a_circle():
    graph = {name_of(path): imports_of(path) for path in MODULES}

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join([*above, name])
        for imported in graph[name]:
            visit(imported, (*above, name))

    for name in graph:
        visit(name, ())


def test_only_the_trainer_and_the_rules_read_the_configuration():
    readers = {name_of(path) for path in MODULES if "config" in imports_of(path)}
    assert readers == READ_CONFIG


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_files_stay_under_350_lines_and_functions_under_60(path):
    source = path.read_text(encoding="utf-8")
    if name_of(path) not in LONG:
        assert source.count("\n") <= 350
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            first = node.body[0]
            documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            begins = first.end_lineno if documented else node.lineno
            assert node.end_lineno - begins < 60, f"{node.name} is too long"


def test_nothing_is_printed_past_the_log():
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_print = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"
            assert not is_print, f"{name_of(path)}:{node.lineno} prints"
