"""Keeps docs/architecture.md true: floors, imports, sizes."""

import ast
import re

import pytest

from tests.support.package import FLOORS, MODULES, PROGRAMS, ROOT, imports_of, name_of


def room_of(name: str) -> str:
    return name if name in PROGRAMS else name.partition(".")[0]


def floor_of(name: str) -> int:
    if name in PROGRAMS:
        return len(FLOORS) - 1
    return next(number for number, rooms in enumerate(FLOORS) if room_of(name) in rooms)


def test_every_folder_and_program_has_a_floor():
    rooms = {room_of(name_of(path)) for path in MODULES if name_of(path)} - PROGRAMS
    assert rooms == set().union(*FLOORS)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_imports_only_lower_floors_and_its_own_room(path):
    name = name_of(path)
    for imported in imports_of(path):
        lower = floor_of(imported) < floor_of(name)
        assert lower or room_of(imported) == room_of(name), f"llm.{name} imports llm.{imported}"


def test_no_modules_import_one_another_in_a_circle():
    graph = {name_of(path): imports_of(path) for path in MODULES}

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join([*above, name])
        for imported in graph[name]:
            visit(imported, (*above, name))

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_files_stay_under_350_lines_and_functions_under_60(path):
    source = path.read_text(encoding="utf-8")
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


def test_what_several_test_modules_use_lies_in_tests_support():
    for path in (ROOT / "tests").rglob("*.py"):
        imported = re.findall(r"^from tests\.(\S+) import", path.read_text(), re.MULTILINE)
        assert not any(name.rpartition(".")[2].startswith("test_") for name in imported), path
