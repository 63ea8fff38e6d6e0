"""Training from Python: one function that takes a recipe, or what a recipe would say."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, fields
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ludus.core.concurrency import frozen_gc, run_coroutine
from ludus.core.config import apply_overrides, read_toml
from ludus.core.failures import ConfigError, MissingExtraError
from ludus.core.generation import Sampling
from ludus.core.task import Task
from ludus.core.trajectory import Group
from ludus.core.user_code import reset_error_counts
from ludus.envs import Env
from ludus.observe import (
    SHOWN_METRICS,
    SINKS,
    Checkpoint,
    JsonLinesSink,
    Progress,
    RunFolder,
    RunWriter,
    setup_logging,
)
from ludus.rollouts.agent import Agent, Expert
from ludus.training.checkpoint import RunProgress, UnsavedError, load_progress
from ludus.training.conversations import Conversation
from ludus.training.evaluation.evaluate import Evaluation, find_model, measure_sets
from ludus.training.loop import OnStep, Trainer
from ludus.training.models import check_source
from ludus.training.parts import (
    KEYS,
    Parts,
    check_rebuilt,
    load_parts,
    objects_of,
    resolve_part,
    task_set_specs,
)
from ludus.training.preflight import check_parts, with_step_counts
from ludus.training.recipe import (
    Recipe,
    beside,
    find_recipe,
    refuse_empty,
    with_absolute_paths,
)
from ludus.training.report import EXTENDED, Report, success_text, write_report
from ludus.training.run_context import build_run_context
from ludus.training.settings import STAGE_CONFIGS, SFTConfig

log = logging.getLogger(__name__)

PARTS = tuple(field.name for field in fields(Parts))
"""The keywords that are code; the others are tables of the recipe."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What a disk that is full says, or a quota, or a limit on files."""


