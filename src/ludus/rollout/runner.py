"""Many episodes at once: one coroutine each, and nothing waits for a batch.

Who waits for whom: an episode waits for a place among those in flight (`max_in_flight`, the only bound
here), then for its environments (their pools are bounded), then for the engine (which bounds its own
queue). Groups are yielded as soon as their last episode ends. Cancelling the iteration cancels every
episode, and each one releases what it holds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from ludus.core.failures import Aborted, Boundary, Failure, InfraError
from ludus.core.generation import Sampling
from ludus.core.messages import Message
from ludus.core.protocols import Engine
from ludus.core.random import key
from ludus.core.task import Task
from ludus.core.tooling import ToolContext, ToolSet
from ludus.core.trajectory import Group, StopReason, Trajectory
from ludus.envs import EnvPool
from ludus.rewards import Scorer
from ludus.rollout.agent import Agent
from ludus.rollout.budgets import Budgets
from ludus.rollout.episode import Episode, EpisodeOver
from ludus.rollout.renderers import Renderer
from ludus.tools import CombinedTools, LocalTools

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Rollout:
    """Plays episodes: everything an episode needs, and how many run at once."""

    engine: Engine
    renderer: Renderer
    scorer: Scorer
    tools: ToolSet
    pools: Mapping[str, EnvPool] = field(default_factory=dict)
    agent: Agent = field(default_factory=Agent)
    budgets: Budgets = field(default_factory=Budgets)
    sampling: Sampling = field(default_factory=Sampling)
    attempts: int = 1
    max_in_flight: int = 256
    retries: int = 1
    """How often an episode is played again after a failure of ours."""

    async def groups(self, tasks: Sequence[Task], seed: int) -> AsyncIterator[Group]:
        """One group of `attempts` episodes for each task, in the order they finish."""
        places = asyncio.Semaphore(self.max_in_flight)
        seen: Counter[str] = Counter()
        running = []
        for task in tasks:
            # a task that comes twice gets new attempts, not the same ones again
            first = seen[task.id] * self.attempts
            seen[task.id] += 1
            running.append(asyncio.create_task(self._group(task, first, seed, places)))
        try:
            for finished in asyncio.as_completed(running):
                yield await finished
        finally:
            for unfinished in running:
                unfinished.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _group(self, task: Task, first: int, seed: int, places: asyncio.Semaphore) -> Group:
        async def one(attempt: int) -> Trajectory:
            async with places:
                return await self.play(task, attempt, seed)

        group = Group(task, list(await asyncio.gather(*(one(first + i) for i in range(self.attempts)))))
        try:
            await self.scorer.score_group(group)
        except InfraError as error:
            for trajectory in group.trainable:
                _fail(trajectory, Failure.of(error, Boundary.REWARD))
        return group

    async def play(self, task: Task, attempt: int, seed: int) -> Trajectory:
        """One episode, played again when something of ours failed; it always returns a trajectory."""
        trajectory = Trajectory(task)
        for trial in range(self.retries + 1):
            trajectory = Trajectory(task, attempt=attempt, seed=key(seed, task.id, attempt))
            name = f"{seed:x}/{task.id}/{attempt}/{trial}"
            started = time.perf_counter()
            try:
                async with asyncio.timeout(self.budgets.max_seconds):
                    await self._live(trajectory, name)
            except Aborted:
                trajectory.stop = StopReason.ABORTED
            except TimeoutError:
                message = f"the episode took longer than budgets.max_seconds = {self.budgets.max_seconds:g}"
                _fail(trajectory, Failure(Boundary.DEADLINE, "TimeoutError", message, trial + 1))
            except InfraError as error:
                _fail(trajectory, Failure.of(error, error.boundary, trial + 1))
                if not error.retriable or error.boundary is Boundary.REWARD:
                    break  # rewards have retries of their own; playing again would not mend them
            except Exception as error:
                log.exception("the agent failed on task %s", task.id)
                _fail(trajectory, Failure.of(error, Boundary.AGENT, trial + 1))
                break
            finally:
                trajectory.seconds["total"] = time.perf_counter() - started
                await self.engine.release(name)
            if trajectory.failure is None:
                break
            log.info("task %s, attempt %d: %s", task.id, attempt, trajectory.failure)
        return trajectory

    async def _live(self, trajectory: Trajectory, name: str) -> None:
        """From the first environment to the last reward; whatever happens, all is released."""
        task = trajectory.task
        async with AsyncExitStack() as held:
            envs: dict[str, Any] = {}
            seen: list[str] = []
            for env_name in task.envs or self.pools:
                pool = self._pool(env_name)
                lease = await pool.acquire(name, task)
                held.push_async_callback(pool.release, name)
                envs[env_name] = lease.env
                seen.append(lease.observation.text)
            context = ToolContext(name, task, envs)
            own = [tool for env in envs.values() for tool in env.tools()]
            tools = CombinedTools([self.tools, LocalTools(own, encode=self.renderer.tokenizer.encode)])
            await tools.open(context)
            held.push_async_callback(tools.close, context)
            episode = Episode(
                trajectory,
                engine=self.engine,
                renderer=self.renderer,
                tools=tools,
                specs=await tools.list(context),
                context=context,
                budgets=self.budgets,
                sampling=self.sampling,
                opening=opening_messages(task.messages, [text for text in seen if text]),
            )
            try:
                await self.agent.run(episode)
            except EpisodeOver:
                log.debug("task %s ended by its budget or its environment", task.id)
            episode.finish()
            started = time.perf_counter()
            await self.scorer.score(trajectory, envs)
            trajectory.seconds["rewards"] = time.perf_counter() - started

    def _pool(self, name: str) -> EnvPool:
        if name not in self.pools:
            known = ", ".join(self.pools) or "none"
            message = f"a task asks for the environment {name!r}, but this run has: {known}"
            raise InfraError(Boundary.ENV, message, retriable=False)
        return self.pools[name]


def opening_messages(messages: Sequence[Message], observations: Sequence[str]) -> list[Message]:
    """The task's messages, with what the environments show first at the end of the last user message.

    One message rather than two, because many chat templates refuse two user messages in a row.
    """
    if not observations:
        return list(messages)
    text = "\n\n".join(observations)
    if messages and messages[-1].role == "user":
        last = messages[-1]
        return [*messages[:-1], replace(last, content=f"{last.content}\n\n{text}")]
    return [*messages, Message("user", text)]


def _fail(trajectory: Trajectory, failure: Failure) -> None:
    """A failure of ours: no reward, whatever had been scored before."""
    trajectory.failure = failure
    trajectory.stop = StopReason.FAILED
    trajectory.reward = None
    trajectory.rewards = {}
