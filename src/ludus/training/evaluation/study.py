"""Playing models under budgets of turns, and going on where an earlier run stopped.

Models are opened one after the other, and only those with something left to play. A group is written in a
worker thread as soon as its last episode ends, and the next one is taken when it is on the disk: stopping
loses nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from ludus.core.failures import ConfigError, LudusError, most_frequent_failure
from ludus.core.generation import Sampling
from ludus.core.messages import Json
from ludus.core.task import Task
from ludus.core.trajectory import Group, is_lost
from ludus.observe import (
    SettingsFolder,
    atomic_write,
    dump_value,
    read_groups,
    slug_of,
    write_groups,
)
from ludus.rollouts.rollout import Rollout
from ludus.training.config.parts import Parts, TaskSetSpec
from ludus.training.config.recipe import Recipe, with_absolute_paths
from ludus.training.data.tasks import seed_of_set
from ludus.training.evaluation.evaluate import (
    EvalModel,
    Evaluation,
    evaluation_of,
    evaluation_seed,
    joined,
)
from ludus.training.evaluation.summary import (
    Comparison,
    Summary,
    SummaryOptions,
    compare,
    summarise,
)

OnGroup = Callable[[str, int, int, int], None]
"""Called as (model, turns, tasks finished, tasks in all) whenever one more task has been played."""


@dataclass(frozen=True, slots=True)
class EvalTasks:
    """The tasks of one task set."""

    name: str
    tasks: tuple[Task, ...]
    max_turns: int
    """The set's own budget of turns."""


@dataclass(frozen=True, slots=True)
class StudyPlan:
    """The tasks, attempts and budgets of a study."""

    models: tuple[EvalModel, ...]
    parts: tuple[EvalTasks, ...]
    turns: tuple[int, ...]
    """The budgets of turns to play under, each with the same tasks and draws; empty: each set's own."""
    attempts: int
    sampling: Sampling
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.models or not self.parts or not all(part.tasks for part in self.parts):
            raise ConfigError("an evaluation needs a model and tasks")
        if self.attempts < 1 or min(self.turns, default=1) < 1:
            raise ConfigError("attempts and turns are at least 1")
        for label, count in Counter(model.label for model in self.models).items():
            if count > 1:
                raise ConfigError(f"the model {label!r} is named {count} times; name it once")


def eval_tasks_of(sets: Sequence[TaskSetSpec], most: int | None = None) -> tuple[EvalTasks, ...]:
    """The held-out tasks of each set that has any, or the first `most` of them."""
    found = [(one, tuple(one.parts.held_out[:most])) for one in sets]
    return tuple(
        EvalTasks(one.name, tasks, one.recipe.budgets.max_turns) for one, tasks in found if tasks
    )


@dataclass(frozen=True, slots=True)
class ModelResult:
    """One model under one budget of turns, on all task sets."""

    model: str
    turns: int
    """The budget; where sets have budgets of their own, the largest."""
    evaluation: Evaluation
    kept: int
    """How many tasks had been played by an earlier run."""


@dataclass(frozen=True)
class Study:
    """All that was measured, and how to look at it."""

    measured: tuple[ModelResult, ...]
    how: SummaryOptions
    against: str | None = None
    """The label of the model that the others are compared with."""

    @cached_property
    def summaries(self) -> list[tuple[ModelResult, Summary]]:
        """Every measurement: the whole, and its sub-tasks."""
        return [
            (m, summary) for m in self.measured for summary in summarise(m.evaluation.groups, self.how)
        ]

    @cached_property
    def comparisons(self) -> list[tuple[ModelResult, Comparison]]:
        """Every other model minus `against`, under the same budget."""
        others = {m.turns: m for m in self.measured if m.model == self.against}
        return [
            (m, comparison)
            for m in self.measured
            if m.model != self.against and m.turns in others
            for comparison in compare(m.evaluation.groups, others[m.turns].evaluation.groups, self.how)
        ]


async def run_study(
    recipe: Recipe,
    parts: Parts,
    plan: StudyPlan,
    how: SummaryOptions | None = None,
    *,
    against: str | None = None,
    results: ResultsFolder | None = None,
    on_group: OnGroup | None = None,
) -> Study:
    """Play what is not in `results` yet; without a folder, everything, and nothing is kept."""
    measured: list[ModelResult] = []
    for model in plan.models:
        measured += await _measured(recipe, parts, plan, model, results, on_group)
    return Study(tuple(measured), how or SummaryOptions(), against)