@dataclass(frozen=True, slots=True, repr=False)
class Result:
    """A finished run: its folder, the trained model's folder, and what was measured."""

    run: RunFolder
    model: Path
    report: Report
    best: Path | None = None
    """The checkpoint with the best held-out number (evaluation.best_by), where there are any."""

    def __repr__(self) -> str:
        """One line, for a notebook's cell."""
        measured = f", success={' → '.join(self.success.values())!r}" if self.success else ""
        return f"Result(run={str(self.run.path)!r}{measured}, model={str(self.model)!r})"

    def __str__(self) -> str:
        """What it learned: the held-out success after each stage, and where the model is."""
        width = max(map(len, self.success), default=0)
        lines = [f"{stage:<{width}}  {share}" for stage, share in self.success.items()]
        return "\n".join(
            ["held-out success" if lines else "nothing was measured", *lines, f"model: {self.model}"]
        )

    @property
    def success(self) -> dict[str, str]:
        """The share of held-out tasks that succeeded, by when it was measured."""
        return {str(row[0]): str(row[2]) for row in self.report.rows}

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Every logged row, in order."""
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
    agent: Agent | Mapping[str, Any] | None = None,
    demonstrations: Expert | Sequence[Conversation] | None = None,
    resume: str | Path | None = None,
    on_step: OnStep | None = None,
    progress: bool = True,
    **settings: Any,
) -> Result:
    """Train an agent.

    Give a recipe (a TOML file's path, or a `Recipe`), or its tables as keywords: `model="folder or name"`,
    `rl={"steps": 50}`, `budgets={"max_turns": 4}`. What is code can be passed as objects, or by the names
    that a recipe would use; it comes before what the recipe says. `resume` is a run's folder to go on with,
    by its own recipe. The run's folder and its progress are shown on stderr, unless `progress` is false.
    """
    if isinstance(agent, Mapping):
        settings["agent"], agent = agent, None
    if resume is not None and recipe is not None:
        raise ConfigError(
            "a resumed run goes on by its own recipe: leave out the recipe. To train otherwise, begin a new "
            "run whose model is the last checkpoint's folder"
        )
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
        else:
            resolved = resolve(recipe, settings)
        parts = _parts(resolved, **given)
    show = Console(stderr=True) if progress else None
    again = "ludus.train(resume={path!r}, ...) with the same tasks, tools and rewards"
    objects = objects_of(given)
    return run_coroutine(train_async(resolved, parts, run, on_step, objects, show=show, again=again))


def resumed_recipe(run: RunWriter, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe that a run goes on by: its own, with its last stage made longer where that is asked for."""
    where = f"{run.path}/recipe.json"
    raw = run.recipe()
    if not overrides:
        return Recipe.parse(raw, where)
    changed = apply_overrides(raw, overrides)
    recipe = Recipe.parse(changed, where)
    latest = run.latest_checkpoint()
    done = load_progress(latest.path) if latest is not None else None
    keys = [one.partition("=")[0].strip() for one in overrides]
    objects = run.objects()
    missing = {name: what for name, what in objects.items() if KEYS.get(name, name) not in keys}
    rebuilt = {
        KEYS.get(name, name) for name in objects.keys() - missing.keys()
    }  # named by reference now
    before = Recipe.parse(raw, where)
    check_extension(recipe, [key for key in keys if key not in rebuilt], done, before)
    optimizer = getattr(recipe.stages[-1], "optimizer", None)
    if optimizer is not None and optimizer.schedule != "constant":
        log.warning(
            "the learning rate's schedule (%s) is over all steps of a stage: with more of them it is another "
            "one from here on",
            optimizer.schedule,
        )
    if done is not None and recipe.stages[-1] != before.stages[-1]:  # which differ in length alone
        with closing(JsonLinesSink(run.metrics_path)) as rows:
            rows.write(done.step, {EXTENDED: 1.0})
    run.replace_recipe(with_absolute_paths(changed))
    if rebuilt:
        run.note_objects(missing)
    return recipe


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
    code = {name: what.pop(name) for name in PARTS if name in what}
    resolved = resolve(recipe, what)
    parts = _parts(resolved, **code)
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
    code = {name: what.pop(name) for name in PARTS if name in what}
    resolved = resolve(recipe, what)
    parts = _parts(resolved, **code)
    most = resolved.evaluation.tasks
    tasks = {one.name: one.parts.held_out[:most] for one in task_set_specs(resolved, parts)}
    if not any(tasks.values()):
        raise ConfigError("there is nothing to evaluate on: set tasks.evaluation, or pass held_out=")
    drawn = sampling or Sampling(temperature=resolved.evaluation.temperature)
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


def _parts(recipe: Recipe, **given: Any) -> Parts:
    """What the recipe names, replaced by what was passed in."""
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
    again: str = "ludus train --resume {path}",
) -> Result:
    """The same, inside a running event loop. Without a `run`, a new folder is made.

    `objects` says what of the parts no recipe names, for whoever finds the folder later. `show` is where its
    progress is shown; `again`, how a run that was stopped is gone on with.
    """
    reset_error_counts()  # each run shows the tracebacks of user code once
    with _closed_on_error(run):
        check_parts(recipe, parts)
    if run is None:
        check_source(recipe.model)  # before there is a folder
    writer = run or new_run(recipe)
    if run is None and objects:
        writer.note_objects(objects)
    try:
        counted = with_step_counts(recipe, parts)
        with show_progress(writer, show, again.format(path=str(writer.path))) as display:
            watching = _joined([one for one in (display, on_step) if one is not None])
            return await _train_in(writer, counted, parts, run is not None, watching)
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


def _joined(watching: Sequence[OnStep]) -> OnStep:
    def on_step(phase: str, step: int, total: int, metrics: dict[str, float]) -> None:
        for one in watching:
            one(phase, step, total, metrics)

    return on_step


@contextmanager
def _closed_on_error(run: RunWriter | None) -> Iterator[None]:
    """Give a run back that could not be gone on with, so that it can be tried again."""
    try:
        yield
    except BaseException:
        if run is not None:
            run.close()
        raise


