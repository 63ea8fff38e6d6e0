"""A group as a tree: a few attempts from the prompt, then branches from turns that are worth another try.

    random    any turn (Tree-GRPO, arXiv:2509.21240)
    entropy   where the model was least sure: the largest mean -log p of an action, less a penalty for each
              branch that the turn has already (AT2PO; ARPO, arXiv:2507.19849)
    success   turns of attempts that succeeded (after GRPO-RoC): what could have been done better there?
    beam      the prefixes with the highest mean reward of the attempts below them (TSR)
    turns     no attempts at first, but single actions: at each turn several are sampled and done, and the best
              prefixes are held and gone on from (TSR; `turn_search`)

Which attempts end first decides nothing: a round begins when the one before has ended, and every draw has a
key of its own. All leaves are learned from and are in the baseline, the bad ones too.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from pydantic import Field

from ludus.core.config import Config
from ludus.core.random import key, shuffled
from ludus.core.trajectory import Segment, StopReason, Trajectory, is_success
from ludus.rollouts.branching import EpisodeRecord, Origin


class TreeConfig(Config):
    """Play each group as a tree; its leaves are the attempts."""

    branch: Literal["random", "entropy", "success", "beam", "turns"] = "random"
    """Where to branch: any turn, where the model was least sure, in successes, at the best prefixes; or turns:
    candidates at each turn, of which the best are gone on from."""
    roots: int = Field(default=2, ge=1)
    """Attempts that begin at the prompt."""
    branches: int = Field(default=1, ge=1)
    """Branches from each turn that is chosen."""
    rounds: int = Field(default=1, ge=1)
    """Rounds in which turns are chosen; the further attempts are divided among them."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Tokens that a group may sample, shared ones counted once: no round begins when they are used up."""
    max_calls: int | None = Field(default=None, ge=1)
    """The same for tool calls."""
    penalty: float = Field(default=0.5, ge=0)
    """entropy: what each branch of a turn takes off it, in nats."""
    beam: int = Field(default=2, ge=1)
    """beam, turns: how many prefixes to keep in a round, or at a turn."""
    candidates: int = Field(default=4, ge=2)
    """turns: actions that are sampled and done at a turn, from each prefix that was kept."""
    score: str = "total"
    """turns: what a prefix is kept by: the total of the rewards, if it ended there, or one of them by name."""
    state: Literal["snapshot", "replay"] = "snapshot"
    """How branches find tools and environments: from snapshots taken before each turn (replayed where there is
    none), or always by making the recorded calls again."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """An attempt that has been played."""

    trajectory: Trajectory
    record: EpisodeRecord

    @property
    def spent(self) -> tuple[int, int]:
        """The tokens that it sampled and the calls that it made, without what it shares."""
        actions = [one for one in self.trajectory.own_segments if one.logprobs is not None]
        return sum(len(one.tokens) for one in actions), sum(len(one.calls) for one in actions)

    @property
    def score(self) -> float:
        """What it is worth: its reward, or what it was worth when it was held."""
        return (self.trajectory.reward or 0.0) if self.record.score is None else self.record.score


@dataclass(frozen=True, slots=True)
class Point:
    """Before the action `turn` of a leaf."""

    leaf: int
    turn: int


class Play(Protocol):
    """Plays an attempt by its number, from the prompt or as a branch, to its end or until it is held."""

    def __call__(self, attempt: int, origin: Origin | None, hold: int | None = None) -> Awaitable[Leaf]:
        """The attempt, scored; `hold` is the turn before which it stops."""


async def grow_tree(
    config: TreeConfig, attempts: int, first: int, draw: int, play: Play
) -> list[Trajectory]:
    """The attempts `first` and following, in order: at most `attempts`, fewer when the budget is spent."""
    leaves = await at_once([play(first + i, None) for i in range(min(config.roots, attempts))])
    taken: Counter[Point] = Counter()
    for number in range(config.rounds):
        count = math.ceil((attempts - len(leaves)) / (config.rounds - number))
        count = min(count, _affordable(config, leaves))
        if count < 1:
            break
        points = choose_points(config, leaves, taken, count, key(draw, number))
        taken.update(point for point in points if point is not None)
        origins = [
            None
            if point is None
            else Origin(leaves[point.leaf].trajectory, leaves[point.leaf].record, point.turn)
            for point in points
        ]
        start = first + len(leaves)
        leaves += await at_once([play(start + i, origin) for i, origin in enumerate(origins)])
    return [leaf.trajectory for leaf in leaves]


def leaf_weights(trajectories: Sequence[Trajectory]) -> dict[int, float]:
    """The share of the policy's own attempts that each leaf of a group stands for, by attempt; they sum to 1.

    The prompt's share is divided among the attempts that began there, and at every branching among the ways
    that go on: the attempt that was branched off, and its branches from that turn. So the weighted mean over
    the leaves estimates what the policy earns, whatever is branched more often; where the choice of
    branchings looked at nothing behind them, without bias. In a group without branches all weights are equal.
    """
    below: dict[int, dict[int, list[int]]] = {}
    roots: list[int] = []
    there = {one.attempt for one in trajectories}
    for one in trajectories:
        branch = one.branch
        if branch is None or not branch.segments or branch.attempt not in there:
            roots.append(one.attempt)
        else:
            below.setdefault(branch.attempt, {}).setdefault(branch.segments, []).append(one.attempt)
    weights: dict[int, float] = {}
    waiting = [(attempt, 1 / len(roots)) for attempt in roots]
    while waiting:
        attempt, weight = waiting.pop()
        for place in sorted(below.get(attempt, {})):
            branches = below[attempt][place]
            weight /= len(branches) + 1
            waiting += [(branch, weight) for branch in branches]
        weights[attempt] = weight
    return weights


def _affordable(config: TreeConfig, leaves: Sequence[Leaf]) -> int:
    """How many more attempts the budget pays for, each taken to cost what those so far did on average."""
    most = 2**31
    for limit, spent in zip((config.max_tokens, config.max_calls), spent_by(leaves), strict=True):
        if limit is not None:
            left, mean = limit - spent, max(1.0, spent / len(leaves))
            most = min(most, math.ceil(left / mean))
    return most


def spent_by(leaves: Sequence[Leaf]) -> tuple[int, int]:
    spent = [leaf.spent for leaf in leaves]
    return sum(tokens for tokens, _ in spent), sum(calls for _, calls in spent)


def choose_points(
    config: TreeConfig, leaves: Sequence[Leaf], taken: Counter[Point], count: int, draw: int
) -> list[Point | None]:
    """Where the next `count` branches begin; None, the prompt, where no attempt has a second turn."""
    points = _points(leaves)
    if not points:
        return [None] * count
    wanted = math.ceil(count / config.branches)
    order = _ranked(config, leaves, points, taken, draw)
    if config.branch == "beam":
        order = order[: config.beam]
    chosen = [order[i % len(order)] for i in range(wanted)]  # a turn may be chosen again
    return [chosen[i // config.branches] for i in range(count)]


def _points(leaves: Sequence[Leaf]) -> list[Point]:
    """Every turn but first ones, each once: with the attempt that sampled it."""
    points = []
    for number, leaf in enumerate(leaves):
        one, record = leaf.trajectory, leaf.record
        if one.failure is not None or one.stop is StopReason.ABORTED:
            continue
        first = 1 if record.origin is None else record.origin.turn + 1
        last = min(len(record.called), sum(1 for _ in one.sequences[0].actions))
        points += [Point(number, turn) for turn in range(first, last)]
    return points


def _ranked(
    config: TreeConfig,
    leaves: Sequence[Leaf],
    points: Sequence[Point],
    taken: Counter[Point],
    draw: int,
) -> list[Point]:
    mixed = [points[i] for i in shuffled(len(points), key=draw)]  # ties are broken by chance
    if config.branch == "entropy":
        return sorted(
            mixed, key=lambda p: config.penalty * taken[p] - uncertainty(_action(leaves, p, p.turn))
        )
    if config.branch == "success":
        good = [point for point in mixed if is_success(leaves[point.leaf].trajectory)]
        return good or mixed
    if config.branch == "beam":
        return sorted(mixed, key=lambda p: _value(leaves, p), reverse=True)
    return mixed


def uncertainty(action: Segment) -> float:
    """The mean of -log p over the tokens that were sampled: an estimate of the turn's entropy per token."""
    logprobs = action.logprobs or [0.0]
    return -sum(logprobs) / len(logprobs)


def _value(leaves: Sequence[Leaf], point: Point) -> tuple[float, float, int]:
    """What a prefix promises: the mean reward of the attempts that have it, what it was paid, its depth."""
    last = _action(leaves, point, point.turn - 1)
    below = [
        leaf.trajectory.reward
        for leaf in leaves
        if leaf.trajectory.reward is not None and any(one is last for one in leaf.trajectory.actions)
    ]
    paid = sum(_action(leaves, point, turn).reward or 0.0 for turn in range(point.turn))
    return sum(below) / max(1, len(below)), paid, point.turn


def _action(leaves: Sequence[Leaf], point: Point, turn: int) -> Segment:
    return leaves[point.leaf].trajectory.actions[turn]


async def at_once(playing: Sequence[Awaitable[Leaf]]) -> list[Leaf]:
    """All of them; when one raises, or the caller is cancelled, the others are stopped first."""
    running = [asyncio.ensure_future(one) for one in playing]
    try:
        return list(await asyncio.gather(*running))
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
