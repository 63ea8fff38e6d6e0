"""`ludus eval` and `ludus rollout`: play episodes with a model, and look at them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ludus.core.config import apply_overrides
from ludus.core.failures import ConfigError
from ludus.core.generation import Sampling
from ludus.core.task import Task
from ludus.observe import RunFolder, episode_text, table_rich, write_groups
from ludus.observe.report import Cell
from ludus.training import Evaluation, Parts, Recipe, load_parts, load_recipe
from ludus.training.api import play

SHOWN = {
    "success": "success",
    "reward": "reward",
    "turns": "turns",
    "tool_calls": "tool calls",
    "invalid_call_share": "tool errors (share)",
    "truncated": "truncated (share)",
    "tokens/action": "tokens said",
    "failures": "failures of ours",
}
"""The numbers of the table, and what they are called there."""


@dataclass(frozen=True, slots=True)
class Options:
    """What both commands take; None leaves it to the recipe."""

    tasks: int | None
    attempts: int | None
    temperature: float | None
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    seed: int
    show: int
    out: Path | None

    def sampling(self, temperature: float) -> Sampling:
        return Sampling(
            temperature=self.temperature if self.temperature is not None else temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
        )


def run_evaluation(source: Path, overrides: list[str], model: str | None, options: Options) -> None:
    """Measure on the held-out tasks."""
    recipe, parts = load(source, overrides, model)
    if not parts.held_out:
        raise ConfigError(f"{source} names no held-out tasks: set tasks.evaluation")
    _play(recipe, parts, parts.held_out[: options.tasks or recipe.evaluation.tasks], options)


def run_rollout(source: Path, overrides: list[str], model: str | None, options: Options) -> None:
    """Play training tasks."""
    recipe, parts = load(source, overrides, model)
    if not parts.tasks:
        raise ConfigError(f"{source} names no tasks: set tasks.train")
    _play(recipe, parts, parts.tasks[: options.tasks], options)


def load(source: Path, overrides: list[str], model: str | None) -> tuple[Recipe, Parts]:
    """The recipe and its code; a run's folder brings its own recipe and its newest checkpoint."""
    if source.is_dir():
        raw = apply_overrides(RunFolder(source).recipe(), overrides)
        recipe = Recipe.parse(raw, f"{source}/recipe.json")
        model = model or str(source)
    else:
        recipe = load_recipe(source, overrides)
    if model is not None:
        chosen = {"name": _model_folder(model), "scratch": None}
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update=chosen)})
    return recipe, load_parts(recipe)


def _model_folder(model: str) -> str:
    run = RunFolder(model)
    if not run.is_run:
        return model
    latest = run.latest_checkpoint()
    if latest is None:
        raise ConfigError(f"the run {model} has no checkpoint yet")
    return str(latest.path)


def _play(recipe: Recipe, parts: Parts, tasks: Sequence[Task], options: Options) -> None:
    console = Console()
    sampling = options.sampling(recipe.evaluation.temperature)
    attempts = options.attempts or recipe.evaluation.attempts
    with console.status(f"playing {len(tasks) * attempts} episodes"):
        result = asyncio.run(play(recipe, parts, tasks, attempts, sampling, options.seed))
    for trajectory in result.trajectories[: options.show]:
        console.rule(Text(f"task {trajectory.task.id}, attempt {trajectory.attempt}"))
        console.print(Text(episode_text(trajectory)), soft_wrap=True)
    console.print(table_rich(f"{len(tasks)} tasks × {attempts}", ("metric", "value"), _rows(result)))
    if options.out is not None:
        write_groups(options.out, result.groups, split="rollout")
        console.print(Text(f"episodes: {options.out}"))


def _rows(result: Evaluation) -> list[list[Cell]]:
    return [
        [label, round(result.metrics[name], 3)]
        for name, label in SHOWN.items()
        if name in result.metrics
    ]
