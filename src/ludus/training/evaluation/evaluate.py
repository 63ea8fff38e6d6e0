"""Evaluating a model, wherever it is, on tasks that it does not learn from."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from ludus.chat.recognition import format_for
from ludus.chat.tokenizers import load_tokenizer
from ludus.core.failures import ConfigError
from ludus.core.generation import Sampling
from ludus.core.random import key
from ludus.core.task import Task
from ludus.core.tokenizer import Tokenizer
from ludus.core.trajectory import Group, Trajectory
from ludus.engine.servers import RemoteEngine, RemoteOptions, TranscriptTokenizer
from ludus.llm import Address, is_address
from ludus.observe import RunFolder, rollout_metrics, set_metrics
from ludus.rollouts.rollout import Rollout
from ludus.sandbox import close_shared_sandboxes
from ludus.training.config.parts import Parts
from ludus.training.config.recipe import Recipe
from ludus.training.data.tasks import TaskSet, seed_of_set
from ludus.training.evaluation.summary import Comparison, Summary, SummaryOptions, compare, summarise
from ludus.training.task_sets import build_task_sets, close_task_sets

TASK_SET = "task_set"
"""The metadata key under which groups of several task sets have their set's name."""
OnTasks = Callable[[int, int], object]
"""Called with how many tasks have been played, and of how many; first with 0."""
_PER_SET = ("success", "reward", "turns")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Metrics, and the episodes that they were measured on."""

    metrics: dict[str, float]
    groups: list[Group]

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group.trajectories]

    def summary(self, how: SummaryOptions | None = None) -> Summary:
        """Success, pass@k, average@k and reward over all tasks, with intervals."""
        return summarise(self.groups, how)[0]

    def by_subtask(self, by: str, how: SummaryOptions | None = None) -> dict[str, Summary]:
        """A summary for each sub-task: the value of a task's metadata under `by`."""
        _, *parts = summarise(self.groups, replace(how or SummaryOptions(), by=by))
        return {part.subtask: part for part in parts}

    def against(self, other: Evaluation, how: SummaryOptions | None = None) -> Comparison | None:
        """This one minus another one on the same tasks; None when they share no scored task."""
        found = compare(self.groups, other.groups, how)
        return found[0] if found else None


def in_order(groups: Sequence[Group], task_ids: Sequence[str]) -> list[Group]:
    """Groups in the order of their tasks: which one finished first must not decide anything."""
    place = {task_id: number for number, task_id in enumerate(task_ids)}
    return sorted(groups, key=lambda group: (place[group.task.id], group.trajectories[0].attempt))


async def measure(
    rollout: Rollout,
    tasks: Sequence[Task],
    *,
    attempts: int,
    sampling: Sampling,
    seed: int,
    on_task: Callable[[], object] = lambda: None,
) -> Evaluation:
    """Play every task `attempts` times. The same seed gives the same draws before and after training."""
    playing = replace(rollout, attempts=attempts, sampling=sampling)
    groups: list[Group] = []
    async for group in playing.groups(tasks, evaluation_seed(seed)):
        groups.append(group)
        on_task()
    return evaluation_of(groups, tasks)


async def measure_sets(
    chosen: Sequence[tuple[TaskSet, Sequence[Task]]],
    *,
    attempts: int,
    sampling: Sampling,
    seed: int,
    on_tasks: OnTasks | None = None,
) -> Evaluation:
    """Play these tasks of these sets, one set after the other; `on_tasks` is told how many are done."""
    parts: dict[str, Evaluation] = {}
    total, done = sum(len(tasks) for _, tasks in chosen), count()

    def one_done() -> None:
        if on_tasks is not None:
            on_tasks(next(done), total)

    one_done()
    for number, (one, tasks) in enumerate(chosen):
        parts[one.name] = await measure(
            one.rollout,
            tasks,
            attempts=attempts,
            sampling=sampling,
            seed=seed_of_set(seed, number, one.name),
            on_task=one_done,
        )
    return joined(parts)


def joined(parts: Mapping[str, Evaluation]) -> Evaluation:
    """The evaluations of several task sets as one, with the numbers of each under sets/NAME/...

    Sets may have tasks of the same id, which are not attempts at one task: groups have the names of
    their sets in their metadata. Their trajectories stay as they are.
    """
    if len(parts) == 1:
        return next(iter(parts.values()))
    groups = [_apart(group, name) for name, part in parts.items() for group in part.groups]
    metrics = rollout_metrics(groups)
    for name, part in parts.items():
        metrics |= set_metrics(name, part.metrics, _PER_SET)
    return Evaluation(metrics, groups)


def _apart(group: Group, name: str) -> Group:
    task = group.task
    named = replace(task, id=f"{name}/{task.id}", metadata={**task.metadata, TASK_SET: name})
    return Group(named, group.trajectories)


def evaluation_of(groups: Sequence[Group], tasks: Sequence[Task]) -> Evaluation:
    """The evaluation that these groups are, put into the order of the tasks."""
    ordered = in_order(groups, [task.id for task in tasks])
    return Evaluation(rollout_metrics(ordered), ordered)


