"""`ludus check data PATH`: put files of examples, or folders of logs, through quality control.

`ludus check reward`: compares rewards with people's labels, and finds tests that pass unsolved.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from ludus.chat.tokenizers import load_tokenizer
from ludus.cli.eval import load
from ludus.cli.synth import ProgressBars, open_model, show_result
from ludus.core.config import apply_overrides, read_toml
from ludus.core.failures import ConfigError
from ludus.core.task import Task
from ludus.core.tokenizer import ByteTokenizer, Tokenizer
from ludus.core.trajectory import StopReason, Trajectory
from ludus.core.user_files import file_problem
from ludus.engine.fake import FakeEngine
from ludus.observe import Progress, holds_trajectories, read_trajectories, setup_logging
from ludus.rewards import REWARDS, TurnReward, build_reward
from ludus.rewards.check import measure_agreement, read_labels
from ludus.rewards.code_tests import UnitTests
from ludus.rewards.code_tests.weak_tests import find_weak_tests
from ludus.rewards.scorer import rewards_by_name
from ludus.rollouts.tasksets import load_tasks
from ludus.sandbox import close_shared_sandboxes
from ludus.synth import Cost, SynthContext, SynthFolder, SynthResult, write_result
from ludus.synth.quality.pipeline import QualityConfig, QualityPipeline
from ludus.training.config.parts import Parts, errors_at, load_parts, task_set_specs
from ludus.training.config.recipe import Recipe, beside, load_recipe, packaged_recipes
from ludus.training.data.conversations import PROMPT_TOOLS, asked, read_conversations, tools_of

_MOST_TOKENS = 1_000_000


def check_data(
    files: Sequence[Path], recipe: Path | None, settings: Sequence[str], out: Path | None
) -> None:
    given = apply_overrides({}, settings)
    parsed = QualityConfig.parse(given, "the settings of the check")
    loaded = load(recipe, [], None) if recipe is not None else None
    with setup_logging(verbosity=1):  # what was read of logs, and what was not
        trajectories = [one for file in files for one in read_examples(file)]
    console = Console(stderr=True)
    asked = {
        "format": 1,
        "method": "check",
        "settings": parsed.model_dump(mode="json"),
        "files": {str(file): _digest(file) for file in files},
        "recipe": loaded[0].model_dump(mode="json") if loaded else None,
    }
    with (
        SynthFolder.at(out, f"{files[0].stem}-checked", asked) as folder,
        ExitStack() as shown,
    ):
        bars = ProgressBars(console, shown)
        context = SynthContext((), folder, open_model=open_model, on_item=bars.update)
        result, written = asyncio.run(_checked(trajectories, parsed, loaded, context))
    show_result(Console(), "quality control", result, context.cost, written)


def _digest(path: Path) -> str:
    """Of a file, or of all files of a folder."""
    files = sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]
    digest = hashlib.sha256()
    for one in files:
        digest.update(one.read_bytes())
    return digest.hexdigest()[:16]


def read_examples(file: Path) -> list[Trajectory]:
    """Episodes as Ludus writes them, or conversations as others do."""
    if not file.is_dir() and (problem := file_problem(file, beside_recipe=False)) is not None:
        raise ConfigError(problem)
    if file.suffix == ".parquet" and holds_trajectories(file):
        return read_trajectories(file)
    found = []
    for number, conversation in enumerate(read_conversations(file)):
        own = tools_of(conversation)
        metadata = {} if own is None else {PROMPT_TOOLS: [tool.as_openai() for tool in own]}
        task = Task(f"{file.stem}-{number}", tuple(asked(conversation)), metadata=metadata)
        found.append(Trajectory(task, messages=list(conversation), stop=StopReason.ANSWERED))
    return found


async def _checked(
    trajectories: Sequence[Trajectory],
    settings: QualityConfig,
    loaded: tuple[Recipe, Parts] | None,
    context: SynthContext,
) -> tuple[SynthResult, list[Path]]:
    """The pipeline with the recipe's tools, environments and held-out tasks; no model is loaded."""
    if loaded is None:
        result = await QualityPipeline(settings).run(trajectories, context)
        return result, await asyncio.to_thread(_write, context, result)
    # torch comes with it
    from ludus.training.task_sets import build_task_sets, close_task_sets, tool_specs

    recipe, parts = loaded
    sets = build_task_sets(recipe, parts, FakeEngine([]), _tokenizer(recipe))
    try:
        specs = [spec for one in sets for spec in await tool_specs(one.rollout)]
        rollouts = {task.id: one.rollout for one in sets for task in (*one.tasks, *one.held_out)}
        for one in sets:  # another program may have counted tokens otherwise
            one.rollout.budgets = one.rollout.budgets.model_copy(update={"max_tokens": _MOST_TOKENS})
        pipeline = QualityPipeline(
            settings,
            {spec.name: spec for spec in specs},
            [task for one in sets for task in one.held_out],
            {"": sets[0].rollout, **rollouts},
            sets[0].rollout.renderer.format.parse,
        )
        result = await pipeline.run(trajectories, context)
    finally:
        await context.close()
        await close_task_sets(sets)
        await close_shared_sandboxes()
    return result, await asyncio.to_thread(_write, context, result)


def _write(context: SynthContext, result: SynthResult) -> list[Path]:
    cost: Cost = context.cost
    return write_result(context.folder, "quality control", result, cost, context.failures)


def _tokenizer(recipe: Recipe) -> Tokenizer:
    """The recipe's own where it has one, so that long results are cut as they were."""
    name = recipe.model.name
    return ByteTokenizer() if name is None or name.endswith(".gguf") else load_tokenizer(name)


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
