"""Batch of a step: groups with shaped rewards, without those that teach nothing; played, or recorded before.

shape     penalties for length and for broken episodes, added to the reward. Success is decided before that, and
          noted as the part "success": a right answer does not become a wrong one by being long. Broken episodes
          went wrong by the model's fault; infrastructure failures are in no loss and no baseline anyway
resample  GRPO-RoC: keep a share of each group
signal    whether a group teaches anything (DAPO's dynamic sampling replaces those that do not): a difference
          in the part "success" of the reward, or without that part in the reward itself; what shaping adds
          is none
replay    an update is a function of the weights, the optimizer's state and the groups of its step, in their
          order: training from a run's record gives its weights, bit for bit on a CPU, whatever was played when

The formulas are in `algos/shaping.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from ludus.algos import overlong_penalty, resample_on_correct, roc_penalty
from ludus.core.failures import ConfigError, Fault
from ludus.core.generation import FinishReason
from ludus.core.trajectory import SUCCESS, Group, Segment, StopReason, Trajectory, is_success
from ludus.observe import (
    RunFolder,
    has_signal,
    read_groups,
    read_notes,
    rollout_metrics,
    set_metrics,
    with_images,
)
from ludus.rewards.scores import trainable
from ludus.training.config.recipe import PER_SET, Recipe
from ludus.training.config.rl import BrokenConfig, OverlongConfig, RolloutSettings
from ludus.training.data.tasks import TaskSet

OVERLONG, BROKEN = "overlong", "broken"
"""The parts of the reward that hold the penalties."""
VERLTOOL = "verltool"
"""Reward 0, in the baseline, not in the loss (VerlTool, C.2)."""


def shape_reward(trajectory: Trajectory, settings: RolloutSettings) -> None:
    """Add the penalties for length and for broken episodes to the reward, and show them as its parts."""
    if trajectory.reward is None or not trajectory.is_trainable:
        return
    added: dict[str, float] = {}
    if settings.overlong is not None:
        added[OVERLONG] = length_penalty(trajectory, settings.overlong)
    kinds = broken_kinds(trajectory)
    if has_penalties(settings.broken):
        added[BROKEN] = penalty(kinds, settings.broken)
    is_zero = any(getattr(settings.broken, kind) == VERLTOOL for kind in kinds)
    if is_zero:
        added[BROKEN] = 0.0 - trajectory.reward - added.get(OVERLONG, 0.0)
    if not added:
        return
    if taken := added.keys() & trajectory.rewards.keys():
        raise ConfigError(
            f"a reward reports a part called {min(taken)!r}, a name of shaping's; rename it"
        )
    trajectory.rewards.setdefault(SUCCESS, float(is_success(trajectory)))
    trajectory.rewards |= added
    total = 0.0 if is_zero else trajectory.reward + sum(added.values())
    trajectory.reward = trainable(total, "the reward with its penalties")


def length_penalty(trajectory: Trajectory, config: OverlongConfig) -> float:
    """DAPO's soft overlong punishment, from 0 down to minus the price."""
    said = torch.tensor(float(sum(len(action.tokens) for action in trajectory.actions)))
    return config.price * float(overlong_penalty(said, longest=config.longest, buffer=config.buffer))


def resample(group: Group, keep: int, key: int) -> tuple[Group, list[Trajectory]]:
    """GRPO-RoC: the group with `keep` of its scored attempts, and the others. Failed attempts stay."""
    scored = [number for number, one in enumerate(group.trajectories) if one.is_trainable]
    attempts = [group.trajectories[number] for number in scored]
    kept = resample_on_correct(
        [is_success(attempt) for attempt in attempts],
        [_untidiness(attempt) for attempt in attempts],
        keep=keep,
        key=key,
    )
    leaving = set(scored) - {scored[number] for number in kept}
    staying = [one for number, one in enumerate(group.trajectories) if number not in leaving]
    return Group(group.task, staying), [group.trajectories[number] for number in sorted(leaving)]


def _untidiness(trajectory: Trajectory) -> float:
    return roc_penalty(
        # a call that could not be parsed may have left a fault and no call: it was an attempt at one
        calls=sum(max(len(action.calls), len(action.faults)) for action in trajectory.actions),
        errors=len(trajectory.faults),
        answers=1,  # an episode ends with its first answer
        turns=trajectory.turns,
    )


Kind = Literal["no_answer", "over_length", "tool_error", "timed_out", "void_turn", "over_time"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_TOO_LONG = frozenset({Fault.TOOL_TIMEOUT, Fault.LIMIT})


def broken_kinds(trajectory: Trajectory) -> frozenset[Kind]:
    """In which ways an episode is broken; empty for one that cannot be trained on."""
    if not trajectory.is_trainable:
        return frozenset()
    faults = {fault for action in trajectory.actions for fault in _faults(action)}
    found: dict[Kind, bool] = {
        "no_answer": trajectory.stop is StopReason.MAX_TURNS,
        "over_length": trajectory.stop is StopReason.MAX_TOKENS,
        "tool_error": bool(faults - _TOO_LONG),
        "timed_out": bool(faults & _TOO_LONG),
        "void_turn": _has_void_turn(trajectory),
        "over_time": trajectory.stop is StopReason.MAX_SECONDS,
    }
    return frozenset(kind for kind, is_so in found.items() if is_so)


def is_masked(kinds: Collection[Kind], config: BrokenConfig) -> bool:
    """Whether an episode with these kinds is left out of the loss."""
    return any(getattr(config, kind) in ("mask", VERLTOOL) for kind in kinds)


def penalty(kinds: Collection[Kind], config: BrokenConfig) -> float:
    """The penalty of an episode with these kinds: the sum of one number for each of them."""
    treatments = (getattr(config, kind) for kind in KINDS if kind in kinds)
    return sum((value for value in treatments if isinstance(value, float)), 0.0)


def has_penalties(config: BrokenConfig) -> bool:
    """Whether any kind is answered by a number."""
    return any(isinstance(getattr(config, kind), float) for kind in KINDS)


def _faults(action: Segment) -> set[Fault]:
    """The faults of a turn. A call that a token limit cut off is malformed, but that is no tool error."""
    unanswered = () if action.finish is FinishReason.LENGTH else action.calls
    return {*action.faults, *(call.fault for call in unanswered if call.fault is not None)}


def _has_void_turn(trajectory: Trajectory) -> bool:
    """Whether a turn holds neither a call nor an answer; turns that were cut off do not count."""
    silent = [
        number
        for number, action in enumerate(trajectory.actions)
        if not action.calls and not action.faults and action.finish is not FinishReason.LENGTH
    ]
    answered = trajectory.stop is StopReason.ANSWERED and bool((trajectory.answer or "").strip())
    return any(number < trajectory.turns - 1 or not answered for number in silent)


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
    for (where, _), (stage, start, end) in zip(recipe.named_stages, recipe.stage_spans, strict=True):
        if stage.learns and stage.needs_tasks and stage.kind != "rl":
            raise ConfigError(
                f"{where} plays (kind {stage.kind!r}), and only the groups of RL are recorded to be replayed"
            )
        if stage.kind != "rl":
            continue
        steps = range(start + 1, end + 1)
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
