"""Running what the model wrote: Python as in a notebook, shell commands, programs.

Python statements share one namespace, and the last expression's value is shown. Shell state is kept without a
shell that stays alive: each command runs in a fresh bash that first sources what the last one saved (variables,
functions, aliases, options, working directory). So a command that hangs is killed without losing earlier state,
and a session with a shell can be forked like any other.

The host trusts nothing here: the code that runs may have replaced any of it. Its reports are what the model
reads; lifetime and limits are enforced from outside.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import io
import linecache
import os
import resource
import select
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess

_MOST_VALUE = 20_000
_MOST_ERROR = 6_000
_MOST_FRAMES = 8
_COROUTINE = 0x80
_FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
_NO_EXPRESSION = ("", " ", "\t", "#", ")", "]", "}")


class CpuTimeExceeded(BaseException):
    """Raised in code that used up its CPU time."""


class Interpreter:
    """One `__main__` namespace that stays between runs."""

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
        """Run `source` and report the outcome. `cpu_seconds`: how much more CPU time it may use."""
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
            # What filled the memory may still be referenced; the reserve is for the report and for a `del`.
            # The limit's tuple was built beforehand: nothing can be allocated now.
            resource.setrlimit(resource.RLIMIT_AS, self._with_reserve)
            outcome = {"done": "memory", "error": short_traceback(error)}
        except BaseException as error:  # noqa: BLE001 - whatever the code raised is its result
            outcome = self._failed(error)
        self._flush()
        return outcome

    def _evaluate(self, source: str, name: str) -> Any:
        statements, expression = _split_last_expression(source, name) or (None, None)
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
        """SIGINT handler: interrupts running code, and does nothing otherwise."""
        if self._running:
            raise KeyboardInterrupt

    def _out_of_time(self, number: int, frame: object) -> None:
        if self._running:
            raise CpuTimeExceeded

    def _open_streams(self) -> None:
        sys.stdin = _stream(0, "r")
        self._streams = sys.stdout, sys.stderr = _stream(1, "w"), _stream(2, "w")

    def fresh_input(self) -> None:
        """Discard what was read ahead from the previous standard input."""
        sys.stdin = _stream(0, "r")

    def _flush(self) -> None:
        ours = self._streams
        is_ours = sys.stdout is ours[0] and sys.stderr is ours[1]
        # of ordinary text streams `flush` returns
        is_plain = type(sys.stdout) is io.TextIOWrapper and type(sys.stderr) is io.TextIOWrapper
        for stream in ours if is_ours or not is_plain else {*ours, sys.stdout, sys.stderr}:
            try:  # noqa: SIM105 - this is cheaper right after a fork
                stream.flush()
            except BaseException:  # noqa: BLE001, S110 - the code may have closed or replaced it
                pass


def _split_last_expression(
    source: str, name: str
) -> tuple[types.CodeType | None, types.CodeType] | None:
    """Compiled: what comes before the last line, if anything, and the last line if it is an expression.

    Fast path: most programs then need no syntax tree, which takes longer to build than they take to run. None
    wherever the two parts could mean something else than the whole. Text with a backslash is left to the slow
    path, because an invalid escape would be warned of twice.
    """
    text = source.rstrip(" \t\n")
    start = text.rfind("\n") + 1
    if text[start : start + 1] in _NO_EXPRESSION or "\\" in text or "\r" in text or "\f" in text:
        return None
    try:
        lines = "\n" * text.count("\n")  # so that errors have the right line number
        expression = compile(lines + text[start:], name, "eval", _FLAGS, dont_inherit=True)
        if not start:
            return None, expression
        return compile(text[:start], name, "exec", _FLAGS, dont_inherit=True), expression
    except (SyntaxError, ValueError):
        return None  # the slow path reports the error, or compiles it


def allow_cpu(seconds: float) -> None:
    """Allow this process so much more CPU time than it has used already."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(usage.ru_utime + usage.ru_stime + seconds + 1)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))


def short_traceback(error: BaseException) -> str:
    """The traceback for the model: the last frames of its own code, none of this file."""
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
    """A text stream over a descriptor; closing the stream leaves the descriptor open."""
    return open(fd, mode, encoding="utf-8", errors="backslashreplace", closefd=False)


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n... [{len(text) - 2 * half:,} characters left out] ...\n{text[-half:]}"


