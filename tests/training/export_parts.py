"""A tool, tasks and an expert of episodes with a call, its result and an answer: what exported models play."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import ludus
from ludus.training import Recipe

DESKS = {"billing": "desk 4", "access": "desk 7", "network": "desk 2", "mail": "desk 9"}
PEOPLE = ["baker", "school", "pilot", "farmer", "nurse", "museum", "singer", "bank", "lawyer", "clown"]


@ludus.tool
def desk_of(team: str, urgent: bool = False) -> str:
    """Find the desk of a team.

    Args:
        team: The team's name, such as "billing".
        urgent: Whether it cannot wait.
    """
    return f"{team} sits at {DESKS.get(team, 'no desk')}"


@ludus.reward(name="success")
def right(answer: str | None, target: str) -> float:
    return float(answer == target)


def tasks() -> list[dict[str, str]]:
    drawn = [
        {"prompt": f"Where is {team}, asks a {who}?", "target": f"{team}: {desk}"}
        for who in PEOPLE
        for team, desk in DESKS.items()
    ]
    Random(0).shuffle(drawn)
    return drawn


def expert(task: ludus.Task) -> Iterator[Any]:
    yield ludus.ToolCall("desk_of", {"team": str(task.target).partition(":")[0]})
    yield str(task.target)


def recipe(folder: Path, steps: int, **changes: Any) -> Recipe:
    """A recipe of imitation alone. `changes` are tables of it."""
    here = str(Path(__file__))
    table = {
        "name": "desks",
        "threads": 1,
        "model": {"scratch": {"layers": 2, "width": 128}},
        "tasks": {"train": f"{here}:tasks", "evaluation": f"{here}:tasks"},
        "agent": {"tools": [f"{here}:desk_of"], "system": "You know where every team sits."},
        "rewards": [f"{here}:right"],
        "budgets": {"max_turns": 3, "max_turn_tokens": 48},
        "warm_start": {
            "demonstrations": f"{here}:expert",
            "steps": steps,
            "batch": 16,
            "optimizer": {"learning_rate": 2e-3},
        },
        "rl": {"steps": 0},
        "evaluation": {"tasks": 8},
        "run": {"folder": str(folder)},
    }
    for name, value in changes.items():
        table[name] = {**table.get(name, {}), **value} if isinstance(value, dict) else value  # type: ignore[dict-item]
    return Recipe.parse(table, "the test")
