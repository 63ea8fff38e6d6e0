"""`ludus check reward`: compares rewards with people's labels, and finds tests that pass unsolved."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from ludus.core.config import read_toml
from ludus.core.failures import ConfigError
from ludus.core.task import Task
from ludus.observe import Progress
from ludus.rewards import TurnReward, build_reward
from ludus.rewards.check import measure_agreement, read_labels
from ludus.rewards.code_tests import UnitTests
from ludus.rewards.code_tests.weak_tests import find_weak_tests
from ludus.rewards.registry import REWARDS
from ludus.rewards.scorer import rewards_by_name
from ludus.rollouts.tasksets import load_tasks
from ludus.sandbox import close_shared_sandboxes
from ludus.training.config.parts import errors_at, load_parts, task_set_specs
from ludus.training.config.recipe import beside, load_recipe, packaged_recipes

Findings = list[tuple[str, str]]
SAMPLE = 16
"""How many tasks' tests are tried."""


def reward_findings(
    reward: str, labels: Path | None, threshold: float | None = None, tasks: str | None = None
) -> Findings:
    """How each reward that is named, or that a file's `rewards` has, agrees with labels; and which of the tests
    that unit tests score by pass with solutions that solve nothing."""
    own = {} if reward in REWARDS else packaged_recipes()
    file = reward if reward.endswith(".toml") else own.get(reward)
    table = beside(read_toml(file), file) if file else {"rewards": [reward]}
    specs = table.get("rewards", ())
    if not specs:
        raise ConfigError(f"{reward} has no rewards")
    with errors_at("rewards"):
        built = [build_reward(spec) for spec in specs]
    sets: list[tuple[Sequence[Any], Sequence[Task]]] = []
    if tasks is not None:
        sets = [(built, load_tasks(tasks))]
    elif labels is None and "tasks" in table:
        recipe = load_recipe(Path(file or reward), [])
        plans = task_set_specs(recipe, load_parts(recipe))
        sets = [(plan.parts.rewards, plan.parts.tasks) for plan in plans]
    pairs = [
        (one, given)
        for rewards, given in sets
        for one in rewards_by_name(rewards).values()
        if given and isinstance(one, UnitTests)
    ]
    if labels is None and not pairs:
        raise ConfigError(
            f"there is nothing to check {reward} by: give labelled answers (--labels), or, for unit_tests, a "
            "recipe with tasks or --tasks"
        )

    async def check() -> Findings:
        findings: Findings = []
        for one, given in pairs:
            findings += await _weak_tests(one, given)
        if labels is not None:
            findings += await _agreement(built, labels, threshold)
        await close_shared_sandboxes()
        return findings

    return asyncio.run(check())


async def _weak_tests(reward: UnitTests, tasks: Sequence[Task]) -> Findings:
    """The tests of some tasks, evenly spread, that pass unsolved."""
    chosen = tasks[:: max(1, -(-len(tasks) // SAMPLE))]
    found = await find_weak_tests(reward, chosen)
    weak = len({one.task for one in found})
    head = (
        f"{reward.name}: of {len(chosen)} tasks {weak} have tests that pass unsolved (docs/toolbox.md)"
    )
    told = [("warning" if one.is_serious else "info", f"{reward.name}: {one}") for one in found]
    return [("info", head), *sorted(told, reverse=True)]


async def _agreement(built: Sequence[Any], labels: Path, threshold: float | None) -> Findings:
    findings: Findings = []
    known = read_labels(labels)
    for one in built:
        if isinstance(one, TurnReward):
            findings.append(("skipped", f"{one.name}: scores single turns"))
            continue
        with Progress(len(known), one.name, console=Console(stderr=True)) as bar:
            found = await measure_agreement(
                one, known, threshold=threshold, on_scored=partial(bar.update, metrics={})
            )
        findings += [("info", f"{one.name}: {line}") for line in str(found).splitlines()]
        findings += [("warning", f"{one.name}: {text}") for text in found.warnings()]
    return findings
