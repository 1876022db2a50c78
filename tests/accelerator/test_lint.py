"""What code for several kinds of device, and for many ranks, must not do."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.support.package import MODULES, PACKAGE, name_of

ONLY_ON_CUDA = {
    "extensions.matrix_optim.eigenbases": "asks whether a GPU has TF32",
    "metrics.energy": "asks for the identifier of a GPU",
    "models.attention_kernels": "asks whether a GPU is a Hopper",
    "models.softmax_kernel": "asks for the multiprocessors and the cache of a GPU",
    "parallel.accelerator": "asks whether a GPU has fp8 and bf16",
    "tools.preflight": "names the GPU and the version of NCCL",
}
"""Modules outside of `runtime` that name `torch.cuda`, each behind a check of the device."""

SENDS_NOTHING = {"tools.plan.rank_model"}
"""Modules whose process group is the one of a plan, in which no rank waits."""


def nodes_of(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def names_cuda(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda"


def makes_the_default_group(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith("init_process_group")


def has_no_timeout(call: ast.AST) -> bool:
    assert isinstance(call, ast.Call)
    return all(keyword.arg != "timeout" for keyword in call.keywords)


def test_torch_cuda_is_named_in_runtime_or_for_a_reason():
    modules = {
        name_of(path)
        for path in MODULES
        if path.parent != PACKAGE / "runtime" and any(map(names_cuda, nodes_of(path)))
    }
    assert modules == ONLY_ON_CUDA.keys()


# Groups that are made later have the default time-out that `make_accelerator` sets: test_steps.py.
def test_no_default_process_group_is_made_without_a_timeout():
    calls = [
        (name_of(path), node)
        for path in MODULES
        for node in nodes_of(path)
        if makes_the_default_group(node)
    ]
    assert {"parallel.accelerator", "tools.preflight"} <= {module for module, _ in calls}
    assert {module for module, call in calls if has_no_timeout(call)} == SENDS_NOTHING
