"""`ludus eval` and `ludus rollout`: play episodes with a model, and look at them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ludus.cli.options import stopped_says, until_told
from ludus.cli.show import missing_run
from ludus.core.config import apply_overrides
from ludus.core.failures import (
    ConfigError,
    LudusError,
    failed_episodes_warning,
    most_frequent_failure,
    not_there,
)
from ludus.core.generation import Sampling
from ludus.core.task import Task
from ludus.core.trajectory import Group, Trajectory
from ludus.engine.servers import RemoteOptions
from ludus.llm import is_address
from ludus.observe import (
    ReportTable,
    RunFolder,
    episode_text,
    printable,
    rollout_metrics,
    write_groups,
)
from ludus.observe.console import EvaluationBars
from ludus.training.config.parts import Parts, check_rebuilt, load_parts, task_set_specs
from ludus.training.config.recipe import Recipe, find_recipe, load_recipe, packaged_recipes
from ludus.training.early_end import best_of
from ludus.training.evaluation.evaluate import TASK_SET, EvalModel, Evaluation, find_model
from ludus.training.evaluation.report import (
    comparison_table,
    letters,
    metric_rows,
    short_table,
    single_table,
    study_warnings,
    write_report,
)
from ludus.training.evaluation.study import (
    EvalTasks,
    OnGroup,
    ResultsFolder,
    Study,
    StudyPlan,
    eval_tasks_of,
    run_study,
    settings_of,
)
from ludus.training.evaluation.summary import SummaryOptions


@dataclass(frozen=True, slots=True)
class PlayOptions:
    """Options of both commands; None leaves a setting to the recipe."""

    tasks: int | None
    attempts: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    seed: int
    show: int
    out: Path | None

    def sampling(self, usual: Sampling) -> Sampling:
        """How to draw: as the command's options say, and as `usual` where they say nothing."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        try:
            return replace(usual, **given)
        except ValueError as error:
            name, _, why = str(error).removeprefix("sampling.").partition(" ")
            raise ConfigError(f"--{name.replace('_', '-')} {why}") from None


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """Further options of `ludus eval`."""

    models: Sequence[str]
    against: str | None
    turns: str | None
    pass_at: str | None
    by: str | None
    results: Path | None
    tokenizer: str | None
    prompt: str
    tools: str
    request: str | None
    checkpoint: str | None = None

    def remote(self) -> RemoteOptions:
        if self.prompt not in ("tokens", "text"):
            raise ConfigError(f"--prompt is tokens or text, not {self.prompt!r}")
        try:
            fields = json.loads(self.request or "{}")
        except ValueError as error:
            raise ConfigError(f"--request is a JSON object: {error}") from None
        if not isinstance(fields, dict):
            raise ConfigError("--request is a JSON object, such as '{\"top_k\": 20}'")
        if self.tools not in ("text", "native"):
            raise ConfigError(f"--tools is text or native, not {self.tools!r}")
        return RemoteOptions(
            prompt="text" if self.prompt == "text" else "tokens",
            tools="native" if self.tools == "native" else "text",
            request=fields,
        )


def run_evaluation(
    source: Path, overrides: list[str], study_options: EvalOptions, options: PlayOptions
) -> None:
    """Measure on the held-out tasks of all sets, write the results into a folder, and show them."""
    recipe, parts = load(source, overrides, None)
    sets = task_set_specs(recipe, parts)
    held_out = eval_tasks_of(sets, options.tasks or recipe.evaluation.tasks)
    if not held_out:
        raise ConfigError(
            f"{source} names no held-out tasks: set tasks.evaluation, or evaluation in a [[task_sets]] table"
        )
    sampling = options.sampling(recipe.evaluation.sampling)
    attempts = options.attempts or recipe.evaluation.attempts
    measured = [one for one in sets if one.name in {part.name for part in held_out}]
    settings = settings_of(measured, [part.tasks for part in held_out], attempts, sampling, options.seed)
    turns = parse_numbers(study_options.turns, "--turns")
    how = _statistics(study_options, held_out, attempts)
    own = str(source) if source.is_dir() else None
    if study_options.checkpoint is not None:
        own = str(checkpoint_of(source, study_options.checkpoint))
    if own is None and not study_options.models:
        _warn_of_scratch(recipe)

    async def played(results: ResultsFolder, on_group: OnGroup) -> Study:
        *models, last = await _players(recipe, own, study_options)
        plan = StudyPlan((*models, last), held_out, turns, attempts, sampling, options.seed)
        against = last.label if study_options.against is not None else None
        return await run_study(
            recipe, parts, plan, how, against=against, results=results, on_group=on_group
        )

    console = Console()
    with ResultsFolder.at(study_options.results, recipe.name, settings) as results:
        with EvaluationBars(Console(stderr=True)) as on_group:
            kept = f"what is measured is kept. Go on with the same command and --results {results.path}"
            with stopped_says(console, kept):
                study = asyncio.run(until_told(played(results, on_group)))
        _show(console, study, options)
        paths = write_report(results.path, study)
    for path in paths:
        console.print(Text(str(path)), soft_wrap=True)


