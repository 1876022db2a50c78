"""Names are the field's nouns and verbs: counts of vague names, which may not grow."""

import ast
import re

from tests.support.package import MODULES, name_of, tree_of

_WORDS = """
its it those these each other others alike held left gone rest back own given found made kept laid
taken said told heard asked named there here now before after left_out words its_own theirs ours one
both several only most known again onward around inside whole mine where which such same got sent
seen begun last this that them read shown served made_of own_ is_first
"""
VAGUE = set(_WORDS.split())
"""Pronouns, participles and adverbs, which do not say what a variable holds."""


def assigned_names(tree: ast.Module) -> list[str]:
    """The names of variables, fields and arguments."""
    nodes = list(ast.walk(tree))
    stored = [n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    return stored + [node.arg for node in nodes if isinstance(node, ast.arg)]


def private_functions(tree: ast.Module) -> list[str]:
    functions = [n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    return [name for name in functions if name.startswith("_") and not name.startswith("__")]


def test_fewer_than_three_names_in_a_thousand_are_vague():
    by_module = {name_of(path): assigned_names(tree_of(path)) for path in MODULES}
    vague = [f"{m}: {name}" for m, names in by_module.items() for name in names if name in VAGUE]
    assert len(vague) < 0.003 * sum(map(len, by_module.values())), vague


def test_few_private_functions_have_a_name_of_one_word():
    functions = [
        (name_of(path), name) for path in MODULES for name in private_functions(tree_of(path))
    ]
    of_one_word = [f"{module}: {name}" for module, name in functions if "_" not in name.strip("_")]
    assert len(of_one_word) < 0.15 * len(functions), of_one_word


def documented_arguments(node: ast.FunctionDef | ast.ClassDef) -> set[str]:
    """The names in the section `Args:` of a docstring."""
    _, _, text = (ast.get_docstring(node) or "").partition("Args:\n")
    section = re.split(r"\n(?=\S)", text)[0]
    return set(re.findall(r"^ {4}\**(\w+):", section, flags=re.MULTILINE))


def arguments_of(function: ast.FunctionDef) -> set[str]:
    return {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}


def test_docstrings_document_arguments_by_their_names():
    unknown = []
    for path in MODULES:
        nodes = list(ast.walk(tree_of(path)))
        functions = [(node, node) for node in nodes if isinstance(node, ast.FunctionDef)]
        constructors = [
            (node, part)
            for node in nodes
            if isinstance(node, ast.ClassDef)
            for part in node.body
            if isinstance(part, ast.FunctionDef) and part.name == "__init__"
        ]
        for documented, function in (*functions, *constructors):
            names = documented_arguments(documented) - arguments_of(function)
            unknown += [f"{name_of(path)}: {documented.name} has no {name}" for name in names]
    assert not unknown
