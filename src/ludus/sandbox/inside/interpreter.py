"""Python as in a notebook: statements share one namespace, and the last expression's value is shown.

Nothing here is trusted by the host: the code that runs may have replaced any of it. What it says about itself
is what the model reads; whether it lives, for how long and with what, is decided from outside.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import io
import linecache
import os
import resource
import signal
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any

RESERVE = 32 << 20
"""Bytes of address space that are kept for the report of a `MemoryError`."""
OUT_OF_MEMORY = 86
"""The exit status of a session that could not even make that report."""
_MOST_VALUE = 20_000
_MOST_ERROR = 6_000
_MOST_FRAMES = 8
_COROUTINE = 0x80
_FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
_NO_EXPRESSION = ("", " ", "\t", "#", ")", "]", "}")


class CpuTimeExceeded(BaseException):
    """Raised in the code that used up its processor time."""


class Interpreter:
    """One namespace and the code that ran in it so far."""

    def __init__(self) -> None:
        self._main = types.ModuleType("__main__")
        self._main.__dict__["__builtins__"] = builtins
        sys.modules["__main__"] = self._main
        sys.argv = [""]
        self._count = 0
        self._running = False
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        self._with_reserve = (most, most)
        signal.signal(signal.SIGINT, self.interrupt)
        signal.signal(signal.SIGXCPU, self._out_of_time)
        self._open_streams()

    def run(self, source: str, cpu_seconds: float | None = None) -> dict[str, Any]:
        """Run `source`, and say how it went. `cpu_seconds`: how much more processor time it may use."""
        self._count += 1
        name = f"<cell {self._count}>"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        if cpu_seconds is not None:
            allow_cpu(cpu_seconds)
        try:
            self._running = True
            try:
                value = self._evaluate(source, name)
                shown = None if value is None else _cut(repr(value), _MOST_VALUE)
            finally:
                self._running = False
            outcome: dict[str, Any] = {"done": "ok", "value": shown}
        except MemoryError as error:
            # What filled the memory may still be there; the reserve is for saying so, and for a `del`.
            # Everything that is needed to get at it was made beforehand: nothing can be made now.
            resource.setrlimit(resource.RLIMIT_AS, self._with_reserve)
            outcome = {"done": "memory", "error": short_traceback(error)}
        except BaseException as error:  # noqa: BLE001 - whatever the code raised is its result
            outcome = self._failed(error)
        self._flush()
        return outcome

    def _evaluate(self, source: str, name: str) -> Any:
        statements, expression = _parts(source, name) or (None, None)
        if expression is None:
            tree = compile(source, name, "exec", _FLAGS | ast.PyCF_ONLY_AST, dont_inherit=True)
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            if tree.body or last is None:
                statements = compile(tree, name, "exec", _FLAGS, dont_inherit=True)
        result = None
        if statements is not None:
            result = self._execute(statements)
        if expression is None and last is not None:
            expression = compile(ast.Expression(last.value), name, "eval", _FLAGS, dont_inherit=True)
        if expression is not None:
            result = self._execute(expression)
            if result is not None:
                self._main.__dict__["_"] = result
        return result

    def _execute(self, code: types.CodeType) -> Any:
        result = eval(code, self._main.__dict__)
        if code.co_flags & _COROUTINE:
            import asyncio

            result = asyncio.run(result)
        return result

    def _failed(self, error: BaseException) -> dict[str, Any]:
        if isinstance(error, SystemExit):
            return {"done": "exited", **_exit_status(error)}
        try:
            text = short_traceback(error)
        except BaseException:  # noqa: BLE001 - an exception that cannot even be shown
            text = type(error).__name__
        kinds = ((CpuTimeExceeded, "cpu"), (KeyboardInterrupt, "interrupted"))
        kind = next((name for kind, name in kinds if isinstance(error, kind)), "raised")
        return {"done": kind, "error": text}

    def interrupt(self, number: int, frame: object) -> None:
        """The handler of SIGINT: ends what runs, and nothing else."""
        if self._running:
            raise KeyboardInterrupt

    def _out_of_time(self, number: int, frame: object) -> None:
        if self._running:
            raise CpuTimeExceeded

    def _open_streams(self) -> None:
        sys.stdin = _stream(0, "r")
        self._streams = sys.stdout, sys.stderr = _stream(1, "w"), _stream(2, "w")

    def fresh_input(self) -> None:
        """Forget what was read ahead from the last statement's standard input."""
        sys.stdin = _stream(0, "r")

    def _flush(self) -> None:
        ours = self._streams
        is_ours = sys.stdout is ours[0] and sys.stderr is ours[1]
        for stream in ours if is_ours or not _plain() else {*ours, sys.stdout, sys.stderr}:
            try:  # noqa: SIM105 - this is cheaper right after a fork
                stream.flush()
            except BaseException:  # noqa: BLE001, S110 - the code may have closed or replaced it
                pass


def _parts(source: str, name: str) -> tuple[types.CodeType | None, types.CodeType] | None:
    """The last line, where that is an expression at the margin, and what comes before it, if anything.

    It spares most programs a syntax tree, which takes longer to make than they take to run. None wherever the
    two could mean something else than the whole. An escape may be one that Python warns of: not twice.
    """
    text = source.rstrip(" \t\n")
    start = text.rfind("\n") + 1
    if text[start : start + 1] in _NO_EXPRESSION or "\\" in text or "\r" in text or "\f" in text:
        return None
    try:
        lines = "\n" * text.count("\n")  # so that errors name the right one
        expression = compile(lines + text[start:], name, "eval", _FLAGS, dont_inherit=True)
        if not start:
            return None, expression
        return compile(text[:start], name, "exec", _FLAGS, dont_inherit=True), expression
    except (SyntaxError, ValueError):
        return None  # the whole says what is wrong, or is right


def _plain() -> bool:
    """Whether the standard streams are of the ordinary kind, whose `flush` comes back."""
    return type(sys.stdout) is io.TextIOWrapper and type(sys.stderr) is io.TextIOWrapper


def allow_cpu(seconds: float) -> None:
    """Let this process use so much more processor time than it has used already."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(usage.ru_utime + usage.ru_stime + seconds + 1)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))


def short_traceback(error: BaseException) -> str:
    """The traceback as a model needs it: its own lines, the last frames, no file of ours."""
    told = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = told
    while part is not None:
        frames = [frame for frame in part.stack if frame.filename != __file__]
        part.stack[:] = frames[-_MOST_FRAMES:]
        part = part.__cause__ or part.__context__
    return _cut("".join(told.format()).rstrip(), _MOST_ERROR)


def _exit_status(error: SystemExit) -> dict[str, Any]:
    code = error.code
    if code is None or isinstance(code, int):
        return {"code": int(code or 0) & 0xFF, "error": None}
    return {"code": 1, "error": _cut(str(code), _MOST_ERROR)}


def _stream(fd: int, mode: str) -> Any:
    """A text stream over a descriptor, which stays open whatever becomes of the stream."""
    return open(fd, mode, encoding="utf-8", errors="backslashreplace", closefd=False)


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n... [{len(text) - 2 * half:,} characters left out] ...\n{text[-half:]}"


def redirect(fds: list[int]) -> Callable[[], None]:
    """Point the standard streams at `fds` (output, errors, perhaps input), and return what undoes it."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for target, source in ((1, fds[0]), (2, fds[1]), (0, fds[2] if len(fds) > 2 else nothing)):
        os.dup2(source, target)
    for fd in fds:
        os.close(fd)

    def undo() -> None:
        for target in (0, 1, 2):
            os.dup2(nothing, target)
        os.close(nothing)

    return undo