async def _players(recipe: Recipe, own: str | None, options: EvalOptions) -> list[EvalModel]:
    """The models in order, `own` when none is named; the one they are compared with is the last."""
    names: list[str | None] = [*options.models] or [own]
    if options.against is not None:
        names.append(options.against)
    remote = options.remote()
    return [await find_model(name, recipe, tokenizer=options.tokenizer, remote=remote) for name in names]


def _statistics(options: EvalOptions, held_out: Sequence[EvalTasks], attempts: int) -> SummaryOptions:
    """How to summarise the results; several task sets get a row each unless --by says otherwise."""
    ks = parse_numbers(options.pass_at, "--pass-at")
    if ks and ks[-1] > attempts:
        raise ConfigError(f"pass@{ks[-1]} needs --attempts {ks[-1]} or more, not {attempts}")
    several = [TASK_SET] if len(held_out) > 1 else []
    known = {name for part in held_out for task in part.tasks for name in task.metadata}
    by = options.by if options.by is not None or not several else TASK_SET
    if by is not None and by not in {*known, *several}:
        has = ", ".join(sorted({*known, *several})) or "nothing"
        raise ConfigError(f"no task has {by!r} in its metadata; it has: {has}")
    return SummaryOptions(by=by, ks=ks)


def _warn_of_scratch(recipe: Recipe) -> None:
    if recipe.model.scratch is not None:
        text = (
            "warning: no model is named, and the recipe's own is made from scratch: what plays has learned "
            "nothing yet. Give a run's folder instead of the recipe, or -m FOLDER"
        )
        Console(stderr=True).print(Text(text, style="yellow"), soft_wrap=True)


def parse_numbers(text: str | None, option: str) -> tuple[int, ...]:
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


def _show(console: Console, study: Study, options: PlayOptions) -> None:
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
        console.print(table.rich())
    for text in study_warnings(study):
        console.print(Text(f"warning: {printable(text)}", style="yellow"), soft_wrap=True)
    if options.out is not None:
        groups = [group for measured in study.measured for group in measured.evaluation.groups]
        write_groups(options.out, groups, split="eval")
        console.print(Text(f"episodes: {options.out}"), soft_wrap=True)


def run_rollout(
    source: Path,
    overrides: list[str],
    model: str | None,
    checkpoint: str | None,
    task_sets: Sequence[str],
    options: PlayOptions,
) -> None:
    """Play training tasks, of all sets or of those that are named."""
    if checkpoint is not None:
        model = str(checkpoint_of(source, checkpoint))
    recipe, parts = load(source, overrides, model)
    tasks = {one.name: one.parts.tasks[: options.tasks] for one in task_set_specs(recipe, parts)}
    for name in task_sets:
        if name not in tasks:
            raise ConfigError(f"there is no task set {name!r}; there are: {', '.join(tasks)}")
    tasks = {name: own for name, own in tasks.items() if not task_sets or name in task_sets}
    if not any(tasks.values()):
        raise ConfigError(f"{source} names no tasks: set tasks.train")
    if model is None and not source.is_dir():
        _warn_of_scratch(recipe)
    _play(recipe, parts, tasks, options)