async def _measured(
    recipe: Recipe,
    parts: Parts,
    plan: StudyPlan,
    model: EvalModel,
    results: ResultsFolder | None,
    on_group: OnGroup | None,
) -> list[ModelResult]:
    """One model under each budget of turns, or under each set's own."""
    most = max(part.max_turns for part in plan.parts)
    rounds = {
        turns or most: [
            _Round(plan, number, turns or part.max_turns) for number, part in enumerate(plan.parts)
        ]
        for turns in plan.turns or (None,)
    }
    every = [one for own in rounds.values() for one in own]
    if results is not None:
        identity = model.identity(recipe)
        for one in every:
            name = one.name if len(plan.parts) > 1 else None
            await one.load(results.cell(model.label, identity, one.turns, name))
    if any(one.missing for one in every):
        async with model.open(recipe, parts) as sets:
            rollouts = {made.name: made.rollout for made in sets}
            for turns, own in rounds.items():
                total = sum(len(one.tasks) for one in own)
                for one in own:
                    async for _ in one.play(rollouts[one.name], model.label):
                        done = total - sum(len(other.missing) for other in own)
                        if on_group is not None:
                            on_group(model.label, turns, done, total)
    return [
        ModelResult(
            model.label,
            turns,
            joined({one.name: one.evaluation for one in own}),
            sum(one.kept for one in own),
        )
        for turns, own in rounds.items()
    ]


class _Round:
    """One model under one budget on one task set: what has been played, and what is missing."""

    def __init__(self, plan: StudyPlan, number: int, turns: int) -> None:
        part = plan.parts[number]
        self.name, self.tasks, self.turns = part.name, part.tasks, turns
        self.missing = {task.id: task for task in part.tasks}
        self.kept = 0
        """How many tasks an earlier run has played."""
        self._plan = plan
        self._seed = seed_of_set(plan.seed, number, part.name)
        self._cell: Cell | None = None
        self._groups: dict[str, Group] = {}

    @property
    def evaluation(self) -> Evaluation:
        return evaluation_of(list(self._groups.values()), self.tasks)

    async def load(self, cell: Cell) -> None:
        self._cell = cell
        self._groups = await asyncio.to_thread(cell.groups, self.tasks)
        for name, group in self._groups.items():
            if is_finished(group, self._plan.attempts):
                self.missing.pop(name, None)
        self.kept = len(self.tasks) - len(self.missing)

    async def play(self, rollout: Rollout, model: str) -> AsyncIterator[Group]:
        """Play what is missing, and write it down group by group."""
        if not self.missing:
            return
        numbers = {task.id: number for number, task in enumerate(self.tasks)}
        playing = replace(
            rollout,
            attempts=self._plan.attempts,
            sampling=self._plan.sampling,
            budgets=rollout.budgets.model_copy(update={"max_turns": self.turns}),
        )
        played = playing.groups(list(self.missing.values()), evaluation_seed(self._seed))
        async with aclosing(cast(AsyncGenerator[Group, None], played)) as groups:
            async for group in groups:
                self._groups[group.task.id] = group
                if self._cell is not None:
                    await asyncio.to_thread(self._cell.write, group, numbers[group.task.id])
                self.missing.pop(group.task.id, None)
                yield group
        self._check_scored(model)
        if self._cell is not None:
            await asyncio.to_thread(self._cell.close, self.evaluation.groups)

    def _check_scored(self, model: str) -> None:
        """Nothing at all was measured: say why, instead of a table of dashes."""
        played = [t for group in self._groups.values() for t in group.trajectories]
        if any(trajectory.is_trainable for trajectory in played):
            return
        failures = [t.failure for t in played if t.failure is not None]
        if not failures:
            raise ConfigError(
                f"none of {len(played)} episodes was scored: there are no rewards, or they return None. List "
                "rewards in the recipe, or pass rewards="
            )
        raise LudusError(
            f"no episode of {model} could be scored: {len(failures)} of {len(played)} were lost to "
            f"infrastructure failures. {most_frequent_failure(failures)}"
        )


