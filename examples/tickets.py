"""Support tickets, each of which belongs to one of four teams: the agent assigns them with a tool.

Demonstrations show how the tool is called, and are right on half of the tickets. The rest is left for
reinforcement learning to find out, and is measured on tickets that it has not seen.
"""

from __future__ import annotations

import random
from collections.abc import Generator

import ludus

TEAMS = {
    "Charged twice": "billing",
    "No login": "access",
    "No signal": "network",
    "Lost parcel": "mail",
}
WHO = ("baker", "school", "pilot", "farmer", "nurse", "museum")
WHO += ("singer", "bank", "lawyer", "clown", "painter", "judge")
HELD_OUT = 8


@ludus.tool
async def assign(to: str) -> ludus.ToolResult:
    """Assign the ticket to a team.

    Args:
        to: billing, access, network or mail.
    """
    return ludus.ToolResult("assigned", terminated=True)


@ludus.reward(name="success")
async def right(trajectory: ludus.Trajectory, target: str) -> float:
    """1 when the ticket was assigned to the right team."""
    return float(any(call.arguments.get("to") == target for call in trajectory.calls))


def training_tasks() -> list[ludus.Task]:
    """Each ticket several times: the expert does something else each time."""
    return [ludus.Task.of(prompt, team) for prompt, team in _tickets()[:-HELD_OUT] * 12]


def held_out_tasks() -> list[ludus.Task]:
    """Tickets that are neither demonstrated nor trained on, several times for a finer measurement."""
    return [ludus.Task.of(prompt, team) for prompt, team in _tickets()[-HELD_OUT:] * 8]


def few_tasks() -> list[ludus.Task]:
    """Tickets of one customer, each several times: for an agent that takes a second to start."""
    return [ludus.Task.of(f"{what}.", team) for what, team in TEAMS.items()] * 6


def few_held_out() -> list[ludus.Task]:
    """The tickets of `few_tasks` again: measured is whether the agent learns, not whether it generalises."""
    return [ludus.Task.of(f"{what}.", team) for what, team in TEAMS.items()] * 2


def expert(task: ludus.Task) -> Generator[ludus.ToolCall, str, None]:
    """Calls the tool as it should be, with the right team on half of the tickets."""
    teams = [task.target, task.target, *TEAMS.values()]
    yield ludus.ToolCall("assign", {"to": random.Random(task.id).choice(teams)})


def _tickets() -> list[tuple[str, str]]:
    tickets = [(f"{what}, says a {who}.", team) for who in WHO for what, team in TEAMS.items()]
    random.Random(0).shuffle(tickets)
    return tickets
