"""What a safe pays: a part for each dial that was found, and the rest for the open door."""

from __future__ import annotations

from ludus.envs.safe.env import DIALS, Safe
from ludus.rewards import reward


@reward(name="success")
async def opened(env: Safe) -> float:
    """1 when the door has been opened."""
    return float(env.opened)


@reward(weight=0.5)
async def found(env: Safe) -> float:
    """The share of dials whose number was found: without it, a beginner would hardly ever be paid."""
    return len(env.found) / len(DIALS)
