"""Runs side by side: how their recipes differ, and paired statistics over the tasks that both have played."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from ludus.core.messages import Json
from ludus.observe import PairedTest, paired_test
from ludus.viewer.episode_index import EpisodeIndex, FilterError

_MOST_TASKS = 5000
_MISSING = "(not set)"


def flat_recipe(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """A recipe's settings by their dotted names."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from flat_recipe(inner, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
        for number, inner in enumerate(value):
            yield from flat_recipe(inner, f"{prefix}.{number}")
    else:
        yield prefix, value


def recipe_difference(recipes: Mapping[str, Json]) -> list[Json]:
    """The settings in which recipes differ, each with its value in every one."""
    flats = {run: dict(flat_recipe(recipe)) for run, recipe in recipes.items()}
    names = sorted({name for flat in flats.values() for name in flat})
    found = []
    for name in names:
        values = {run: flat.get(name, _MISSING) for run, flat in flats.items()}
        if len({repr(value) for value in values.values()}) > 1:
            found.append({"name": name, "values": values})
    return found


def paired_runs(index: EpisodeIndex, first: Mapping[str, Any], second: Mapping[str, Any]) -> Json:
    """Two sides, each a run, a split and a step, on the tasks that both have: `second` minus `first`.

    The numbers of a task are means over its scored attempts, as in `ludus eval`; lost episodes are left out.
    """
    one, other = _by_task(index, first), _by_task(index, second)
    shared = sorted(one.keys() & other.keys())
    result: Json = {
        "tasks": len(shared),
        "only_first": len(one.keys() - other.keys()),
        "only_second": len(other.keys() - one.keys()),
    }
    if not shared:
        return result | {"statistics": None, "by_task": []}
    wins = [
        {
            "task": task,
            "first": float(one[task]["success"]),
            "second": float(other[task]["success"]),
            "first_reward": one[task]["reward"],
            "second_reward": other[task]["reward"],
            "first_episode": one[task]["episode"],
            "second_episode": other[task]["episode"],
        }
        for task in shared
    ]
    measured = {
        "success": paired_test(
            [other[task]["success"] for task in shared], [one[task]["success"] for task in shared]
        ),
        "reward": paired_test(
            [other[task]["reward"] for task in shared], [one[task]["reward"] for task in shared]
        ),
    }
    means = {
        name: [sum(float(side[task][name]) for task in shared) / len(shared) for side in (one, other)]
        for name in measured
    }
    wins.sort(key=lambda row: (-abs(float(row["first"]) - float(row["second"])), str(row["task"])))
    return result | {
        "statistics": {name: _test_json(test, means[name]) for name, test in measured.items()},
        "by_task": wins[:500],
    }


def _by_task(index: EpisodeIndex, side: Mapping[str, Any]) -> dict[str, Json]:
    if not side.get("run"):
        raise FilterError("a side of a comparison names a run")
    tests, values = ["run = ?", "reward IS NOT NULL", "success IS NOT NULL"], [side["run"]]
    if side.get("split"):
        tests.append("split = ?")
        values.append(side["split"])
    if side.get("step") is not None:
        tests.append("step = ?")
        values.append(side["step"])
    rows = index.rows(
        "SELECT task, count(*) AS n, sum(success::INTEGER) AS won, avg(reward) AS reward, "
        "first({'file': file, 'row': row} ORDER BY step DESC, attempt) AS episode "
        f"FROM episodes WHERE {' AND '.join(tests)} GROUP BY task ORDER BY task LIMIT {_MOST_TASKS}",
        values,
    )
    return {
        row["task"]: {
            "success": Fraction(int(row["won"]), int(row["n"])),
            "reward": float(row["reward"]),
            "episode": row["episode"],
        }
        for row in rows
    }


def _test_json(test: PairedTest, means: Sequence[float]) -> Json:
    return {
        "first": means[0],
        "second": means[1],
        "difference": test.difference.value,
        "low": test.difference.low,
        "high": test.difference.high,
        "wins": test.wins,
        "losses": test.losses,
        "ties": test.ties,
        "p_flip": test.p_flip,
        "p_sign": test.p_sign,
        "is_exact": test.is_exact,
    }


def evaluated_steps(index: EpisodeIndex, run: str) -> list[Json]:
    """Steps at which a run has episodes, by split, for comparison."""
    return index.rows(
        "SELECT split, step, count(*) AS episodes, count(DISTINCT task) AS tasks FROM episodes WHERE run = ? "
        "GROUP BY ALL ORDER BY split, step LIMIT 5000",
        [run],
    )


def task_history(index: EpisodeIndex, run: str, task: str) -> list[Json]:
    """All attempts at a task in a run, in the order of the steps: the same task at several checkpoints."""
    return index.rows(
        "SELECT * EXCLUDE (spoken, text) FROM episodes WHERE run = ? AND task = ? "
        "ORDER BY step, attempt LIMIT 500",
        [run, task],
    )
