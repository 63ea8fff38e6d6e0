"""Training from Python: one function that takes a recipe, or what a recipe would say."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from rich.console import Console

from ludus.core.config import read_toml
from ludus.core.failures import ConfigError, LudusError, MissingExtraError
from ludus.core.generation import Sampling
from ludus.core.task import Task
from ludus.core.trajectory import Group
from ludus.envs import Env
from ludus.observe import SINKS, AuditLog, RunFolder, RunWriter, setup_logging
from ludus.remote import user_log
from ludus.remote.threads import frozen_gc, run_coroutine
from ludus.rollouts.agent import Agent, Expert
from ludus.tools.calling import forget_errors
from ludus.training.checkpoint import (
    checkpoint_to_resume,
    going_on_text,
    replayed_recipe,
    resumed_recipe,
)
from ludus.training.config.parts import (
    Parts,
    check_rebuilt,
    load_parts,
    objects_of,
    resolve_part,
    task_set_specs,
)
from ludus.training.config.recipe import (
    AGAIN,
    Recipe,
    beside,
    find_recipe,
    rate_notes,
    refuse_empty,
    with_absolute_paths,
    with_usual_settings,
)
from ludus.training.config.run import launched_rank
from ludus.training.data.conversations import Conversation
from ludus.training.display import ProgressDisplay, show_progress
from ludus.training.evaluation.evaluate import Evaluation, find_model, measure_sets
from ludus.training.loop import OnStep, Trainer
from ludus.training.models.loading import check_source
from ludus.training.optim.fitting import memory_note
from ludus.training.optim.shard_files import UnsavedError
from ludus.training.preflight import check_engines, check_parts, check_servers, with_step_counts
from ludus.training.ranks.processes import RankError
from ludus.training.ranks.steps import serve_rank
from ludus.training.report import Report, write_report
from ludus.training.run_context import build_run_context

log = logging.getLogger(__name__)

PARTS = tuple(field.name for field in fields(Parts))
"""The keywords that are code; the others are tables of the recipe."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk, a quota, or a limit on files."""


@dataclass(frozen=True, slots=True, repr=False)
class Result:
    """A finished run: its folder, the trained model's folder, and what was measured."""

    run: RunFolder
    model: Path
    report: Report
    best: Path | None = None
    """The checkpoint with the best held-out number (evaluation.best_by), where there are any."""

    def __repr__(self) -> str:
        measured = f", success={' → '.join(self.success.values())!r}" if self.success else ""
        return f"Result(run={str(self.run.path)!r}{measured}, model={str(self.model)!r})"

    def __str__(self) -> str:
        """Summary: the held-out success after each stage, and the model's place."""
        width = max(map(len, self.success), default=0)
        lines = [f"{stage:<{width}}  {share}" for stage, share in self.success.items()]
        return "\n".join(
            ["held-out success" if lines else "nothing was measured", *lines, f"model: {self.model}"]
        )

    @property
    def success(self) -> dict[str, str]:
        """The share of held-out tasks that succeeded, by when it was measured."""
        return dict(self.report.success)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return self.run.metrics()


