"""Several task sets through whole runs: curricula, recordings, and going on after a stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stage_runs import Talker, assert_same_runs
from training_helpers import TINY, add, even, tasks

import ludus
from ludus.core import ByteTokenizer, ConfigError, InfraError, Task, ToolContext
from ludus.engine import FakeEngine
from ludus.training import Parts, Recipe, Result, build_task_sets, close_task_sets

RL = {"kind": "rl", "steps": 3, "tasks": 4, "attempts": 2, "optimizer": {"learning_rate": 1e-2}}

PIECES = '''
import ludus


@ludus.tool
async def shout(text: str) -> str:
    """Say it loudly."""
    return text.upper()


@ludus.reward
async def brief(trajectory: ludus.Trajectory) -> float:
    return 1 / sum(len(action.tokens) for action in trajectory.actions)


def _tasks(word):
    return [ludus.Task.of(f"{n} {word} {n + 1}?", id=str(n), difficulty=n) for n in range(4)]


def sums():
    return _tasks("plus")


def words():
    return _tasks("and")
'''


@pytest.fixture
def sets(tmp_path: Path) -> list[dict[str, Any]]:
    """Two sets with tasks of the same ids; the second has tools, rewards and a tighter horizon of its own."""
    file = tmp_path / "pieces.py"
    file.write_text(PIECES)
    return [
        {"name": "sums", "train": f"{file}:sums", "evaluation": f"{file}:sums"},
        {"name": "words", "train": f"{file}:words", "evaluation": f"{file}:words", "weight": 0.5,
         "tools": [f"{file}:shout"], "rewards": [f"{file}:brief"], "budgets": {"max_turns": 2}},
    ]  # fmt: skip


def settings(folder: Path, sets: list[dict[str, Any]], **stage: Any) -> dict[str, Any]:
    whole = {name: table for name, table in TINY.items() if name != "rl"}
    run = {"checkpoint_every": 1, "keep_checkpoints": 50, "folder": str(folder)}
    return {**whole, "max_in_flight": 1, "task_sets": sets, "stage": [{**RL, **stage}], "run": run}


def code() -> dict[str, Any]:
    return {"tools": [add], "rewards": [even], "agent": Talker(), "group_rewards": ["count_bonus"]}


def column(result: Result, name: str) -> list[float]:
    return [row[name] for row in result.metrics if name in row]


class Stop(Exception):
    """Whatever ends a run."""


def stopping(phase: str, step: int, total: int, metrics: dict[str, float]) -> None:
    if phase == "RL" and step < total:
        raise Stop


@pytest.mark.slow
def test_a_run_with_several_sets_goes_on_after_every_step(
    tmp_path: Path, sets: list[dict[str, Any]]
) -> None:
    """What a set leaves out of its budgets is the recipe's, also when the recipe is read from the run."""
    how = {"refill": {"rounds": 1}, "algorithm": "reinforce_pp_baseline"}
    ludus.train(**settings(tmp_path / "whole", sets, **how), **code())
    with pytest.raises(Stop):
        ludus.train(**settings(tmp_path / "cut", sets, **how), **code(), on_step=stopping)
    with pytest.raises(Stop):
        ludus.train(resume=tmp_path / "cut", **code(), on_step=stopping)
    ludus.train(resume=tmp_path / "cut", **code())
    assert_same_runs(tmp_path / "whole", tmp_path / "cut")


def test_a_set_keeps_its_own_tighter_budget_under_a_curriculum(
    tmp_path: Path, sets: list[dict[str, Any]]
) -> None:
    growing = {"setting": "budgets.max_turns", "schedule": [[0, 1], [1, 2], [2, 4]]}
    result = ludus.train(**settings(tmp_path / "run", sets, curriculum=[growing]), **code())
    assert column(result, "curriculum/budgets.max_turns") == [1, 2, 4]
    assert column(result, "sets/sums/turns") == [1, 2, 4], "beyond the recipe's own, which is 3"
    assert column(result, "sets/words/turns") == [1, 2, 2]


