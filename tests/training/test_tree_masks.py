"""Trees with masked branches: a turn is in the loss once, with the credit of the branches that are not masked.

The reference walks the attempts one by one, in plain Python, and tells turns apart by their segments.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from typing import Any

import pytest
from ragged_episodes import (
    assert_same_gradient,
    branched,
    gradient_of,
    row_logprobs,
    slope,
    tiny_learner,
    tiny_model,
)
from torch import nn

from ludus.core import Group, Segment, Trajectory
from ludus.training import RLConfig, RolloutBatch
from played_steps import policy_update

CLIP = 0.2


def standard(value: float, others: list[float]) -> float:
    if len(set(others)) == 1:
        return 0.0
    return (value - statistics.mean(others)) / (statistics.stdev(others) + 1e-6)


def having(turn: Segment, group: Group) -> list[Trajectory]:
    return [one for one in group.trajectories if any(turn is action for action in one.actions)]


def rewards_of(trajectories: list[Trajectory]) -> list[float]:
    return [one.reward or 0.0 for one in trajectories]


def grpo(turn: Segment, leaf: Trajectory, group: Group) -> float:
    return standard(leaf.reward or 0.0, rewards_of(group.trajectories))


def tree_value(turn: Segment, leaf: Trajectory, group: Group) -> float:
    """The leaf's reward against what the attempts earned that had come to the branching before the turn."""
    below = having(turn, group)
    before = group.trajectories
    for earlier in leaf.actions:
        if earlier is turn:
            break
        if len(having(earlier, group)) > len(below):
            before = having(earlier, group)
    return (leaf.reward or 0.0) - statistics.mean(rewards_of(before))


CREDITS: dict[str, Any] = {"grpo": grpo, "tree_value": tree_value}


def masked_places(given: RolloutBatch, seed: int) -> frozenset[tuple[int, int]]:
    """Every first attempt, which sampled the shared turns, and some of the others."""
    source = random.Random(seed)
    return frozenset(
        (number, place)
        for number, group in enumerate(given.groups)
        for place in range(len(group.trajectories))
        if place == 0 or source.random() < 0.3
    )


def expected_gradient(model: nn.Module, given: RolloutBatch, credit: Any) -> tuple[list[Any], int]:
    """The gradient of the clipped loss over all turns that an unmasked attempt has; and how many tokens."""
    turns: list[tuple[Trajectory, Segment, float]] = []
    seen: set[int] = set()
    for number, group in enumerate(given.groups):
        trained = [
            one for place, one in enumerate(group.trajectories) if (number, place) not in given.masked
        ]
        for one in trained:
            for turn in one.actions:
                if id(turn) not in seen:
                    seen.add(id(turn))
                    leaves = [leaf for leaf in having(turn, group) if any(leaf is t for t in trained)]
                    mean = statistics.mean(credit(turn, leaf, group) for leaf in leaves)
                    turns.append((one, turn, mean))
    count = sum(len(turn.tokens) for _, turn, _ in turns)
    rows: list[list[int]] = []
    slopes: list[list[float]] = []
    for one, turn, advantage in turns:
        now = row_logprobs(model, one.tokens).tolist()
        along = [0.0] * len(one.tokens)
        start = 0
        for segment in one.sequences[0].segments:
            if segment is turn:
                break
            start += len(segment.tokens)
        for i, old in enumerate(turn.logprobs or []):

            def loss(new: float, old: float = old, advantage: float = advantage) -> float:
                ratio = 2.718281828459045 ** (new - old)
                bounded = min(max(ratio, 1 - CLIP), 1 + CLIP)
                return -min(ratio * advantage, bounded * advantage)

            along[start + i] = slope(loss, now[start + i]) / count
        rows.append(one.tokens)
        slopes.append(along)
    return gradient_of(model, rows, slopes), count


@pytest.mark.parametrize("algorithm", ["grpo", "tree_value"])
@pytest.mark.parametrize("seed", range(4))
def test_a_shared_turn_is_trained_by_the_branches_that_are_not_masked(algorithm: str, seed: int) -> None:
    model = tiny_model()
    given = branched(model, seed=seed)
    masked = replace(given, masked=masked_places(given, seed))
    owners = {
        id(turn): place
        for group in given.groups
        for place, one in reversed(list(enumerate(group.trajectories)))
        for turn in one.actions
    }
    rescued = {
        id(turn)
        for number, group in enumerate(given.groups)
        for place, one in enumerate(group.trajectories)
        for turn in one.actions
        if (number, place) not in masked.masked and (number, owners[id(turn)]) in masked.masked
    }
    assert rescued, "no good branch has a turn that a masked attempt sampled"
    expected, count = expected_gradient(model, masked, CREDITS[algorithm])
    learner = tiny_learner(model)
    config = RLConfig.parse({"algorithm": algorithm, "loss": {"clip_low": CLIP, "clip_high": CLIP}})
    metrics = policy_update(learner, masked, config, reference=None, critic=None)
    assert metrics["action_tokens"] == count
    assert_same_gradient(model, expected)
    for number, group in enumerate(given.groups):
        for place, one in enumerate(group.trajectories):
            if (number, place) not in masked.masked:  # the viewer shows what each turn was trained with
                assert all(turn.advantages is not None for turn in one.actions)


def test_without_masks_every_attempt_has_its_credit() -> None:
    model = tiny_model()
    given = branched(model, seed=1)
    expected, count = expected_gradient(model, given, grpo)
    metrics = policy_update(tiny_learner(model), given, RLConfig(), reference=None, critic=None)
    assert metrics["action_tokens"] == count
    assert_same_gradient(model, expected)
