"""The judge's side: runs the tests, and asks the solution, which is in another process, through the host.

Who waits for whom. The tests run in a thread of their own. When one needs the solution, the thread puts a
request into `_out` and waits at `_in`; the host, which called `step`, gets the request, asks the other
process, and calls `step` again with the answer. At any moment one of the two is waiting for the other, so
each queue holds at most one item.
"""

from __future__ import annotations

import io
import itertools
import queue
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

from ludus.rewards.judging.inside.cases import Namespace, collect, define_rest, run_statements
from ludus.rewards.judging.inside.names import (
    TESTS_FILE,
    BrokenTests,
    free_names,
    imported,
    modules_used,
    own_names,
)
from ludus.rewards.judging.inside.plain import read, write
from ludus.rewards.judging.inside.proxies import Link, Stopped
from ludus.rewards.judging.inside.seen import Seen, look
from ludus.rewards.judging.inside.stand_in import pytest_stand_in

MARK = "\x1eludus-event:"
_MOST_TEXT = 500

_in: queue.SimpleQueue[str] = queue.SimpleQueue()
_out: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
_link: Link


def begin(text: str) -> None:
    """Start the tests, and print the first thing they want.

    The text is JSON: the tests' `sources`, the solution's `module` name and the `names` it defines, its
    `entry` point if the tests need one, and whether the statements of each source are `one_each`.
    """
    global _link
    _link = Link(_ask)
    threading.Thread(target=_guarded, args=(read(text),), daemon=True).start()
    _emit()


def step(answer: str, generation: str) -> None:
    """Hand the tests an answer, and print what they want next."""
    _link.generation = int(generation)
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


def _guarded(plan: dict[str, Any]) -> None:
    module = plan["module"]
    end: dict[str, Any] = {"end": True}
    try:
        seen = look(plan["sources"], plan["entry"], plan["one_each"])
        _out.put({"expected": sum(one.count for one in seen)})
        _in.get()
        _define_modules(module)
        if plan["one_each"]:
            _run_one_each(plan, seen)
        else:
            _run_all(plan, seen)
    except BrokenTests as error:
        end["broken"] = str(error)[:_MOST_TEXT]
    except ModuleNotFoundError as error:
        end[_whose(error, plan)] = _text(error)
    except BaseException as error:  # noqa: BLE001 - what a statement between the tests raised
        at_fault = isinstance(error, Stopped) or _is_from_tests(error)
        end["problem" if at_fault else "failed"] = _text(error)
    _out.put(end)


def _whose(error: ModuleNotFoundError, plan: dict[str, Any]) -> str:
    """A module that the tests name is missing to all answers; of others the host must find out."""
    if not _is_missing(error, plan["module"]):
        return "problem"
    named = set().union(*(imported(source) for source in plan["sources"]))
    return "broken" if str(error.name).partition(".")[0] in named else "failed"


def _is_from_tests(error: BaseException) -> bool:
    """Whether the tests' own code was running; if not, the mistake is in this file."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == TESTS_FILE:
            return True
        trace = trace.tb_next
    return False


def _define_modules(module: str) -> None:
    """The solution as a module, and the stand-in for pytest, for the tests to import."""
    solution = types.ModuleType(module)
    setattr(solution, "__getattr__", lambda name: getattr(_link.root, name))  # noqa: B010
    sys.modules[module] = solution
    sys.modules["pytest"] = pytest_stand_in()


def _namespace(source: str, plan: dict[str, Any], kept: Namespace, earlier: set[str]) -> Namespace:
    """What the source sees: what earlier ones defined, modules, and the names that are the solution's."""
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
        return getattr(_link.root, name)
    except Exception:  # noqa: BLE001 - it said that it has the name: whatever it raises is its own doing
        raise _link.stop(f"it no longer has the name {name}") from None


def _run_all(plan: dict[str, Any], seen: list[Seen]) -> None:
    for source, one in zip(plan["sources"], seen, strict=True):
        namespace = _namespace(source, plan, {}, set())
        for name, run in collect(one, namespace):
            _report(name, _problem(run, plan["module"]))


def _run_one_each(plan: dict[str, Any], seen: list[Seen]) -> None:
    """Each source in a namespace of its own, with what earlier ones defined."""
    kept: Namespace = {}
    earlier: set[str] = set()
    for number, (source, one) in enumerate(zip(plan["sources"], seen, strict=True)):
        own = own_names(source)
        _link.stopped = None
        try:
            namespace = _namespace(source, plan, kept, earlier)
        except Stopped as stopped:
            if not one.count:
                raise  # what was to be prepared is missing to all that follows
            _report_all(one.count, f"test {number}", _text(stopped))
            earlier |= own
            continue
        if not one.count:
            run_statements(one.tree, namespace)
        elif not _run_source(number, one, namespace, plan["module"]):
            define_rest(source, namespace)
        kept |= {name: namespace[name] for name in own if name in namespace}
        earlier |= own


def _run_source(number: int, one: Seen, namespace: Namespace, module: str) -> bool:
    """The tests of one source, and whether all have passed; all have failed when what is around them does."""
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
    _link.stopped = None
    try:
        run()
    except ModuleNotFoundError as error:
        if _is_missing(error, module):
            raise
        return _text(error)
    except BaseException as error:  # noqa: BLE001 - a failed test, whatever it was
        return _text(error)
    return _link.stopped


def _is_missing(error: ModuleNotFoundError, module: str) -> bool:
    """Whether the tests need a module that is not here. What the solution raised comes without a name."""
    return error.name is not None and error.name.partition(".")[0] != module


def _text(error: BaseException) -> str:
    if isinstance(error, Stopped):
        return f"the solution was stopped: {error}"
    try:
        return f"{type(error).__name__}: {error}"[:_MOST_TEXT]
    except BaseException:  # noqa: BLE001 - its text may ask the solution, which may be gone
        return type(error).__name__