async def _train_in(
    writer: RunWriter, recipe: Recipe, parts: Parts, is_resumed: bool, on_step: OnStep
) -> Result:
    with writer, setup_logging(writer):
        checkpoint = _continue(writer, recipe) if is_resumed else None
        async with await build_run_context(
            recipe, parts, checkpoint.path if checkpoint else None
        ) as context:
            if is_resumed:  # now that it can be gone on with: what was written after it will come again
                writer.truncate_after(checkpoint.step if checkpoint else -1)
            _add_sinks(writer, recipe, checkpoint.step + 1 if checkpoint else 0)
            with frozen_gc():
                trainer = Trainer(context, writer, on_step)
                await trainer.train(checkpoint)
        report = write_report(writer, trainer.recipe)
        latest = writer.latest_checkpoint()
        if latest is None:
            raise ConfigError(f"{writer.path} has no checkpoint, though the run has ended")
        return Result(RunFolder(writer.path), latest.path, report, report.best)


def new_run(recipe: Recipe) -> RunWriter:
    raw = with_absolute_paths(recipe.model_dump(mode="json"))
    if recipe.run.folder is not None:
        return RunWriter.create(recipe.run.folder, raw)
    return RunWriter.create_numbered(recipe.name, raw)


def _continue(run: RunWriter, recipe: Recipe) -> Checkpoint | None:
    """The checkpoint to go on from."""
    checkpoint = run.latest_checkpoint(thorough=True)
    if checkpoint is None and any(run.checkpoints_path.glob("step-*")):
        raise ConfigError(
            f"every checkpoint in {run.checkpoints_path} is damaged (the log says how), so there is nothing to "
            "go on from: put back what they were, or begin a new run"
        )
    if checkpoint is None and _must_have_saved(run, recipe):
        raise ConfigError(
            f"{run.path} has recorded steps and has no checkpoint of them in {run.checkpoints_path.name}, so "
            "there is nothing to go on from: put the folder back, or begin a new run"
        )
    return checkpoint


def _must_have_saved(run: RunWriter, recipe: Recipe) -> bool:
    """Whether a run that recorded what it did has had a checkpoint; only imitation begins without one."""
    done: int = max((row.get("step", 0) for row in run.metrics()), default=0)
    first = recipe.stages[0]
    return done > (0 if first.saves_at_start else min(first.total_steps, recipe.run.checkpoint_every))


def _add_sinks(run: RunWriter, recipe: Recipe, first_step: int) -> None:
    raw = recipe.model_dump(mode="json")
    for name in recipe.run.all_sinks:
        run.add_sink(partial(SINKS.load(name), run.path, raw, first_step))


# Progress on the terminal or in a notebook.

_OWN = {
    "pairs": "pairs",
    "accuracy": "accuracy",
    "kept": "kept",
    "reverse_kl": "KL",
    "loss": "loss",
    "held_out_loss": "held-out loss",
}
_SHOWN = {**SHOWN_METRICS} | {
    f"{stage.prefix}/{name}": label
    for stage in STAGE_CONFIGS
    if stage.prefix and stage.learns
    for name, label in {**SHOWN_METRICS, **_OWN}.items()
}
"""What a progress line has, where a step has it: RL's numbers, and under their names those of other stages."""


