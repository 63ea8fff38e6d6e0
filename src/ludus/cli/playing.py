"""`ludus eval` and `ludus rollout`: play episodes with a model, and look at them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ludus.core.config import apply_overrides
from ludus.core.failures import ConfigError
from ludus.core.generation import Sampling
from ludus.core.messages import Json
from ludus.core.task import Task
from ludus.core.trajectory import Trajectory
from ludus.engine.remote import RemoteOptions, is_address
from ludus.observe import RunFolder, episode_text, table_rich, write_groups
from ludus.observe.report import Cell
from ludus.training import Evaluation, Parts, Recipe, load_parts, load_recipe
from ludus.training.api import play
from ludus.training.evaluating.players import Player, player_of
from ludus.training.evaluating.report import (
    comparison_table,
    letters,
    short_table,
    single_table,
    write_report,
)
from ludus.training.evaluating.results import ResultsFolder, settings_of
from ludus.training.evaluating.study import OnGroup, Plan, Study, run_study
from ludus.training.evaluating.summary import Statistics

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


@dataclass(frozen=True, slots=True)
class StudyOptions:
    """What `ludus eval` takes beside what both commands take."""

    models: Sequence[str]
    against: str | None
    turns: str | None
    pass_at: str | None
    by: str | None
    results: Path | None
    tokenizer: str | None
    prompt: str
    request: str | None

    def remote(self) -> RemoteOptions:
        if self.prompt not in ("tokens", "text"):
            raise ConfigError(f"--prompt is tokens or text, not {self.prompt!r}")
        try:
            fields = json.loads(self.request or "{}")
        except ValueError as error:
            raise ConfigError(f"--request is a JSON object: {error}") from None
        if not isinstance(fields, dict):
            raise ConfigError("--request is a JSON object, such as '{\"top_k\": 20}'")
        return RemoteOptions(prompt="text" if self.prompt == "text" else "tokens", request=fields)


def run_evaluation(
    source: Path, overrides: list[str], study_options: StudyOptions, options: Options
) -> None:
    """Measure on the held-out tasks, write the results into a folder, and show them."""
    recipe, parts = load(source, overrides, None)
    if not parts.held_out:
        raise ConfigError(f"{source} names no held-out tasks: set tasks.evaluation")
    tasks = parts.held_out[: options.tasks or recipe.evaluation.tasks]
    sampling = options.sampling(recipe.evaluation.temperature)
    attempts = options.attempts or recipe.evaluation.attempts
    settings = settings_of(recipe, tasks, attempts, sampling, options.seed)
    turns = numbers_of(study_options.turns, "--turns") or (recipe.budgets.max_turns,)
    how = Statistics(by=study_options.by, ks=numbers_of(study_options.pass_at, "--pass-at"))
    if how.ks and how.ks[-1] > attempts:
        raise ConfigError(f"pass@{how.ks[-1]} needs --attempts {how.ks[-1]} or more, not {attempts}")

    _check_key(how.by, tasks)
    own = str(source) if source.is_dir() else None

    async def played(results: ResultsFolder, on_group: OnGroup) -> Study:
        *players, last = await _players(recipe, own, study_options)
        plan = Plan((*players, last), tuple(tasks), turns, attempts, sampling, options.seed)
        against = last.label if study_options.against is not None else None
        return await run_study(
            recipe, parts, plan, how, against=against, results=results, on_group=on_group
        )

    console = Console()
    with _results(study_options.results, recipe, settings) as results:
        with console.status("loading") as status:

            def on_group(model: str, turns: int, done: int, total: int) -> None:
                status.update(Text(f"{model}, at most {turns} turns: {done} of {total} tasks"))

            try:
                study = asyncio.run(played(results, on_group))
            except (KeyboardInterrupt, asyncio.CancelledError):
                console.print(Text(f"stopped; go on with the same command and --results {results.path}"))
                raise KeyboardInterrupt from None
        _show(console, study, options)
        paths = write_report(results.path, study)
    for path in paths:
        console.print(Text(str(path)), soft_wrap=True)


async def _players(recipe: Recipe, own: str | None, options: StudyOptions) -> list[Player]:
    """The models in order, `own` when none is named; the one they are compared with is the last."""
    names: list[str | None] = [*options.models] or [own]
    if options.against is not None:
        names.append(options.against)
    remote = options.remote()
    return [await player_of(name, recipe, tokenizer=options.tokenizer, remote=remote) for name in names]


def _results(folder: Path | None, recipe: Recipe, settings: Json) -> ResultsFolder:
    if folder is not None:
        return ResultsFolder(folder, settings)
    return ResultsFolder.numbered(recipe.name, settings)


def _check_key(by: str | None, tasks: Sequence[Task]) -> None:
    known = sorted({name for task in tasks for name in task.metadata})
    if by is not None and by not in known:
        raise ConfigError(f"no task has {by!r} in its metadata; it has: {', '.join(known) or 'nothing'}")


def numbers_of(text: str | None, option: str) -> tuple[int, ...]:
    """The numbers of `2,4,8`, in order."""
    if text is None:
        return ()
    try:
        numbers = sorted({int(number) for number in text.split(",")})
    except ValueError:
        numbers = [0]
    if numbers[0] < 1:
        raise ConfigError(f"{option} takes positive numbers, such as 2,4,8, not {text!r}")
    return tuple(numbers)


def _show(console: Console, study: Study, options: Options) -> None:
    trajectories = [t for m in study.measured for t in m.evaluation.trajectories]
    _show_episodes(console, trajectories[: options.show])
    kept = sum(measured.kept for measured in study.measured)
    if kept:
        console.print(Text(f"{kept} tasks had been played before"))
    is_single = len(study.summaries) == 1
    tables = [single_table(study) if is_single else short_table(study)]
    if study.against is not None:
        tables.append(comparison_table(study, short=True))
    for model, letter in letters(study).items() if not is_single else ():
        console.print(Text(f"{letter} = {model}"))
    for table in tables:
        console.print(table_rich(table.title, table.columns, table.rows))
    if options.out is not None:
        groups = [group for measured in study.measured for group in measured.evaluation.groups]
        write_groups(options.out, groups, split="eval")
        console.print(Text(f"episodes: {options.out}"), soft_wrap=True)


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
        if is_address(model):
            raise ConfigError("a model behind an address can be evaluated only: ludus eval")
        recipe = asyncio.run(player_of(model, recipe)).recipe(recipe)
    return recipe, load_parts(recipe)


def _play(recipe: Recipe, parts: Parts, tasks: Sequence[Task], options: Options) -> None:
    console = Console()
    sampling = options.sampling(recipe.evaluation.temperature)
    attempts = options.attempts or recipe.evaluation.attempts
    with console.status(f"playing {len(tasks) * attempts} episodes"):
        result = asyncio.run(play(recipe, parts, tasks, attempts, sampling, options.seed))
    _show_episodes(console, result.trajectories[: options.show])
    console.print(table_rich(f"{len(tasks)} tasks × {attempts}", ("metric", "value"), _rows(result)))
    if options.out is not None:
        write_groups(options.out, result.groups, split="rollout")
        console.print(Text(f"episodes: {options.out}"))


def _show_episodes(console: Console, trajectories: Sequence[Trajectory]) -> None:
    for trajectory in trajectories:
        console.rule(Text(f"task {trajectory.task.id}, attempt {trajectory.attempt}"))
        console.print(Text(episode_text(trajectory)), soft_wrap=True)


def _rows(result: Evaluation) -> list[list[Cell]]:
    return [
        [label, round(result.metrics[name], 3)]
        for name, label in SHOWN.items()
        if name in result.metrics
    ]
