"""What should a model imitate before RL? The same budget of episodes, spent on data in different ways.

    python benchmarks/data_methods.py [--seeds 3]

Three tickets, one after the other, go to one of four teams each; an expert sends nine of ten to the right
one, but tickets about parcels (`mail`) it only guesses. Each way of making data may play 96 episodes; then a
small model made from scratch imitates what came out, and RL follows, with the same settings for all. Success
is all three right, measured on 64 held-out tasks.

- raw: 96 demonstrations of the expert, as they are.
- rejection: the same 96, those that succeed.
- looptool: 48 demonstrations (those that succeed), 16 probes of a model trained on them, 32 more demonstrations
  where it fails (those that succeed).
- steca: the same 96; wrong steps are replaced by a rule that knows better, as a stronger model would.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console
from rich.table import Table

import ludus
from ludus.cli.synth import run_synthesis
from ludus.core.messages import Message, ToolContext
from ludus.core.trajectory import Trajectory, is_success
from ludus.observe import read_trajectories, write_trajectories
from ludus.rollouts.agent import Agent, Demonstrator
from ludus.rollouts.rollout import Rollout
from ludus.synth import SynthContext, SynthFolder
from ludus.synth.episodes import demonstration_rollout
from ludus.synth.steca import StecaConfig, StepCalibration
from ludus.tools import as_toolset

TEAMS = {"Charged twice": "billing", "No login": "access", "No signal": "network", "Lost parcel": "mail"}
WHO = [
    "baker",
    "school",
    "pilot",
    "farmer",
    "nurse",
    "museum",
    "singer",
    "bank",
    "lawyer",
    "clown",
    "painter",
    "judge",
]
EPISODES = 96
HERE = Path(__file__).resolve()
CODE = """
import sys
sys.path.insert(0, {here!r})
from data_methods import assign, expert, held_out, right, training
"""
RECIPE = """
name = "tickets"
seed = {seed}
rewards = ["parts.py:right"]
[model.scratch]
width = 64
[tasks]
train = "parts.py:training"
[agent]
tools = ["parts.py:assign"]
[budgets]
max_turns = 3
max_turn_tokens = 32
[warm_start]
demonstrations = "parts.py:expert"
steps = 150
batch = 16
optimizer = {{ learning_rate = 3e-3 }}
[rl]
steps = 0
[synth.looptool]
rounds = 1
first_examples = 48
probe = 16
examples = 32
start = "base"
"""


@ludus.tool
async def assign(to: str, context: ToolContext) -> ludus.ToolResult:
    """Assign the next ticket to a team."""
    done = PLACES.get(context.episode, 0)
    PLACES[context.episode] = done + 1
    target = context.task.target
    is_last = done + 1 >= len(target)
    if is_last:
        PLACES.pop(context.episode)
    is_right = done < len(target) and to == target[done]
    return ludus.ToolResult("assigned", reward=float(is_right), terminated=is_last)


PLACES: dict[str, int] = {}
"""How many tickets an episode has assigned."""


@ludus.reward(name="success")
async def right(trajectory: ludus.Trajectory, target: list[str]) -> float:
    return float([call.arguments.get("to") for call in trajectory.calls] == list(target))


def task_row(number: int) -> dict[str, Any]:
    draw = Random(number)
    reasons = [draw.choice([*TEAMS]) for _ in range(3)]
    lines = [f"{reason}, says a {draw.choice(WHO)}." for reason in reasons]
    target = [TEAMS[reason] for reason in reasons]
    hard = "mail" if "mail" in target else "other"
    return {"id": str(number), "prompt": " ".join(lines), "target": target, "capability": hard}


def training() -> list[dict[str, Any]]:
    return [task_row(number) for number in range(400)]


def held_out() -> list[dict[str, Any]]:
    return [task_row(number) for number in range(1000, 1064)]


def expert(task: ludus.Task) -> Any:
    """Right on nine tickets of ten, and on mail only by chance."""
    draw = Random(f"expert {task.id}")
    for team in task.target:
        knows = team != "mail" and draw.random() < 0.9
        yield ludus.ToolCall("assign", {"to": team if knows else draw.choice([*TEAMS.values()])})


def better(task: ludus.Task, messages: list[Message]) -> ludus.ToolCall:
    """What a stronger model would have done at a step."""
    done = sum(message.role == "assistant" for message in messages)
    return ludus.ToolCall("assign", {"to": task.target[done]})


@dataclass
class Source:
    tasks: list[ludus.Task]
    rollout: Rollout
    held_out: tuple[ludus.Task, ...] = ()
    name: str = "tickets"


def demonstrating() -> Rollout:
    return demonstration_rollout(Demonstrator(expert), as_toolset([assign]), {}, [right])


async def demonstrations(seed: int) -> list[Trajectory]:
    """The expert's episodes."""
    rows = training()
    Random(seed).shuffle(rows)
    tasks = [ludus.Task.parse(row) for row in rows[:EPISODES]]
    played = [one async for group in demonstrating().groups(tasks, seed) for one in group.trajectories]
    return sorted(played, key=lambda one: int(one.task.id))  # not in the order in which they ended


