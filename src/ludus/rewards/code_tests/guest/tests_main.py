"""The tests' process: runs the tests, and sends requests to the solution, in another process, through the host.

Concurrency: the tests run in a thread of their own. When one needs the solution, the thread puts a request
into `_out` and waits at `_in`. The host, which called `step`, gets the request, asks the other process, and
calls `step` again with the reply. At any moment one of the two waits for the other, so each queue holds at
most one item.
"""

from __future__ import annotations

import ast
import inspect
import io
import itertools
import math
import queue
import re
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

from ludus.rewards.code_tests.guest.plain_data import read, write
from ludus.rewards.code_tests.guest.proxies import Proxy, SolutionClient, Stopped, guard_arrays
from ludus.rewards.code_tests.guest.test_discovery import (
    FUNCTIONS,
    TESTS_FILE,
    BrokenTests,
    DiscoveredTests,
    discover_tests,
    free_names,
    imported,
    modules_used,
    own_names,
    parsed,
)

MARK = "\x1eludus-event:"
_MOST_TEXT = 500

_in: queue.SimpleQueue[str] = queue.SimpleQueue()
_out: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
_solution: SolutionClient


def begin(text: str) -> None:
    """Start the tests, and print their first request or event.

    The text is JSON: the tests' `sources`, the solution's `module` name and the `names` it defines, its
    `entry` point if the tests need one, and whether the statements of each source are `one_each`.
    """
    global _solution
    _solution = SolutionClient(_ask)
    threading.Thread(target=_run_tests, args=(read(text),), daemon=True).start()
    _emit()


def step(answer: str, generation: str) -> None:
    """Give the tests a reply, and print their next request or event."""
    _solution.generation = int(generation)
    _in.put(answer)
    _emit()


def _emit() -> None:
    out, sys.stdout = sys.stdout, io.StringIO()
    event = _out.get()
    sys.stdout = out
    out.write(f"\n{MARK}{write(event)}\n")
    out.flush()


def _ask(request: str) -> str:
    _out.put({"ask": request})
    return _in.get()


def _report(name: str, problem: str | None) -> None:
    _out.put({"test": name, "passed": problem is None, "problem": problem or ""})
    _in.get()


def _run_tests(plan: dict[str, Any]) -> None:
    module = plan["module"]
    end: dict[str, Any] = {"end": True}
    try:
        found = discover_tests(plan["sources"], plan["entry"], plan["one_each"])
        _out.put({"expected": sum(one.count for one in found)})
        _in.get()
        _define_modules(module)
        guard_arrays(plan["sources"])
        if plan["one_each"]:
            _run_one_each(plan, found)
        else:
            _run_all(plan, found)
    except BrokenTests as error:
        end["broken"] = str(error)[:_MOST_TEXT]
    except ModuleNotFoundError as error:
        end[_fault_of(error, plan)] = _describe(error)
    except BaseException as error:  # noqa: BLE001 - what a statement between the tests raised
        at_fault = isinstance(error, Stopped) or _is_from_tests(error)
        end["problem" if at_fault else "failed"] = _describe(error)
    _out.put(end)


def _fault_of(error: ModuleNotFoundError, plan: dict[str, Any]) -> str:
    """A missing module that the tests import is the tests' fault; of others the host must find out."""
    if not _is_missing(error, plan["module"]):
        return "problem"
    named = set().union(*(imported(source) for source in plan["sources"]))
    return "broken" if str(error.name).partition(".")[0] in named else "failed"


def _is_from_tests(error: BaseException) -> bool:
    """Whether the tests' own code was running; if not, the bug is in this file."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == TESTS_FILE:
            return True
        trace = trace.tb_next
    return False


def _define_modules(module: str) -> None:
    """The solution as a module, and the stand-in for pytest, for the tests to import."""
    solution = types.ModuleType(module)
    setattr(solution, "__getattr__", lambda name: getattr(_solution.root, name))  # noqa: B010
    sys.modules[module] = solution
    sys.modules["pytest"] = pytest_stand_in()


def _namespace(source: str, plan: dict[str, Any], kept: Namespace, earlier: set[str]) -> Namespace:
    """Globals of a source: definitions of earlier sources, modules, and the solution's names."""
    modules = modules_used(source, but={plan["module"], plan["entry"], *earlier})
    used = (free_names(source) - earlier - modules.keys()) & set(plan["names"])
    setattr(sys.modules[plan["module"]], "__all__", sorted(used))  # noqa: B010
    namespace: Namespace = {"__name__": "tests", **modules, **kept}
    for name in sorted(used):
        namespace[name] = _from_solution(name)
    if plan["entry"] in plan["names"]:
        namespace["__candidate__"] = _from_solution(plan["entry"])
    return namespace


def _from_solution(name: str) -> Any:
    try:
        return getattr(_solution.root, name)
    except Exception:  # noqa: BLE001 - it said that it has the name: any exception is the solution's doing
        raise _solution.stop(f"it no longer has the name {name}") from None


