"""From what the inside said, or from how its process ended, to a result. Pure."""

from __future__ import annotations

import os
import signal
from typing import Any

from ludus.sandbox.config import Limits
from ludus.sandbox.execution import Execution, Outcome
from ludus.sandbox.inside.interpreter import OUT_OF_MEMORY
from ludus.sandbox.worker import Ending

_MOST_TEXT = 50_000
_SAID = {
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
    """What the inside reported. It may be lying about itself, but not about its time being up."""
    done = said.get("done")
    outcome = _SAID.get(done, Outcome.RAISED) if isinstance(done, str) else Outcome.RAISED
    error = _text(said.get("error"))
    if outcome is Outcome.TIMEOUT and done == "interrupted" and stopped is None and error:
        outcome = Outcome.RAISED  # a KeyboardInterrupt of its own making
    if stopped is Outcome.TIMEOUT:
        outcome = Outcome.TIMEOUT
    number = _signal(said.get("signal"))
    if outcome is Outcome.KILLED and number == signal.SIGXCPU:
        outcome = Outcome.CPU
    return Execution(
        outcome=outcome,
        value=_text(said.get("value")),
        error=error,
        exit_code=_whole(said.get("code")),
        signal=None if number is None else signal_name(number),
    )


def unfinished(ending: Ending, stopped: Outcome | None, limits: Limits) -> Execution:
    """The process ended without a word: why, from the kernel's account of it."""
    if ending.excess == "unreadable":
        return Execution(Outcome.KILLED, error="its processes could not be looked after, and were ended")
    if ending.excess is not None:
        return Execution(_EXCESS.get(ending.excess, Outcome.MEMORY))
    if stopped is not None:
        return Execution(stopped)
    if ending.status is None:
        return Execution(Outcome.KILLED, error="the session's process ended")
    if os.WIFEXITED(ending.status) and os.WEXITSTATUS(ending.status) == OUT_OF_MEMORY:
        return Execution(Outcome.MEMORY)
    if os.WIFEXITED(ending.status):
        return Execution(Outcome.EXITED, exit_code=os.WEXITSTATUS(ending.status))
    number = os.WTERMSIG(ending.status)
    if number in (signal.SIGKILL, signal.SIGXCPU) and ending.cpu_seconds >= limits.cpu_seconds:
        return Execution(Outcome.CPU)
    return Execution(Outcome.KILLED, signal=signal_name(number))


def wait_status(said: Any) -> int | None:
    """A status as `os.wait` gives it, if what a stranger said is one."""
    return said if isinstance(said, int) and 0 <= said <= 0xFFFF else None


def looks_killed(said: Execution) -> bool:
    """Whether the kernel may have ended it, or a program in it, for the memory of the whole sandbox."""
    is_killed = said.outcome is Outcome.KILLED and said.signal in (None, "SIGKILL")
    return is_killed or said.exit_code == 128 + signal.SIGKILL  # as a shell tells it


def ended_at_once(ending: Ending) -> str:
    """Why a session that never began is not there."""
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


def _text(value: Any) -> str | None:
    """A text as the inside said it, without lone surrogates, which cannot be written as UTF-8."""
    if not isinstance(value, str):
        return None
    return value[:_MOST_TEXT].encode("utf-8", "backslashreplace").decode()


def _signal(value: Any) -> int | None:
    """The number of a signal, if what a stranger said is one."""
    return value if isinstance(value, int) and 0 < value < signal.NSIG else None


def _whole(value: Any) -> int | None:
    if not isinstance(value, int):
        return None
    return value if 0 <= value <= 0xFF else 1
