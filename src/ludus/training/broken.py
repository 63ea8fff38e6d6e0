"""Episodes that went wrong by the model's doing: which kind of wrong, and what becomes of them.

What failed through our fault is no broken episode; it is in no loss and no baseline anyway.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, get_args

from ludus.core.failures import Fault
from ludus.core.generation import FinishReason
from ludus.core.trajectory import Segment, StopReason, Trajectory
from ludus.training.settings import BrokenConfig

Kind = Literal["no_answer", "over_length", "tool_error", "timed_out", "void_turn"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_TOO_LONG = frozenset({Fault.TOOL_TIMEOUT, Fault.LIMIT})


def kinds_of(trajectory: Trajectory) -> frozenset[Kind]:
    """All that is broken about an episode; nothing for one that cannot be trained on."""
    if not trajectory.is_trainable:
        return frozenset()
    faults = {fault for action in trajectory.actions for fault in _faults(action)}
    found: dict[Kind, bool] = {
        "no_answer": trajectory.stop is StopReason.MAX_TURNS,
        "over_length": trajectory.stop is StopReason.MAX_TOKENS,
        "tool_error": bool(faults - _TOO_LONG),
        "timed_out": bool(faults & _TOO_LONG),
        "void_turn": _has_void_turn(trajectory),
    }
    return frozenset(kind for kind, is_so in found.items() if is_so)


def is_masked(kinds: Collection[Kind], config: BrokenConfig) -> bool:
    """Whether an episode with these kinds is left out of the loss."""
    return any(getattr(config, kind) == "mask" for kind in kinds)


def penalty(kinds: Collection[Kind], config: BrokenConfig) -> float:
    """What is added to the reward of an episode with these kinds: one number for each of them."""
    treatments = (getattr(config, kind) for kind in KINDS if kind in kinds)
    return sum((value for value in treatments if isinstance(value, float)), 0.0)


def has_penalties(config: BrokenConfig) -> bool:
    """Whether any kind is answered by a number."""
    return any(isinstance(getattr(config, kind), float) for kind in KINDS)


def _faults(action: Segment) -> set[Fault]:
    """The faults of a turn. A call that was cut off by a limit is malformed too, but that is no error."""
    unanswered = () if action.finish is FinishReason.LENGTH else action.calls
    return {*action.faults, *(call.fault for call in unanswered if call.fault is not None)}


def _has_void_turn(trajectory: Trajectory) -> bool:
    """Whether a turn holds neither a call nor an answer. What a cut turn would have held, nobody knows."""
    silent = [
        number
        for number, action in enumerate(trajectory.actions)
        if not action.calls and not action.faults and action.finish is not FinishReason.LENGTH
    ]
    answered = trajectory.stop is StopReason.ANSWERED and bool((trajectory.answer or "").strip())
    return any(number < trajectory.turns - 1 or not answered for number in silent)
