"""A slot seen from outside: what came of its programs, and whether it can be used again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ludus.sandbox.config import Limits
from ludus.sandbox.endings import execution_of, unfinished
from ludus.sandbox.errors import SandboxError, SessionLost
from ludus.sandbox.execution import Execution, Outcome
from ludus.sandbox.inside import frames
from ludus.sandbox.worker import Ending


@dataclass(slots=True)
class SlotUsage:
    """What the programs in one slot have used so far, and whether the last one has left it clean.

    The slot's own words (`header`) are ours; `report` is the program's process speaking of itself.
    """

    cpu_seconds: float = 0.0
    peak_mb: float = 0.0
    is_clean: bool = True

    def execution(
        self, header: dict[str, Any], report: str, stopped: Outcome | None, limits: Limits
    ) -> Execution:
        """What came of a program; `SandboxError` when it never began, which is nobody's doing but ours."""
        self.is_clean = False
        if "status" not in header:
            raise SessionLost(f"a slot's first process broke: {header!r:.500}")
        ending = Ending(header["status"], header["cpu"], header["peak_kb"] / 1024)
        # the signal or the kill that stopped a program may still be on its way, and would meet the next one
        self.is_clean = bool(header["clean"]) and stopped is None
        self.cpu_seconds = header["total_cpu"]
        self.peak_mb = max(self.peak_mb, ending.peak_mb)
        if not header["began"]:
            raise SandboxError(f"a program could not be started in its slot: {report[:500]!r}")
        try:
            said = execution_of(frames.parsed(report), stopped)
        except frames.BadFrame:  # it ended without a word, or with words that are not ours
            said = unfinished(ending, stopped, limits)
        return replace(said, cpu_seconds=ending.cpu_seconds, peak_mb=ending.peak_mb)

    def rest(self, ending: Ending) -> Ending:
        """What the last program has used of all that the slot had used when it ended."""
        return replace(ending, cpu_seconds=max(0.0, ending.cpu_seconds - self.cpu_seconds))
