"""Discovery of the tests in a source, and of the names that it takes from the solution, without running it.

A name that the tests define or import is the tests', a builtin is Python's, and a module that they use without
importing it (`math.isclose`, `np.allclose`) is imported for them. Only what is left may be the solution's: one
that defines `abs`, `math` or a helper of the tests does not change what they mean by it.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import sys
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType

TESTS_FILE = "tests.py"
"""File name of the tests' code in tracebacks."""
KNOWN_MODULES = {
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
        if name in KNOWN_MODULES:
            found[name] = _known(name)
        elif name in sys.stdlib_module_names - _NEVER and not node.attr.startswith("__"):
            module = _standard(name, node.attr)
            if module is not None:
                found[name] = module
    return found


def _known(name: str) -> ModuleType:
    try:
        return importlib.import_module(KNOWN_MODULES[name])
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


# Test discovery: `test_*` functions, `Test*` classes and `unittest.TestCase`s with `test*` methods, HumanEval's
# `check(candidate)`, and otherwise top-level statements that check something: an assertion, a loop or a `with`
# that holds one, a call of a function that does. A source without tests prepares those after it.

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_BLOCKS = (ast.For, ast.While, ast.If, ast.With, ast.Try, ast.TryStar, ast.Match)


@dataclass(frozen=True)
class DiscoveredTests:
    tree: ast.Module
    holds_tests: bool
    """Whether its tests are functions and classes; otherwise they are statements."""
    statements: tuple[bool, ...]
    """Which of its top-level statements are tests."""
    needs_check: bool
    """Whether it leaves its function `check` to be called with the solution's."""
    count: int
    """How many tests that makes."""


def discover_tests(sources: Sequence[str], entry: str | None, one_each: bool) -> list[DiscoveredTests]:
    """The tests of each source; `BrokenTests` when none has any.

    With `one_each`, the statements of a source are one test together, and later sources may call what earlier
    ones define.
    """
    trees = [parsed(source) for source in sources]
    is_check_called = any(_calls_check(node) for tree in trees for node in tree.body)
    checking: set[str] = set()
    found: list[DiscoveredTests] = []
    for tree in trees:
        checking = _checking(tree, checking if one_each else set())
        statements = tuple(_is_test(node, checking) for node in tree.body)
        defines_check = any(isinstance(node, FUNCTIONS) and node.name == "check" for node in tree.body)
        needs_check = entry is not None and defines_check and not is_check_called
        if any(_holds_tests(node) for node in tree.body):
            count = sum(_count_in(node) for node in tree.body)
            found.append(DiscoveredTests(tree, True, statements, False, count))
        else:
            count = (min(sum(statements), 1) if one_each else sum(statements)) + needs_check
            found.append(DiscoveredTests(tree, False, statements, needs_check, count))
    if not any(one.count for one in found):
        raise BrokenTests(_why_none(trees, entry))
    return found


def _why_none(trees: list[ast.Module], entry: str | None) -> str:
    names = {node.name for tree in trees for node in tree.body if isinstance(node, FUNCTIONS)}
    if "check" in names and entry is None:
        return "they define check(candidate), and the task names no function for it: set its entry_point"
    return "there are none"


def _holds_tests(node: ast.stmt) -> bool:
    """Whether it is a test function, or a class with test methods."""
    if isinstance(node, ast.ClassDef):
        return any(_holds_tests(inner) for inner in node.body)
    return isinstance(node, FUNCTIONS) and node.name.startswith("test")


def _count_in(node: ast.stmt) -> int:
    if isinstance(node, ast.ClassDef):
        is_collected = node.name.startswith("Test") or bool(node.bases)
        return sum(_holds_tests(inner) for inner in node.body) if is_collected else 0
    if not isinstance(node, FUNCTIONS) or not _holds_tests(node):
        return 0
    sets = 1
    for mark in node.decorator_list:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func).endswith("parametrize"):
            values = mark.args[1] if len(mark.args) > 1 else None
            sets *= len(values.elts) if isinstance(values, (ast.List, ast.Tuple)) else 1
    return sets


def _checking(tree: ast.Module, earlier: set[str]) -> set[str]:
    """The functions of the tests that check something; `earlier` are those of the sources before.

    A function at the top level also checks by raising; a method may do that for other reasons.
    """
    checking = set(earlier)
    functions = [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]
    grows = True
    while grows:  # one may call another that is defined below it
        before = len(checking)
        for node in functions:
            parts = (
                part for part in ast.walk(node) if node in tree.body or not isinstance(part, ast.Raise)
            )
            if node.name not in checking and any(_checks(part, checking) for part in parts):
                checking.add(node.name)
        grows = len(checking) > before
    return checking


def _is_test(node: ast.stmt, checking: set[str]) -> bool:
    """Whether a statement at the top level is a test, rather than one that prepares some."""
    if isinstance(node, (ast.Expr, *_BLOCKS)):
        return any(_checks(part, checking) for part in _run_by(node))
    return isinstance(node, ast.Assert)


def _run_by(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that a statement runs: not those of functions that it only defines."""
    yield node
    if not isinstance(node, FUNCTIONS):
        for inner in ast.iter_child_nodes(node):
            yield from _run_by(inner)


def _checks(node: ast.AST, checking: set[str]) -> bool:
    """Whether it is an assertion, or a call that works like one."""
    if not isinstance(node, ast.Call):
        return isinstance(node, (ast.Assert, ast.Raise))
    called = node.func
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return name in checking or name in ("raises", "fail") or name.startswith("assert")


def _calls_check(node: ast.stmt) -> bool:
    """Whether a statement at the top level calls the tests' function `check` itself."""
    if not _is_test(node, {"check"}):
        return False
    calls = (part.func for part in _run_by(node) if isinstance(part, ast.Call))
    return any(isinstance(called, ast.Name) and called.id == "check" for called in calls)