def test_tasks_get_harder_by_a_curriculum(tmp_path: Path, sets: list[dict[str, Any]]) -> None:
    harder = {"setting": "tasks.difficulty", "schedule": [[0, 0], [2, 3]]}
    result = ludus.train(**settings(tmp_path / "run", sets, curriculum=[harder]), **code())
    drawn = [{t.task.id for t in result.run.trajectories(step)} for step in (1, 2, 3)]
    assert drawn[:2] == [{"0"}, {"0"}] and len(drawn[2]) > 1
    assert column(result, "curriculum/tasks.difficulty") == [0, 0, 3]


def test_rewards_get_stricter_when_the_model_is_ready(tmp_path: Path) -> None:
    @ludus.reward
    async def long_enough(trajectory: ludus.Trajectory, *, strictness: float = 100.0) -> float:
        return 1.0 / (1 + strictness)

    ready = {"start": 0, "stop": 3, "by": 1, "metric": "reward", "above": 0.5, "over": 1}
    stage = {**RL, "steps": 4, "curriculum": [{"setting": "rewards.strictness", "adaptive": ready}]}
    tables = {**settings(tmp_path / "run", []), "stage": [stage]}
    del tables["task_sets"]
    parts = {"tasks": tasks(4), "held_out": tasks(1, first=9), "agent": Talker()}
    result = ludus.train(**tables, **parts, rewards=[long_enough])
    assert column(result, "curriculum/rewards.strictness") == [0, 1, 2, 2]
    assert column(result, "reward") == pytest.approx([1, 1 / 2, 1 / 3, 1 / 3])
    assert column(result, "eval/reward") == pytest.approx([1 / 101] * 2), "evaluations are as they were"


def test_python_plays_all_sets(tmp_path: Path, sets: list[dict[str, Any]]) -> None:
    tables = {n: t for n, t in settings(tmp_path, sets).items() if n not in ("stage", "run")}
    parts = {**code(), "group_rewards": None}
    found = ludus.evaluate(**tables, **parts, attempts=2)
    assert {name: (s.tasks, s.episodes) for name, s in found.by_subtask("task_set").items()} == {
        "sums": (4, 8), "words": (4, 8)}  # fmt: skip
    assert found.summary().tasks == 8 and found.metrics["sets/words/turns"] == 2
    groups = ludus.rollout(**tables, **parts)
    assert [len(group.trajectories[0].actions) for group in groups] == [3] * 4 + [2] * 4
    with pytest.raises(ConfigError, match="leave out tasks="):
        ludus.evaluate(**tables, **parts, held_out=tasks(1))


async def test_recorded_tools_of_two_sets_are_kept_apart(
    tmp_path: Path, sets: list[dict[str, Any]]
) -> None:
    """In one store: when it is replayed without the tools, a task that is new gets the tools of its set."""
    own = {**sets[0], "tools": [f"{tmp_path / 'pieces.py'}:shout"]}

    async def named(mode: str, table: dict[str, Any]) -> list[list[str]]:
        raw = {
            "model": {"scratch": {}},
            "agent": {"record": {"path": str(tmp_path / "calls.sqlite"), "mode": mode}},
            "task_sets": [own, table],
        }
        made = build_task_sets(Recipe.parse(raw), Parts(tools=[add]), FakeEngine([]), ByteTokenizer())
        found = []
        for number, one in enumerate(made):
            context = ToolContext(f"{mode} {number}", Task.of(f"{mode} {number}"))
            await one.rollout.tools.open(context)
            found.append([spec.name for spec in await one.rollout.tools.list(context)])
            await one.rollout.tools.close(context)
        await close_task_sets(made)
        return found

    adding = {**sets[1], "tools": None}
    assert await named("record", adding) == [["shout"], ["add"]]
    try:
        replayed = await named("replay", adding)
    except InfraError as error:
        pytest.fail(f"nothing was found: {error}")
    assert replayed == [["shout"], ["add"]]
