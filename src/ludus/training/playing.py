"""From tasks to the groups that a step learns from.

    deal      tasks of all sets, by their weights          (task_sets)
    play      all sets at once, on one engine
    shape     prices for length and for broken episodes    (shaping, broken)
    resample  GRPO-RoC: keep a telling share of each group
    refill    DAPO: groups without signal are replaced by groups of further tasks, and so on

Who waits for whom: the sets of a round run at the same time and share the places in flight among them, in
proportion to their tasks (where there are too few places for that, one set after the other); a round of refills
begins when the round before has ended, and there are at most `refill.rounds` of them. Which episode ends first
decides nothing: groups stand in the order of their tasks, and every draw has a key of its own. Cancelling
`play` cancels every episode and leaves the player as it was.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ludus.core.failures import ConfigError
from ludus.core.random import key
from ludus.core.trajectory import Group, Trajectory
from ludus.observe import rollout_metrics
from ludus.observe.metrics import has_signal
from ludus.rollouts.budgets import Budgets
from ludus.rollouts.runner import Rollout
from ludus.training.broken import KINDS, is_masked, kinds_of
from ludus.training.curriculum import BUDGETS, DIFFICULTY, STRICTNESS
from ludus.training.settings import RLConfig
from ludus.training.shaping import resample, shape
from ludus.training.task_sets import PER_SET, Dealt, Deck, TaskSet, seed_of_set


@dataclass(frozen=True, slots=True)
class Played:
    """The groups of a step."""

    groups: list[Group]
    masked: frozenset[tuple[int, int]]
    """Attempts to leave out of the loss, as (group, place among its trajectories)."""
    sets: list[int]
    """The task set of each group."""
    metrics: dict[str, float]
    dropped: list[Group] = field(default_factory=list)
    """What was played and is not learnt from: replaced groups, and attempts that resampling left out."""


class Player:
    """Plays the steps of a stage, and knows which tasks come next."""

    def __init__(self, sets: Sequence[TaskSet], config: RLConfig, seed: int) -> None:
        self._sets = list(sets)
        self._config = config
        self._seed = seed
        self._decks = {0: Deck(self._sets, seed)}
        """The deck with which a step begins: the last one played, and the one after it."""

    async def play(self, step: int, values: Mapping[str, float]) -> Played:
        """The groups of a step of the stage, under the settings that a curriculum has it at.

        The same step can be played again, and is the same then; but for that, steps follow each other.
        """
        deck = self._deck(step).copy()
        table = _Table(self._sets, self._config, self._rollouts(values))
        seed, hardest = key(self._seed, "rl", step), values.get(DIFFICULTY)
        dealt = deck.deal(self._config.tasks, hardest)
        groups = await table.play(dealt, seed)
        refilled = 0
        for number in range(self._config.refill.rounds if self._config.refill else 0):
            empty = [place for place, group in enumerate(groups) if not table.teaches(group)]
            further = deck.deal_from([dealt[place].set for place in empty], hardest)
            found = await table.play(further, key(seed, "refill", number))
            for place, group in zip(empty, found, strict=True):
                table.dropped[dealt[place].set].append(groups[place])
                groups[place] = group
                refilled += table.teaches(group)
        self._decks = {step: self._decks[step], step + 1: deck}
        sets, masked = [one.set for one in dealt], table.masked(groups)
        metrics = table.metrics(groups, sets) | {"masked": len(masked)}
        if self._config.refill is not None:
            metrics["refilled"] = refilled
            metrics["without_signal"] = sum(not table.teaches(group) for group in groups)
        return Played(groups, masked, sets, metrics, [g for one in table.dropped for g in one])

    def state_dict(self) -> dict[str, Any]:
        """Where the last step played began, and where it ended: a step that was cut off begins again."""
        return {str(step): deck.state_dict() for step, deck in self._decks.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        decks = {int(step): Deck(self._sets, self._seed) for step in state}
        for step, deck in decks.items():
            deck.load_state_dict(state[str(step)])
        self._decks = decks

    def _deck(self, step: int) -> Deck:
        if step not in self._decks:
            known = " or ".join(map(str, self._decks))
            raise ValueError(f"step {step} cannot begin here: this player stands at step {known}")
        return self._decks[step]

    def _rollouts(self, values: Mapping[str, float]) -> list[Rollout]:
        """Each set's rollout under the settings of a curriculum."""
        strictness = values.get(STRICTNESS)
        if strictness is not None and not any(s.rollout.scorer.takes_strictness for s in self._sets):
            raise ConfigError(
                f"a curriculum moves {STRICTNESS}, but no reward takes it: give one a keyword-only "
                "parameter `strictness` with a default"
            )
        return [
            replace(
                one.rollout,
                attempts=self._config.attempts,
                budgets=budgets_at(one.rollout.budgets, values, one.limits),
                scorer=one.rollout.scorer.at_strictness(strictness),
            )
            for one in self._sets
        ]