def train(
    recipe: Recipe | str | Path | None = None,
    *,
    tasks: str | Iterable[Task | Mapping[str, Any]] | None = None,
    held_out: str | Iterable[Task | Mapping[str, Any]] | None = None,
    tools: Sequence[Any] | None = None,
    envs: Mapping[str, str | Callable[[], Env]] | None = None,
    rewards: Sequence[Any] | None = None,
    group_rewards: Sequence[Any] | None = None,
    agent: Agent | Callable[..., Any] | Mapping[str, Any] | None = None,
    demonstrations: Expert | Sequence[Conversation] | None = None,
    resume: str | Path | None = None,
    replay: str | Path | None = None,
    on_step: OnStep | None = None,
    progress: bool = True,
    **settings: Any,
) -> Result:
    """Train an agent.

    Give a recipe (a TOML file's path, or a `Recipe`), or its tables as keywords: `model="folder or name"`,
    `rl={"steps": 50}`, `budgets={"max_turns": 4}`. What is code can be passed as objects, or by the names
    that a recipe would use; it comes before what the recipe says. `resume` is a run's folder to go on with,
    by its own recipe; `replay`, one to train again from the groups that it recorded. The run's folder and its
    progress are shown on stderr, unless `progress` is false.
    """
    if launched_rank()[0]:
        serve_rank()  # one of several ranks that torchrun started: rank 0 has the run
        raise SystemExit
    if isinstance(agent, Mapping):
        settings["agent"], agent = agent, None
    if resume is not None and recipe is not None:
        raise ConfigError(
            "a resumed run goes on by its own recipe: leave out the recipe. To train otherwise, begin a new "
            "run whose model is the last checkpoint's folder"
        )
    if replay is not None and (recipe is not None or resume is not None):
        raise ConfigError("a replay has the recipe of its run: leave out the recipe, and resume")
    given: dict[str, Any] = {
        "tasks": tasks,
        "held_out": held_out,
        "tools": tools,
        "envs": envs,
        "rewards": rewards,
        "group_rewards": group_rewards,
        "agent": agent,
        "demonstrations": demonstrations,
    }
    for name in ("tasks", "held_out"):
        if isinstance(given[name], Iterator):
            given[name] = list(given[name])  # it is looked at twice
    run = RunWriter.resume(resume) if resume is not None else None
    with _closed_on_error(run):
        if run is not None:
            passed = [name for name, value in given.items() if value is not None]
            check_rebuilt(str(resume), run.objects(), passed)
            resolved = resumed_recipe(run, list(_dotted(settings)))
        elif replay is not None:
            passed = [name for name, value in given.items() if value is not None]
            check_rebuilt(str(replay), RunFolder(replay).objects(), passed)
            resolved = replayed_recipe(RunFolder(replay), list(_dotted(settings)))
        else:
            resolved = resolve(recipe, settings)
        parts = _parts(resolved, **given)
    show = Console(stderr=True) if progress else None
    again = "ludus.train(resume={path!r}, ...) with the same tasks, tools and rewards"
    objects = objects_of(given)
    return run_coroutine(train_async(resolved, parts, run, on_step, objects, show=show, again=again))


