"""The private names of Determined that ``deepspeed_trial`` uses: few, and each for a reason.

A name counts if it has one leading underscore, stands in Determined's source, and this package reads, calls, overrides
or imports it, or names it in a string.
"""

import ast
import functools
import pathlib
import re

import determined
import pytest
from support import PROJECT

USED = {
    "_config": "of TrialInfo: the experiment configuration; the Core API has no public name for all of it",
    "_init_ipc": "of DistributedContext: it opens sockets whose messages can run code, so Ranks overrides it",
    "_init_device": "of DeepSpeedTrialContext: it refuses a machine without a GPU, so TrialContext overrides it",
    "_steps_completed": "of TrialInfo: the steps that a restarted trial has done; the master alone knows them",
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def defined(tree: ast.AST) -> set[str]:
    """Find the private functions, classes, attributes and variables that a module defines."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return {name for name in names if is_private(name)}


@functools.cache
def of_determined(before: str = "") -> set[str]:
    """Find the private names in Determined's source, or the ones after a word such as ``def``."""
    files = pathlib.Path(determined.__file__).parent.rglob("*.py")
    return {name for file in files for name in re.findall(rf"\b{before}(_[A-Za-z]\w*)", file.read_text())}


def overridden(tree: ast.AST) -> set[str]:
    """Find the methods of classes with a base class from Determined."""
    nodes = list(ast.walk(tree))
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    roots = {
        alias.asname or alias.name
        for node in imports
        for alias in node.names
        if (getattr(node, "module", None) or alias.name).startswith("determined")
    }
    return {
        method.name
        for node in nodes
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base).partition(".")[0] in roots for base in node.bases)
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name in of_determined("def ")
    }


def used(tree: ast.AST) -> set[str]:
    """Find the private names of Determined that a module uses; a module's own names count only as overrides."""
    others = {"os", "sys"}  # their private names are not Determined's
    names, own = overridden(tree), defined(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in others:
            names |= {node.attr} - own
        elif isinstance(node, ast.Import | ast.ImportFrom):
            path = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            names |= set(".".join(path).split(".")) if "determined" in ".".join(path) else set()
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            names.add(ast.unparse(node.args[1]).strip("'"))
    return {name for name in names if is_private(name)} & of_determined()


def test_the_package_uses_few_private_names_of_determined():
    files = {file: used(ast.parse(file.read_text())) for file in PROJECT.glob("deepspeed_trial/**/*.py")}
    assert set().union(*files.values()) == USED.keys(), {
        file: names for file, names in files.items() if names
    }
    assert len(USED) <= 8


@pytest.mark.parametrize(
    "code",
    [
        "context._session.get('/')",
        "from determined.core import _session",
        "from determined import core\ncore._context.init()",
        "import determined.core._context",
        "setattr(context, '_mpu', mpu)",
        "from determined import core\nclass Ranks(core.DistributedContext):\n    def _init_ipc(self): pass",
    ],
)
def test_a_use_of_a_private_name_is_found(code):
    assert used(ast.parse(code))
