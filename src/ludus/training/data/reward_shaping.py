"""Reward shaping of a step: penalties for length and broken episodes, and which episodes are masked.

Success is decided before any penalty, and noted as the part "success": a right answer does not become a wrong
one by being long. Broken episodes are those that went wrong by the model's fault; infrastructure failures are
in no loss and no baseline anyway. The formulas are in `algos/shaping.py`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, get_args

import torch

from ludus.algos import overlong_penalty, resample_on_correct, roc_penalty
from ludus.core.failures import ConfigError, Fault
from ludus.core.generation import FinishReason
from ludus.core.trajectory import SUCCESS, Group, Segment, StopReason, Trajectory, is_success
from ludus.rewards.scores import trainable
from ludus.training.config.rl import BrokenConfig, OverlongConfig, RolloutSettings

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
