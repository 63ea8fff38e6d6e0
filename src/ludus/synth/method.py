"""Interface of a method of synthesis, and its context.

A method has settings and a coroutine `run(context) -> SynthResult`. The context plays episodes, asks language
models and keeps what was made::

    pieces = await context.each("attempts", tasks, make, name=lambda task: task.id)

calls `make(task)` for each item, many at once, and writes what it returns before it counts as done. After a
kill the same command reads the finished ones and makes the others. Everything that follows from the pieces
(filters, choices) is computed again, so it must depend on nothing but them and the settings.

Adding one: a class derived from `SynthMethod`, named by an entry point of the group `ludus.synth` in its
package's pyproject.toml, or on the command line as `file.py:Class`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from pydantic import Field

from ludus.core.config import Config
from ludus.core.failures import ConfigError, Failure, InfraError, LudusError, most_frequent_failure
from ludus.core.generation import ChatModel, ChatOptions, ChatReply, Sampling
from ludus.core.messages import Json, Message
from ludus.core.random import key
from ludus.core.registry import Registry
from ludus.core.task import Task
from ludus.core.trajectory import Group
from ludus.envs.world import Expert
from ludus.llm import ask_json
from ludus.rollouts.rollout import Rollout
from ludus.rollouts.tree import TreeConfig
from ludus.synth.result import Cost, ItemResult, SynthFolder, SynthResult, current_cost

T = TypeVar("T")
OnItem = Callable[[str, int, int], None]
"""Called as (stage, items done, items in all) whenever one more item has been made or found."""

METHODS = Registry("method of synthesis", group="ludus.synth")
"""The methods by name."""
ModelSpec = str | dict[str, Any]
"""How settings name a language model: an address, a table with an address and limits, or "policy"."""
POLICY = "policy"
"""The name of the model that plays the episodes, where it is asked for text."""


class TaskSource(Protocol):
    """Tasks, and the rollout that plays them: a task set of a recipe."""

    @property
    def name(self) -> str: ...
    @property
    def tasks(self) -> Sequence[Task]: ...
    @property
    def held_out(self) -> Sequence[Task]: ...
    @property
    def rollout(self) -> Rollout: ...


@dataclass(frozen=True, slots=True)
class SourcedTask:
    """A task, and where it is played."""

    source: TaskSource
    task: Task

    @property
    def name(self) -> str:
        return f"{self.source.name}/{self.task.id}"


class ModelTrainer(Protocol):
    """Trains and plays models by the recipe; handed in by the command line, which may import training."""

    @property
    def expert(self) -> Expert | None:
        """The recipe's demonstrator, where its demonstrations are one."""

    async def train(self, data: Path, folder: Path, model: str | None) -> str:
        """Train by the recipe, with the examples of `data` as its demonstrations; the folder of the model.

        It begins with `model`, or with the recipe's own. An interrupted run in `folder` is resumed.
        """

    async def play(
        self, model: str | None, tasks: Sequence[Task], attempts: int, temperature: float
    ) -> list[Group]:
        """Episodes of a model at tasks, scored."""


class SynthConfig(Config):
    """Settings of every method."""

    tasks: int | None = Field(default=None, ge=1)
    """How many of the tasks to use, of each task set; all when left out."""


C = TypeVar("C", bound=SynthConfig)


async def ask(
    model: ChatModel,
    system: str,
    given: str | Json,
    kind: type[T],
    options: ChatOptions = ChatOptions(),  # noqa: B008 - frozen
    *,
    check: Callable[[T], object] | None = None,
) -> T:
    """The answer to instructions about `given`, as a `kind` that passes `check`; a table is given as JSON."""
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False, default=str)
    asked = [Message("system", system), Message("user", text)]
    return (await ask_json(model, asked, kind, options, check=check)).value


def transcript(messages: Sequence[Message], asked: int = 0, most: int = 24_000) -> str:
    """A conversation as text for a language model; the middle of a long one is left out.

    The first `asked` messages are the task's: none of them is a step of the agent.
    """
    steps, lines = 0, []
    for place, message in enumerate(messages):
        is_step = message.role == "assistant" and place >= asked
        steps += is_step
        label = f"step {steps}, the agent" if is_step else message.role
        lines.append(f"[{label}]\n{message.content}")
    text = "\n".join(lines)
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[... {len(text) - most} characters left out ...]\n{text[-half:]}"


class MeteredModel:
    """A language model whose calls are counted."""

    def __init__(self, inner: ChatModel) -> None:
        self._inner = inner

    @property
    def name(self) -> str:
        return self._inner.name

    async def chat(self, messages: Sequence[Message], options: ChatOptions | None = None) -> ChatReply:
        reply = await self._inner.chat(messages, options or ChatOptions())
        cost = current_cost.get()
        if cost is not None and reply.is_cached:
            cost.cached_calls += 1
        elif cost is not None:
            cost.model_calls += 1
            cost.prompt_tokens += reply.prompt_tokens
            cost.completion_tokens += reply.completion_tokens
        return reply

    async def close(self) -> None:
        await self._inner.close()


