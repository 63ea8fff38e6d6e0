"""Code of users around training: step hooks, a curriculum and a sampler by function, and numbers logged."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from stage_runs import assert_same_runs
from training_helpers import TINY, Chatty, add, expert, tasks

import ludus
from ludus.core import ConfigError, Group, StopReason, Trajectory
from ludus.observe import RunFolder
from ludus.observe.console import numbers_text
from ludus.observe.metrics import undefined
from ludus.training import TaskRecord, check_parts, load_parts
from ludus.training.config.recipe import Recipe
from ludus.training.data.tasks import learnable
from ludus.training.loop import HookError

MINE = """
import random

import ludus

CALLS = []


def before(event):
    CALLS.append(("before", event.step, event.stage, dict(event.metrics)))
    ludus.log("custom/before", event.step)


def after(event):
    CALLS.append(("after", event.step, event.stage, event.metrics["step_seconds"] > 0))
    ludus.log("custom/after", event.metrics["reward"])
    if (event.run / "raise-at").exists() and event.step == int((event.run / "raise-at").read_text()):
        raise KeyError("mine")


def stops(event):
    raise OSError("no disk of mine")


async def waits(event):
    return None


def longer(step, recent):
    assert len(recent) == min(step, 20)
    mean = sum(row["reward"] for row in recent) / max(1, len(recent))
    return {"budgets.max_turns": 1 + (step + (mean > 0.5)) % 3}


def chosen(tasks, records, seed):
    drawn = [random.Random(seed + n).randrange(len(tasks)) for n in range(3)]
    return min(drawn, key=lambda i: records[tasks[i].id].reward if tasks[i].id in records else -1.0)


def wrong(*given):
    return {"budgets.max_turnz": 1}


def negative(*given):
    return {"budgets.max_turns": -1}


def endless(*given):
    return {"tasks.difficulty": float("inf")}


def nothing(*given):
    return None


def far(tasks, records, seed):
    return len(tasks)
