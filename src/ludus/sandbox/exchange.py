"""What goes into a guest (modules of Ludus as source code, text, commands), and what comes out: results. Pure.

What the guest reports is data from a hostile process: every field is checked. How a process ended is known from
the kernel alone.
"""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from ludus.sandbox.config import Limits, SandboxError, SessionLost
from ludus.sandbox.guest import frames

# A bundle defines each module under its full name before the next one runs, so modules that import each other
# work unchanged in a sandbox, which cannot see this package.
_DEFINE = """\
def _define(name, source):
    import sys, types
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
"""

_MOST_TEXT = 50_000
_DISCARDED = 16 << 20
"""Output beyond its limit that is read and thrown away before the program is stopped."""


@cache
def bundle(*modules: str, then: str = "") -> str:
    """Source code that defines the named modules in this order and runs `then`."""
    definitions = [f"_define({name!r}, {_source(name)!r})" for name in modules]
    return "\n".join([_DEFINE, *definitions, then, ""])


def _source(name: str) -> str:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"there is no module {name!r} to bundle", name=name)
    return Path(spec.origin).read_text(encoding="utf-8")


def call(module: str, function: str, arguments: Sequence[str] = ()) -> str:
    """Source that calls a function of a bundled module with text arguments."""
    given = ", ".join(repr(one) for one in arguments)
    return f"__import__('sys').modules[{module!r}].{function}({given})"


def checked_argv(argv: Sequence[str]) -> list[str]:
    """The words of a command, NUL and lone surrogates escaped."""
    if isinstance(argv, str | bytes) or not argv:
        raise ValueError(f'argv is a list of words such as ["ls", "-la"], not {argv!r:.60}; see `shell`')
    return [os.fsdecode(encode_argument(word)) for word in argv]


def encode_text(given: str) -> bytes:
    """UTF-8, with lone surrogates kept."""
    return given.encode("utf-8", "surrogatepass")


def encode_argument(word: str) -> bytes:
    """A word of a command line, with NUL and lone surrogates escaped."""
    return word.replace("\0", "\\0").encode("utf-8", "backslashreplace")


class Outcome(StrEnum):
    """How an execution ended. Everything but OK is caused by the code itself."""

    OK = "ok"
    RAISED = "raised"
    """An exception, or a program's exit status other than 0."""
    EXITED = "exited"
    """The code ended its interpreter (`sys.exit`, `os._exit`)."""
    TIMEOUT = "timeout"
    CPU = "cpu"
    MEMORY = "memory"
    PROCESSES = "processes"
    OUTPUT = "output"
    """It wrote far more output than is kept, and was stopped."""
    KILLED = "killed"
    """A signal, such as that of a crash in C code."""


@dataclass(frozen=True, slots=True)
class Execution:
    outcome: Outcome
    stdout: str = ""
    stderr: str = ""
    value: str | None = None
    """`repr` of the last expression; None where there was none, or its value was None."""
    error: str | None = None
    """A short traceback, or details of an outcome."""
    exit_code: int | None = None
    signal: str | None = None
    truncated: bool = False
    """Part of the output was left out."""
    seconds: float = 0.0
    cpu_seconds: float | None = None
    """CPU time; known for one-shot executions."""
    peak_mb: float | None = None
    """Peak memory; known for one-shot executions."""
    lost: bool = False
    """The session did not survive: its variables and files are gone."""

    @property
    def ok(self) -> bool:
        return self.outcome is Outcome.OK

    def text(self) -> str:
        """Text for the model: output, value, error, and a note on how it was stopped."""
        parts = [
            self.stdout.rstrip("\n"),
            self.stderr.rstrip("\n"),
            self.value,
            self.error,
            self._note(),
        ]
        return "\n".join(part for part in parts if part)

    def _note(self) -> str:
        notes = {
            Outcome.TIMEOUT: f"[stopped: it took longer than {self.seconds:.3g} seconds]",
            Outcome.CPU: "[stopped: it used up its processor time]",
            Outcome.MEMORY: "[stopped: it used up its memory]",
            Outcome.PROCESSES: "[stopped: it started too many processes]",
            Outcome.OUTPUT: "[stopped: it wrote far too much output]",
            Outcome.KILLED: f"[ended by {self.signal or 'a signal'}]",
            Outcome.EXITED: f"[exited with status {self.exit_code}]",
        }
        if self.outcome is Outcome.MEMORY and self.error:
            note = ""
        elif self.outcome is Outcome.RAISED and self.error is None:
            note = f"[exit status {self.exit_code}]"
        else:
            note = notes.get(self.outcome, "")
        lost = "[the session ended: its variables and files are gone]" if self.lost else ""
        return " ".join(part for part in (note, lost) if part)


