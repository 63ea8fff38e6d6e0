"""The judge's side: runs the tests, and asks the solution, which is in another process, through the host.

Who waits for whom. The tests run in a thread of their own. When one needs the solution, the thread puts a
request into `_out` and waits at `_in`; the host, which called `step`, gets the request, asks the other
process, and calls `step` again with the answer. At any moment one of the two is waiting for the other, so
each queue holds at most one item.
"""

from __future__ import annotations

import io
import queue
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

from ludus.rewards.judging.inside.cases import (
    TESTS_FILE,
    BrokenTests,
    Namespace,
    collect,
    count,
    free_names,
    pytest_stand_in,
)
from ludus.rewards.judging.inside.plain import read, write
from ludus.rewards.judging.inside.proxies import Link, Stopped

MARK = "\x1eludus-event:"
_MOST_TEXT = 500

_in: queue.SimpleQueue[str] = queue.SimpleQueue()
_out: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
_link: Link


def begin(text: str) -> None:
    """Start the tests, and print the first thing they want.

    The text is JSON: the tests' `sources`, the solution's `module` name and the `names` it defines, its
    `entry` point if the tests need one, and whether `one_each` of the sources is one test.
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
    sources, module = plan["sources"], plan["module"]
    end: dict[str, Any] = {"end": True}
    try:
        expected = len(sources) if plan["one_each"] else sum(count(source) for source in sources)
        _out.put({"expected": expected})
        _in.get()
        namespace = _namespace(sources, module, plan["names"])
        if plan["entry"] in plan["names"]:
            namespace["__candidate__"] = getattr(_link.root, plan["entry"])
        if plan["one_each"]:
            _run_one_each(sources, namespace)
        else:
            _run_all(sources, namespace, plan["entry"])
    except BrokenTests as error:
        end["broken"] = str(error)[:_MOST_TEXT]
    except ModuleNotFoundError as error:
        end["problem" if error.name == module else "broken"] = _text(error)
    except BaseException as error:  # noqa: BLE001 - what a statement between the tests raised
        at_fault = isinstance(error, Stopped) or _is_from_tests(error)
        end["problem" if at_fault else "broken"] = _text(error)
    _out.put(end)


def _is_from_tests(error: BaseException) -> bool:
    """Whether the tests' own code was running; if not, the mistake is in this file."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == TESTS_FILE:
            return True
        trace = trace.tb_next
    return False


def _namespace(sources: list[str], module: str, names: list[str]) -> Namespace:
    """What the tests see: the solution's names that they use, and the solution as a module."""
    solution = types.ModuleType(module)
    used = set().union(*(free_names(source) for source in sources)) & set(names)
    setattr(solution, "__getattr__", lambda name: getattr(_link.root, name))  # noqa: B010
    setattr(solution, "__all__", sorted(used))  # noqa: B010
    sys.modules[module] = solution
    sys.modules["pytest"] = pytest_stand_in()
    namespace: Namespace = {"__name__": "tests"}
    for name in sorted(used):
        namespace[name] = getattr(_link.root, name)
    return namespace


def _run_all(sources: list[str], namespace: Namespace, entry: str | None) -> None:
    for source in sources:
        for name, run in collect(source, namespace, entry):
            _report(name, _problem(run))


def _run_one_each(sources: list[str], namespace: Namespace) -> None:
    for number, source in enumerate(sources):
        code = compile(source, TESTS_FILE, "exec")
        _report(f"test {number}", _problem(lambda code=code: exec(code, dict(namespace))))  # type: ignore[misc]


def _problem(run: Callable[[], object]) -> str | None:
    _link.stopped = None
    try:
        run()
    except BaseException as error:  # noqa: BLE001 - a failed test, whatever it was
        return _text(error)
    return _link.stopped


def _text(error: BaseException) -> str:
    if isinstance(error, Stopped):
        return f"the solution was stopped: {error}"
    try:
        return f"{type(error).__name__}: {error}"[:_MOST_TEXT]
    except BaseException:  # noqa: BLE001 - its text may ask the solution, which may be gone
        return type(error).__name__
