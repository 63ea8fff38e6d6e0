"""Safes to open. A combination is either for training or held out, never both."""

from __future__ import annotations

from ludus.core.random import shuffled
from ludus.core.task import Task
from ludus.envs.safe.env import DIALS, NUMBERS

HELD_OUT = 200
"""Combinations kept for evaluation, of the 1,000 there are."""


def training_tasks() -> list[Task]:
    """Every combination that is not held out."""
    return [_task(number) for number in _order()[HELD_OUT:]]


def held_out_tasks() -> list[Task]:
    """Combinations that no demonstration and no training episode has."""
    return [_task(number) for number in _order()[:HELD_OUT]]


def _order() -> list[int]:
    return shuffled(NUMBERS ** len(DIALS), key=20260101)


def _task(number: int) -> Task:
    combination = [number // NUMBERS**place % NUMBERS for place in range(len(DIALS))]
    return Task.of("Open the safe.", id=f"safe-{number}", envs={"safe": {"combination": combination}})
