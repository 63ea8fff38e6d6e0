"""The controller of rollouts: schedules groups to a player, and makes batches of what comes back.

    sample   a task, the values of curricula and a seed: fixed when a group is scheduled (`GroupPlan`)
    play     a `Player` plays as many groups as the ledger has slots
    keep     shape rewards, resample attempts; a group without signal is replaced by another one (refill)
    take     the ledger says which groups are the next batch, and bounds how stale they are
    train    whatever trains says so, and slots are free

Without staleness a step is a function of the seed and the step alone: outcomes are looked at when all of a
round have come, in the order of their ordinals. An error or a cancellation leaves the controller as it was
before the step. With staleness groups are played all the time: the trainer waits for the groups of its next
batch, the player's episodes for the engine, and where no group finishes for `stall_seconds`, the run ends.

A checkpoint has the ledger, the plans of all groups under way, and the episodes of groups that are finished and
not trained: a resumed run plays again what was in flight, and trains every ordinal exactly once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from ludus.core.failures import ConfigError, LudusError
from ludus.core.messages import Json
from ludus.core.random import key
from ludus.core.trajectory import Group, StopReason, Trajectory
from ludus.observe import keep_images, read_numbered_groups, with_images, write_trajectories
from ludus.training.config.rl import RolloutSettings
from ludus.training.data.curricula import DIFFICULTY
from ludus.training.data.rollout_batch import GroupFilter, KeptGroup, RolloutBatch
from ludus.training.data.tasks import TaskSampler, TaskSet, seed_of_set
from ludus.training.ledger import Ledger
from ludus.training.player import GroupPlan, LocalPlayer, PlayedGroup, Player

log = logging.getLogger(__name__)

T = TypeVar("T")

GROUPS = "groups.parquet"
"""The finished groups of a checkpoint that were not trained yet."""
_NAMED = 3
"""How many of the groups that are waited for are named."""


class StalledError(LudusError):
    """Something that was waited for did not come in time."""


async def within(seconds: float | None, what: Callable[[], str], awaited: Awaitable[T]) -> T:
    """Await something; where it takes longer, the error and the log say what was waited for. None: no limit."""
    try:
        async with asyncio.timeout(seconds) as deadline:
            return await awaited
    except TimeoutError as error:
        if not deadline.expired():
            raise
        text = (
            f"waited {seconds:g} s for {what()}; rl.staleness.stall_seconds says how long a wait may be"
        )
        log.error("%s", text)
        raise StalledError(text) from error


@dataclass(frozen=True, slots=True)
class NextBatch:
    """The groups of a step, each with its plan."""

    played: RolloutBatch
    plans: list[GroupPlan]
    waited: float
    """Seconds that were spent waiting for them."""


class RolloutController:
    """Schedules groups to a player for as long as the ledger has slots, and gives batches to the trainer."""

    def __init__(
        self,
        sets: Sequence[TaskSet],
        settings: RolloutSettings,
        seed: int,
        ledger: Ledger,
        player: Player,
        values_at: Callable[[int], Mapping[str, float]],
        *,
        stall_seconds: float | None = None,
    ) -> None:
        self._sets, self._settings, self._seed = list(sets), settings, seed
        self.ledger, self._player, self._values_at = ledger, player, values_at
        self._stall_seconds = stall_seconds
        self._sampler = TaskSampler(self._sets, seed, choose=settings.sampler)
        self._plans: dict[int, GroupPlan] = {}
        self._groups: dict[int, KeptGroup] = {}
        self._filter = GroupFilter(self._sets, settings)
        self._refills: deque[tuple[int, int, int]] = deque()
        """(slot, set, refills so far) of the groups that stand in for replaced ones, to be scheduled next."""
        self._refilled = 0
        self._slots = 0
        """How many groups have been scheduled, refills left out."""
        self._scheduled: Counter[tuple[int, int]] = Counter()
        """How many groups each (step, round of refills) has had, for the steps that may get more."""
        self._seen: Counter[tuple[int, int, int, str]] = Counter()
        """How often tasks have come among these: (step, round, set, task)."""
        self._before: Json | None = None
        """Without staleness: the state before the step that has not been trained yet."""

    @property
    def _plays_on(self) -> bool:
        """Whether groups are played while others are trained."""
        return self.ledger.staleness > 0

    async def next_batch(self) -> NextBatch:
        """The next step's groups, as soon as they are finished. `trained` is to be called with it."""
        if self._plays_on:
            return await self._next_batch()
        if self._before is not None:
            self._restore(self._before)  # the last step was not trained: it begins again
        self._before = self._state()
        try:
            return await self._next_batch()
        except BaseException:
            await self._player.close()
            self._restore(self._before)
            raise

    async def _next_batch(self) -> NextBatch:
        started = time.perf_counter()
        self._receive(self._player.outcomes())
        while True:
            self._fill()
            ordinals = self.ledger.take()
            if ordinals is not None:
                break
            self._receive(await self._outcomes())
        plans = sorted((self._plans[ordinal] for ordinal in ordinals), key=lambda plan: plan.slot)
        groups = [self._groups[plan.ordinal] for plan in plans]
        played = self._filter.batch(groups, [plan.set for plan in plans], self._refilled)
        return NextBatch(played, plans, time.perf_counter() - started)

    async def _outcomes(self) -> list[PlayedGroup]:
        """The next outcome; without staleness those of all groups in flight."""
        count = 1 if self._plays_on else len(self.ledger.in_flight())
        found = [
            await within(self._stall_seconds, self._waiting_for, self._player.outcome())
            for _ in range(count)
        ]
        return sorted(found, key=lambda one: one.ordinal)

    def trained(self, batch: NextBatch) -> None:
        """The batch has been trained: its slots go to further groups."""
        ordinals = [plan.ordinal for plan in batch.plans]
        self.ledger.train(ordinals)
        for ordinal in ordinals:
            del self._plans[ordinal], self._groups[ordinal]
        self._filter, self._refilled, self._before = GroupFilter(self._sets, self._settings), 0, None
        slots = [
            self._slots,
            *(plan.slot for plan in self._plans.values()),
            *(r[0] for r in self._refills),
        ]
        open_steps = {slot // self.ledger.batch for slot in slots}
        self._scheduled = Counter({key: n for key, n in self._scheduled.items() if key[0] in open_steps})
        self._seen = Counter({key: n for key, n in self._seen.items() if key[0] in open_steps})
        if self._plays_on:
            self._receive(self._player.outcomes())
            self._fill()

    def notes(self, batch: NextBatch) -> list[Json]:
        return [
            {"ordinal": d.ordinal, "set": self._sets[d.set].name, "curriculum": dict(d.values)}
            for d in batch.plans
        ]

    async def hold(self) -> None:
        """Keep training requests from the engine, for an evaluation."""
        await within(
            self._stall_seconds,
            lambda: f"episodes to end before an evaluation: {self._shown()}",
            self._player.hold(),
        )

    def release(self) -> None:
        self._player.release()

    async def close(self) -> None:
        """Stop playing. What was in flight can be saved as to be played again."""
        await self._player.close()
        for ordinal in self.ledger.in_flight():
            self.ledger.interrupt(ordinal)

    def _fill(self) -> None:
        while self.ledger.can_schedule:
            self._schedule()
        for ordinal in self.ledger.to_play():
            self.ledger.start(ordinal)
            self._player.play(self._plans[ordinal])

    def _schedule(self) -> None:
        values = dict(self._values_at(self.ledger.next_step))
        ordinal, hardest = self.ledger.schedule(), values.get(DIFFICULTY)
        if self._refills:
            slot, number, refills = self._refills.popleft()
            (sampled,) = self._sampler.sample_from([number], hardest)
        else:
            slot, refills = self._slots, 0
            (sampled,) = self._sampler.sample(1, hardest)
            self._slots += 1
        step = slot // self.ledger.batch
        seed = key(self._seed, "rl", step)
        if refills:
            seed = key(seed, "refill", refills - 1)
        draw = key(seed, "resample", self._scheduled[step, refills])
        self._scheduled[step, refills] += 1
        # a task that comes twice has new attempts, not the same ones again
        name = step, refills, sampled.set, sampled.task.id
        attempt = self._seen[name] * self._settings.attempts
        self._seen[name] += 1
        own = seed_of_set(seed, sampled.set, self._sets[sampled.set].name)
        self._plans[ordinal] = GroupPlan(
            ordinal, slot, sampled.set, sampled.task, sampled.place, attempt, own, draw, values, refills
        )

    def _receive(self, outcomes: Sequence[PlayedGroup]) -> None:
        for outcome in outcomes:
            plan = self._plans[outcome.ordinal]
            group = outcome.group or _failed_group(plan, outcome, self._settings.attempts)
            all_failed = group.trajectories and all(t.failure is not None for t in group.trajectories)
            if all_failed and self.ledger.max_tries > 1:
                self._fail(plan, group)
            else:
                self._finish(plan, group)

    def _fail(self, plan: GroupPlan, group: Group) -> None:
        """No episode of the group could be played: once more, or it is given up with its failures."""
        if self.ledger.fail(plan.ordinal):
            self._filter.dropped[plan.set].append(group)
        else:
            self._groups[plan.ordinal] = KeptGroup(group, is_informative=False)
            failure = group.trajectories[0].failure
            log.warning("group %d (task %s) is given up: %s", plan.ordinal, plan.task.id, failure)

    def _finish(self, plan: GroupPlan, group: Group) -> None:
        self.ledger.finish(plan.ordinal)
        self._sampler.observe(plan.set, group)
        kept = self._filter.keep(group, plan.set, plan.draw)
        most = self._settings.refill.rounds if self._settings.refill is not None else 0
        if not kept.is_informative and plan.refills < most:
            self.ledger.replace(plan.ordinal)
            self._refills.append((plan.slot, plan.set, plan.refills + 1))
            self._filter.dropped[plan.set].append(kept.group)
            del self._plans[plan.ordinal]
            return
        self._refilled += kept.is_informative and plan.refills > 0
        self._groups[plan.ordinal] = kept

    def _waiting_for(self) -> str:
        return f"the groups of step {self.ledger.version + 1}: {self._shown()}"

    def _shown(self) -> str:
        """The oldest groups that are being played, and what their episodes do."""
        waiting = self.ledger.in_flight()
        named = "; ".join(map(self._player.describe, waiting[:_NAMED]))
        return f"{named}; and {len(waiting) - _NAMED} more" if len(waiting) > _NAMED else named

    def save(self, folder: Path) -> Json:
        """Write the finished groups into a checkpoint's folder; the rest of the state is returned."""
        if self._before is not None:
            return self._before
        kept = {ordinal: self._groups[ordinal] for ordinal in self.ledger.finished()}
        finished = [(ordinal, t) for ordinal, one in kept.items() for t in one.group.trajectories]
        if self._plays_on:
            ordinals = [ordinal for ordinal, _ in finished]
            write_trajectories(folder / GROUPS, [t for _, t in finished], groups=ordinals)
            keep_images(folder, (t for _, t in finished))
        return self._state()

    def _state(self) -> Json:
        """All that is known, finished groups left out."""
        return {
            "ledger": self.ledger.state_dict(),
            "sampler": self._sampler.state_dict(),
            "plans": [
                {name: value for name, value in _fields(plan).items() if name != "task"}
                | {"task": plan.task.id, "values": dict(plan.values)}
                for plan in self._plans.values()
            ],
            "refills": list(self._refills),
            "without_signal": [
                ordinal for ordinal in self.ledger.finished() if not self._groups[ordinal].is_informative
            ],
            "slots": self._slots,
            "scheduled": [[*name, count] for name, count in self._scheduled.items()],
            "seen": [[*name, count] for name, count in self._seen.items()],
        }

    def load(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Go on from what `save` wrote."""
        self._restore(state)
        finished = self.ledger.finished()
        found = read_numbered_groups(folder / GROUPS) if finished else {}
        with_images((t for group in found.values() for t in group.trajectories), folder / GROUPS)
        empty = set(state["without_signal"])
        for ordinal in finished:
            plan, group = self._plans[ordinal], found.get(ordinal)
            played = [] if group is None else group.trajectories
            for trajectory in played:
                trajectory.task = plan.task  # a target need not survive being written down
            self._groups[ordinal] = KeptGroup(Group(plan.task, played), ordinal not in empty)

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.ledger.load_state_dict(state["ledger"])
        self._sampler.load_state_dict(state["sampler"])
        self._plans = {int(one["ordinal"]): self._loaded(one) for one in state["plans"]}
        self._refills = deque((int(slot), int(of), int(count)) for slot, of, count in state["refills"])
        self._slots = int(state["slots"])
        self._scheduled = Counter({(int(s), int(r)): int(n) for s, r, n in state["scheduled"]})
        self._seen = Counter(
            {(int(s), int(r), int(of), str(t)): int(n) for s, r, of, t, n in state["seen"]}
        )
        self._groups, self._before = {}, None
        self._filter, self._refilled = GroupFilter(self._sets, self._settings), 0

    def _loaded(self, one: Mapping[str, Any]) -> GroupPlan:
        tasks = self._sets[one["set"]].tasks
        if one["place"] >= len(tasks) or tasks[one["place"]].id != one["task"]:
            raise ConfigError(
                f"group {one['ordinal']} of the saved run plays the task {one['task']!r}, which is not at "
                f"place {one['place']} of the set {self._sets[one['set']].name!r} any more: give the run the "
                "tasks that it had"
            )
        fields = {name: value for name, value in one.items() if name != "task"}
        return GroupPlan(task=tasks[one["place"]], **fields)


def step_by_step(
    sets: Sequence[TaskSet],
    settings: RolloutSettings,
    seed: int,
    values_at: Callable[[int], Mapping[str, float]] = lambda step: {},
) -> RolloutController:
    """A controller without staleness.

    A group that failed is not played again, because its episodes have been; their own limits bound a step.
    """
    ledger = Ledger(settings.tasks, max_tries=1)
    player = LocalPlayer(sets, settings)
    return RolloutController(sets, settings, seed, ledger, player, values_at)


def _fields(plan: GroupPlan) -> Json:
    return {field.name: getattr(plan, field.name) for field in fields(plan)}


def _failed_group(plan: GroupPlan, outcome: PlayedGroup, attempts: int) -> Group:
    lost = [
        Trajectory(plan.task, attempt=plan.attempt + i, failure=outcome.failure, stop=StopReason.FAILED)
        for i in range(attempts)
    ]
    return Group(plan.task, lost)