def _dotted(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Nested settings as overrides: {"rl": {"steps": 5}} is rl.steps=5."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}={json.dumps(_without_paths(value))}"


def rollout(
    recipe: Recipe | str | Path | None = None,
    *,
    attempts: int = 1,
    sampling: Sampling | None = None,
    seed: int = 0,
    **what: Any,
) -> list[Group]:
    """Play episodes without training: a group of `attempts` for each task. `what` is as for `train`."""
    resolved, parts = _resolve_all(recipe, what)
    tasks = {one.name: one.parts.tasks for one in task_set_specs(resolved, parts)}
    return run_coroutine(play(resolved, parts, tasks, attempts, sampling or Sampling(), seed)).groups


def evaluate(
    recipe: Recipe | str | Path | None = None,
    *,
    attempts: int | None = None,
    sampling: Sampling | None = None,
    seed: int = 0,
    **what: Any,
) -> Evaluation:
    """Measure a model on the recipe's held-out tasks (or `held_out=`). `what` is as for `train`.

    Where there are several task sets, all of them are played: `by_subtask("task_set")` has their statistics.
    """
    resolved, parts = _resolve_all(recipe, what)
    most = resolved.evaluation.tasks
    tasks = {one.name: one.parts.held_out[:most] for one in task_set_specs(resolved, parts)}
    if not any(tasks.values()):
        raise ConfigError("there is nothing to evaluate on: set tasks.evaluation, or pass held_out=")
    drawn = sampling or resolved.evaluation.sampling
    return run_coroutine(
        play(resolved, parts, tasks, attempts or resolved.evaluation.attempts, drawn, seed)
    )


async def play(
    recipe: Recipe,
    parts: Parts,
    tasks: Mapping[str, Sequence[Task]],
    attempts: int,
    sampling: Sampling,
    seed: int,
) -> Evaluation:
    """Put everything together, play these tasks of these sets, take it apart again."""
    if not any(tasks.values()):
        raise ConfigError("there are no tasks to play: set tasks.train, or pass tasks=")
    model = await find_model(recipe.model.name, recipe)
    async with model.open(recipe, parts) as sets:
        chosen = [(one, tasks[one.name]) for one in sets if tasks.get(one.name)]
        with frozen_gc():
            return await measure_sets(chosen, attempts=attempts, sampling=sampling, seed=seed)


def _resolve_all(recipe: Recipe | str | Path | None, what: Mapping[str, Any]) -> tuple[Recipe, Parts]:
    code = {name: value for name, value in what.items() if name in PARTS}
    resolved = resolve(recipe, {name: value for name, value in what.items() if name not in PARTS})
    return resolved, _parts(resolved, **code)


def _parts(recipe: Recipe, **given: Any) -> Parts:
    """The parts that the recipe names, replaced by those that were passed in."""
    parts = load_parts(recipe)
    for name, value in given.items():
        if value is not None:
            setattr(parts, name, resolve_part(name, value, recipe))
    return parts


def resolve(recipe: Recipe | str | Path | None, settings: Mapping[str, Any]) -> Recipe:
    """A recipe from a file, an object or keywords; keywords replace what the recipe says."""
    if isinstance(recipe, Recipe):
        raw = recipe.model_dump()
    elif recipe is not None:
        recipe = find_recipe(recipe)
        raw = beside(read_toml(recipe), recipe)
        refuse_empty(raw)
    else:
        raw = {}
    refuse_empty(settings)
    for name, value in settings.items():
        value = _without_paths(value)
        if name == "model" and isinstance(value, str):
            value = (
                {"scratch": {}, "name": None} if value == "scratch" else {"name": value, "scratch": None}
            )
        if isinstance(value, Mapping) and isinstance(raw.get(name), Mapping):
            value = {**raw[name], **value}
        raw[name] = value
    return Recipe.parse(raw, str(recipe or "the call of train"))


def _without_paths(value: Any) -> Any:
    """Settings as a file would hold them: a path is text there."""
    if isinstance(value, Mapping):
        return {key: _without_paths(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_without_paths(entry) for entry in value]
    return str(value) if isinstance(value, PathLike) else value


async def train_async(
    recipe: Recipe,
    parts: Parts,
    run: RunWriter | None = None,
    on_step: OnStep | None = None,
    objects: Mapping[str, str] | None = None,
    *,
    show: Console | None = None,
    again: str = AGAIN,
) -> Result:
    """`train` inside a running event loop. Without a `run`, a new folder is made.

    `objects` describes the parts that no recipe names, for a later resume. `show` gets its progress; `again` is
    the command that resumes an interrupted run.
    """
    forget_errors()  # each run shows the tracebacks of user code once
    with _closed_on_error(run):
        check_parts(recipe, parts)
        await check_servers(recipe, parts)
        await check_engines(recipe)
    if run is None:
        check_source(recipe.model)  # before there is a folder
        recipe = with_usual_settings(recipe)
    writer = run or new_run(recipe)
    if run is None and objects:
        writer.note_objects(objects)
    try:
        counted = with_step_counts(recipe, parts)
        how = again.format(path=str(writer.path))
        notes = [*rate_notes(recipe), *filter(None, [memory_note(recipe)])]
        with show_progress(writer, show, how, notes) as display:
            watchers = [on_step] if on_step is not None else []
            return await _train_on(writer, counted, parts, run is not None, watchers, display)
    except (OSError, UnsavedError) as error:
        if isinstance(error, OSError) and error.errno not in _NO_ROOM:
            raise
        free = shutil.disk_usage(writer.path).free / 2**20
        raise UnsavedError(
            f"the run could not be written to {writer.path.absolute()}, where {free:,.0f} MiB are free: "
            f"{error}. Make room, then go on with: {again.format(path=str(writer.path))}"
        ) from error
    except (ConfigError, MissingExtraError):
        writer.discard()  # if nothing was recorded: the corrected command finds the place as this one did
        raise
    except LudusError as error:  # a rank that died, a server that is gone: nothing that the recipe says
        error.args = (
            f"{error}. To go on from the last checkpoint: {again.format(path=str(writer.path))}",
        )
        raise


@contextmanager
def _closed_on_error(run: RunWriter | None) -> Iterator[None]:
    """Give a run back that could not be resumed, so that it can be tried again."""
    try:
        yield
    except BaseException:
        if run is not None:
            run.close()
        raise


async def _train_on(
    writer: RunWriter,
    recipe: Recipe,
    parts: Parts,
    is_resumed: bool,
    watchers: Sequence[OnStep],
    display: ProgressDisplay,
) -> Result:
    """Train; after the death of a trainer rank, go on from the last checkpoint as often as the recipe says."""
    for left in reversed(range(recipe.cluster.restarts + 1)):
        try:
            return await _train_in(writer, recipe, parts, is_resumed, watchers, display)
        except RankError as error:
            if not left:
                raise
            log.warning("%s; the run goes on from its last checkpoint (cluster.restarts)", error)
        writer, is_resumed = RunWriter.resume(writer.path), True
    raise AssertionError("the last attempt returns or raises")


async def _train_in(
    writer: RunWriter,
    recipe: Recipe,
    parts: Parts,
    is_resumed: bool,
    watchers: Sequence[OnStep],
    display: ProgressDisplay,
) -> Result:
    with writer, setup_logging(writer), user_log.opened(), _audited(writer, recipe, parts) as parts:
        checkpoint = checkpoint_to_resume(writer, recipe) if is_resumed else None
        start = checkpoint.path if checkpoint else None
        if is_resumed and (checkpoint is not None or writer.metrics()):
            text = going_on_text(writer, recipe, checkpoint)
            log.info("%s", text)
            display.say(text, is_prose=True)
        with display.waiting("loading the model"):
            built = await build_run_context(
                recipe, parts, start, run=writer.path.name, folder=writer.path
            )
        async with built as context:
            display.begin(context)
            context.on_tasks = display.measured
            if context.placement is not None:
                watchers = [*watchers, context.placement.report]
            if is_resumed:  # what was written after the checkpoint will come again
                writer.truncate_after(checkpoint.step if checkpoint else -1)
            raw, first = recipe.model_dump(mode="json"), checkpoint.step + 1 if checkpoint else 0
            for name in recipe.run.all_sinks:
                writer.add_sink(partial(SINKS.load(name), writer.path, raw, first))
            writer.write_in_background()
            with frozen_gc():
                trainer = Trainer(context, writer, watchers, display=display)
                await trainer.train(checkpoint)
        display.close()
        report = write_report(writer, trainer.recipe, trainer.findings)
        await asyncio.sleep(0)  # a Ctrl-C of meanwhile ends the run here, where what is saved is said
        latest = writer.latest_checkpoint()
        if latest is None:
            raise ConfigError(f"{writer.path} has no checkpoint, though the run has ended")
        return Result(RunFolder(writer.path), latest.path, report, report.best)


@contextmanager
def _audited(writer: RunWriter, recipe: Recipe, parts: Parts) -> Iterator[Parts]:
    """The parts, with a log of all tool calls in the run's folder where the recipe wants one."""
    wanted = recipe.run.audit
    if wanted is None:
        wanted = any(one.parts.uses_mcp for one in task_set_specs(recipe, parts))
    if not wanted:
        yield parts
        return
    log = AuditLog(writer.path)
    try:
        yield replace(parts, audit=log)
    finally:
        log.close()


def new_run(recipe: Recipe) -> RunWriter:
    raw = with_absolute_paths(recipe.model_dump(mode="json"))
    if recipe.run.folder is not None:
        return RunWriter.create(recipe.run.folder, raw)
    return RunWriter.create_numbered(recipe.name, raw)
