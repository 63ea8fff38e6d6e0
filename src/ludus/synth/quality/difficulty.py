"""How hard an example's task is, and the mix of a set: about 30% easy, 50% medium, 20% hard.

Measured where it can be: the share of attempts at the task that succeeded. Else what the task's metadata says
(`difficulty = "easy" | "medium" | "hard"`), else how many calls it took.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from ludus.core.random import key, shuffled
from ludus.core.task import Task
from ludus.observe import ReportTable, Share

Difficulty = Literal["easy", "medium", "hard"]
DIFFICULTIES: tuple[Difficulty, ...] = get_args(Difficulty)
TARGET: Mapping[Difficulty, float] = {"easy": 0.3, "medium": 0.5, "hard": 0.2}
EASY_RATE, HARD_RATE = 0.7, 0.3
"""A task that is solved more often is easy; one that is solved less often is hard."""
LEAST_ATTEMPTS = 4
"""Fewer attempts say too little of how often a task is solved."""
EASY_CALLS, HARD_CALLS = 3, 7


def difficulty_of_rate(rate: float) -> Difficulty:
    return "easy" if rate > EASY_RATE else "hard" if rate < HARD_RATE else "medium"


def difficulty_of(task: Task, calls: int, rate: float | None = None) -> Difficulty:
    """From the success rate of its attempts, else its metadata, else the calls of a solution."""
    if rate is not None:
        return difficulty_of_rate(rate)
    told = task.metadata.get("difficulty")
    if told in DIFFICULTIES:
        found: Difficulty = told
        return found
    return "easy" if calls <= EASY_CALLS else "hard" if calls >= HARD_CALLS else "medium"


def difficulty_table(levels: Sequence[Difficulty]) -> ReportTable:
    """The mix of a set beside what it should be."""
    counts = Counter(levels)
    total = max(1, len(levels))
    return ReportTable(
        ("difficulty", "kept", "share", "target"),
        [
            [name, counts[name], Share(counts[name] / total), Share(TARGET[name])]
            for name in DIFFICULTIES
        ],
        "difficulty of the kept examples",
    )


def balanced(
    found: Sequence[Difficulty],
    quality: Sequence[float],
    target: Mapping[Difficulty, float] = TARGET,
    seed: int = 0,
) -> set[int]:
    """The largest part of a set with the target's mix, of each difficulty the best first.

    A difficulty of which there is nothing is left out of the target, rather than the whole set.
    """
    counts = Counter(found)
    there = {name: share for name, share in target.items() if counts[name] and share > 0}
    if not there:
        return set()
    total = min(counts[name] * sum(there.values()) / share for name, share in there.items())
    chosen: set[int] = set()
    order = shuffled(len(found), key(seed, "difficulty"))
    for name, share in there.items():
        most = max(1, math.floor(total * share / sum(there.values()) + 1e-9))
        own = sorted((i for i in order if found[i] == name), key=lambda i: -quality[i])
        chosen |= set(own[:most])
    return chosen
