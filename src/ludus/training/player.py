"""Players of groups: a small interface, and a player in this process.

Every episode is a task of the event loop and waits for one of `max_in_flight` places, in the order in which
groups were scheduled. Outcomes wait in an unbounded queue, which holds no more groups than the ledger has
slots. While the player is held, no episode begins and no request passes the gate to the engine; tools go on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from ludus.core.failures import Boundary, ConfigError, EngineError, Failure
from ludus.core.task import Task
from ludus.core.trajectory import Group
from ludus.remote.limits import EpisodePlaces, GroupPlaces, SamplingGate, stop_all
from ludus.rollouts.recorder import Budgets
from ludus.rollouts.rollout import Rollout
from ludus.training.config.rl import RolloutSettings
from ludus.training.data.curricula import BUDGETS, STRICTNESS
from ludus.training.data.tasks import TaskSet


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A group to play: everything that was decided when it was scheduled."""

    ordinal: int
    slot: int
    """Its place among all scheduled groups; a refill has that of the group that it replaces."""
    set: int
    """The number of its task set."""
    task: Task
    place: int
    """The task's place in its set."""
    attempt: int
    """The number of its first attempt: a task that comes again soon has new ones."""
    seed: int
    draw: int = 0
    """The key of what is drawn among its attempts."""
    values: Mapping[str, float] = field(default_factory=dict)
    """The values of curricula."""
    refills: int = 0
    """How many groups without signal have stood in its place before."""


@dataclass(frozen=True, slots=True)
class PlayedGroup:
    """Result of a group: its episodes, or why it could not be played."""

    ordinal: int
    group: Group | None = None
    failure: Failure | None = None


class Player(Protocol):
    """Plays groups, many at once, in any order."""

    def play(self, plan: GroupPlan) -> None:
        """Begin; its outcome will come."""

    async def outcome(self) -> PlayedGroup:
        """The next outcome. Raises what is wrong with the recipe rather than with a group (`ConfigError`)."""

    def outcomes(self) -> list[PlayedGroup]:
        """The outcomes that wait already."""

    async def hold(self) -> None:
        """Let no request of an episode reach the engine until `release`."""

    def release(self) -> None:
        """Go on after `hold`."""

    def describe(self, ordinal: int) -> str:
        """Text on what a group waits for."""

    async def close(self) -> None:
        """Drop what is being played, and return when it has released its resources."""


