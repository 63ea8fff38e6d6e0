"""Runs side by side: seeds of one recipe as one line, its held-out success with an interval, and paired tests.

What is compared is the newest evaluation of each run. Where a recipe has several seeds, its interval is over
seeds, and the paired test by task is of the means over seeds. Reads folders, and needs no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ludus.core.failures import ConfigError, not_there
from ludus.core.messages import Json
from ludus.core.trajectory import Group
from ludus.observe import (
    Cell,
    Estimate,
    ReportTable,
    RunFolder,
    Share,
    mean_interval,
    paired_test,
    read_groups,
    recorded_in,
)
from ludus.training.evaluation.summary import TESTED, Summary, compare, summarise, test_cells

_MISSING = "(not set)"
_MOST_SETTINGS = 3
"""Recipes that differ in more settings are told apart by the names of their runs."""


def recipe_key(recipe: Mapping[str, Any]) -> str | None:
    """A key that all seeds of a recipe share, whatever their names and folders; None where it has no seed."""
    if not isinstance(recipe.get("seed"), int):
        return None
    same = {name: value for name, value in recipe.items() if name not in ("name", "run", "seed")}
    return hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()[:16]


def flat_recipe(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
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


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """A run, and the episodes of its newest evaluation."""

    name: str
    path: Path
    recipe: Json
    step: int
    groups: list[Group]

    @property
    def summary(self) -> Summary:
        return summarise(self.groups)[0]


@dataclass(frozen=True, slots=True)
class ComparedRecipe:
    """The runs of one recipe, which differ in their seeds alone."""

    label: str
    runs: list[ComparedRun]

    @property
    def pooled(self) -> list[Group]:
        return [group for run in self.runs for group in run.groups]

    def estimate(self, what: str) -> Estimate | None:
        """Success or reward: over seeds where there are several, over tasks of a single run."""
        found = [getattr(run.summary, what) for run in self.runs]
        values = [one.value for one in found if one is not None]
        if len(self.runs) == 1 or not values:
            return found[0] if values else None
        over_seeds = mean_interval(values)
        if what != "success" or over_seeds.low is None or over_seeds.high is None:
            return over_seeds
        return replace(over_seeds, low=max(0.0, over_seeds.low), high=min(1.0, over_seeds.high))

    @property
    def by_seed(self) -> dict[int, float]:
        successes = {run.recipe.get("seed"): run.summary.success for run in self.runs}
        return {
            seed: one.value for seed, one in successes.items() if seed is not None and one is not None
        }


def compared_recipes(folders: Sequence[Path]) -> tuple[list[ComparedRecipe], list[str]]:
    """The recipes of the runs in these folders, and the names of runs without an evaluation."""
    found: dict[str, list[ComparedRun]] = {}
    without: list[str] = []
    for folder in folders:
        recorded = list(recorded_in(folder)) if folder.is_dir() else []
        if not recorded:
            what = (
                f"{folder} holds no run"
                if folder.is_dir()
                else not_there(folder, "folder", beside_recipe=False)
            )
            raise ConfigError(f"{what}: name runs, folders of runs, or results of `ludus eval`")
        for name, run in sorted(recorded, key=lambda pair: pair[0]):
            recipe, step, groups = run.recipe(), *_newest_evaluation(run)
            if groups:
                one = ComparedRun(name, run.path, recipe, step, groups)
                found.setdefault(recipe_key(recipe) or str(run.path.resolve()), []).append(one)
            else:
                without.append(name)
    unique = [list({run.path.resolve(): run for run in runs}.values()) for runs in found.values()]
    labels = _labels(unique)
    return [ComparedRecipe(label, runs) for label, runs in zip(labels, unique, strict=True)], without


def _newest_evaluation(run: RunFolder) -> tuple[int, list[Group]]:
    files = [one for one in run.trajectory_files() if one.split == "eval"]
    last = files[-1].step if files else 0
    groups = [group for one in files if one.step == last for group in read_groups(one.path)]
    seen: Counter[str] = Counter()
    named: list[Group] = []
    for group in groups:  # tasks of two sets may have the same id
        seen[group.task.id] += 1
        number = seen[group.task.id]
        task = group.task if number == 1 else replace(group.task, id=f"{group.task.id} ({number})")
        named.append(Group(task, group.trajectories))
    return last, named


def _labels(recipes: Sequence[Sequence[ComparedRun]]) -> list[str]:
    """What tells the recipes apart: the settings in which they differ where these are few, else their runs."""
    names = [runs[0].name + (f" + {len(runs) - 1} more" if runs[1:] else "") for runs in recipes]
    shown = {name: runs[0].recipe for name, runs in zip(names, recipes, strict=True)}
    ignored = ("name", "seed", "run")
    differing = [one for one in recipe_difference(shown) if one["name"].partition(".")[0] not in ignored]
    if not 0 < len(differing) <= _MOST_SETTINGS:
        return names
    return [
        ", ".join(f"{one['name'].rpartition('.')[2]}={one['values'][name]}" for one in differing)
        for name in names
    ]


def recipes_table(recipes: Sequence[ComparedRecipe]) -> ReportTable:
    rows: list[list[Cell]] = [
        [
            one.label,
            len(one.runs),
            " ".join(sorted({str(run.step) for run in one.runs})),
            Share.of(one.estimate("success")),
            None if (reward := one.estimate("reward")) is None else reward.value,
        ]
        for one in recipes
    ]
    return ReportTable(("recipe", "runs", "step", "held-out success", "reward"), rows)


def paired_table(recipes: Sequence[ComparedRecipe], against: ComparedRecipe) -> ReportTable:
    """Every other recipe minus `against`: by task, and by seed where both have two at least."""
    rows: list[list[Cell]] = []
    for one in recipes:
        if one is against:
            continue
        found = compare(one.pooled, against.pooled)
        rows += [[one.label, f"{pair.tasks} tasks", *test_cells(pair.test)] for pair in found]
        seeds = sorted(one.by_seed.keys() & against.by_seed.keys())
        if len(seeds) > 1:
            test = paired_test([one.by_seed[s] for s in seeds], [against.by_seed[s] for s in seeds])
            rows.append([one.label, f"{len(seeds)} seeds", *test_cells(test)])
    return ReportTable(("recipe", "paired by", *TESTED), rows, f"success, minus that of {against.label}")