"""


@ludus.reward
async def even(trajectory: ludus.Trajectory) -> float:
    said = [token for action in trajectory.actions for token in action.tokens]
    ludus.log("custom/said", len(said))
    return sum(token % 2 == 0 for token in said) / len(said)


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(MINE)
    return f"{tmp_path}/mine.py"


def settings(folder: Path, mine: str, **rl: Any) -> dict[str, Any]:
    hooks = {"before_step": [f"{mine}:before"], "after_step": [f"{mine}:after"]}
    return {
        **TINY,
        "max_in_flight": 1,
        "rl": {"steps": 4, "tasks": 2, "attempts": 2, "optimizer": {"learning_rate": 1e-3}} | rl,
        "run": {**TINY["run"], "folder": str(folder), **hooks},
    }


def code() -> dict[str, Any]:
    return {
        "tasks": tasks(6), "held_out": tasks(2, first=50), "tools": [add], "rewards": [even],
        "agent": Chatty(), "progress": False,
    }  # fmt: skip


def test_all_of_it_in_a_run_that_is_the_same_after_a_resume(tmp_path: Path, mine: str) -> None:
    mixed = {"curriculum": f"{mine}:longer", "sampler": f"{mine}:chosen"}
    run = RunFolder(tmp_path / "whole")
    given = settings(run.path, mine, **mixed)
    given["run"]["after_step"] = []
    ludus.train(**given, **code())
    rows = [row for row in run.metrics() if "reward" in row]
    assert [row["custom/before"] for row in rows] == [1, 2, 3, 4]
    assert all(row["custom/said"] == pytest.approx(row["tokens/action"]) for row in rows)
    measured = [row for row in run.metrics() if "eval/reward" in row]
    assert [row["eval/custom/said"] for row in measured] == [
        row["eval/tokens/action"] for row in measured
    ]
    assert not any("custom/said" in row for row in measured) and not undefined(
        rows[0].keys() - {"step", "time"}
    )
    turns = [row["curriculum/budgets.max_turns"] for row in rows]
    assert turns[0] == 1 and len(set(turns)) > 1
    cut = RunFolder(tmp_path / "cut")
    shutil.copytree(run.path, cut.path)
    for checkpoint in cut.checkpoints():
        if checkpoint.step > 2:
            shutil.rmtree(checkpoint.path)
    (cut.path / "recipe.json").write_text(
        (run.path / "recipe.json").read_text().replace(str(run.path), str(cut.path))
    )
    ludus.train(resume=cut.path, **code())
    assert_same_runs(run.path, cut.path)


def test_hooks_see_every_step_of_every_stage(tmp_path: Path, mine: str) -> None:
    given = settings(tmp_path / "run", mine)
    given["run"]["after_step"] = []
    given["rl"]["steps"] = 1
    given["warm_start"] = {"steps": 2, "batch": 2, "optimizer": {"learning_rate": 1e-3}}
    ludus.train(**given, **code(), demonstrations=expert)
    from ludus.core.registry import import_object

    seen = import_object(f"{mine}:CALLS")
    assert seen == [("before", n, stage, {}) for n, stage in ((1, "sft"), (2, "sft"), (3, "rl"))]
    rows = RunFolder(tmp_path / "run").metrics()
    assert [row["custom/before"] for row in rows if "custom/before" in row] == [1, 2, 3]


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_hook_that_raises_stops_the_run_and_its_step_is_saved(
    tmp_path: Path, mine: str, staleness: int
) -> None:
    folder = tmp_path / "run"
    given = settings(folder, mine, staleness=staleness)
    folder.mkdir()
    given["run"]["folder"] = str(folder / "it")
    (tmp_path / "mine.py").write_text(
        MINE.replace('event.run / "raise-at"', 'event.run.parent / "raise-at"')
    )
    (folder / "raise-at").write_text("2")
    with pytest.raises(
        HookError, match=r"mine.py:after \(run.after_step\) raised KeyError: 'mine' .*resume"
    ):
        ludus.train(**given, **code())
    run = RunFolder(folder / "it")
    latest = run.latest_checkpoint()
    assert latest is not None and latest.step == 2
    rows = [row for row in run.metrics() if "reward" in row]
    assert [row["step"] for row in rows] == [1, 2] and all("custom/after" in row for row in rows)
    (folder / "raise-at").unlink()
    ludus.train(resume=run.path, **code())
    assert [row["step"] for row in run.metrics() if "reward" in row] == [1, 2, 3, 4]


def test_a_hook_that_raises_before_a_step_leaves_the_one_before(tmp_path: Path, mine: str) -> None:
    given = settings(tmp_path / "run", mine)
    given["run"] |= {"before_step": [f"{mine}:stops"], "after_step": []}
    with pytest.raises(
        HookError, match=r"mine.py:stops \(run.before_step\) raised OSError: no disk of mine"
    ):
        ludus.train(**given, **code())
    assert not any("reward" in row for row in RunFolder(tmp_path / "run").metrics())


@pytest.mark.parametrize(
    ("where", "name", "told"),
    [
        ("run.before_step", "missing", "run.before_step: .*has no 'missing'"),
        ("run.after_step", "waits", "run.after_step: .*waits is no plain function"),
        ("rl.curriculum", "wrong", "rl.curriculum .*mine.py:wrong, for step 0: .*budgets.max_turnz"),
        ("rl.curriculum", "negative", "for step 0: .*budgets.max_turns"),
        ("rl.curriculum", "endless", "'tasks.difficulty' must be a finite number, not inf"),
        ("rl.curriculum", "nothing", "rl.curriculum .*'NoneType'"),
        ("rl.sampler", "missing", "rl.sampler: .*has no 'missing'"),
        ("rl.sampler", "CALLS", "rl.sampler: .*CALLS is no plain function"),
    ],
)
def test_what_could_not_be_run_is_refused_before(mine: str, where: str, name: str, told: str) -> None:
    table, key = where.split(".")
    reference = f"{mine}:{name}"
    value: Any = [reference] if table == "run" else reference
    recipe = Recipe.parse({**TINY, table: {**TINY[table], key: value}}, "the test")
    parts = load_parts(recipe)
    parts.tasks, parts.rewards = tasks(2), [even]
    with pytest.raises(ConfigError, match=f"(?s){told}"):
        check_parts(recipe, parts)


def test_a_function_is_the_whole_curriculum(mine: str) -> None:
    recipe = Recipe.parse({**TINY, "rl": {**TINY["rl"], "curriculum": f"{mine}:longer"}}, "the test")
    assert Recipe.parse(recipe.model_dump(mode="json")) == recipe
    assert recipe.rl.curriculum[0].function == f"{mine}:longer"
    form = Recipe.model_json_schema()["$defs"]["RLConfig"]["properties"]["curriculum"]
    assert {one["type"] for one in form["anyOf"]} == {"string", "array"}
    moved = {"setting": "budgets.max_turns", "schedule": [[0, 5]]}
    for tables, told in (
        ([moved, {"function": f"{mine}:longer"}], "a function is the whole curriculum"),
        ([{"schedule": [[0, 5]]}], "give a setting, or a function"),
        ([moved | {"function": "a.py:b"}], "give a setting, or a function"),
        ([{"function": "a.py:b", "schedule": [[0, 5]]}], "exactly one of schedule and adaptive"),
    ):
        with pytest.raises(ConfigError, match=told):
            Recipe.parse({**TINY, "rl": {**TINY["rl"], "curriculum": tables}}, "the test")


def test_a_place_that_no_task_has_ends_the_run(tmp_path: Path, mine: str) -> None:
    given = settings(tmp_path / "run", mine, sampler=f"{mine}:far")
    with pytest.raises(
        ConfigError, match="gave 6, which is no place among the 6 tasks of the set 'tasks'"
    ):
        ludus.train(**given, **code())


def test_a_task_that_sometimes_succeeds_comes_more_often() -> None:
    """By hand: the weights are 0.02, 0.02 + 0.25 and, for the task that was not played, 0.02 + 0.25."""
    three = tasks(3)
    records = {"0": TaskRecord(5, 1.0, 1.0), "1": TaskRecord(2, 0.5, 0.5)}
    drawn = [learnable(three, records, seed) for seed in range(4000)]
    shares = [drawn.count(place) / 4000 for place in range(3)]
    assert shares == pytest.approx([0.02 / 0.56, 0.27 / 0.56, 0.27 / 0.56], abs=0.03)


def test_records_have_the_newest_group_and_are_resumed() -> None:
    from test_task_sampler import task_set

    from ludus.training import TaskSampler

    def group(*rewards: float | None) -> Group:
        return Group(
            tasks(1)[0],
            [
                Trajectory(tasks(1)[0], attempt=n, stop=StopReason.ANSWERED, reward=r)
                for n, r in enumerate(rewards)
            ],
        )

    sampler = TaskSampler([task_set(tasks(2))], seed=0, choose="learnable")
    sampler.observe(0, group(1.0, 1.0))
    sampler.observe(0, group(1.0, 0.5, None))
    sampler.observe(0, group(None, None))
    assert sampler.records == {0: {"0": TaskRecord(2, 0.5, 0.75)}}
    again = TaskSampler([task_set(tasks(2))], seed=0, choose="learnable")
    again.load_state_dict(sampler.state_dict())
    assert again.records == sampler.records and again.sample(8) == sampler.sample(8)


def test_logged_numbers_are_shown_by_their_names() -> None:
    from io import StringIO

    from rich.console import Console

    from ludus.observe import Progress

    out = StringIO()
    with Progress(1, "RL", console=Console(file=out, width=200)) as progress:
        progress.update(1, {"reward": 0.5} | {f"custom/{name}": 2.0 for name in "edcba"})
    assert out.getvalue().split()[1:] == [
        "1/1",
        *("reward", "0.50", "a", "2.00", "b", "2.00", "c", "2.00", "d", "2.00"),
    ]
    assert "custom" not in numbers_text({"custom/x": 1.0})