def evaluation_seed(seed: int) -> int:
    """The key of an evaluation's draws, apart from those of training with the same seed."""
    return key("evaluation", seed)


# Models to evaluate: a folder, a name on the hub, a run, a server's address.

_WEIGHTS = (".safetensors", ".bin", ".json")


@dataclass(frozen=True, slots=True)
class EvalModel:
    """A model that can be opened. `label` is what reports call it, `name` what it is loaded by.

    Without a name it is the recipe's own model. `tokenizer` (a folder or hub name) is for an address: with
    it, tokens are sent; without one, messages.
    """

    label: str
    name: str | None
    tokenizer: str | None = None
    remote: RemoteOptions = field(default_factory=RemoteOptions)

    @property
    def is_remote(self) -> bool:
        return self.name is not None and is_address(self.name)

    def identity(self, recipe: Recipe) -> dict[str, Any]:
        """Identity of the model in results: those of different models must not mix."""
        if self.is_remote:
            return {
                "address": self.name,
                "tokenizer": self.tokenizer,
                "prompt": self.remote.prompt,
                **({"tools": "native"} if self.remote.tools == "native" else {}),
                "request": dict(self.remote.request),
            }
        model = self.recipe(recipe).model
        identity: dict[str, Any] = model.model_dump(mode="json")
        if model.name is not None and Path(model.name).is_dir():
            identity["name"] = str(Path(model.name).resolve())
            identity["files"] = _files(Path(model.name))
        if model.scratch is not None:
            identity["seed"] = recipe.seed
        return identity

    def recipe(self, recipe: Recipe) -> Recipe:
        """The recipe with this model in it. A run's servers are left alone: they may be training."""
        recipe = recipe.model_copy(
            update={"cluster": recipe.cluster.model_copy(update={"servers": (), "weights": None})}
        )
        if self.name is None or self.is_remote:
            return recipe
        chosen = {"name": self.name, "scratch": None}
        return recipe.model_copy(update={"model": recipe.model.model_copy(update=chosen)})

    @asynccontextmanager
    async def open(self, recipe: Recipe, parts: Parts) -> AsyncIterator[list[TaskSet]]:
        """The task sets, ready to be played by the model; all that was opened is closed at the end."""
        # loads torch
        from ludus.training.preflight import check_servers
        from ludus.training.run_context import build_run_context

        await check_servers(recipe, parts)
        if not self.is_remote:
            async with await build_run_context(self.recipe(recipe), parts) as context:
                yield context.task_sets
            return
        assert self.name is not None
        variables, options = recipe.model.chat_template_kwargs, self.remote
        tokenizer: Tokenizer = TranscriptTokenizer()
        if self.tokenizer:
            tokenizer = load_tokenizer(self.tokenizer, template_kwargs=variables)
        elif variables:  # the server renders: vLLM and SGLang take them with the request
            options = replace(
                options, request={"chat_template_kwargs": dict(variables), **options.request}
            )
        format = format_for(tokenizer, recipe.agent.format.name, **recipe.agent.format.options)
        if self.remote.tools == "native" and (self.tokenizer or format.name != "hermes"):
            raise ConfigError(
                'native tools are for chat servers: leave out --tokenizer, and use agent.format = "hermes"'
            )
        engine = RemoteEngine(
            self.name,
            tokenizer,
            options=options,
            write_calls=format.render_action,
        )
        sets: list[TaskSet] = []
        try:
            sets = build_task_sets(recipe, parts, engine, tokenizer)
            await engine.check()
            yield sets
        finally:
            await engine.close()
            await close_task_sets(sets)
            await close_shared_sandboxes()


async def find_model(
    model: str | None,
    recipe: Recipe,
    *,
    tokenizer: str | None = None,
    remote: RemoteOptions | None = None,
) -> EvalModel:
    """The model that a user names.

    A run's folder stands for its newest checkpoint, an address without a model for the only one there.
    """
    if model is None:
        return EvalModel(recipe.model.name or f"{recipe.name} (from scratch)", None)
    if is_address(model):
        parsed = Address.parse(model)
        address = str(parsed if parsed.model else await _only_model(parsed))
        return EvalModel(address, address, tokenizer, remote or RemoteOptions())
    run = RunFolder(model)
    if not run.is_run:
        return EvalModel(model, model)
    latest = run.latest_checkpoint()
    if latest is None:
        raise ConfigError(f"the run {model} has no checkpoint yet")
    return EvalModel(f"{model}, step {latest.step}", str(latest.path))


async def _only_model(address: Address) -> Address:
    engine = RemoteEngine(address, TranscriptTokenizer())
    try:
        await engine.check()
        return engine.address
    finally:
        await engine.close()


def _files(folder: Path) -> list[list[Any]]:
    """The model's files by name, size and time: weights that were replaced are another model."""
    found = [(file, file.stat()) for file in sorted(folder.iterdir()) if file.suffix in _WEIGHTS]
    return [[file.name, stat.st_size, stat.st_mtime_ns] for file, stat in found]