@dataclass(slots=True)
class SynthContext:
    """The context of a method: model, task sets, folder."""

    sources: Sequence[TaskSource]
    folder: SynthFolder
    seed: int = 0
    open_model: Callable[[ModelSpec], Awaitable[ChatModel]] | None = None
    """Opens the language model that a setting names: an address, a table, or "policy"."""
    trainer: ModelTrainer | None = None
    """Trains models, for methods that go round between data and training."""
    on_item: OnItem = lambda stage, done, total: None
    at_once: int = 64
    """Most items being made at once; episodes have a limit of their own (max_in_flight)."""
    cost: Cost = field(default_factory=Cost)
    failures: list[Failure] = field(default_factory=list)
    """Of items that could not be made."""
    _models: dict[str, ChatModel] = field(default_factory=dict)
    _places: dict[int, AbstractAsyncContextManager[object]] = field(default_factory=dict)

    def tasks(self, most: int | None = None) -> list[SourcedTask]:
        found = [SourcedTask(one, task) for one in self.sources for task in one.tasks[:most]]
        if not found:
            raise ConfigError("there are no tasks to make examples from: set tasks.train")
        return found

    def held_out(self) -> list[Task]:
        """The tasks that nothing may be learned from."""
        return [task for one in self.sources for task in one.held_out]

    async def model(self, spec: ModelSpec) -> ChatModel:
        """The language model that a setting names, opened once; its calls are counted."""
        name = json.dumps(spec, sort_keys=True)
        if name not in self._models:
            if self.open_model is None:
                raise ConfigError(f"there is nothing here that opens the language model {spec!r}")
            self._models[name] = MeteredModel(await self.open_model(spec))
        return self._models[name]

    async def group(
        self,
        one: SourcedTask,
        attempts: int,
        *,
        sampling: Sampling | None = None,
        tree: TreeConfig | None = None,
        **changes: Any,
    ) -> Group:
        """Play and score `attempts` at a task, by the source's rollout with these changes."""
        rollout = replace(
            one.source.rollout,
            attempts=attempts,
            sampling=sampling or one.source.rollout.sampling,
            tree=tree,
            **changes,
        )
        places = self._places.setdefault(rollout.max_in_flight, asyncio.Semaphore(rollout.max_in_flight))
        group = await rollout.group(one.task, 0, key(self.seed, one.name), places)
        if (cost := current_cost.get()) is not None:
            cost.add_episodes(group.trajectories)
        return group

    async def each(
        self,
        stage: str,
        items: Sequence[T],
        make: Callable[[T], Awaitable[ItemResult]],
        *,
        name: Callable[[T], str],
        needs_some: bool = True,
    ) -> list[ItemResult]:
        """Make a result of each item, in order; finished ones are read from the folder.

        An item whose `make` fails through our fault gives an empty piece, and is made again by the next run.
        Where nothing at all could be made, `needs_some` refuses to go on.
        """
        found: dict[int, ItemResult] = {}
        for number, item in enumerate(items):
            piece = await asyncio.to_thread(self.folder.piece, stage, number, name(item))
            if piece is not None:
                found[number] = piece
        self.on_item(stage, len(found), len(items))
        waiting = iter([number for number in range(len(items)) if number not in found])

        async def work() -> None:
            for number in waiting:
                found[number] = await self._make(stage, number, items[number], make, name)
                self.on_item(stage, len(found), len(items))

        workers = [asyncio.create_task(work()) for _ in range(min(self.at_once, len(items)))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        for piece in found.values():
            self.cost.add(piece.cost)
        if needs_some and self.failures and not any(p.trajectories or p.notes for p in found.values()):
            raise LudusError(
                f"nothing could be made: {len(self.failures)} failures. "
                f"{most_frequent_failure(self.failures)}"
            )
        return [found[number] for number in range(len(items))]

    async def once(self, stage: str, make: Callable[[], Awaitable[ItemResult]]) -> ItemResult:
        """The result of a stage of a single item."""
        return (await self.each(stage, [0], lambda _: make(), name=str))[0]

    async def groups(
        self, stage: str, tasks: Sequence[SourcedTask], attempts: int, **changes: Any
    ) -> list[Group]:
        """`attempts` at each of these tasks, played as one stage; `changes` are those of `group`."""

        async def play(one: SourcedTask) -> ItemResult:
            return ItemResult((await self.group(one, attempts, **changes)).trajectories)

        pieces = await self.each(stage, tasks, play, name=lambda one: one.name)
        return [Group(one.task, piece.trajectories) for one, piece in zip(tasks, pieces, strict=True)]

    async def _make(
        self,
        stage: str,
        number: int,
        item: T,
        make: Callable[[T], Awaitable[ItemResult]],
        name: Callable[[T], str],
    ) -> ItemResult:
        cost = Cost()
        token = current_cost.set(cost)
        try:
            piece = await make(item)
        except InfraError as error:
            self.failures.append(Failure.of(error, error.boundary))
            return ItemResult(cost=cost)
        finally:
            current_cost.reset(token)
        piece.cost.add(cost)
        self.failures += [one.failure for one in piece.trajectories if one.failure is not None]
        await asyncio.to_thread(self.folder.write_piece, stage, number, name(item), piece)
        return piece

    async def close(self) -> None:
        for model in self._models.values():
            await model.close()
        self._models.clear()


class SynthMethod(Generic[C]):
    """A way to make examples."""

    title: ClassVar[str]
    """Name of the method in sentences."""
    settings_type: ClassVar[type[SynthConfig]] = SynthConfig
    needs_policy: ClassVar[bool] = True
    """Whether the recipe's model plays episodes; without it none is loaded, and `rollout` only demonstrates."""

    def __init__(self, settings: C) -> None:
        self.settings = settings

    async def run(self, context: SynthContext) -> SynthResult:
        """Make the examples. All that is played or asked goes through `context.each`."""
        raise NotImplementedError


def load_method(name: str) -> type[SynthMethod[Any]]:
    """The method of that name, or of a reference such as 'file.py:MyMethod'."""
    found = METHODS.load(name)
    if not (isinstance(found, type) and issubclass(found, SynthMethod)):
        raise ConfigError(f"{name!r} is no method of synthesis: {found!r:.80} is no SynthMethod")
    return found
