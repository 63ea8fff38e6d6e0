"""Batch of a step: groups with shaped rewards, without those that teach nothing; played, or recorded before.

shape     penalties for length and for broken episodes, added to the reward
resample  GRPO-RoC: keep a share of each group
signal    whether a group teaches anything (DAPO's dynamic sampling replaces those that do not): a difference
          in the part "success" of the reward, or without that part in the reward itself; what shaping adds
          is none
replay    an update is a function of the weights, the optimizer's state and the groups of its step, in their
          order: training from a run's record gives its weights, bit for bit on a CPU, whatever was played when
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from ludus.core.failures import ConfigError
from ludus.core.trajectory import SUCCESS, Group, Trajectory
from ludus.observe import (
    RunFolder,
    has_signal,
    read_groups,
    read_notes,
    rollout_metrics,
    set_metrics,
    with_images,
)
from ludus.training.config.recipe import PER_SET, Recipe
from ludus.training.config.rl import RolloutSettings
from ludus.training.data.reward_shaping import KINDS, broken_kinds, is_masked, resample, shape_reward
from ludus.training.data.task_sampler import TaskSet


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


@dataclass(frozen=True, slots=True)
class KeptGroup:
    """The kept part of a group that was played."""

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
        """The batch of a step; `sets` has the task set of each group."""
        groups = [one.group for one in kept]
        masked = self.masked(groups)
        metrics = self._metrics(groups, sets) | {"masked": len(masked)}
        if self._settings.refill is not None:
            metrics["refilled"] = refilled
            metrics["without_signal"] = sum(not one.is_informative for one in kept)
        dropped = [group for one in (*self.dropped, *self._left_out) for group in one]
        return RolloutBatch(groups, masked, sets, metrics, dropped)

    def masked(self, groups: Sequence[Group]) -> frozenset[tuple[int, int]]:
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


@dataclass(frozen=True, slots=True)
class Recording:
    """The recorded groups of a run."""

    run: RunFolder
    scored: Mapping[int, float]
    """Episodes that were scored in each step. Those that were left out are not in the record, and count for an
    adaptive KL coefficient."""

    def batch(self, step: int, sets: Sequence[TaskSet], settings: RolloutSettings) -> RolloutBatch:
        """The batch that the run trained on in a step, counted from 1 over all stages."""
        path = self.run.trajectory_path(step)
        groups, notes = read_groups(path), read_notes(path)
        with_images((t for group in groups for t in group.trajectories), path)
        names = {one.name: number for number, one in enumerate(sets)}
        if not notes and len(sets) > 1:
            raise ConfigError(
                f"{path} does not say which task set its groups are of: it cannot be replayed"
            )
        numbers = [names[note["set"]] for note in notes] or [0] * len(groups)
        played = {"episodes_scored": self.scored[step]} if step in self.scored else {}
        masked = GroupFilter(sets, settings).masked(groups)
        return RolloutBatch(groups, masked, numbers, played)


def open_recording(recipe: Recipe) -> Recording | None:
    """The recording that a recipe replays, if any. What cannot be replayed whole is refused."""
    if recipe.run.replay is None:
        return None
    run = RunFolder(recipe.run.replay)
    if not run.is_run:
        raise ConfigError(f"run.replay: {recipe.run.replay} is not a run")
    ends = list(accumulate(stage.total_steps for stage in recipe.stages))
    for (where, stage), end in zip(recipe.named_stages, ends, strict=True):
        if stage.learns and stage.needs_tasks and stage.kind != "rl":
            raise ConfigError(
                f"{where} plays (kind {stage.kind!r}), and only the groups of RL are recorded to be replayed"
            )
        if stage.kind != "rl":
            continue
        steps = range(end - stage.total_steps + 1, end + 1)
        missing = [step for step in steps if not run.trajectory_path(step).is_file()]
        if missing:
            raise ConfigError(
                f"{run.path} has no episodes of {len(missing)} of the {len(steps)} steps of {where} (the first "
                f"is step {missing[0]}), and a replay needs those of every step: record them with "
                "run.trajectories_every=1, finish a run that was stopped with --resume, or replay the first "
                f"steps alone with {where}.steps=N"
            )
    scored = {row["step"]: row["episodes_scored"] for row in run.metrics() if "episodes_scored" in row}
    return Recording(run, scored)
