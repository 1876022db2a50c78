"""The package's own modules, for tests that look at the code."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "llm"
MODULES = sorted(PACKAGE.rglob("*.py"))

# From the lowest. A module imports packages (folders) of lower layers, or its own package.
LAYERS = [
    {"errors"},
    {"config"},
    {"runtime", "tokenizers"},
    {"data", "models", "optim", "checkpoint", "metrics"},
    {"parallel"},
    {"trainers"},
    {"extensions"},
    {"prepare"},
    {"tools"},
    {"__main__"},
]

# The extensions that an extension may import: whoever deletes one of these deletes that first.
USES = {"custom_optim": ["matrix_optim"], "kfac": ["matrix_optim"]}


def name_of(path: Path) -> str:
    """The name of a module without the package's, such as `data.loader`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports_of(path: Path) -> set[str]:
    """Modules of this package that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    known = {f"llm.{name_of(module)}".rstrip(".") for module in MODULES}
    return {name.removeprefix("llm").lstrip(".") for name in found & known} - {""}
