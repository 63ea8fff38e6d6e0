"""`ludus train`: progress while it runs, a report when it ends, and the way back after Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from ludus.cli.options import VIEW_PACKAGES, missing_packages, stopped_says, until_told
from ludus.core.failures import ConfigError, install_hint
from ludus.observe import (
    ReportTable,
    RunFolder,
    RunWriter,
    Share,
    change_style,
    folded_episode,
    large,
    share_lines,
    share_text,
)
from ludus.observe.console import say
from ludus.observe.findings import STYLES
from ludus.training.config.parts import Parts, check_rebuilt, load_parts
from ludus.training.config.recipe import AGAIN, Recipe, load_recipe
from ludus.training.config.run import launched_rank

if TYPE_CHECKING:
    from ludus.training.api import Result

_WIDEST = 120
"""Columns that the end of a run uses at most."""


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
        show_ending(console, result, recipe)


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
        done = load_progress(latest.path) if latest is not None and run.curve_path.exists() else None
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


def show_ending(console: Console, result: Result, recipe: Recipe) -> None:
    """The end of a run: its result first, then two episodes, then where everything is and what comes next."""
    from ludus.training.checkpoint import longer_command

    report = result.report
    _show_result(console, result)
    for label, trajectory in report.samples:
        console.print()
        console.print(folded_episode(trajectory, label, min(console.width, _WIDEST)))
    table = _beside_success(report.held_out) if report.held_out.rows else report.losses
    if table.rows:
        console.print(table.rich())
    for text in report.warnings:
        say(console, f"warning: {text}", style="yellow", is_prose=True)
    for one in report.findings:
        detail = "" if one.severity == "note" else f". {one.detail}"
        say(console, f"{one.title}{detail}", style=STYLES[one.severity], is_prose=True)
    console.print()
    rows = [("model", str(result.model)), ("report", f"{result.run.report_path}, curve.png beside it")]
    if result.best is not None and result.best != result.model:
        how = f"{report.best_stage}; ludus eval RUN --checkpoint best"
        rows.insert(1, ("best", f"{result.best}   ({how})"))
    _say_rows(console, rows)
    console.print()
    console.print(Text("next", style="bold"))
    run = str(result.run.path)
    watch = f"ludus rollout {run} --tasks 3"
    if not any(one.train for one in recipe.sets):  # nothing of its own to play
        watch = f"ludus rollout RECIPE -m {run}"
    steps = [
        ("look inside", f"ludus view {result.run.path.parent}"),
        ("what still goes wrong", f"ludus show {run} --wrong"),
        ("watch it play", watch),
        ("talk to it", f"ludus serve model {run}"),
        ("use it elsewhere", f"ludus export {run}"),
    ]
    if (longer := longer_command(recipe, run)) is not None:
        steps.append(("go on training", longer))
    here = Path(sys.executable).with_name("ludus")
    if shutil.which("ludus") is None and here.exists():  # its environment is not activated
        steps.insert(0, ("the command ludus", os.path.relpath(here)))
    missing = missing_packages(VIEW_PACKAGES)
    if missing:
        needy = "ludus view" if missing == ["duckdb"] else "ludus view and ludus serve"
        steps.append(("to install first", f"{install_hint('view')}: for {needy}"))
    _say_rows(console, steps)


def _show_result(console: Console, result: Result) -> None:
    """Held-out success, large where the terminal allows it."""
    measured = [(str(row[0]), row[2]) for row in result.report.held_out.rows]
    shares = [(when, share) for when, share in measured if share is None or isinstance(share, Share)]
    console.print()
    if not shares:
        console.print(Text("nothing was measured on held-out tasks", style="bold"))
        return
    console.print(Text("held-out success", style="bold"))
    known = [share.value for _, share in shares if share is not None]
    width = min(console.width, _WIDEST)
    if console.is_terminal and not console.options.ascii_only:
        ends = [known[0], known[-1]] if len(known) > 1 else known
        parts = [(share_text(value), change_style(known[0], value)) for value in ends]
        if parts and (text := large(parts, width)) is not None:
            console.print(text)
            console.print()
    else:
        width = 0  # no bars
    for line in share_lines(shares, width):
        console.print(line, soft_wrap=True)


def _beside_success(held_out: ReportTable) -> ReportTable:
    """The other columns of the held-out table; success is above it."""
    keep = [place for place, name in enumerate(held_out.columns) if name != "success"]
    if all(row[held_out.columns.index("lost")] == 0 for row in held_out.rows):
        keep = [place for place in keep if held_out.columns[place] != "lost"]
    rows = [[row[place] for place in keep] for row in held_out.rows]
    return ReportTable([held_out.columns[place] for place in keep], rows)


def _say_rows(console: Console, rows: Sequence[tuple[str, str]]) -> None:
    """Two columns; commands and paths stay on one line, to be copied."""
    wide = max(len(left) for left, _ in rows)
    for left, right in rows:
        console.print(
            Text(f"  {left:<{wide}}  ", style="dim").append(right, style="not dim"), soft_wrap=True
        )
