"""Runs whose steps teach nothing: solved ones are told as such; algorithms without groups are told of none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stage_runs import Talker
from training_helpers import TINY, tasks

import ludus
from ludus.observe.findings import metric_findings

RL = {"kind": "rl", "steps": 6, "tasks": 1, "attempts": 2, "optimizer": {"learning_rate": 1e-3}}


def run(folder: Path, reward: Any, **stage: Any) -> ludus.Result:
    base = {name: table for name, table in TINY.items() if name != "rl"}
    tables = {**base, "max_in_flight": 1, "stage": [{**RL, **stage}], "run": {"folder": str(folder)}}
    return ludus.train(**tables, tasks=tasks(6), held_out=tasks(1, 50), rewards=[reward], agent=Talker())


@ludus.reward
async def solved(task: ludus.Task) -> float:
    return 1.0


@ludus.reward
async def solved_at_some(task: ludus.Task, trajectory: ludus.Trajectory) -> float:
    """At every third task, attempts differ."""
    return float(trajectory.attempt % 2) if int(task.id) % 3 == 0 else 1.0


@ludus.reward
async def chance(trajectory: ludus.Trajectory) -> float:
    return float(trajectory.seed % 2)


def test_a_run_that_has_learned_and_is_solved_has_no_warning(tmp_path: Path) -> None:
    result = run(tmp_path / "run", solved_at_some)
    assert sum(row.get("no_signal", 0) for row in result.metrics) == 4
    assert result.report.warnings == [] and [one.kind for one in result.report.findings] == ["solved"]
    kinds = {one.kind: one.severity for one in metric_findings(result.metrics)}
    assert kinds["solved"] == "note" and "no_signal" not in kinds
    log = result.run.log_path.read_text()
    assert "Solved: nothing was left to learn in" in log and "WARNING" not in log


def test_a_run_that_was_solved_from_the_start_is_told_so(tmp_path: Path) -> None:
    (one,) = run(tmp_path / "run", solved).report.findings
    assert one.title == "Solved: nothing was left to learn in 6 of the last 6 steps"
    assert "too easy from the start" in one.detail and "harder tasks" in one.detail


@pytest.mark.parametrize("algorithm", ["ppo", "reinforce", "reinforce_pp"])
def test_algorithms_without_groups_are_not_told_of_groups(algorithm: str, tmp_path: Path) -> None:
    result = run(tmp_path / "run", chance, algorithm=algorithm, attempts=1, tasks=4)
    rows = [row for row in result.metrics if "groups_without_signal" in row]
    assert all(row["groups_without_signal"] == 1 for row in rows)
    idle = [row["without_advantage"] for row in rows if "without_advantage" in row]
    assert idle and sum(idle) / len(idle) < 0.5
    assert not [one for one in metric_findings(result.metrics) if one.kind == "no_signal"]


@pytest.mark.parametrize(
    ("measured", "kind"),
    [
        ({"eval/success": 0.5, "eval/success_high": 0.68}, "learned_by_heart"),
        ({"eval/success": 0.95, "eval/success_high": 1.0}, "solved"),
        ({"eval/success": 0.5}, "solved"),  # a single task has no interval
    ],
)
def test_tasks_that_are_solved_while_held_out_ones_are_not(
    measured: dict[str, float], kind: str
) -> None:
    silent = {"no_signal": 1.0, "success": 1.0, "reward": 1.0, "reward_std": 0.0}
    rows = [{"step": step, **silent} for step in (3, 4, 5)]
    early = [{"step": 2, "eval/success": 0.1, "eval/success_high": 0.2}]
    assert [one.kind for one in metric_findings([*early, *rows])] == ["solved"], "measured before"
    (one,) = metric_findings([*early, *rows[:-1], {**rows[-1], **measured}])
    assert one.kind == kind
    assert kind == "solved" or ("50.0%" in one.title and one.severity == "warning")
