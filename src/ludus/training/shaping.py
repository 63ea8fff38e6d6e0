"""What a step does to episodes after they were played and scored: prices, penalties, and who stays.

What counts as a success is settled before any price is put on it, and noted as the part "success": a right
answer does not become a wrong one by being long.
"""

from __future__ import annotations

import torch

from ludus.algos import overlong_penalty, resample_on_correct, roc_penalty
from ludus.core.failures import ConfigError
from ludus.core.trajectory import SUCCESS, Group, Trajectory, is_success
from ludus.training.broken import has_penalties, kinds_of, penalty
from ludus.training.settings import OverlongConfig, RLConfig

OVERLONG, BROKEN = "overlong", "broken"
"""The parts of the reward under which prices and penalties are shown."""


def shape(trajectory: Trajectory, config: RLConfig) -> None:
    """Add the price of length and the penalties of broken episodes to the total, and show them as parts."""
    if trajectory.reward is None or not trajectory.is_trainable:
        return
    added: dict[str, float] = {}
    if config.overlong is not None:
        added[OVERLONG] = price_of_length(trajectory, config.overlong)
    if has_penalties(config.broken):
        added[BROKEN] = penalty(kinds_of(trajectory), config.broken)
    if not added:
        return
    if taken := added.keys() & trajectory.rewards.keys():
        raise ConfigError(
            f"a reward reports a part called {min(taken)!r}, a name of shaping's; rename it"
        )
    trajectory.rewards.setdefault(SUCCESS, float(is_success(trajectory)))
    trajectory.rewards |= added
    trajectory.reward += sum(added.values())


def price_of_length(trajectory: Trajectory, config: OverlongConfig) -> float:
    """What the tokens that were said cost: from 0 down to minus the price."""
    said = torch.tensor(float(sum(len(action.tokens) for action in trajectory.actions)))
    return config.price * float(overlong_penalty(said, longest=config.longest, buffer=config.buffer))


def resample(group: Group, keep: int, key: int) -> tuple[Group, list[Trajectory]]:
    """GRPO-RoC: the group with `keep` of its scored attempts, and those that leave it.

    Attempts that failed through our fault stay where they are: they are in no baseline, and are counted.
    """
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