def redirect(fds: list[int]) -> Callable[[], None]:
    """Point the standard streams at `fds` (stdout, stderr, perhaps stdin); returns the undo function."""
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


SHELL_SCRIPT = r"""
__ludus_state=$1; __ludus_command=$2; set --
shopt -s expand_aliases
[ -f "$__ludus_state" ] && source "$__ludus_state" 2>/dev/null
__ludus_keep() {
  local __ludus_code=$? __ludus_name __ludus_names
  trap - EXIT
  local IFS=$'\n'
  __ludus_names=$(compgen -v)
  {
    for __ludus_name in $__ludus_names; do
      case $__ludus_name in
        BASH*|__ludus*|DIRSTACK|EPOCH*|EUID|FUNCNAME|GROUPS|HISTCMD|LINENO|PIPESTATUS|PPID|PWD|OLDPWD|\
        RANDOM|SECONDS|SHELLOPTS|SHLVL|SRANDOM|UID|COMP_WORDBREAKS|OPTIND|OPTERR|IFS|_) continue;;
      esac
      declare -p "$__ludus_name"
    done
    declare -f; alias -p; shopt -p; set +o; umask -p
    unset -v IFS; [ -v IFS ] && declare -p IFS
    printf 'cd %q\n' "$PWD"
  } > "$__ludus_state.new" 2>/dev/null && mv -f "$__ludus_state.new" "$__ludus_state"
  exit $__ludus_code
}
trap __ludus_keep EXIT
eval "$__ludus_command"
"""


def run_shell(command: str, state: str, wall_seconds: float, cpu_seconds: float) -> dict[str, Any]:
    script = ["bash", "--norc", "--noprofile", "-c", SHELL_SCRIPT, "bash", f"{state}/shell", command]
    return run_program(script, wall_seconds, cpu_seconds)


def run_program(argv: list[str], wall_seconds: float, cpu_seconds: float) -> dict[str, Any]:
    """Run a program with the session's standard streams; at its deadline its process group is killed."""
    import subprocess  # lazy: it loads `threading`, whose fork hook would dominate the cost of every fork

    started = time.monotonic()
    own = resource.getrlimit(resource.RLIMIT_CPU)
    limit = int(cpu_seconds + 1)
    try:
        # inherited by the program and counted from 0 there; this process may exceed it for a moment
        resource.setrlimit(resource.RLIMIT_CPU, (limit if own[1] < 0 else min(limit, own[1]), own[1]))
        process = subprocess.Popen(argv, start_new_session=True)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return {"done": "raised", "error": f"{argv[0][:200]}: {reason}", "code": 127}
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, own)
    in_time = _ended_in_time(process, started + wall_seconds)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if not in_time:
            os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    if not in_time:
        return {"done": "interrupted", "error": None}
    if code < 0:
        return {"done": "signal", "signal": -code, "error": None}
    return {"done": "ok" if code == 0 else "raised", "code": code, "error": None}


def _ended_in_time(process: subprocess.Popen[bytes], deadline: float) -> bool:
    fd = os.pidfd_open(process.pid)
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        while (left := deadline - time.monotonic()) > 0:
            if poll.poll(left * 1000):
                return True
        return bool(poll.poll(0))
    finally:
        os.close(fd)


def serve() -> None:
    """In a container: keep one interpreter, and run what comes on standard input until that ends.

    A request is a line of JSON: code, stdin, cpu_seconds and a mark that only the host knows. The report is
    written after the mark on stdout; the mark on stderr says that nothing more comes there.
    """
    import json
    import tempfile

    requests = os.fdopen(os.dup(0), "rb")
    out, err = os.dup(1), os.dup(2)
    interpreter = Interpreter()
    os.write(out, f"{os.getpid()}\n".encode())
    for line in requests:
        asked = json.loads(line)
        with tempfile.TemporaryFile() as given:
            given.write(asked["stdin"].encode("utf-8", "surrogatepass"))
            given.seek(0)
            os.dup2(given.fileno(), 0)
        interpreter.fresh_input()
        said = interpreter.run(asked["code"], asked["cpu_seconds"])
        _write(out, f"{asked['mark']}{json.dumps(said)}\n")
        _write(err, f"{asked['mark']}\n")


def _write(fd: int, text: str) -> None:
    data = text.encode("utf-8", "backslashreplace")
    while data:
        data = data[os.write(fd, data) :]
