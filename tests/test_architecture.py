"""Keeps docs/architecture.md true: layers, imports, names, sizes, ways through the files."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.package import (
    LAYERS,
    MODULES,
    ROOT,
    USES,
    imports_of,
    name_of,
    tree_of,
)


def package_of(name: str) -> str:
    return name.partition(".")[0]


def layer_of(name: str) -> int:
    return next(number for number, packages in enumerate(LAYERS) if package_of(name) in packages)


def test_every_folder_and_program_has_a_layer():
    packages = {package_of(name_of(path)) for path in MODULES if name_of(path)}
    assert packages == set().union(*LAYERS)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_imports_only_lower_layers_and_its_own_package(path):
    name = name_of(path)
    if name in ("", "trainers.gpt.extensions"):
        return  # the functions of the package; the list of the extensions
    for imported in imports_of(path):
        lower = layer_of(imported) < layer_of(name)
        assert lower or package_of(imported) == package_of(name), (
            f"llm.{name} imports llm.{imported}"
        )


def test_a_run_imports_neither_prepare_nor_tools():
    """What a run loads stands on one side of a wall, and the programs on the other side."""
    behind = ("prepare", "tools")
    names = {
        "__main__",  # names the programs
        "data.text_to_tokens",  # starts the preparation of a text in another process
    }
    for path in MODULES:
        name = name_of(path)
        if package_of(name) in behind or name == "":
            continue
        assert not [each for each in imports_of(path) if package_of(each) in behind], name
        named = re.search(r"llm\.(prepare|tools)\b", path.read_text(encoding="utf-8"))
        assert named is None or name in names, f"llm.{name} names {named[0]}"


def commands_of(path: Path) -> list[str]:
    """The calls that start a program of `llm` in another process, such as `python -m llm plan`."""
    program = re.compile(r"'-m', 'llm'|-m llm |'llm-trainers'|llm\.__main__")
    calls = (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.List | ast.Tuple))
    return [text for text in map(ast.unparse, calls) if program.search(text)]


def test_a_run_starts_no_program_in_a_subprocess():
    """Programs of `prepare` and `tools` are behind the wall, also as commands."""
    for path in MODULES:
        if package_of(name_of(path)) in ("prepare", "tools", "__main__"):
            continue
        if "subprocess" in path.read_text(encoding="utf-8"):  # else a reader of the log starts it
            assert not commands_of(path), f"llm.{name_of(path)} starts {commands_of(path)}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_an_extension_is_named_by_its_own_files_and_the_list_only(path):
    name = name_of(path)
    if name == "trainers.gpt.extensions":
        return
    own = name.split(".")[1:2]
    allowed = {*own, *(used for each in own for used in USES.get(each, ()))}
    for imported in imports_of(path):
        if imported.startswith("extensions."):
            assert imported.split(".")[1] in allowed, f"llm.{name} imports llm.{imported}"


def test_no_modules_import_one_another_in_a_circle():
    graph = {name_of(path): imports_of(path) for path in MODULES}
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join([*above, name])
        if name not in done:  # otherwise every path through the graph would be followed
            for imported in graph[name]:
                visit(imported, (*above, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_no_two_files_have_one_name():
    by_design = {"__init__", "__main__", "options"}
    names = Counter(path.stem for path in MODULES if path.stem not in by_design)
    assert {name for name, number in names.items() if number > 1} == set()


def test_at_most_five_files_read_the_learning_rate():
    def reads(node: ast.AST) -> bool:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            return node.target.id == "learning_rate"
        return isinstance(node, ast.Attribute) and node.attr == "learning_rate"

    trees = {name_of(path): tree_of(path) for path in MODULES}
    files = [name for name, tree in trees.items() if any(map(reads, ast.walk(tree)))]
    assert "optim.options" in files
    assert len(files) <= 5, files


def list_option_classes() -> dict[str, str]:
    """The dataclasses whose fields are options, and the modules that declare them."""
    classes = {
        node.name: (name_of(path), node)
        for path in MODULES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef)
    }

    def declares(name: str) -> bool:
        if name not in classes:
            return False
        node = classes[name][1]
        calls = (n.func for n in ast.walk(node) if isinstance(n, ast.Call))
        bases = (base.id for base in node.bases if isinstance(base, ast.Name))
        return any(getattr(f, "id", "") == "option" for f in calls) or any(map(declares, bases))

    return {name: module for name, (module, _) in classes.items() if declares(name)}


def parameters_of(path: Path) -> Iterator[tuple[str, ast.arg]]:
    """The parameters of a module's functions, and the names of their functions."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef):
            for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
                yield node.name, arg


def test_a_package_takes_its_own_options_or_those_of_lower_layers():
    declared = list_option_classes()
    assert {"GPTConfig", "DataOptions", "KFACSettings", "GenerateOptions"} <= declared.keys()
    for path in MODULES:
        name = name_of(path)
        for function, arg in parameters_of(path):
            hint = "" if arg.annotation is None else ast.unparse(arg.annotation)
            for module in (declared[word] for word in re.findall(r"\w+", hint) if word in declared):
                own = package_of(module) == package_of(name) or layer_of(module) < layer_of(name)
                assert own, f"{name}.{function} takes {hint} of {module}"
            # Without a type they could be anybody's; llm/config handles those of every program.
            if arg.arg == "options" and package_of(name) != "config":
                assert hint not in ("", "Any", "object"), f"{name}.{function} has untyped options"


def test_files_have_at_most_600_lines():
    lines = {name_of(path): path.read_text(encoding="utf-8").count("\n") for path in MODULES}
    assert [name for name, number in lines.items() if number > 600] == []


def test_nothing_is_printed_past_the_log():
    for path in MODULES:
        for node in ast.walk(tree_of(path)):
            is_print = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"
            assert not is_print, f"{name_of(path)}:{node.lineno} prints"


def test_what_several_test_modules_use_lies_in_tests_support():
    for path in (ROOT / "tests").rglob("*.py"):
        imported = re.findall(r"^from tests\.(\S+) import", path.read_text(), re.MULTILINE)
        assert not any(name.rpartition(".")[2].startswith("test_") for name in imported), path


def test_names_of_tests_have_at_most_70_characters():
    names = [
        node.name
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert [name for name in names if len(name) > 70] == []
