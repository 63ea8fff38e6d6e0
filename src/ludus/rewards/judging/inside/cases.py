"""Tests from source that a task's author wrote: what they are, and how each is run.

Understood are `test_*` functions, `Test*` classes and `unittest.TestCase`s with `test*` methods,
`check(candidate)` as HumanEval has it, and otherwise bare assertions, each of which is a test. A small
stand-in for `pytest` (`raises`, `approx`, `fail`, `mark.parametrize`) is there to import.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import itertools
import math
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from ludus.rewards.judging.inside.proxies import Proxy

Case = tuple[str, Callable[[], object]]
Namespace = dict[str, Any]
TESTS_FILE = "tests.py"
"""What the tests' own code is called in tracebacks."""


class BrokenTests(Exception):
    """The tests themselves are wrong; no solution is at fault."""


def free_names(source: str) -> set[str]:
    """The names that the tests use and that they may expect the solution to define.

    Neither builtins nor what the tests define or import themselves are among them: a solution that
    defines `abs` or `unittest` does not change what the tests mean by it.
    """
    tree = _parsed(source)
    own: set[str] = set()
    for node in _module_level(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            own |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return used - own - set(vars(builtins))


def _module_level(tree: ast.Module) -> Iterator[ast.AST]:
    """The nodes outside functions and classes, these themselves included."""
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            pending.extend(ast.iter_child_nodes(node))


def _parsed(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise BrokenTests(f"the tests do not compile: {error}") from None


def count(source: str) -> int:
    """How many tests the source seems to hold: what is missed when it cannot be run to its end."""
    tree = _parsed(source)
    functions = [
        n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name.startswith("test")
    ]
    return len(functions) or sum(isinstance(node, ast.Assert) for node in tree.body) or 1


def collect(source: str, namespace: Namespace, entry: str | None) -> Iterator[Case]:
    """Run the source's own statements in order, and yield the tests it holds."""
    tree = ast.parse(source)
    if not any(_holds_tests(node) for node in tree.body):
        yield from _assertions(tree, namespace, entry)
        return
    exec(compile(tree, TESTS_FILE, "exec"), namespace)
    for name, thing in list(namespace.items()):
        if isinstance(thing, Proxy):
            continue
        if isinstance(thing, type) and (name.startswith("Test") or _is_unittest(thing)):
            yield from _methods(thing)
        elif inspect.isfunction(thing) and name.startswith("test"):
            yield from _parametrized(name, thing)


def _holds_tests(node: ast.stmt) -> bool:
    """Whether it is a test function, or a class with test methods."""
    if isinstance(node, ast.ClassDef):
        return any(_holds_tests(inner) for inner in node.body)
    return isinstance(node, ast.FunctionDef) and node.name.startswith("test")


def _is_unittest(kind: type) -> bool:
    """Whether it is a `unittest.TestCase`; tests that have such a class have imported the module."""
    module = sys.modules.get("unittest")
    return module is not None and issubclass(kind, module.TestCase)


def _assertions(tree: ast.Module, namespace: Namespace, entry: str | None) -> Iterator[Case]:
    for node in tree.body:
        code = compile(ast.Module([node], []), TESTS_FILE, "exec")
        if isinstance(node, ast.Assert):
            yield f"line {node.lineno}", lambda code=code: exec(code, namespace)  # type: ignore[misc]
        else:
            exec(code, namespace)
    check = namespace.get("check")
    if inspect.isfunction(check) and entry is not None:
        yield "check", lambda: check(namespace["__candidate__"])


def _methods(kind: type) -> Iterator[Case]:
    for name in [key for base in reversed(kind.__mro__) for key in vars(base)]:
        if name.startswith("test") and callable(getattr(kind, name)):
            yield f"{kind.__name__}.{name}", lambda name=name: _run_method(kind, name)  # type: ignore[misc]


def _run_method(kind: type, name: str) -> None:
    is_case = _is_unittest(kind)
    instance = kind(name) if is_case else kind()
    prepare, clean = ("setUp", "tearDown") if is_case else ("setup_method", "teardown_method")
    if is_case:
        instance.setUpClass()
    getattr(instance, prepare, _nothing)()
    try:
        for _, run in _parametrized(name, getattr(instance, name)):
            run()
    finally:
        getattr(instance, clean, _nothing)()


def _nothing() -> None:
    pass


def _parametrized(name: str, function: Any) -> Iterator[Case]:
    sets = getattr(function, "ludus_parameters", [])
    if not sets:
        yield name, function
        return
    for number, combination in enumerate(itertools.product(*sets)):
        arguments = {key: value for part in combination for key, value in part.items()}
        yield f"{name}[{number}]", lambda given=arguments: function(**given)  # type: ignore[misc]


# A stand-in for pytest ----------------------------------------------------------------------------


class _Raises:
    def __init__(self, expected: Any, match: str | None = None) -> None:
        self._expected, self._match = expected, match
        self.value: BaseException | None = None

    def __enter__(self) -> _Raises:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if error is None:
            raise AssertionError(f"{self._expected!r} was not raised")
        if not isinstance(error, self._expected):
            return False
        if self._match is not None and not re.search(self._match, str(error)):
            raise AssertionError(f"{str(error)!r} does not match {self._match!r}")
        self.value = error
        return True


class _Approx:
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None) -> None:
        self._expected = expected
        self._rel = rel if rel is not None else (0.0 if abs is not None else 1e-6)
        self._abs = 1e-12 if abs is None else abs

    def __eq__(self, other: object) -> bool:
        return self._close(self._expected, other)

    def _close(self, expected: Any, found: Any) -> bool:
        if isinstance(expected, dict):
            same = isinstance(found, dict) and expected.keys() == found.keys()
            return same and all(self._close(expected[key], found[key]) for key in expected)
        if isinstance(expected, (list, tuple)):
            same = isinstance(found, (list, tuple)) and len(expected) == len(found)
            return same and all(map(self._close, expected, found))
        if isinstance(expected, (int, float)) and isinstance(found, (int, float)):
            return expected == found or math.isclose(
                expected, found, rel_tol=self._rel, abs_tol=self._abs
            )
        return bool(expected == found)


class _Marks:
    def __getattr__(self, name: str) -> Any:
        if name == "parametrize":
            return _parametrize
        return lambda *args, **named: args[0] if len(args) == 1 and callable(args[0]) else (lambda f: f)


def _parametrize(names: Any, values: Any, **_: Any) -> Callable[[Any], Any]:
    keys = [key.strip() for key in names.split(",")] if isinstance(names, str) else list(names)
    sets = [dict(zip(keys, value if len(keys) > 1 else [value], strict=True)) for value in values]

    def decorate(function: Any) -> Any:
        function.ludus_parameters = [sets, *getattr(function, "ludus_parameters", [])]
        return function

    return decorate


def _raises(expected: Any, *call: Any, match: str | None = None, **named: Any) -> Any:
    context = _Raises(expected, match)
    if not call:
        return context
    with context:
        call[0](*call[1:], **named)
    return context


def _fail(reason: str = "") -> None:
    raise AssertionError(reason)


def pytest_stand_in() -> types.ModuleType:
    """What `import pytest` gives in a test."""
    module = types.ModuleType("pytest")
    vars(module).update(raises=_raises, approx=_Approx, fail=_fail, mark=_Marks())
    return module
