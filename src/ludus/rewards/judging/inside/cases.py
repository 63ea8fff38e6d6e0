"""Tests from source that a task's author wrote: what they are, and how each is run.

Understood are `test_*` functions, `Test*` classes and `unittest.TestCase`s with `test*` methods,
`check(candidate)` as HumanEval has it, and otherwise the statements at the top level that check something,
each of which is a test: an assertion, a loop or a `with` that holds some, a call of a function that does.
Tests may be `async`. A small stand-in for `pytest` (`raises`, `approx`, `fail`, `mark.parametrize`) is there
to import.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import math
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from ludus.rewards.judging.inside.names import parsed
from ludus.rewards.judging.inside.proxies import Proxy

Case = tuple[str, Callable[[], object]]
Namespace = dict[str, Any]
TESTS_FILE = "tests.py"
"""What the tests' own code is called in tracebacks."""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_BLOCKS = (ast.For, ast.While, ast.If, ast.With, ast.Try, ast.TryStar, ast.Match)


def count(source: str, entry: str | None = None) -> int:
    """How many tests the source seems to hold, as far as that can be seen without running it."""
    tree = parsed(source)
    if any(_holds_tests(node) for node in tree.body):
        return sum(_count_in(node) for node in tree.body) or 1
    checking = _checking(tree)
    return sum(_is_test(node, checking) for node in tree.body) + _needs_check(tree, entry) or 1


def _count_in(node: ast.stmt) -> int:
    if isinstance(node, ast.ClassDef):
        is_collected = node.name.startswith("Test") or bool(node.bases)
        return sum(_holds_tests(inner) for inner in node.body) if is_collected else 0
    if not isinstance(node, _FUNCTIONS) or not _holds_tests(node):
        return 0
    sets = 1
    for mark in node.decorator_list:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func).endswith("parametrize"):
            values = mark.args[1] if len(mark.args) > 1 else None
            sets *= len(values.elts) if isinstance(values, (ast.List, ast.Tuple)) else 1
    return sets


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
    return isinstance(node, _FUNCTIONS) and node.name.startswith("test")


def _is_unittest(kind: type) -> bool:
    """Whether it is a `unittest.TestCase`; tests that have such a class have imported the module."""
    module = sys.modules.get("unittest")
    return module is not None and issubclass(kind, module.TestCase)


def _assertions(tree: ast.Module, namespace: Namespace, entry: str | None) -> Iterator[Case]:
    checking = _checking(tree)
    for node in tree.body:
        code = compile(ast.Module([node], []), TESTS_FILE, "exec")
        if _is_test(node, checking):
            yield f"line {node.lineno}", lambda code=code: exec(code, namespace)  # type: ignore[misc]
        else:
            exec(code, namespace)
    check = namespace.get("check")
    if inspect.isfunction(check) and _needs_check(tree, entry):
        yield "check", lambda: _run(check, namespace["__candidate__"])


def _checking(tree: ast.Module) -> set[str]:
    """The functions of the tests that check something."""
    return {
        node.name
        for node in tree.body
        if isinstance(node, _FUNCTIONS) and any(_checks(part, set()) for part in ast.walk(node))
    }


def _is_test(node: ast.stmt, checking: set[str]) -> bool:
    """Whether a statement at the top level is a test, rather than one that prepares some."""
    if isinstance(node, (ast.Expr, *_BLOCKS)):
        return any(_checks(part, checking) for part in ast.walk(node))
    return isinstance(node, ast.Assert)


def _checks(node: ast.AST, checking: set[str]) -> bool:
    """Whether it is an assertion, or a call that works like one."""
    if not isinstance(node, ast.Call):
        return isinstance(node, (ast.Assert, ast.Raise))
    called = node.func
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return name in checking or name in ("raises", "fail") or name.startswith("assert")


def _needs_check(tree: ast.Module, entry: str | None) -> bool:
    """Whether the tests are a function `check` that they leave to be called with the solution's."""
    if entry is None or "check" not in {getattr(node, "name", None) for node in tree.body}:
        return False
    return not any(_is_test(node, {"check"}) and _calls_check(node) for node in tree.body)


def _calls_check(node: ast.stmt) -> bool:
    calls = (part.func for part in ast.walk(node) if isinstance(part, ast.Call))
    return any(isinstance(called, ast.Name) and called.id == "check" for called in calls)


def define_rest(source: str, namespace: Namespace) -> None:
    """What a source that failed would have defined after that: later sources may use it."""
    for node in parsed(source).body:
        if not isinstance(node, (*_FUNCTIONS, ast.Import, ast.ImportFrom)):
            continue
        if isinstance(node, _FUNCTIONS) and node.name in namespace:
            continue
        try:
            exec(compile(ast.Module([node], []), TESTS_FILE, "exec"), namespace)
        except BaseException:  # noqa: BLE001, S112 - then it stays undefined, and who uses it fails
            continue


def _run(function: Callable[..., Any], *args: Any, **named: Any) -> None:
    found = function(*args, **named)
    if inspect.iscoroutine(found):
        import asyncio  # most tests have none, and it takes its time

        asyncio.run(found)


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
    _run(getattr(instance, "asyncSetUp", _nothing))
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
        yield name, lambda: _run(function)
        return
    for number, combination in enumerate(itertools.product(*sets)):
        arguments = {key: value for part in combination for key, value in part.items()}
        yield f"{name}[{number}]", lambda given=arguments: _run(function, **given)  # type: ignore[misc]


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
