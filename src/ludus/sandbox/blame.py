"""Whose doing it is that a session's process is gone, where the process itself does not tell.

It is the code's, with two exceptions: its worker has died; or it was killed while the kernel ended processes
for the memory of the whole sandbox. Those are ours (`SessionLost`): whoever exceeds a limit of its own is
ended for that, with a result that says so.
"""

from __future__ import annotations

from ludus.sandbox.config import Limits
from ludus.sandbox.endings import looks_killed, unfinished
from ludus.sandbox.worker import Process

FULL = (
    "all sessions together used up the memory of the sandbox's control group, and the kernel ended this one; "
    "allow fewer at a time (max_sessions) or less memory to each (limits.memory_mb)"
)


class Blame:
    """Since when the kernel may have ended somebody for the memory of all."""

    def __init__(self, limits: Limits, process: Process) -> None:
        self._limits = limits
        self.begin(process)

    def begin(self, process: Process) -> None:
        """From now on; before an execution, say."""
        self._kills = process.worker.group.kills()

    def is_group_full(self, process: Process) -> bool:
        """Whether the kernel has ended somebody for the memory of all. Not where we alone may fill it."""
        group = process.worker.group
        return group.kills() > self._kills and self._limits.memory_mb << 20 < group.memory_bytes

    def ours(self, process: Process) -> str | None:
        """Why the end of a process is ours; None where it is the code's doing."""
        if process.problem is not None:
            return process.problem
        if not process.ended.done() or process.was_killed or not self.is_group_full(process):
            return None
        return FULL if looks_killed(unfinished(process.ended.result(), None, self._limits)) else None