@dataclass(frozen=True, slots=True)
class ProcessExit:
    status: int | None
    """As `os.wait` gives it; None when unknown."""
    cpu_seconds: float = 0.0
    peak_mb: float = 0.0
    excess: str | None = None
    """The limit on the whole session for which it was killed."""


_REPORTED = {
    "ok": Outcome.OK,
    "raised": Outcome.RAISED,
    "exited": Outcome.EXITED,
    "memory": Outcome.MEMORY,
    "cpu": Outcome.CPU,
    "interrupted": Outcome.TIMEOUT,
    "signal": Outcome.KILLED,
}
_EXCESS = {"memory": Outcome.MEMORY, "processes": Outcome.PROCESSES, "cpu": Outcome.CPU}


def execution_of(said: dict[str, Any], stopped: Outcome | None) -> Execution:
    """The guest's report as a result. It may lie about itself, but not about a timeout (`stopped`)."""
    done = said.get("done")
    outcome = _REPORTED.get(done, Outcome.RAISED) if isinstance(done, str) else Outcome.RAISED
    error = _text_field(said.get("error"))
    if outcome is Outcome.TIMEOUT and done == "interrupted" and stopped is None and error:
        outcome = Outcome.RAISED  # a KeyboardInterrupt of its own making
    if stopped is Outcome.TIMEOUT:
        outcome = Outcome.TIMEOUT
    number = _signal(said.get("signal"))
    if outcome is Outcome.KILLED and number == signal.SIGXCPU:
        outcome = Outcome.CPU
    return Execution(
        outcome=outcome,
        value=_text_field(said.get("value")),
        error=error,
        exit_code=_whole(said.get("code")),
        signal=None if number is None else signal_name(number),
    )


def unfinished(ending: ProcessExit, stopped: Outcome | None, limits: Limits) -> Execution:
    """The process ended without a report: why, according to the kernel."""
    if ending.excess == "unreadable":
        return Execution(Outcome.KILLED, error="its processes could not be monitored, and were killed")
    if ending.excess is not None:
        return Execution(_EXCESS.get(ending.excess, Outcome.MEMORY))
    if stopped is not None:
        return Execution(stopped)
    if ending.status is None:
        return Execution(Outcome.KILLED, error="the session's process ended")
    if os.WIFEXITED(ending.status) and os.WEXITSTATUS(ending.status) == frames.OUT_OF_MEMORY:
        return Execution(Outcome.MEMORY)
    if os.WIFEXITED(ending.status):
        return Execution(Outcome.EXITED, exit_code=os.WEXITSTATUS(ending.status))
    number = os.WTERMSIG(ending.status)
    if number in (signal.SIGKILL, signal.SIGXCPU) and ending.cpu_seconds >= limits.cpu_seconds:
        return Execution(Outcome.CPU)
    return Execution(Outcome.KILLED, signal=signal_name(number))


def wait_status(said: Any) -> int | None:
    """A status as `os.wait` gives it, if what the guest said is one."""
    return said if isinstance(said, int) and 0 <= said <= 0xFFFF else None


