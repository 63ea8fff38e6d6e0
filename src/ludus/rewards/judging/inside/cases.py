"""Running the tests of a source that a task's author wrote, `async` ones too; `seen` says which these are."""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from ludus.rewards.judging.inside.names import TESTS_FILE, parsed
from ludus.rewards.judging.inside.proxies import Proxy
from ludus.rewards.judging.inside.seen import FUNCTIONS, Seen

Case = tuple[str, Callable[[], object]]
Namespace = dict[str, Any]


def collect(seen: Seen, namespace: Namespace, one_each: bool = False) -> Iterator[Case]:
    """Run the source's own statements in order, and yield the tests it holds.

    With `one_each`, statements that are tests are one together with all the others of their source.
    """
    if seen.holds_tests:
        yield from _defined(seen.tree, namespace)
        return
    if one_each and any(seen.statements):
        yield "statements", lambda: run_statements(seen.tree, namespace)
    elif one_each:
        run_statements(seen.tree, namespace)
    else:
        yield from _statements(seen, namespace)
    check = namespace.get("check")
    if inspect.isfunction(check) and seen.needs_check:
        yield "check", lambda: _run(check, namespace["__candidate__"])


def run_statements(tree: ast.Module, namespace: Namespace) -> None:
    """Run a source as it stands."""
    exec(compile(tree, TESTS_FILE, "exec"), namespace)


def _defined(tree: ast.Module, namespace: Namespace) -> Iterator[Case]:
    """The functions and classes of this source; what earlier ones defined has been run."""
    earlier = dict(namespace)
    run_statements(tree, namespace)
    for name, thing in list(namespace.items()):
        if isinstance(thing, Proxy) or earlier.get(name) is thing:
            continue
        if isinstance(thing, type) and (name.startswith("Test") or _is_unittest(thing)):
            yield from _methods(thing)
        elif inspect.isfunction(thing) and name.startswith("test"):
            yield from _parametrized(name, thing)


def _statements(seen: Seen, namespace: Namespace) -> Iterator[Case]:
    for node, is_test in zip(seen.tree.body, seen.statements, strict=True):
        code = compile(ast.Module([node], []), TESTS_FILE, "exec")
        if is_test:
            yield f"line {node.lineno}", lambda code=code: exec(code, namespace)  # type: ignore[misc]
        else:
            exec(code, namespace)


def _is_unittest(kind: type) -> bool:
    """Whether it is a `unittest.TestCase`; tests that have such a class have imported the module."""
    module = sys.modules.get("unittest")
    return module is not None and issubclass(kind, module.TestCase)


def define_rest(source: str, namespace: Namespace) -> None:
    """What a source that failed would have defined after that: later sources may use it."""
    for node in parsed(source).body:
        if not isinstance(node, (*FUNCTIONS, ast.Import, ast.ImportFrom)):
            continue
        if isinstance(node, FUNCTIONS) and node.name in namespace:
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
    for name in dict.fromkeys(key for base in reversed(kind.__mro__) for key in vars(base)):
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
