"""What tests a source holds, as far as that can be seen without running it.

Understood are `test_*` functions, `Test*` classes and `unittest.TestCase`s with `test*` methods,
`check(candidate)` as HumanEval has it, and otherwise the statements at the top level that check something:
an assertion, a loop or a `with` that holds some, a call of a function that does. A source that has nothing of
this prepares those after it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ludus.rewards.judging.inside.names import BrokenTests, parsed

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_BLOCKS = (ast.For, ast.While, ast.If, ast.With, ast.Try, ast.TryStar, ast.Match)


@dataclass(frozen=True)
class Seen:
    """One source of tests."""

    tree: ast.Module
    holds_tests: bool
    """Whether its tests are functions and classes; otherwise they are statements."""
    statements: tuple[bool, ...]
    """Which of its top-level statements are tests."""
    needs_check: bool
    """Whether it leaves its function `check` to be called with the solution's."""
    count: int
    """How many tests that makes."""


def look(sources: Sequence[str], entry: str | None, one_each: bool) -> list[Seen]:
    """Look through all of them; `BrokenTests` when none has a test.

    With `one_each`, the statements of a source are one test together, and later sources may call what earlier
    ones define.
    """
    trees = [parsed(source) for source in sources]
    is_check_called = any(_calls_check(node) for tree in trees for node in tree.body)
    checking: set[str] = set()
    found: list[Seen] = []
    for tree in trees:
        checking = _checking(tree, checking if one_each else set())
        statements = tuple(_is_test(node, checking) for node in tree.body)
        defines_check = any(isinstance(node, FUNCTIONS) and node.name == "check" for node in tree.body)
        needs_check = entry is not None and defines_check and not is_check_called
        if any(_holds_tests(node) for node in tree.body):
            count = sum(_count_in(node) for node in tree.body)
            found.append(Seen(tree, True, statements, False, count))
        else:
            count = (min(sum(statements), 1) if one_each else sum(statements)) + needs_check
            found.append(Seen(tree, False, statements, needs_check, count))
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