def looks_killed(said: Execution) -> bool:
    """Whether the kernel may have killed it, or a program in it, for the memory of the whole sandbox."""
    is_killed = said.outcome is Outcome.KILLED and said.signal in (None, "SIGKILL")
    return is_killed or said.exit_code == 128 + signal.SIGKILL  # as a shell reports it


def ended_at_once(ending: ProcessExit) -> str:
    """Why a session did not start."""
    if ending.status is None:
        return "its process ended at once"
    code = os.waitstatus_to_exitcode(ending.status)
    how = f"with status {code}" if code >= 0 else f"by {signal_name(-code)}"
    return f"its process ended at once, {how}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _text_field(value: Any) -> str | None:
    """A text from the guest, without lone surrogates, which cannot be encoded as UTF-8."""
    if not isinstance(value, str):
        return None
    return value[:_MOST_TEXT].encode("utf-8", "backslashreplace").decode()


def _signal(value: Any) -> int | None:
    """A signal number, if what the guest said is one."""
    return value if isinstance(value, int) and 0 < value < signal.NSIG else None


def _whole(value: Any) -> int | None:
    if not isinstance(value, int):
        return None
    return value if 0 <= value <= 0xFF else 1


@dataclass(slots=True)
class SlotUsage:
    """Resources used so far by the programs in one slot, and whether the last one left it clean.

    `header` comes from the slot's first process, which is trusted; `report` from the program's, which is not.
    """

    cpu_seconds: float = 0.0
    peak_mb: float = 0.0
    is_clean: bool = True

    def execution(
        self, header: dict[str, Any], report: str, stopped: Outcome | None, limits: Limits
    ) -> Execution:
        """The result of a program; `SandboxError` when it never began, an infrastructure failure."""
        self.is_clean = False
        if "status" not in header:
            raise SessionLost(f"a slot's first process broke: {header!r:.500}")
        ending = ProcessExit(header["status"], header["cpu"], header["peak_kb"] / 1024)
        # the signal that stopped a program may still be on its way, and would hit the next one
        self.is_clean = bool(header["clean"]) and stopped is None
        self.cpu_seconds = header["total_cpu"]
        self.peak_mb = max(self.peak_mb, ending.peak_mb)
        if not header["began"]:
            raise SandboxError(f"a program could not be started in its slot: {report[:500]!r}")
        try:
            said = execution_of(frames.parsed(report), stopped)
        except frames.BadFrame:  # no report, or a forged one
            said = unfinished(ending, stopped, limits)
        return replace(said, cpu_seconds=ending.cpu_seconds, peak_mb=ending.peak_mb)

    def rest(self, ending: ProcessExit) -> ProcessExit:
        """`ending` without what earlier programs in the slot have used."""
        return replace(ending, cpu_seconds=max(0.0, ending.cpu_seconds - self.cpu_seconds))


class OutputBuffer:
    """Keeps the head and the tail of an output."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._head = bytearray()
        self._tail = bytearray()
        self._total = 0

    @property
    def truncated(self) -> bool:
        return self._total > self._limit

    @property
    def is_flooded(self) -> bool:
        """Whether it is far beyond its limit, so that the program is to be stopped."""
        return self._total > self._limit + _DISCARDED

    def keep(self, data: bytes) -> None:
        self._total += len(data)
        room = self._limit - len(self._head) if not self._tail else 0
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * self._limit:
            del self._tail[: -self._limit]

    def text(self) -> str:
        """The kept output, with a note in the middle of how much was left out."""
        if not self.truncated:
            return _decoded(self._head + self._tail)
        half = self._limit // 2
        whole = self._head + self._tail
        left_out = self._total - 2 * half
        note = f"\n... [{left_out:,} bytes left out] ...\n"
        return _decoded(whole[:half]) + note + _decoded(whole[-half:])


def _decoded(data: bytes | bytearray) -> str:
    return bytes(data).decode("utf-8", errors="backslashreplace")
