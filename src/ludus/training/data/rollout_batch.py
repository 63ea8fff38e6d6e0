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
buffer    experience replay with expiry: scored groups of earlier steps, trained on again for as long as they
          hold. A stored group has the log-probabilities of the policy that played it, so the importance
          correction weighs its tokens as stale samples'; its baseline is its own group's. It is dropped by
          `age`, `versions`, `uses`, or `tools`: what a changed tool or environment answered then would not be
          observed now. Which groups join a step is a function of the seed, the step and what is stored

The formulas are in `algos/shaping.py`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

import torch

from ludus.algos import overlong_penalty, resample_on_correct, roc_penalty
from ludus.core.failures import ConfigError, Fault
from ludus.core.generation import FinishReason
from ludus.core.random import key, shuffled
from ludus.core.trajectory import SUCCESS, Group, Segment, StopReason, Trajectory, is_success
from ludus.observe import (
    RunFolder,
    has_signal,
    keep_images,
    read_groups,
    read_notes,
    rollout_metrics,
    set_metrics,
    with_images,
    write_groups,
)
from ludus.rewards.scores import trainable
from ludus.rollouts.rollout import Rollout
from ludus.tools.versions import tool_versions
from ludus.training.config.recipe import PER_SET, Recipe
from ludus.training.config.rl import BrokenConfig, OverlongConfig, ReplayBufferConfig, RolloutSettings
from ludus.training.data.tasks import TaskSet

OVERLONG, BROKEN = "overlong", "broken"
"""The parts of the reward that hold the penalties."""
VERLTOOL = "verltool"
"""Reward 0, in the baseline, not in the loss (VerlTool, C.2)."""

_TOO_LONG = frozenset({Fault.TOOL_TIMEOUT, Fault.LIMIT})
STORED = "replay.parquet"
REASONS = ("age", "versions", "tools", "uses")


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


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A scored group, and what it depends on."""

    group: Group
    set: int
    version: int
    """Version of the oldest policy that played it."""
    code: Mapping[str, str]
    """The versions of the tools that it called, and of its environments, by name."""
    stored: float
    """When, in seconds since 1970."""
    uses: int = 0

    def expired(
        self, config: ReplayBufferConfig, version: int, code: Mapping[str, str], now: float
    ) -> str | None:
        """Why it is dropped; None while it holds."""
        if config.max_age is not None and now - self.stored > config.max_age:
            return "age"
        if version - self.version > config.max_lag:
            return "versions"
        if any(code.get(name) != one for name, one in self.code.items()):
            return "tools"
        return "uses" if self.uses >= config.uses else None


async def code_versions(rollout: Rollout) -> dict[str, str]:
    """The versions of a rollout's tools and environments, by name."""
    tools = {f"tool {name}": one for name, one in (await tool_versions(rollout.tools)).items()}
    return tools | {f"env {name}": pool.version for name, pool in rollout.pools.items()}


@dataclass(slots=True)
class ReplayBuffer:
    """The stored groups of a stage."""

    config: ReplayBufferConfig
    settings: RolloutSettings
    sets: Sequence[TaskSet]
    code: Sequence[Mapping[str, str]]
    """The versions of tools and environments of each task set, now."""
    seed: int
    stored: list[StoredGroup] = field(default_factory=list)
    _expired: Counter[str] = field(default_factory=Counter)

    def mixed(
        self, played: RolloutBatch, step: int, version: int, now: float | None = None
    ) -> RolloutBatch:
        """The step's groups with stored ones among them, evenly spread."""
        self._expire(version, time.time() if now is None else now)
        chosen = shuffled(len(self.stored), key(self.seed, "replay", step))[: self.config.groups]
        again = [self.stored[place] for place in sorted(chosen)]
        for place in chosen:
            self.stored[place] = replace(self.stored[place], uses=self.stored[place].uses + 1)
        groups, sets = list(played.groups), list(played.sets)
        for number, one in enumerate(again):
            place = (number + 1) * len(played.groups) // (len(again) + 1) + number
            groups.insert(place, one.group)
            sets.insert(place, one.set)
        masked = GroupFilter(self.sets, self.settings).masked(groups)
        metrics = {
            "replay/groups": float(len(again)),
            "replay/stored": float(len(self.stored)),
            **{f"replay/expired_{name}": float(self._expired[name]) for name in REASONS},
        }
        if again:
            metrics["replay/lag_mean"] = sum(version - one.version for one in again) / len(again)
        self._expired.clear()
        return RolloutBatch(groups, masked, sets, metrics)

    def add(self, played: RolloutBatch, version: int, now: float | None = None) -> None:
        """Store what a step has played, if it can teach anything; the oldest make room."""
        moment = time.time() if now is None else now
        for group, number in zip(played.groups, played.sets, strict=True):
            if has_signal(group):
                versions = [v.version for t in group.trainable for a in t.actions for v in a.versions]
                code = _used(group, self.code[number])
                oldest = min(versions, default=version)
                self.stored.append(StoredGroup(group, number, oldest, code, moment))
        del self.stored[: max(0, len(self.stored) - self.config.capacity)]

    def _expire(self, version: int, now: float) -> None:
        held: list[StoredGroup] = []
        for one in self.stored:
            reason = one.expired(self.config, version, self.code[one.set], now)
            if reason is None:
                held.append(one)
            else:
                self._expired[reason] += 1
        self.stored = held

    def save(self, folder: Path) -> None:
        notes = [
            {
                "set": self.sets[one.set].name,
                "version": one.version,
                "code": dict(one.code),
                "stored": one.stored,
                "uses": one.uses,
            }
            for one in self.stored
        ]
        write_groups(folder / STORED, [one.group for one in self.stored], notes=notes)
        keep_images(folder, (t for one in self.stored for t in one.group.trajectories))

    def load(self, folder: Path) -> None:
        """Load the groups of a checkpoint; those of task sets that are gone are left out."""
        if not (folder / STORED).is_file():
            return
        numbers = {one.name: number for number, one in enumerate(self.sets)}
        groups = read_groups(folder / STORED)
        with_images((t for group in groups for t in group.trajectories), folder / STORED)
        rows = zip(groups, read_notes(folder / STORED), strict=True)
        self.stored = [
            StoredGroup(
                group, numbers[note["set"]], note["version"], note["code"], note["stored"], note["uses"]
            )
            for group, note in rows
            if note["set"] in numbers
        ]


def _used(group: Group, code: Mapping[str, str]) -> dict[str, str]:
    """The versions of what a group depends on: tools that were called, environments that it was played in."""
    called = {f"tool {call.name}" for t in group.trajectories for call in t.calls}
    envs = {f"env {name}" for name in group.task.envs}
    own = envs or {name for name in code if name.startswith("env ")}
    return {name: one for name, one in code.items() if name in called | own}
