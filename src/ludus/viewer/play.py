"""Playing by hand: an episode of the recipe's own rollout, in which a person is asked for the next action.

The episode's coroutine waits for a move in a queue of its session; a request that makes a move waits until the
episode asks for the next one, or is over. A session without a move for an hour is ended by the next new one.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal

from ludus.core.failures import LudusError
from ludus.core.messages import Json, Media, ToolCall
from ludus.core.task import Task
from ludus.core.trajectory import Trajectory
from ludus.rollouts.agent import Agent
from ludus.rollouts.episode import Episode, Turn
from ludus.training.config.parts import Parts
from ludus.training.config.recipe import Recipe
from ludus.training.data.tasks import TaskSet
from ludus.training.evaluation.evaluate import find_model
from ludus.viewer.episode_view import episode_json
from ludus.viewer.workspace import NotFound

_MOST_SESSIONS = 8
_IDLE_SECONDS = 3600.0
_EPISODE_SECONDS = 24 * 3600.0
_MOVE_SECONDS = 300.0
_MOST_TASKS = 500


class PlayError(LudusError):
    """A move that cannot be made."""


@dataclass(frozen=True, slots=True)
class Move:
    """A person's move in place of the model's next action, or the request that the model acts."""

    kind: Literal["call", "say", "model"]
    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    turns: int = 1
    """Turns that the model plays, if it acts."""

    @classmethod
    def parse(cls, raw: Any) -> Move:
        if not isinstance(raw, dict):
            raise PlayError("a move is an object")
        kind = raw.get("kind")
        if kind == "model":
            turns = raw.get("turns", 1)
            if not isinstance(turns, int) or not 1 <= turns <= 1000:
                raise PlayError("turns is a number from 1 to 1000")
            return cls("model", turns=turns)
        content = raw.get("content", "")
        if not isinstance(content, str) or len(content) > 100_000:
            raise PlayError("content is a text of at most 100,000 characters")
        if kind == "say":
            return cls("say", content)
        if kind == "call":
            name, arguments = raw.get("name"), raw.get("arguments", {})
            if not isinstance(name, str) or not isinstance(arguments, dict):
                raise PlayError("a call has a name and arguments, which are an object")
            return cls("call", content, (ToolCall(name, arguments),))
        raise PlayError(f"a move is a call, say or model, not {kind!r:.40}")


class PlaySession(Agent):
    """One episode that is being played by hand. It is the agent of its rollout."""

    def __init__(self, task: Task, made: TaskSet, seed: int) -> None:
        self.id = secrets.token_hex(8)
        self.touched = time.monotonic()
        self.trajectory: Trajectory | None = None
        """The episode, once it is over."""
        self.task = task
        self._set = made
        self._moves: asyncio.Queue[Move] = asyncio.Queue(1)
        self._asks = asyncio.Event()
        """Whether a move is waited for."""
        self._episode: Episode | None = None
        self._model_turns = 0
        self._problem = ""
        budgets = made.rollout.budgets.model_copy(update={"max_seconds": _EPISODE_SECONDS})
        rollout = replace(made.rollout, agent=self, budgets=budgets, attempts=1, retries=0, renders=True)
        self._playing = asyncio.create_task(rollout.play(task, 0, seed))
        self._playing.add_done_callback(self._note_end)

    async def run(self, episode: Episode) -> None:
        """The recipe's own loop, in which a person is asked where the model would be."""
        self._episode = episode
        sampled = episode.generate

        async def generate(*, max_tokens: int | None = None) -> Turn:
            if self._model_turns > 0:
                self._model_turns -= 1
                return await sampled(max_tokens=max_tokens)
            await episode.note_renders()
            while True:
                self._asks.set()
                move = await self._moves.get()
                self._asks.clear()
                if move.kind == "model":
                    self._model_turns = move.turns - 1
                    return await sampled(max_tokens=max_tokens)
                try:
                    return episode.demonstrate(move.content, move.calls)
                except ValueError as error:  # what the format cannot write
                    self._problem = str(error)[:500]

        episode.generate = generate  # type: ignore[method-assign] # this episode's only; loops call it by name
        await self._set.rollout.agent.run(episode)

    async def move(self, move: Move) -> Json:
        """Make a move, and wait until the next one can be made."""
        self.touched = time.monotonic()
        if self._playing.done():
            raise PlayError("the episode is over; start another one")
        if not self._asks.is_set():
            raise PlayError("the episode is busy: wait until it asks for a move")
        self._problem = ""
        self._asks.clear()
        await self._moves.put(move)
        return await self.state()

    async def state(self) -> Json:
        """The state for the page, once the episode waits for a move or is over."""
        self.touched = time.monotonic()
        asked = asyncio.create_task(self._asks.wait())
        try:
            await asyncio.wait(
                {asked, self._playing}, timeout=_MOVE_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            asked.cancel()
        return self._json()

    def _json(self) -> Json:
        trajectory = self.trajectory
        episode = self._episode
        found: Json = {"id": self.id, "set": self._set.name, "is_over": self._playing.done()}
        if trajectory is None and episode is not None:
            trajectory = replace(episode.trajectory, messages=episode.messages)
        found["episode"] = None if trajectory is None else episode_json(trajectory, None)
        found["problem"] = self._problem
        found["turns_left"] = episode.turns_left if episode is not None else None
        found["tools"] = [
            {"name": spec.name, "description": spec.description, "parameters": spec.parameters}
            for spec in (episode.specs if episode is not None else ())
        ]
        return found

    def picture(self, sha256: str) -> Media | None:
        trajectory = self.trajectory or (self._episode.trajectory if self._episode else None)
        if trajectory is None:
            return None
        shown = [render.picture for render in trajectory.renders if render.picture is not None]
        for media in (*shown, *(one for message in trajectory.messages for one in message.media)):
            if media.sha256 == sha256:
                return media
        return None

    async def end(self) -> None:
        self._playing.cancel()
        await asyncio.wait({self._playing}, timeout=30)

    def _note_end(self, playing: asyncio.Task[Trajectory]) -> None:
        if playing.cancelled():
            return
        error = playing.exception()
        if error is None:
            self.trajectory = playing.result()
        else:
            self._problem = str(error)[:1000]


class PlayRoom:
    """The recipe that can be played, its model, and the sessions that are open."""

    def __init__(self, recipe: Recipe, parts: Parts) -> None:
        self._recipe, self._parts = recipe, parts
        self._opened = AsyncExitStack()
        self._sets: Sequence[TaskSet] = ()
        self._sessions: dict[str, PlaySession] = {}
        self._count = 0
        self.model = ""

    async def open(self) -> None:
        model = await find_model(self._recipe.model.name, self._recipe)
        self.model = model.label
        self._sets = await self._opened.enter_async_context(model.open(self._recipe, self._parts))

    async def close(self) -> None:
        for session in list(self._sessions.values()):
            await session.end()
        await self._opened.aclose()

    def describe(self) -> Json:
        return {
            "name": self._recipe.name,
            "model": self.model,
            "is_untrained": self._recipe.model.name is None,
            "sets": [
                {
                    "name": one.name,
                    "tasks": [
                        {"split": split, "number": number, "id": task.id, "prompt": _opening(task)}
                        for split, tasks in (("train", one.tasks), ("eval", one.held_out))
                        for number, task in enumerate(tasks[:_MOST_TASKS])
                    ],
                }
                for one in self._sets
            ],
        }

    async def start(self, name: str, split: str, number: int) -> Json:
        chosen = next((one for one in self._sets if one.name == name), None)
        tasks = None if chosen is None else (chosen.held_out if split == "eval" else chosen.tasks)
        if chosen is None or tasks is None or not 0 <= number < len(tasks):
            raise NotFound(f"there is no task {number} in the set {name!r}, split {split!r}")
        await self._make_room()
        self._count += 1
        session = PlaySession(tasks[number], chosen, self._count)
        self._sessions[session.id] = session
        return await session.state()

    def session(self, id: str) -> PlaySession:
        if id not in self._sessions:
            raise NotFound("this game is over or was never begun; start another one")
        return self._sessions[id]

    async def _make_room(self) -> None:
        now = time.monotonic()
        for id, one in list(self._sessions.items()):
            if now - one.touched > _IDLE_SECONDS:
                await self._sessions.pop(id).end()
        while len(self._sessions) >= _MOST_SESSIONS:
            oldest = min(self._sessions.values(), key=lambda one: one.touched)
            await self._sessions.pop(oldest.id).end()


def _opening(task: Task) -> str:
    return task.messages[-1].content[:200] if task.messages else ""