# A folder of results. What is played is written at once, so that stopping loses nothing that was finished.
#
# ::
#
#     settings.json                        what was asked for; a folder holds one set of settings
#     MODEL-DIGEST/model.json              which model
#     MODEL-DIGEST/turns-8/parts/000003.parquet   the episodes of the fourth task, while it is being played
#     MODEL-DIGEST/turns-8/episodes.parquet       all of them, once it has been
#     MODEL-DIGEST/turns-8/NAME/...        the same for each task set, where there are several
#     report.md, report.json, plot.png     what people and programs read
#
# Every file appears whole or not at all. A task counts as finished when none of its episodes failed through
# our fault or was aborted; those that did are played again by the next run, and shown until then.

_FORMAT = 1
_EPISODES, _PARTS = "episodes.parquet", "parts"


def settings_of(
    sets: Sequence[TaskSetSpec],
    tasks: Sequence[Sequence[Task]],
    attempts: int,
    sampling: Sampling,
    seed: int,
) -> Json:
    """Everything that decides what an episode is, apart from the model and the most turns."""
    found: Json = {
        "format": _FORMAT,
        "attempts": attempts,
        "sampling": asdict(sampling),
        "seed": seed,
    }
    described = {one.name: settings_of_set(one, own) for one, own in zip(sets, tasks, strict=True)}
    if len(described) == 1:
        found |= next(iter(described.values()))
    else:
        found["sets"] = described
    loaded: Json = json.loads(json.dumps(found))
    return loaded


def settings_of_set(one: TaskSetSpec, tasks: Sequence[Task]) -> Json:
    raw = with_absolute_paths(one.recipe.model_dump(mode="json"))
    return {
        "tasks": {"count": len(tasks), "digest": digest_of(tasks)},
        "agent": raw["agent"],
        "budgets": {name: value for name, value in raw["budgets"].items() if name != "max_turns"},
        "rewards": raw["rewards"],
        "group_rewards": raw["group_rewards"],
    }


def digest_of(tasks: Sequence[Task]) -> str:
    """Changes when a task does. A value that cannot be stored, such as an object, is not looked at."""
    digest = hashlib.sha256()
    for task in tasks:
        messages = [message.as_chat() for message in task.messages]
        for value in (task.id, messages, task.target, dict(task.envs), dict(task.metadata)):
            text, is_exact = dump_value(value)
            digest.update((text if is_exact else "?").encode() + b"\0")
    return digest.hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Cell:
    """One model under one budget of turns."""

    path: Path

    def groups(self, tasks: Sequence[Task]) -> dict[str, Group]:
        """The recorded groups, by task, finished or not."""
        known = {task.id: task for task in tasks}
        files = [self.path / _EPISODES, *sorted((self.path / _PARTS).glob("*.parquet"))]
        read = (group for file in files if file.is_file() for group in read_groups(file))
        # a part is newer than the whole: it was played because something in the whole had failed
        return {g.task.id: Group(known[g.task.id], g.trajectories) for g in read if g.task.id in known}

    def write(self, group: Group, number: int) -> None:
        write_groups(self.path / _PARTS / f"{number:06d}.parquet", [group], split="eval")

    def close(self, groups: Sequence[Group]) -> None:
        """All has been played: one file instead of many."""
        if (self.path / _PARTS).is_dir():
            write_groups(self.path / _EPISODES, groups, split="eval")
            shutil.rmtree(self.path / _PARTS)


def is_finished(group: Group, attempts: int) -> bool:
    return len(group.trajectories) == attempts and not any(map(is_lost, group.trajectories))


class ResultsFolder(SettingsFolder):
    """The results of one set of settings, for any models and budgets."""

    root = "evaluations"

    def cell(
        self, label: str, identity: Mapping[str, Any], turns: int, task_set: str | None = None
    ) -> Cell:
        """The place of a model's episodes under a budget. Another model of that name has another place."""
        raw = json.dumps(identity, sort_keys=True)
        digest = hashlib.sha256(raw.encode()).hexdigest()[:8]
        folder = self.path / f"{slug_of(label)}-{digest}"
        if not (folder / "model.json").is_file():
            atomic_write(
                folder / "model.json", json.dumps({"label": label, **identity}, indent=2) + "\n"
            )
        place = folder / f"turns-{turns}"
        return Cell(place if task_set is None else place / task_set)