def load(source: Path, overrides: list[str], model: str | None) -> tuple[Recipe, Parts]:
    """The recipe and its code; a run's folder brings its own recipe and its newest checkpoint."""
    if str(source) in packaged_recipes():
        source = find_recipe(source)
    if not source.exists():
        if source.suffix == ".toml":
            raise ConfigError(not_there(source, "recipe", beside_recipe=False))
        known = ", ".join(packaged_recipes())
        raise ConfigError(f"{missing_run(source)} (recipes that come with Ludus: {known})")
    if source.is_dir():
        _refuse_checkpoint(source)
        # demonstrations are for training alone
        there = ["demonstrations", *(one.partition("=")[0] for one in overrides)]
        check_rebuilt(str(source), RunFolder(source).objects(), there)
        raw = apply_overrides(RunFolder(source).recipe(), overrides)
        recipe = Recipe.parse(raw, f"{source}/recipe.json")
        model = model or str(source)
    else:
        recipe = load_recipe(source, overrides)
    if model is not None:
        if is_address(model):
            raise ConfigError("a model behind an address can be evaluated only: ludus eval")
        recipe = asyncio.run(find_model(model, recipe)).recipe(recipe)
    return recipe, load_parts(recipe)


def checkpoint_of(source: Path, which: str) -> Path:
    """The checkpoint of a run that is called best or last, or after so many steps."""
    run = RunFolder(source)
    if not run.is_run:
        raise ConfigError(f"--checkpoint is for a run's folder, and {source} is none")
    found = {checkpoint.step: checkpoint.path for checkpoint in run.checkpoints()}
    step: int | None = max(found, default=None)
    if which == "best":
        recipe = Recipe.parse(run.recipe(), f"{source}/recipe.json")
        best = best_of(run.metrics(), recipe)
        step = best.step if best is not None else None
        if step is None:
            raise ConfigError(f"{source} has no best checkpoint: nothing was measured on held-out tasks")
    elif which != "last":
        step = int(which) if which.isdecimal() else None
    if step not in found:
        there = ", ".join(map(str, sorted(found))) or "none"
        raise ConfigError(
            f"--checkpoint {which}: {source} has no such checkpoint; it is best, last or a step, and there are "
            f"those of the steps {there}"
        )
    return found[step]


def _refuse_checkpoint(source: Path) -> None:
    """A checkpoint is a model; the recipe is with the run that it belongs to."""
    run = RunFolder(source.resolve().parent.parent)
    if not RunFolder(source).is_run and source.resolve().parent == run.checkpoints_path and run.is_run:
        raise ConfigError(
            f"{source} is a checkpoint, which knows its model and not its recipe: give the run's folder, and "
            f"the checkpoint as the model: {source.parent.parent} -m {source}"
        )


def _play(
    recipe: Recipe, parts: Parts, tasks: Mapping[str, Sequence[Task]], options: PlayOptions
) -> None:
    from ludus.training.api import play  # torch and transformers come with it

    console = Console()
    sampling = options.sampling(recipe.evaluation.sampling)
    attempts = options.attempts or recipe.evaluation.attempts
    count = sum(map(len, tasks.values()))
    with console.status(f"playing {count * attempts} episodes"):
        result = asyncio.run(play(recipe, parts, tasks, attempts, sampling, options.seed))
    _show_episodes(console, result.trajectories[: options.show])
    console.print(_metrics_table(result, f"{count} tasks × {attempts}").rich())
    if options.out is not None:
        write_groups(options.out, result.groups, split="rollout")
        console.print(Text(f"episodes: {options.out}"))
    failures = [t.failure for t in result.trajectories if t.failure is not None]
    if text := failed_episodes_warning(failures, len(result.trajectories), "played"):
        console.print(Text(f"warning: {printable(text)}", style="yellow"), soft_wrap=True)
    if failures and len(failures) == len(result.trajectories):
        raise LudusError(
            f"all episodes were lost to infrastructure failures. {most_frequent_failure(failures)}"
        )


def _show_episodes(console: Console, trajectories: Sequence[Trajectory]) -> None:
    for trajectory in trajectories:
        console.rule(Text(f"task {trajectory.task.id}, attempt {trajectory.attempt}"))
        console.print(Text(episode_text(trajectory)), soft_wrap=True)


def _metrics_table(result: Evaluation, title: str) -> ReportTable:
    """A column over everything, and one for each task set where there are several."""
    sets: dict[str, list[Group]] = {}
    for group in result.groups:
        sets.setdefault(group.task.metadata.get(TASK_SET, ""), []).append(group)
    found = {"value": result.metrics}
    if len(sets) > 1:
        found = {"all": result.metrics} | {name: rollout_metrics(own) for name, own in sets.items()}
    return ReportTable(("metric", *found), metric_rows(list(found.values())), title)
