"""The solution's process: holds the solution, and serves the requests of the tests, one at a time.

The solution shares this process and can change anything in it, this file included. That is expected:
nothing here is secret. Of the tests, only the arguments of calls arrive here, never an expected value. By
forging answers the solution can only give other answers.
"""

from __future__ import annotations

import io
import itertools
import operator
import sys
import types
from collections.abc import Callable
from typing import Any

from ludus.rewards.code_tests.guest.plain_data import ERRORS, Decoder, Encoder, TooLarge, read, write

MARK = "\x1eludus-answer:"
_MOST_TEXT = 1_000
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    name: getattr(operator, name)
    for name in (
        *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
        *("and_", "or_", "xor", "lshift", "rshift", "lt", "le", "gt", "ge"),
    )
}

_held: list[Any] = []
_numbers: dict[int, int] = {}
"""The handle of each object that is held, by its identity: an object is always the same handle."""


class _Nowhere(io.RawIOBase):
    """Discards what the solution prints while it serves a request."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return len(data)


def serve(text: str) -> None:
    """Do what a request says, and print the answer as the last line."""
    out = sys.stdout
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(_Nowhere()), write_through=True, errors="replace")
    try:
        answer = _answer(read(text))
    except TooLarge as error:  # our error about its value: not one that a test could expect of it
        answer = {"stopped": str(error)}
    except BaseException as error:  # noqa: BLE001 - whatever the solution raised is sent to the tests
        answer = {"raised": _raised(error)}
    finally:
        sys.stdout = out
    out.write(f"\n{MARK}{write(answer)}\n")
    out.flush()


def load(source: str, name: str) -> None:
    """Run the solution as a module called `name`; the answer lists what it defines."""

    def run() -> dict[str, Any]:
        module = types.ModuleType(name)
        sys.modules[name] = module
        exec(compile(source, f"{name}.py", "exec"), vars(module))
        _held.append(module)
        _numbers[id(module)] = 0
        return {"value": {"h": 0}, "names": [key for key in vars(module) if not key.startswith("__")]}

    _load.append(run)
    serve('{"do":"load"}')


_load: list[Callable[[], dict[str, Any]]] = []


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    if request["do"] == "load":
        return _load.pop()()
    decoder = Decoder(_held_object)
    on = _held[request["on"]]
    args = [decoder.decode(item) for item in request.get("args", [])]
    if request["do"] != "call":
        return {"value": _encoded(_use(request["do"], on, args))}
    named = {key: decoder.decode(item) for key, item in request.get("named", [])}
    before = [write(_encoded(item)) for item in [*args, *named.values()]]
    value = _encoded(on(*args, **named))
    after = [_encoded(item) for item in [*args, *named.values()]]
    changed = [
        [i, new] for i, (old, new) in enumerate(zip(before, after, strict=True)) if write(new) != old
    ]
    return {"value": value, "changed": changed}


def _use(what: str, on: Any, args: list[Any]) -> Any:
    if what in _BINARY:
        return _BINARY[what](on, args[0])
    return _USES[what](on, *args)


def _next(iterator: Any, count: int) -> tuple[list[Any], bool]:
    items = list(itertools.islice(iterator, count))
    return items, len(items) < count


def _await(coroutine: Any) -> Any:
    """Run a coroutine to its end, in a loop that stays for what it leaves behind."""
    import asyncio  # most solutions have none, and it takes its time

    if not _loops:
        _loops.append(asyncio.new_event_loop())
    return _loops[0].run_until_complete(coroutine)


_loops: list[Any] = []

_USES: dict[str, Callable[..., Any]] = {
    "await": _await,
    "get": getattr,
    "set": setattr,
    "item": operator.getitem,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
    "len": len,
    "bool": bool,
    "iter": iter,
    "next": _next,
    "str": str,
    "repr": repr,
    "neg": operator.neg,
    "abs": abs,
    "enter": lambda on: on.__enter__(),
    "exit": lambda on: on.__exit__(None, None, None),
    "isinstance": lambda kind, value: isinstance(value, kind),
}


def _encoded(value: Any) -> Any:
    return Encoder(_refer).encode(value)


def _refer(value: Any) -> Any:
    if isinstance(value, type) and issubclass(value, Exception):
        return {"e": [value.__name__, _nearest(value)]}
    number = _numbers.setdefault(id(value), len(_held))
    if number == len(_held):
        _held.append(value)
    return {"w" if isinstance(value, types.CoroutineType) else "h": number}


def _held_object(tag: str, inner: Any) -> Any:
    if tag == "h":
        return _held[inner]
    raise ValueError("this is not plain data")


def _nearest(kind: type[BaseException]) -> str | None:
    """The name of the built-in exception that a class is, or comes from."""
    for base in kind.__mro__:
        if ERRORS.get(base.__name__) is base:
            return base.__name__
    return None


def _raised(error: BaseException) -> dict[str, Any]:
    try:
        text = str(error)[:_MOST_TEXT]
    except Exception:  # noqa: BLE001 - its own __str__ is broken
        text = ""
    return {"name": type(error).__name__, "nearest": _nearest(type(error)), "text": text}