class LocalPlayer:
    """Plays in this event loop, on the engine of the task sets' rollouts."""

    def __init__(self, sets: Sequence[TaskSet], settings: RolloutSettings) -> None:
        self._settings = settings
        self._gate = SamplingGate()
        self._sets = [replace(one, rollout=replace(one.rollout, gate=self._gate)) for one in sets]
        self._drains = any(one.rollout.pools or one.rollout.scorer.state_dict() for one in sets)
        """Whether holding waits for the episodes in flight. They have environments that an evaluation may
        need, and scores would be lost: an evaluation puts rewards' memories back to where they were before
        it."""
        self._places = EpisodePlaces(max(one.rollout.max_in_flight for one in sets))
        self._attempts: dict[int, GroupPlaces] = {}
        self._running: dict[int, asyncio.Task[None]] = {}
        self._begun: dict[int, tuple[GroupPlan, float]] = {}
        self._arrived: asyncio.Queue[PlayedGroup | BaseException] = asyncio.Queue()

    def play(self, plan: GroupPlan) -> None:
        self._begun[plan.ordinal] = plan, time.monotonic()
        name = f"group {plan.ordinal}"
        self._running[plan.ordinal] = asyncio.create_task(self._play(plan), name=name)

    async def _play(self, plan: GroupPlan) -> None:
        found: PlayedGroup | BaseException
        try:
            found = PlayedGroup(plan.ordinal, await self._group(plan))
        except EngineError as error:
            found = PlayedGroup(plan.ordinal, failure=Failure.of(error, Boundary.ENGINE))
        except Exception as error:  # noqa: BLE001 - a mistake in the recipe or in the code ends the run
            found = error
        self._running.pop(plan.ordinal, None)
        self._begun.pop(plan.ordinal, None)
        self._arrived.put_nowait(found)

    async def _group(self, plan: GroupPlan) -> Group:
        rollout = rollouts_at(self._sets, self._settings, plan.values)[plan.set]
        places = self._attempts[plan.ordinal] = GroupPlaces(self._places, rollout.attempts)
        try:
            return await rollout.group(plan.task, plan.attempt, plan.seed, places)
        finally:
            del self._attempts[plan.ordinal]

    async def outcome(self) -> PlayedGroup:
        return _unwrapped(await self._arrived.get())

    def outcomes(self) -> list[PlayedGroup]:
        return [_unwrapped(self._arrived.get_nowait()) for _ in range(self._arrived.qsize())]

    async def hold(self) -> None:
        self._places.close()
        if self._drains:
            await self._places.empty()
            scored = [o for o, places in self._attempts.items() if not places.left]
            await asyncio.gather(*(self._running[ordinal] for ordinal in scored))
        self._gate.close()

    def release(self) -> None:
        self._gate.open()
        self._places.open()

    def describe(self, ordinal: int) -> str:
        if ordinal not in self._begun:
            return f"group {ordinal}"
        plan, begun = self._begun[ordinal]
        prefix = f"{plan.seed:x}/{plan.task.id}/"
        own = range(plan.attempt, plan.attempt + self._settings.attempts)
        sessions = [one for one in self._gate.sampling if one.startswith(prefix)]
        sampling = len({one.split("/")[-2] for one in sessions if int(one.split("/")[-2]) in own})
        places = self._attempts.get(ordinal)
        others = max(0, (places.taken if places is not None else 0) - sampling)
        phases = ((sampling, "at the engine"), (others, "at tools or rewards"))
        shown = ", ".join(f"{count} {phase}" for count, phase in phases if count)
        return (
            f"group {ordinal} (task {plan.task.id!r}, begun {time.monotonic() - begun:.0f} s ago; its "
            f"episodes in flight: {shown or 'none yet'})"
        )

    async def close(self) -> None:
        await stop_all(list(self._running.values()))
        self._running.clear()
        self._begun.clear()
        self._arrived = asyncio.Queue()


def _unwrapped(found: PlayedGroup | BaseException) -> PlayedGroup:
    if isinstance(found, BaseException):
        raise found
    return found


def rollouts_at(
    sets: Sequence[TaskSet], settings: RolloutSettings, values: Mapping[str, float]
) -> list[Rollout]:
    """Each set's rollout under the values of a curriculum."""
    strictness = values.get(STRICTNESS)
    if strictness is not None and not any(s.rollout.scorer.takes_strictness for s in sets):
        raise ConfigError(
            f"a curriculum moves {STRICTNESS}, but no reward takes it: give one a keyword-only "
            "parameter `strictness` with a default"
        )
    return [
        replace(
            one.rollout,
            attempts=settings.attempts,
            tree=settings.tree,
            zero_over_time=settings.broken.over_time == "verltool",
            budgets=budgets_at(one.rollout.budgets, values, one.limits),
            scorer=one.rollout.scorer.at_strictness(strictness),
        )
        for one in sets
    ]


def budgets_at(
    budgets: Budgets, values: Mapping[str, float], limits: Mapping[str, float] | None = None
) -> Budgets:
    """The budgets with those that a curriculum sets. A task set's own limits stay: the smaller one holds."""
    moved = {n.removeprefix(BUDGETS): int(v) for n, v in values.items() if n.startswith(BUDGETS)}
    held = {name: min(value, (limits or {}).get(name, value)) for name, value in moved.items()}
    return Budgets.parse({**budgets.model_dump(), **held}, "the curriculum") if held else budgets
