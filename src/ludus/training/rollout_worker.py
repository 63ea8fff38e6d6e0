"""The rollout worker: from tasks to the groups of episodes that a step learns from.

    sample    tasks of all sets, by their weights (`TaskSampler`)
    play      all sets at once, on one engine
    shape     penalties for length and for broken episodes, added to the reward
    resample  GRPO-RoC: keep a share of each group
    refill    DAPO's dynamic sampling: replace groups without signal by groups of further tasks. Signal here is
              a difference in the part "success" of the reward, or where none is told in the reward itself;
              what shaping adds is none

Concurrency: the sets of a round run at the same time and share `max_in_flight` in proportion to their tasks
(one after the other where that leaves a set none). A round of refills begins when the round before has ended;
there are at most `refill.rounds` of them. Which episode ends first decides nothing: groups stand in the order
of their tasks, and every draw has a key of its own. Cancelling `play` cancels every episode and leaves the
worker as it was.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ludus.core.failures import ConfigError
from ludus.core.random import key
from ludus.core.trajectory import SUCCESS, Group, Trajectory
from ludus.observe import has_signal, rollout_metrics, set_metrics
from ludus.rollouts.budgets import Budgets
from ludus.rollouts.rollout import Rollout
from ludus.training.config.recipe import PER_SET
from ludus.training.config.rl import RolloutSettings
from ludus.training.data.curriculum import BUDGETS, DIFFICULTY, STRICTNESS
from ludus.training.data.reward_shaping import KINDS, broken_kinds, is_masked, resample, shape_reward
from ludus.training.data.task_sampler import SampledTask, TaskSampler, TaskSet, seed_of_set


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """The groups of a step."""

    groups: list[Group]
    masked: frozenset[tuple[int, int]]
    """Attempts to leave out of the loss, as (group, place among its trajectories)."""
    sets: list[int]
    """The task set of each group."""
    metrics: dict[str, float]
    dropped: list[Group] = field(default_factory=list)
    """Not learned from: groups that were replaced, and attempts that resampling left out."""


class RolloutWorker:
    """Plays the steps of a stage."""

    def __init__(self, sets: Sequence[TaskSet], settings: RolloutSettings, seed: int) -> None:
        self._sets = list(sets)
        self._settings = settings
        self._seed = seed
        self._samplers = {0: TaskSampler(self._sets, seed)}
        """The task sampler at the beginning of a step: of the last one played, and of the one after it."""

    async def play(self, step: int, values: Mapping[str, float]) -> RolloutBatch:
        """The groups of a step, under a curriculum's values. The same step can be played again."""
        sampler = self._sampler_at(step).copy()
        rollouts = rollouts_at(self._sets, self._settings, values)
        step_rollouts = _StepRollouts(self._sets, self._settings, rollouts)
        seed, hardest = key(self._seed, "rl", step), values.get(DIFFICULTY)
        sampled = sampler.sample(self._settings.tasks, hardest)
        groups = await step_rollouts.play(sampled, seed)
        refilled = 0
        for number in range(self._settings.refill.rounds if self._settings.refill else 0):
            empty = [place for place, one in enumerate(groups) if not one.is_informative]
            further = sampler.sample_from([sampled[place].set for place in empty], hardest)
            found = await step_rollouts.play(further, key(seed, "refill", number))
            for place, one in zip(empty, found, strict=True):
                step_rollouts.dropped[sampled[place].set].append(groups[place].group)
                groups[place] = one
                refilled += one.is_informative
        self._samplers = {step: self._samplers[step], step + 1: sampler}
        return step_rollouts.batch(groups, [one.set for one in sampled], refilled)

    def state_dict(self) -> dict[str, Any]:
        """Where the last step began and where it ended: a step that was cut off begins again."""
        return {str(step): sampler.state_dict() for step, sampler in self._samplers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        samplers = {int(step): TaskSampler(self._sets, self._seed) for step in state}
        for step, sampler in samplers.items():
            sampler.load_state_dict(state[str(step)])
        self._samplers = samplers

    def _sampler_at(self, step: int) -> TaskSampler:
        if step not in self._samplers:
            known = " or ".join(map(str, self._samplers))
            raise ValueError(f"step {step} cannot begin here: this worker is at step {known}")
        return self._samplers[step]


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


@dataclass(frozen=True, slots=True)
class KeptGroup:
    """What is left of a group that was played."""

    group: Group
    is_informative: bool
    """Whether its attempts differ in their outcomes, and one of them is in the loss."""


Outcome = tuple[float | None, float | None]
"""The part "success" of the reward, where there is one, and the reward, before anything is added to it."""


def differ(outcomes: Sequence[Outcome]) -> bool:
    """Whether there are several: in success, or where it is not told, in the reward. DAPO's criterion is the
    accuracy, which bonuses and the prices of length and of broken episodes are not."""
    is_told = all(success is not None for success, _ in outcomes)
    return len({success if is_told else reward for success, reward in outcomes}) > 1


class GroupFilter:
    """Shapes rewards, resamples attempts, tells groups with signal; and keeps what was dropped, by set."""

    def __init__(self, sets: Sequence[TaskSet], settings: RolloutSettings) -> None:
        self._sets, self._settings = sets, settings
        self.dropped: list[list[Group]] = [[] for _ in sets]
        """Whole groups."""
        self._left_out: list[list[Group]] = [[] for _ in sets]
        """Attempts that resampling left out, in groups."""

    def keep(self, group: Group, set_number: int, draw: int) -> KeptGroup:
        """The attempts that resampling leaves, with shaped rewards."""
        before = {id(one): (one.rewards.get(SUCCESS), one.reward) for one in group.trajectories}
        for one in group.trajectories:
            shape_reward(one, self._settings)
        if self._settings.keep_attempts is not None:
            group, leaving = resample(group, self._settings.keep_attempts, draw)
            if leaving:
                self._left_out[set_number].append(Group(group.task, leaving))
        scored = group.trainable
        is_mixed = differ([before[id(one)] for one in scored])
        return KeptGroup(group, is_mixed and not all(map(self._is_masked, scored)))

    def batch(self, kept: Sequence[KeptGroup], sets: list[int], refilled: int) -> RolloutBatch:
        """What a step learns from; `sets` has the task set of each group."""
        groups = [one.group for one in kept]
        masked = self.masked(groups)
        metrics = self._metrics(groups, sets) | {"masked": len(masked)}
        if self._settings.refill is not None:
            metrics["refilled"] = refilled
            metrics["without_signal"] = sum(not one.is_informative for one in kept)
        dropped = [group for one in (*self.dropped, *self._left_out) for group in one]
        return RolloutBatch(groups, masked, sets, metrics, dropped)

    def masked(self, groups: Sequence[Group]) -> frozenset[tuple[int, int]]:
        """The attempts that stay out of the loss."""
        return frozenset(
            (number, place)
            for number, group in enumerate(groups)
            for place, one in enumerate(group.trajectories)
            if self._is_masked(one)
        )

    def _is_masked(self, trajectory: Trajectory) -> bool:
        return is_masked(broken_kinds(trajectory), self._settings.broken)

    def _metrics(self, groups: Sequence[Group], sets: Sequence[int]) -> dict[str, float]:
        """Counts of broken episodes; and each set's own metrics, over all that was played."""
        kinds = Counter(kind for g in groups for one in g.trajectories for kind in broken_kinds(one))
        metrics: dict[str, float] = {f"broken/{kind}": kinds[kind] for kind in KINDS}
        if self._settings.keep_attempts is not None:
            left_out = [group for one in self._left_out for group in one]
            metrics["resampled"] = sum(len(group.trajectories) for group in left_out)
            whole = [*groups, *(group for one in self.dropped for group in one)]
            empty = sum(not has_signal(group) for group in whole)
            metrics["groups_without_signal"] = empty / len(whole)  # what is left out is no group
        if len(self._sets) == 1:
            return metrics
        for number, one in enumerate(self._sets):
            own = [g for g, of in zip(groups, sets, strict=True) if of == number]
            found = rollout_metrics([*own, *self.dropped[number], *self._left_out[number]])
            metrics |= set_metrics(one.name, found, PER_SET)
        return metrics


class _StepRollouts(GroupFilter):
    """One step: each set's rollout, and what has been dropped so far, by set."""

    def __init__(
        self, sets: Sequence[TaskSet], settings: RolloutSettings, rollouts: Sequence[Rollout]
    ) -> None:
        super().__init__(sets, settings)
        self._rollouts = rollouts

    async def play(self, sampled: Sequence[SampledTask], seed: int) -> list[KeptGroup]:
        """A group for each task, in order, shaped and resampled."""
        numbers = sorted({one.set for one in sampled})
        places = {number: self._places(number, sampled) for number in numbers}
        if all(places.values()):
            finished = await self._at_once(
                [self._play_set(n, sampled, seed, places[n]) for n in numbers]
            )
        else:
            finished = [await self._play_set(n, sampled, seed, self._in_flight(n)) for n in numbers]
        groups_of = {number: iter(groups) for number, groups in zip(numbers, finished, strict=True)}
        groups = [next(groups_of[one.set]) for one in sampled]
        return [
            self.keep(group, one.set, key(seed, "resample", place))
            for place, (group, one) in enumerate(zip(groups, sampled, strict=True))
        ]

    def _in_flight(self, number: int) -> int:
        return self._rollouts[number].max_in_flight

    def _places(self, number: int, sampled: Sequence[SampledTask]) -> int:
        """A set's share of `max_in_flight`, by its tasks; 0 where there are too few to share."""
        return self._in_flight(number) * sum(one.set == number for one in sampled) // len(sampled)

    async def _at_once(self, playing: Sequence[Coroutine[Any, Any, list[Group]]]) -> list[list[Group]]:
        running = [asyncio.create_task(one) for one in playing]
        try:
            return await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _play_set(
        self, number: int, sampled: Sequence[SampledTask], seed: int, places: int
    ) -> list[Group]:
        tasks = [one.task for one in sampled if one.set == number]
        rollout = self._rollouts[number]
        own = seed_of_set(seed, number, self._sets[number].name)
        playing = replace(rollout, max_in_flight=places)
        groups = {_label(group): group async for group in playing.groups(tasks, own)}
        # a task that was sampled twice has its second group with the attempts that follow the first's
        seen: Counter[str] = Counter()
        ordered = []
        for task in tasks:
            ordered.append(groups[task.id, seen[task.id] * rollout.attempts])
            seen[task.id] += 1
        return ordered


def _label(group: Group) -> tuple[str, int]:
    return group.task.id, group.trajectories[0].attempt
