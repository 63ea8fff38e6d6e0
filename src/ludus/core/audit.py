"""The execution log of tool calls: one record for each call that an episode makes, failed or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ludus.core.failures import Fault
from ludus.core.messages import Json

Legality = Literal["legal", "malformed", "unknown_tool", "bad_arguments", "not_run"]

_ILLEGAL: dict[Fault, Legality] = {
    Fault.MALFORMED_CALL: "malformed",
    Fault.UNKNOWN_TOOL: "unknown_tool",
    Fault.BAD_ARGUMENTS: "bad_arguments",
}


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """One call: who made it, what was on offer, what was asked, and what came of it."""

    episode: str
    task: str
    attempt: int
    turn: int
    """Actions of the episode up to and including the one that made the call."""
    call: str
    tool: str
    arguments: Json
    offered: tuple[str, ...]
    """The tools on offer when the call was made."""
    legality: Legality
    """Whether it was a call of a tool on offer with arguments that its schema allows."""
    seconds: float
    fault: Fault | None = None
    failure: str | None = None
    """The infrastructure failure, if one prevented a result."""
    chars: int = 0
    """Length of the result, before the episode's budget cuts it."""
    media: int = 0


Audit = Callable[[AuditRecord], None]


def legality_of(fault: Fault | None, *, was_run: bool = True) -> Legality:
    """Whether a call was legal, by the fault it was answered with."""
    if not was_run:
        return "not_run"
    return _ILLEGAL.get(fault, "legal") if fault is not None else "legal"
