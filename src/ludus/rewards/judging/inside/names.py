"""Whose names the tests use: their own, the judge's, or the solution's.

A name that the tests define or import is theirs, a builtin is Python's, and a module that they use without
importing it (`math.isclose`, `np.allclose`) is imported by the judge. Only what is left may be the
solution's: one that defines `abs`, `math` or a helper of the tests does not change what they mean by it.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import sys
from collections.abc import Iterator, Set
from functools import lru_cache
from types import ModuleType

TESTS_FILE = "tests.py"
"""What the tests' own code is called in tracebacks."""
_KNOWN = {
    "np": "numpy",
    "pd": "pandas",
    **{name: name for name in ("numpy", "pandas", "pytest", "scipy", "sympy", "torch")},
}
"""Modules outside the standard library that tests use, by the names they have there."""
_NEVER = frozenset({"antigravity", "this"})


class BrokenTests(Exception):
    """The tests themselves are wrong; no solution is at fault."""


@lru_cache(maxsize=100)
def parsed(source: str) -> ast.Module:
    """The source as a tree; `BrokenTests` when it does not compile."""
    try:
        tree = ast.parse(source)
        compile(tree, TESTS_FILE, "exec")  # a `return` outside a function is found only here
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BrokenTests(f"the tests do not compile: {error}") from None
    return tree


def own_names(source: str) -> set[str]:
    """The names that the source defines at its top level."""
    own: set[str] = set()
    for node in _module_level(parsed(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            own |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            own.add(node.name)
    return own


def imported(source: str) -> set[str]:
    """The modules that the source imports, wherever: the first parts of their names."""
    found: set[str] = set()
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


def free_names(source: str) -> set[str]:
    """The names that the source uses, and neither defines nor has from Python."""
    used = {node.id for node in ast.walk(parsed(source)) if isinstance(node, ast.Name)}
    return used - own_names(source) - set(vars(builtins))


def _module_level(tree: ast.Module) -> Iterator[ast.AST]:
    """The nodes outside functions and classes, these themselves included."""
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            pending.extend(ast.iter_child_nodes(node))


def modules_used(source: str, but: Set[str]) -> dict[str, ModuleType]:
    """The modules that the source uses without importing them, by name; never those in `but`.

    A name of a standard module may also be a function to be written (`bisect(...)`): it is the module where
    something is taken from it that the module has.
    """
    found: dict[str, ModuleType] = {}
    free = free_names(source) - but
    for node in ast.walk(parsed(source)):
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
            continue
        name = node.value.id
        if name not in free or name in found:
            continue
        if name in _KNOWN:
            found[name] = _known(name)
        elif name in sys.stdlib_module_names - _NEVER and not node.attr.startswith("__"):
            module = _standard(name, node.attr)
            if module is not None:
                found[name] = module
    return found


def _known(name: str) -> ModuleType:
    try:
        return importlib.import_module(_KNOWN[name])
    except ImportError as error:
        raise BrokenTests(f"the tests use {name}: {error}") from None


def _standard(name: str, attribute: str) -> ModuleType | None:
    try:
        module = importlib.import_module(name)
        if not hasattr(module, attribute):
            importlib.import_module(f"{name}.{attribute}")
    except Exception:  # noqa: BLE001 - it is not here, or it has no such thing
        return None
    return module