class ProgressDisplay:
    """One progress bar for each stage, fed by the trainer after every step."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._open = ExitStack()
        self._phase = ""
        self._bar: Progress | None = None

    def __call__(self, phase: str, step: int, total: int, metrics: dict[str, float]) -> None:
        if phase == "evaluation":
            self._evaluated(step, metrics)
            return
        if phase != self._phase or self._bar is None:
            self.close()
            self._phase = phase
            # KTO learns from single episodes
            shown = {**_SHOWN, "dpo/pairs": "episodes"} if phase.startswith("KTO") else _SHOWN
            bar = Progress(total, phase, console=self._console, first=step - 1, shown=shown)
            self._bar = self._open.enter_context(bar)
        self._bar.update(step, metrics)

    def _evaluated(self, step: int, metrics: dict[str, float]) -> None:
        shown = [f"success {success_text(metrics)}"]
        if (low := metrics.get("eval/success_low")) is not None and metrics.get("eval/failures"):
            high = metrics["eval/success_high"]
            shown.append(f"{metrics['eval/failures']:.0f} FAILED (95% interval {low:.1%} to {high:.1%})")
        passes = [name for name in metrics if name.startswith("eval/pass@")]
        shown += [f"{name.removeprefix('eval/')} {metrics[name]:.1%}" for name in passes]
        self.say(f"held-out tasks after step {step}: {', '.join(shown)}")

    def say(self, text: str) -> None:
        """A line of its own, above the bar where there is one."""
        if self._bar is not None:
            self._bar.say(text)
        else:
            self._console.print(Text(text), soft_wrap=True)  # paths and commands are there to be copied

    def close(self) -> None:
        self._open.close()
        self._bar = None


@contextmanager
def show_progress(
    run: RunWriter, console: Console | None, again: str
) -> Iterator[ProgressDisplay | None]:
    """Show a run: its folder, its progress, and where it was saved when it is stopped.

    `again` is how to go on with it. Without a console nothing is shown.
    """
    if console is None:
        yield None
        return
    display = ProgressDisplay(console)
    display.say(f"run folder: {run.path}")
    try:
        yield display
    except (KeyboardInterrupt, asyncio.CancelledError):
        display.close()
        latest = run.latest_checkpoint()
        saved = f"saved after step {latest.step} in {latest.path}" if latest else "nothing to save yet"
        display.say(f"stopped; {saved}. Go on with: {again}")
        raise
    finally:
        display.close()


def length_key(recipe: Recipe) -> str | None:
    """The key that says how long the last stage is, such as rl.steps; None where it does not learn."""
    where, last = recipe.named_stages[-1]
    return f"{where}.{last.length_key}" if last.length_key is not None else None


def check_extension(
    recipe: Recipe, changed: Sequence[str], done: RunProgress | None, before: Recipe
) -> None:
    """Refuse what a resumed run cannot change: all but how long its last stage is, and what is written down.

    `changed` are the keys, as on the command line; `done` is how far the run has come; `before` is its recipe
    as it was.
    """
    length = length_key(before)
    for key in changed:
        noted = key.startswith(("run.", "evaluation.")) and key != "run.folder"
        if key != length and not noted:
            raise ConfigError(
                "a resumed run goes on by its own recipe, and "
                f"{key} cannot be changed; what can be: {f'{length}, ' if length else ''}"
                f"evaluation.* and run.*. {_OTHERWISE}"
            )
    where, last = recipe.named_stages[-1]
    if isinstance(last, SFTConfig) and last.epochs is not None:  # its steps depend on the data
        earlier = before.stages[-1]
        assert isinstance(earlier, SFTConfig)
        if earlier.epochs is not None and last.epochs < earlier.epochs:
            raise ConfigError(f"{length} can only be raised: it is {earlier.epochs:g}")
        return
    if done is not None and done.stage == len(recipe.stages) - 1 and last.total_steps < done.done:
        raise ConfigError(
            f"{where} has done {done.done} steps already, so its length cannot be {last.total_steps}"
        )


_OTHERWISE = (
    "To train otherwise, begin a new run whose model is the last checkpoint's folder "
    "(model.name=RUN/checkpoints/step-...)"
)


def finished_text(recipe: Recipe, counted: Recipe, done: RunProgress | None, run: str) -> str | None:
    """What to say of a run that has done all its steps; None for any other.

    `counted` is the recipe with steps where it says epochs.
    """
    if done is None or done.step < sum(stage.total_steps for stage in counted.stages):
        return None
    text, key = f"{run} is finished: all {done.step} steps are done.", length_key(recipe)
    if key is None:
        return f"{text} Its last stage is an evaluation, so it cannot be extended. {_OTHERWISE}"
    longer = 2 * getattr(recipe.stages[-1], key.rpartition(".")[2])
    return (
        f"{text} To extend it, raise the length of its last stage: "
        f"ludus train --resume {run} {key}={longer}"
    )
