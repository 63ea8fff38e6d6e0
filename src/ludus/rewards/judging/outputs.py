"""Whether a program that ran did what it should."""

from __future__ import annotations

from ludus.core.concurrency import run_sync
from ludus.rewards.judging.comparing import Manner, same_output
from ludus.rewards.judging.specs import StdinCase
from ludus.sandbox import Execution, Outcome


async def is_right(
    execution: Execution, case: StdinCase, manner: Manner, tolerance: float | None
) -> bool:
    """Whether it ended well and wrote what was expected; compared in a thread, as outputs can be long."""
    ended_well = execution.ok or (execution.outcome is Outcome.EXITED and not execution.exit_code)
    if not ended_well or execution.truncated:
        return False
    return await run_sync(same_output, execution.stdout, case.stdout, manner, tolerance)
