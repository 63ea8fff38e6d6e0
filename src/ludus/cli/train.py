"""`ludus train`: progress while it runs, a report when it ends, and the way back after Ctrl-C."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from ludus.cli.options import stopped_says, until_told
from ludus.core.failures import ConfigError
from ludus.observe import RunFolder, RunWriter, episode_text, printable
from ludus.training.config.parts import Parts, check_rebuilt, load_parts
from ludus.training.config.recipe import AGAIN, Recipe, load_recipe
from ludus.training.config.run import launched_rank

if TYPE_CHECKING:
    from ludus.training.api import Result


def run_training(
    recipe_path: Path | None,
    overrides: list[str],
    resume: Path | None,
    replay: Path | None = None,
    again: str = AGAIN,
    is_member: bool = False,
) -> None:
    """Train, show progress, write the report; `again` is the command that resumes an interrupted run.

    A member of a study prints no report: the study compares them all.
    """
    if launched_rank()[0]:
        from ludus.training.ranks.steps import serve_rank

        serve_rank()  # one of several ranks that torchrun started: rank 0 has the run
        return
    console = Console(stderr=True)
    if resume is not None and replay is not None:
        raise ConfigError("--replay begins a new run and --resume continues one: give one of them")
    if (resume or replay) is not None and recipe_path is not None and "=" in str(recipe_path):
        recipe_path, overrides = None, [str(recipe_path), *overrides]  # the first word is no recipe then
    if recipe_path is not None and resume is not None:
        raise ConfigError(
            f"a resumed run goes on by its own recipe: leave out {str(recipe_path)!r}, or begin a "
            "new run from its last checkpoint with model.name=FOLDER"
        )
    if recipe_path is not None and replay is not None:
        raise ConfigError(f"a replay has the recipe of its run: leave out {str(recipe_path)!r}")
    if recipe_path is None and resume is None and replay is None:
        raise ConfigError("give either a recipe, or --resume and a run's folder")
    run: RunWriter | None = None
    if resume is not None:
        resumed = _resumed(resume, overrides)
        if isinstance(resumed, str):
            console.print(Text(resumed), soft_wrap=True)
            return
        run, recipe, parts = resumed
    elif replay is not None:
        recipe, parts = _replayed(replay, overrides)
    else:
        assert recipe_path is not None
        recipe = load_recipe(recipe_path, overrides)
        parts = load_parts(recipe)
    # torch and transformers are imported from here on: mistakes in the recipe are reported before
    from ludus.training.api import train_async

    try:
        result = asyncio.run(until_told(train_async(recipe, parts, run, show=console, again=again)))
    except asyncio.CancelledError:  # by a signal; the message about the checkpoint is out
        raise KeyboardInterrupt from None
    if is_member:
        return
    with stopped_says(console, f"the run has ended: {result.run.report_path}, {result.model}"):
        _report(console, result, recipe)


def _resumed(folder: Path, overrides: list[str]) -> tuple[RunWriter, Recipe, Parts] | str:
    """The run to go on with, opened, with its recipe and its code; or why there is nothing left to do."""
    run = RunWriter.resume(folder)
    try:
        check_rebuilt(str(folder), run.objects(), [one.partition("=")[0] for one in overrides])
        recipe = Recipe.parse(run.recipe(), f"{folder}/recipe.json")
        parts = load_parts(recipe)
        from ludus.training.checkpoint import finished_text, load_progress, resumed_recipe
        from ludus.training.preflight import with_step_counts

        if overrides:
            recipe = resumed_recipe(run, overrides)
            return run, recipe, load_parts(recipe)
        latest = run.latest_checkpoint()
        done = load_progress(latest.path) if latest is not None and run.report_path.exists() else None
        text = finished_text(recipe, with_step_counts(recipe, parts), done, str(folder))
    except BaseException:
        run.close()
        raise
    if text is None:
        return run, recipe, parts
    run.close()
    return text


def _replayed(folder: Path, overrides: list[str]) -> tuple[Recipe, Parts]:
    source = RunFolder(folder)
    check_rebuilt(str(folder), source.objects(), [one.partition("=")[0] for one in overrides])
    from ludus.training.checkpoint import replayed_recipe

    recipe = replayed_recipe(source, overrides)
    return recipe, load_parts(recipe)


def _report(console: Console, result: Result, recipe: Recipe) -> None:
    for label, trajectory in result.report.samples:
        console.rule(Text(f"an episode {label}"))
        console.print(Text(episode_text(trajectory)), soft_wrap=True)
    table = result.report.held_out if result.report.held_out.rows else result.report.losses
    if table.rows:
        console.print(table.rich())
    for text in result.report.warnings:
        console.print(Text(f"warning: {printable(text)}", style="yellow"), soft_wrap=True)
    console.print(Text(f"curve:   {result.run.curve_path}"), soft_wrap=True)
    console.print(Text(f"report:  {result.run.report_path}"), soft_wrap=True)
    console.print(Text(f"model:   {result.model}"), soft_wrap=True)
    if result.best is not None and result.best != result.model:
        how = f"{result.report.best_stage}; ludus eval RUN --checkpoint best"
        console.print(Text(f"best:    {result.best}   ({how})"), soft_wrap=True)
    following = f"ludus rollout {result.run.path} --tasks 3   (watch it play)"
    if not any(one.train for one in recipe.sets):  # nothing of its own to play
        following = f"ludus rollout RECIPE -m {result.run.path}   (watch it play the tasks of a recipe)"
    console.print(Text(f"next:    {following}"), soft_wrap=True)
