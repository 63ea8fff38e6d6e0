"""Does an environment keep its contract? Each clause is tried on real instances, through the agent's own tools.

Instances are made as a run makes them (`EnvPool`: own thread or process included). A clause that raises, hangs
or finds a difference has failed; the others are tried all the same. Tools without an environment are held to
the contract too: there, an instance is what an episode has of them, such as a sandbox session.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from ludus.chat.formats import load_format
from ludus.chat.renderer import Renderer
from ludus.core.failures import CannotFork, ConfigError, Fault, LudusError
from ludus.core.messages import ToolCall, ToolContext, ToolSet
from ludus.core.task import Task, spread
from ludus.core.tokenizer import ByteTokenizer
from ludus.core.trajectory import SUCCESS, Trajectory, is_success
from ludus.core.user_code import error_with_location
from ludus.engine import FakeEngine
from ludus.envs import EnvPool, call_env
from ludus.envs.env import Isolation, is_own
from ludus.envs.world import ExpertMoves, next_move
from ludus.remote.threads import DeadlineExceeded, run_sync
from ludus.rewards import Scorer
from ludus.rollouts.agent import Agent, Demonstrator, Expert, RandomAgent, random_call
from ludus.rollouts.checked_instance import (
    BAD_TEXTS,
    Action,
    Broken,
    CheckedInstance,
    ResourceUsage,
    Story,
    bad_calls,
    compare_stories,
    shared_state,
)
from ludus.rollouts.recorder import Budgets
from ludus.rollouts.rollout import Rollout
from ludus.tools import as_toolset

_UNLIMITED = 10_000_000
_EXCEPTION = re.compile(r"[A-Z]\w*(Error|Exception|Exit|Iteration)\b")
_FIX = "answer it with text, or raise ToolFault, which says what the model did wrong"
_LEAST_GOLD = 0.95
"""The share of tasks that a demonstrator has to solve."""


LOOK = ("interface", "isolation", "snapshot")
"""What is looked at first, on an environment alone: where it is broken, all other clauses are."""
CONTRACT = (
    "determinism",
    "reset after done",
    "bad actions",
    "action after done",
    "close twice",
    "concurrent instances",
    "leaks",
    "gold solution",
    "random policy",
)


class Verdict(StrEnum):
    """Broken clauses break episodes; a warning makes them worse than they could be."""

    OK = "ok"
    FAILED = "failed"
    WARNING = "warning"
    INFO = "info"
    """A number, which is neither kept nor broken."""
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Clause:
    """One clause of the contract, and what came of it or is to be done about it."""

    name: str
    verdict: Verdict
    text: str

    @property
    def ok(self) -> bool | None:
        return {Verdict.OK: True, Verdict.FAILED: False}.get(self.verdict)

    def __str__(self) -> str:
        return f"{self.verdict}: {self.name}: {self.text}"


class _NotTried(Exception):
    """A clause could not be tried; the text says why."""


@dataclass(slots=True)
class EnvContract:
    """The contract of an environment, with the tasks and the effort of the check."""

    factory: Callable[[], Any] | None
    tasks: Sequence[Task]
    """Without any, it is reset with an empty one, which many cannot begin with."""
    name: str = "env"
    actions: Sequence[Action] | None = None
    """What is done in an episode; when left out, first what is offered, and else what a random policy does."""
    expert: Expert | None = None
    rewards: Sequence[Any] = ()
    """With none, the environment pays."""
    max_turns: int = 20
    episodes: int = 20
    """Episodes of the search for leaks."""
    instances: int = 4
    """At once."""
    sample: int = 3
    """Tasks of each clause."""
    gold: int = 5
    """Tasks that the expert and the random policy play."""
    seconds: float = 120.0
    """For each clause."""
    tools: ToolSet | None = None
    """Tools of the agent where there is no environment."""
    isolation: Isolation | None = None
    """Where instances live; as their class says when left out."""
    pool: EnvPool | None = field(init=False, default=None)
    _stuck: str = field(init=False, default="")
    """The error of an expert that does not return, once known: no further clause waits for it."""
    _warnings: list[Clause] = field(init=False, default_factory=list)
    _has_tasks: bool = field(init=False, default=True)

    def __post_init__(self) -> None:
        if self.factory is not None:
            size = max(self.instances, 4)
            self.pool = EnvPool(self.factory, name=self.name, size=size, isolation=self.isolation)
        elif self.tools is None:
            raise ConfigError(f"{self.name!r} has neither an environment nor tools")
        if not self.tasks:
            self.tasks, self._has_tasks = [Task.of("check", id="check")], False
        # tasks may have other environments too, which are not checked here
        self.tasks = [
            replace(task, envs={self.name: task.envs.get(self.name) or {}}) if task.envs else task
            for task in self.tasks
        ]

    async def clauses(self, names: Sequence[str] = CONTRACT) -> AsyncIterator[Clause]:
        """Try one after another; after a look that finds it broken, no more."""
        known: dict[str, Callable[[], Awaitable[str]]] = {
            "interface": self._interface,
            "isolation": self._isolation,
            "snapshot": self._snapshot,
            "determinism": self._determinism,
            "reset after done": self._reset_after_done,
            "bad actions": self._bad_actions,
            "action after done": self._action_after_done,
            "close twice": self._close_twice,
            "concurrent instances": self._concurrent,
            "leaks": self._leaks,
            "gold solution": self._gold,
            "random policy": self._random,
        }
        without = () if self.expert is not None else ("gold solution",)
        try:
            for name in (one for one in names if one not in without):
                found = await self._tried(name, known[name])
                yield found
                warnings, self._warnings = self._warnings, []
                for warning in warnings:
                    yield warning
                if name == "interface" and not found.ok:
                    return
        finally:
            if self.pool is not None:
                await self.pool.close()

    @asynccontextmanager
    async def _instance(self) -> AsyncIterator[CheckedInstance]:
        if self.pool is not None:
            async with self.pool.new_instance() as env:
                yield CheckedInstance(self.name, env, None)
            return
        one = CheckedInstance(self.name, None, self.tools)
        try:
            yield one
        finally:
            await one.close()

    async def _tried(self, name: str, clause: Callable[[], Awaitable[str]]) -> Clause:
        try:
            async with asyncio.timeout(self.seconds) as deadline:
                text = await clause()
                return Clause(name, Verdict.INFO if name == "random policy" else Verdict.OK, text)
        except _NotTried as why:
            return Clause(name, Verdict.SKIPPED, str(why))
        except TimeoutError:
            if not deadline.expired():
                raise
            problem = f"it did not end within {self.seconds:g} seconds"
        except (Broken, LudusError) as error:
            problem = str(error)
        except Exception as error:  # noqa: BLE001 - user code
            problem = error_with_location(error)
        return Clause(name, Verdict.FAILED, problem)

    def _warn(self, name: str, problem: str) -> None:
        self._warnings.append(Clause(name, Verdict.WARNING, problem))

    # A look at one instance

    async def _interface(self) -> str:
        """It can be made and reset, its tools say what they do, and what it offers can be done."""
        task = self.tasks[0]
        async with self._instance() as one:
            try:
                await one.reset(task)
            except Exception as error:
                if self._has_tasks:
                    raise
                told = (
                    str(error) if isinstance(error, LudusError | Broken) else error_with_location(error)
                )
                raise Broken(  # more likely than a mistake in reset
                    f"it cannot be reset with an empty task: {told}; give tasks of its own: "
                    "--tasks FILE.jsonl, or --tasks module:function"
                ) from error
            tools, context, specs = await one.offered(task)
            for spec in specs:
                named = f"the tool {spec.name!r}"
                if not spec.description:
                    self._warn("interface", f"{named} has no description; write a docstring for it")
                for parameter, schema in spec.parameters.get("properties", {}).items():
                    if not schema.get("description"):
                        fix = "describe it in the docstring, under Args"
                        told = f"the parameter {parameter!r} of {named} has no description; {fix}"
                        self._warn("interface", told)
            actions = await one.offered_actions(specs) if self.actions is None else self.actions
            if not actions and self.actions is None:
                fix = "mark methods with @tool, or write step"
                self._warn("interface", f"it offers nothing to do; {fix}")
            for action in actions:
                result = await one.act(action, tools, context)
                if result.fault is not None and self.actions is not None:
                    told = f"{action} was answered with the fault {result.fault}: {result.content[:200]}"
                    self._warn("interface", f"{told}; if it should have worked, correct the tool")
                if result.terminated:
                    break
        return f"{len(specs)} tools and {len(actions)} actions"

    async def _isolation(self) -> str:
        """A second instance is another object, and shares nothing that an episode could change."""
        async with self._instance() as one, self._instance() as other:
            if one.env is other.env:
                raise Broken("the factory returned the same object twice; make a new one at each call")
            for instance in (one, other):
                await instance.start(self.tasks[0])
            for name in shared_state(one.env, other.env):
                told = f"two instances share the object in {name!r}"
                fix = "make it in __init__ or in reset, unless it is never changed"
                self._warn("isolation", f"{told}; {fix}")
        return "each instance has its own state"

    async def _snapshot(self) -> str:
        """After `restore`, all goes on as after `snapshot`."""
        async with self._instance() as one:
            kind, task = (
                one.env.__class__,
                self.tasks[0],
            )  # a stand-in names the class that it stands for
            given = [is_own(kind, name) for name in ("snapshot", "restore")]
            if not any(given):
                return "it has none"
            if not all(given):
                raise Broken("only one of snapshot and restore is there; write both, or none")
            await one.start(task)
            try:
                saved = await call_env(one.env.snapshot)
            except CannotFork:
                return "it has none"  # a state that cannot be copied: branches are replayed then
            first = await one.walk(task, self.actions, self.max_turns, starts=False)
            await one.start(task)
            await call_env(one.env.restore, saved)
            if await one.walk(task, self.actions, self.max_turns, starts=False) != first:
                raise Broken(
                    "after restore, the same actions led to something else; copy the state in snapshot "
                    "(copy.deepcopy) and set all of it in restore"
                )
        return "the same again after restore"

    # The contract

    async def _determinism(self) -> str:
        actions = 0
        for task in spread(self.tasks, self.sample):
            async with self._instance() as one, self._instance() as other:
                first = await one.walk(task, self.actions, self.max_turns)
                compare_stories(
                    first,
                    await other.walk(task, self.actions, self.max_turns),
                    task,
                    "in a second instance",
                )
            actions += len(first) - 1
        return f"{self._counted} and {actions} actions, the same in two instances"

    async def _reset_after_done(self) -> str:
        async with self._instance() as env:
            for task in spread(self.tasks, self.sample):
                first = await env.walk(task, self.actions, self.max_turns)
                await self._solve(env, task)  # leave as much behind as can be
                compare_stories(
                    first, await env.walk(task, self.actions, self.max_turns), task, "after a reset"
                )
        return f"{self._counted}, the same again after an episode and a reset"

    async def _bad_actions(self) -> str:
        deadline = self.seconds if self.pool is None else self.pool.step_timeout
        async with self._instance() as env:
            _, tools, context, specs = await env.start(self.tasks[0])
            tried = 0
            for what, call in bad_calls(specs):
                try:
                    async with asyncio.timeout(deadline):
                        result = await tools.call(call, context)
                except Exception as error:
                    found = error_with_location(error)
                    raise Broken(f"{call.name!r} with {what}: {found}; {_FIX}") from error
                is_accident = result.fault is Fault.TOOL_RAISED and self.pool is not None
                if is_accident and _EXCEPTION.match(result.content):
                    raise Broken(f"{call.name!r} with {what} raised {result.content:.200}; {_FIX}")
                tried += 1
                if result.terminated:
                    _, tools, context, specs = await env.start(self.tasks[0])
            await env.walk(self.tasks[0], self.actions, self.max_turns)
        return f"{tried} calls ({', '.join(BAD_TEXTS)}; no, wrong and unknown arguments), each answered"

    async def _action_after_done(self) -> str:
        async with self._instance() as env:
            for task in spread(self.tasks, self.sample):
                last = await self._solve(env, task)
                if last is None:
                    continue
                call, tools, context = last
                again = await tools.call(call, context)
                shown = f"{call.name!r} after the end was answered by {again.content[:60]!r}"
                if again.reward:
                    raise Broken(
                        f"{shown} and the reward {again.reward:g}; an ended episode pays no more"
                    )
                if not again.terminated and again.fault is None:
                    raise Broken(f"{shown}, as if it went on; say that it is over (terminated=True)")
                return shown
        raise _NotTried("not tried, because no episode ended by itself within its turns")

    async def _close_twice(self) -> str:
        async with self._instance() as env:
            await env.walk(self.tasks[0], self.actions, self.max_turns)
            await env.close()
            await env.close()
        return "nothing raised"

    async def _concurrent(self) -> str:
        some = spread(self.tasks, self.instances)
        tasks = [some[number % len(some)] for number in range(self.instances)]
        alone = {}
        async with self._instance() as env:
            for task in some:
                alone[task.id] = await env.walk(task, self.actions, self.max_turns)

        async def one(task: Task) -> tuple[Task, Story]:
            async with self._instance() as env:
                return task, await env.walk(task, self.actions, self.max_turns)

        for task, story in await asyncio.gather(*map(one, tasks)):
            compare_stories(alone[task.id], story, task, f"with {self.instances} instances at once")
        return f"{self.instances} at once, each as one alone"

    async def _leaks(self) -> str:
        async with self._instance() as env:
            before = after = ResourceUsage.of(env.env)
            some = spread(self.tasks, self.episodes)
            for number in range(self.episodes):
                if number == self.episodes // 2:
                    before = ResourceUsage.of(env.env)
                await env.walk(some[number % len(some)], self.actions, self.max_turns)
            after = ResourceUsage.of(env.env)
        grown = f"in {self.episodes - self.episodes // 2} of {self.episodes} episodes: {after - before}"
        if after.leaks_since(before, self.episodes):
            raise Broken(grown)
        return grown

    async def _gold(self) -> str:
        assert self.expert is not None
        if self._stuck:
            raise Broken(self._stuck)
        # budgets are for the model; an expert may waste turns, but not for ever
        played = await self._play(Demonstrator(self.expert), max_turns=10 * self.max_turns)
        lost = [f"{t.task.id}: {t.failure}" for t in played if t.failure is not None]
        if lost:
            raise Broken(lost[0])
        solved = sum(map(is_success, played))
        longest = max(t.turns for t in played)
        text = f"the expert succeeds on {solved} of {len(played)} tasks, in at most {longest} turns"
        if solved < _LEAST_GOLD * len(played):
            wrong = next(t for t in played if not is_success(t))
            text += f"; on {wrong.task.id!r} it gets {wrong.reward} after {wrong.turns} turns"
            text += f" (success: a reward called {SUCCESS!r} of at least 1; without one, a total of at least 1)"
            if not (self.rewards or any(t.reward for t in played)):
                text += "; no step paid anything, and no rewards were given (--reward module:function)"
            raise Broken(text)
        return text

    async def _random(self) -> str:
        played = await self._play(RandomAgent(self.tools), max_turns=self.max_turns)
        scored = [t for t in played if t.reward is not None]
        mean = sum(t.reward or 0.0 for t in scored) / max(1, len(scored))
        solved = sum(map(is_success, scored))
        return f"succeeds on {solved} of {len(scored)} tasks, mean reward {mean:.3f}"

    async def _play(self, agent: Agent, max_turns: int) -> list[Trajectory]:
        budgets = Budgets(max_turns=max_turns, max_tokens=_UNLIMITED, max_observation_tokens=_UNLIMITED)
        playing = Rollout(
            engine=FakeEngine([]),
            renderer=Renderer(ByteTokenizer(), load_format("hermes")),
            scorer=Scorer(self.rewards, default_total=None if self.rewards else 0.0),
            tools=self.tools or as_toolset([]),
            pools={self.name: self.pool} if self.pool is not None else {},
            agent=agent,
            budgets=budgets,
            max_in_flight=max(self.instances, 4),
        )
        tasks = spread(self.tasks, self.gold)
        return [group.trajectories[0] async for group in playing.groups(tasks, seed=0)]

    async def _solve(
        self, env: CheckedInstance, task: Task
    ) -> tuple[ToolCall, ToolSet, ToolContext] | None:
        """Play to the end, as the expert does where there is one; the last call, if it ended the episode."""
        first, tools, context, specs = await env.start(task)
        script = self.expert(task) if self.expert is not None else None
        draw, seen = random.Random(task.id), first.text if first else ""
        for _ in range(self.max_turns * (4 if script is not None else 1)):
            move: ToolCall | str | None = ""
            if script is not None:
                move = await self._expert_move(script, seen)
            elif specs:
                move = await random_call(env.env, specs, draw)
            if move is None or isinstance(move, str):
                return None
            result = await tools.call(move, context)
            seen = result.content
            if result.terminated:
                return move, tools, context
        return None

    async def _expert_move(self, script: ExpertMoves, seen: str) -> ToolCall | str | None:
        """What the expert does next, in a thread: it may think for seconds, but not for ever."""
        if self._stuck:
            raise Broken(self._stuck)
        try:
            return await run_sync(next_move, script, seen, timeout=self.seconds / 2)
        except DeadlineExceeded as late:
            where = f": it was at {late.place} then" if late.place else ""
            self._stuck = f"the expert yielded nothing within {self.seconds / 2:g} seconds{where}"
            raise Broken(self._stuck) from late

    @property
    def _counted(self) -> str:
        count = min(self.sample, len(self.tasks))
        return f"{count} task{'' if count == 1 else 's'}"


async def check_env(
    factory: Callable[[], Any],
    task: Task | None,
    actions: Sequence[Action] | None = None,
    *,
    name: str = "env",
    isolation: Isolation | None = None,
) -> list[Clause]:
    """What is broken or worth a warning in one episode of an environment; an empty list means nothing.

    `actions` are texts for `step`, or tool calls. Without them, what the environment offers is done. Without a
    task (None) it is reset with an empty one, which many cannot begin with: that is said then.
    """
    tasks = [] if task is None else [task]
    contract = EnvContract(factory, tasks, name, actions, max_turns=_FEW_TURNS, isolation=isolation)
    found = [one async for one in contract.clauses((*LOOK, *_COMPARED, "close twice"))]
    return [
        replace(one, verdict=Verdict.WARNING) if one.name in _COMPARED and one.ok is False else one
        for one in found
        if one.ok is False or one.verdict is Verdict.WARNING
    ]


_COMPARED = ("determinism", "reset after done")
"""Where these are broken, attempts compare badly, but episodes can be played."""
_FEW_TURNS = 3