def _run_all(plan: dict[str, Any], found: list[DiscoveredTests]) -> None:
    for source, one in zip(plan["sources"], found, strict=True):
        namespace = _namespace(source, plan, {}, set())
        for name, run in collect(one, namespace):
            _report(name, _problem(run, plan["module"]))


def _run_one_each(plan: dict[str, Any], found: list[DiscoveredTests]) -> None:
    """Run each source in a new namespace, with what earlier ones defined."""
    kept: Namespace = {}
    earlier: set[str] = set()
    for number, (source, one) in enumerate(zip(plan["sources"], found, strict=True)):
        own = own_names(source)
        _solution.stopped = None
        try:
            namespace = _namespace(source, plan, kept, earlier)
        except Stopped as stopped:
            if not one.count:
                raise  # what was to be prepared is missing to all that follows
            _report_all(one.count, f"test {number}", _describe(stopped))
            earlier |= own
            continue
        if not one.count:
            run_statements(one.tree, namespace)
        elif not _run_source(number, one, namespace, plan["module"]):
            define_rest(source, namespace)
        kept |= {name: namespace[name] for name in own if name in namespace}
        earlier |= own


def _run_source(number: int, one: DiscoveredTests, namespace: Namespace, module: str) -> bool:
    """Run the tests of one source; whether all have passed. If the code around them fails, so do all."""
    problems: list[str | None] = []
    cases = collect(one, namespace, one_each=True)
    while True:
        case: list[tuple[str, Callable[[], object]]] = []
        around = _problem(lambda case=case: case.extend(itertools.islice(cases, 1)), module)  # type: ignore[misc]
        if around is not None:
            _report_all(one.count - len(problems), f"test {number}", around)
            return False
        if not case:
            return not any(problems)
        name, run = case[0]
        problems.append(_problem(run, module))
        _report(f"test {number}, {name}", problems[-1])


def _report_all(count: int, name: str, problem: str) -> None:
    for _ in range(max(1, count)):
        _report(name, problem)


def _problem(run: Callable[[], object], module: str) -> str | None:
    _solution.stopped = None
    try:
        run()
    except ModuleNotFoundError as error:
        if _is_missing(error, module):
            raise
        return _describe(error)
    except BaseException as error:  # noqa: BLE001 - a failed test, whatever it was
        return _describe(error)
    return _solution.stopped


def _is_missing(error: ModuleNotFoundError, module: str) -> bool:
    """Whether the tests need a module that is not here. What the solution raised comes without a name."""
    return error.name is not None and error.name.partition(".")[0] != module


def _describe(error: BaseException) -> str:
    if isinstance(error, Stopped):
        return f"the solution was stopped: {error}"
    try:
        return f"{type(error).__name__}: {error}"[:_MOST_TEXT]
    except BaseException:  # noqa: BLE001 - its text may ask the solution, which may be gone
        return type(error).__name__


# Running the tests that `discover_tests` found, `async` ones too.

Case = tuple[str, Callable[[], object]]
Namespace = dict[str, Any]


def collect(found: DiscoveredTests, namespace: Namespace, one_each: bool = False) -> Iterator[Case]:
    """Run the source's own statements in order, and yield the tests it holds.

    With `one_each`, statements that are tests are one together with all the others of their source.
    """
    if found.holds_tests:
        yield from _defined(found.tree, namespace)
        return
    if one_each and any(found.statements):
        yield "statements", lambda: run_statements(found.tree, namespace)
    elif one_each:
        run_statements(found.tree, namespace)
    else:
        yield from _statements(found, namespace)
    check = namespace.get("check")
    if inspect.isfunction(check) and found.needs_check:
        yield "check", lambda: _call(check, namespace["__candidate__"])


def run_statements(tree: ast.Module, namespace: Namespace) -> None:
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


def _statements(found: DiscoveredTests, namespace: Namespace) -> Iterator[Case]:
    for node, is_test in zip(found.tree.body, found.statements, strict=True):
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
    """Run the definitions after the point where a source failed: later sources may use them."""
    for node in parsed(source).body:
        if not isinstance(node, (*FUNCTIONS, ast.Import, ast.ImportFrom)):
            continue
        if isinstance(node, FUNCTIONS) and node.name in namespace:
            continue
        try:
            exec(compile(ast.Module([node], []), TESTS_FILE, "exec"), namespace)
        except BaseException:  # noqa: BLE001, S112 - then it stays undefined, and its use fails
            continue


def _call(function: Callable[..., Any], *args: Any, **named: Any) -> None:
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
    _call(getattr(instance, "asyncSetUp", _nothing))
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
        yield name, lambda: _call(function)
        return
    for number, combination in enumerate(itertools.product(*sets)):
        arguments = {key: value for part in combination for key, value in part.items()}
        yield f"{name}[{number}]", lambda given=arguments: _call(function, **given)  # type: ignore[misc]


# A stand-in for `pytest` that tests can import: `raises`, `approx`, `fail`, `mark.parametrize`.


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
    """The module that `import pytest` gives in a test."""
    module = types.ModuleType("pytest")
    vars(module).update(raises=_raises, approx=_Approx, fail=_fail, mark=_Marks())
    return module