async def repaired(shown: list[Trajectory], folder: Path) -> list[Trajectory]:
    write_trajectories(folder / "raw.parquet", shown)
    settings = {
        "source": str(folder / "raw.parquet"),
        "rule": f"{HERE}:better",
        "regrow": False,
        "max_bad": 1.0,
    }
    source = Source([one.task for one in shown], replace(demonstrating(), agent=Agent()))
    context = SynthContext([source], SynthFolder(folder / "steca", {"format": 1}))
    return (await StepCalibration(StecaConfig.parse(settings)).run(context)).kept


def looptool(seed: int, folder: Path) -> list[list[Message]]:
    here = Path.cwd()
    os.chdir(folder)
    try:
        Path("parts.py").write_text(CODE.format(here=str(HERE.parent)))
        Path("tickets.toml").write_text(RECIPE.format(seed=seed))
        with (
            Path(os.devnull).open("w") as nowhere,
            contextlib.redirect_stdout(nowhere),
            contextlib.redirect_stderr(nowhere),
        ):
            run_synthesis("looptool", Path("tickets.toml"), [], None, None, Path("loop"))
        return [one.messages for one in read_trajectories("loop/examples.parquet")]
    finally:
        os.chdir(here)


def data_of(method: str, seed: int, folder: Path) -> list[list[Message]]:
    if method == "looptool":
        return looptool(seed, folder)
    shown = asyncio.run(demonstrations(seed))
    if method == "rejection":
        shown = [one for one in shown if is_success(one)]
    if method == "steca":
        shown = asyncio.run(repaired(shown, folder))
    return [one.messages for one in shown]


def trained(data: list[list[Message]], seed: int, folder: Path) -> list[float]:
    """Held-out success after imitation and after RL."""
    result = ludus.train(
        model={"scratch": {"width": 64}},
        tools=[assign],
        rewards=[right],
        demonstrations=data,
        tasks=training(),
        held_out=held_out(),
        budgets={"max_turns": 3, "max_turn_tokens": 32},
        seed=seed,
        progress=False,
        warm_start={"steps": 150, "batch": 16, "optimizer": {"learning_rate": 3e-3}},
        rl={"steps": 10, "tasks": 16, "attempts": 8, "optimizer": {"learning_rate": 1e-3}},
        run={"folder": str(folder / "run")},
    )
    return [float(share.rstrip("%")) for share in [*result.success.values()][-2:]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", default="raw,rejection,looptool,steca")
    options = parser.parse_args()
    table = Table("data", "examples", "after imitation", "after RL", "seconds")
    for method in options.methods.split(","):
        sizes, before, after = [], [], []
        started = time.perf_counter()
        for seed in range(options.seeds):
            with tempfile.TemporaryDirectory() as folder:
                data = data_of(method, seed, Path(folder))
                imitated, learned = trained(data, seed, Path(folder))
            sizes.append(len(data))
            before.append(imitated)
            after.append(learned)
            print(
                f"{method} seed {seed}: {len(data)} examples, {imitated:.1f}% -> {learned:.1f}%",
                file=sys.stderr,
            )
        table.add_row(method, f"{statistics.mean(sizes):.0f}", _spread(before), _spread(after),
                      f"{time.perf_counter() - started:.0f}")  # fmt: skip
    Console(width=100).print(table)


def _spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.1f} ({min(values):.1f} to {max(values):.1f})"


if __name__ == "__main__":
    main()
