"""Collecting the dead. A session's first process inherits every orphan inside, and must bury it.

What a shell command left behind is nobody's but ours, and is collected as soon as it has ended. What ended
under Python code may be a child that the code itself will ask about; it gets until the end of the next
execution.
"""

from __future__ import annotations

import contextlib
import os

from ludus.sandbox.inside.branching import ended_children


class Orphans:
    """Remembers which ended children the code could still ask about."""

    def __init__(self) -> None:
        self._waiting: set[int] = set()

    def after_python(self, forks: set[int]) -> None:
        """Collect those that had ended before this execution and that nobody has asked about since."""
        ended = ended_children() - forks
        _collect(ended & self._waiting)
        self._waiting = ended - self._waiting

    def after_command(self, forks: set[int]) -> None:
        """Collect all that were left to us while a command ran."""
        _collect(ended_children() - forks - self._waiting)


def _collect(pids: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