def budgets_at(
    budgets: Budgets, values: Mapping[str, float], limits: Mapping[str, float] | None = None
) -> Budgets:
    """The budgets with those that a curriculum sets, whole numbers all of them.

    A curriculum takes the place of the recipe's budgets, in which all sets share. A limit that a task set has
    of its own stays: of the two, the smaller one holds.
    """
    moved = {n.removeprefix(BUDGETS): int(v) for n, v in values.items() if n.startswith(BUDGETS)}
    held = {name: min(value, (limits or {}).get(name, value)) for name, value in moved.items()}
    return Budgets.parse({**budgets.model_dump(), **held}, "the curriculum") if held else budgets


class _Table:
    """One step's playing: rollouts as they are now, and what has been dropped so far, by set."""

    def __init__(self, sets: Sequence[TaskSet], config: RLConfig, rollouts: Sequence[Rollout]) -> None:
        self._sets, self._config, self._rollouts = sets, config, rollouts
        self._resampled = 0
        self.dropped: list[list[Group]] = [[] for _ in sets]

    async def play(self, dealt: Sequence[Dealt], seed: int) -> list[Group]:
        """A group for each task, in order, shaped and resampled."""
        numbers = sorted({one.set for one in dealt})
        places = {number: self._places(number, dealt) for number in numbers}
        if all(places.values()):
            finished = await self._at_once([self._play_set(n, dealt, seed, places[n]) for n in numbers])
        else:
            finished = [await self._play_set(n, dealt, seed, self._in_flight(n)) for n in numbers]
        groups_of = {number: iter(groups) for number, groups in zip(numbers, finished, strict=True)}
        groups = [next(groups_of[one.set]) for one in dealt]
        return [
            self._kept(group, one.set, key(seed, "resample", place))
            for place, (group, one) in enumerate(zip(groups, dealt, strict=True))
        ]

    def _in_flight(self, number: int) -> int:
        return self._rollouts[number].max_in_flight

    def _places(self, number: int, dealt: Sequence[Dealt]) -> int:
        """A set's share of the places in flight, by its tasks; 0 where there are too few to share."""
        return self._in_flight(number) * sum(one.set == number for one in dealt) // len(dealt)

    async def _at_once(self, playing: Sequence[Coroutine[Any, Any, list[Group]]]) -> list[list[Group]]:
        running = [asyncio.create_task(one) for one in playing]
        try:
            return await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _play_set(
        self, number: int, dealt: Sequence[Dealt], seed: int, places: int
    ) -> list[Group]:
        tasks = [one.task for one in dealt if one.set == number]
        rollout = self._rollouts[number]
        own = seed_of_set(seed, number, self._sets[number].name)
        playing = replace(rollout, max_in_flight=places)
        groups = {_label(group): group async for group in playing.groups(tasks, own)}
        # a task that was dealt twice has its second group with the attempts that follow the first's
        seen: Counter[str] = Counter()
        ordered = []
        for task in tasks:
            ordered.append(groups[task.id, seen[task.id] * rollout.attempts])
            seen[task.id] += 1
        return ordered

    def _kept(self, group: Group, set_number: int, draw: int) -> Group:
        for one in group.trajectories:
            shape(one, self._config)
        if self._config.keep_attempts is None:
            return group
        group, leaving = resample(group, self._config.keep_attempts, draw)
        if leaving:
            self.dropped[set_number].append(Group(group.task, leaving))
            self._resampled += len(leaving)
        return group

    def teaches(self, group: Group) -> bool:
        """Whether attempts differ in reward, and one of them is in the loss."""
        return has_signal(group) and not all(map(self._is_masked, group.trainable))

    def masked(self, groups: Sequence[Group]) -> frozenset[tuple[int, int]]:
        """Where the attempts are that stay out of the loss."""
        return frozenset(
            (number, place)
            for number, group in enumerate(groups)
            for place, one in enumerate(group.trajectories)
            if self._is_masked(one)
        )

    def _is_masked(self, trajectory: Trajectory) -> bool:
        return is_masked(kinds_of(trajectory), self._config.broken)

    def metrics(self, groups: Sequence[Group], sets: Sequence[int]) -> dict[str, float]:
        """What is broken among the groups; and by set, over all that was played, how it went."""
        kinds = Counter(kind for g in groups for one in g.trajectories for kind in kinds_of(one))
        metrics: dict[str, float] = {f"broken/{kind}": kinds[kind] for kind in KINDS}
        if self._config.keep_attempts is not None:
            metrics["resampled"] = self._resampled
        if len(self._sets) == 1:
            return metrics
        for number, one in enumerate(self._sets):
            own = [g for g, of in zip(groups, sets, strict=True) if of == number]
            found = rollout_metrics([*own, *self.dropped[number]])
            metrics |= {f"sets/{one.name}/{n}": found[n] for n in PER_SET if n in found}
        return metrics


def _label(group: Group) -> tuple[str, int]:
    return group.task.id, group.trajectories[0].attempt
