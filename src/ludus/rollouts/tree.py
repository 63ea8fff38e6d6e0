"""A group as a tree: a few attempts from the prompt, then branches from turns that are worth another try.

    random    any turn (Tree-GRPO, arXiv:2509.21240)
    entropy   where the model was least sure: the largest mean -log p of an action, less a penalty for each
              branch that the turn has already (AT2PO; ARPO, arXiv:2507.19849)
    success   turns of attempts that succeeded (after GRPO-RoC): what could have been done better there?
    beam      the prefixes with the highest mean reward of the attempts below them (TSR)
    turns     no attempts at first, but single actions: a search (TSR; `search_turns`)

Which attempts end first decides nothing: a round begins when the one before has ended, and every draw has a
key of its own. All leaves are learned from and are in the baseline, the bad ones too.

The search over turns, at turn t:

    sample   for each of the `beam` prefixes that were kept, `candidates` branches sample one action each, from
             the prefix's forked KV, and do it in a forked (or replayed) environment; each is then held
    score    the recipe's rewards, as if the episode ended there: those of the environment, of a process reward
             model or judge, or a value, by the name of any reward (`tree.score`)
    keep     the best `beam` of all, finished episodes among them; of equal actions at one prefix, one

It ends when the best are all finished. What was not kept stays in the group, with its tokens and
log-probabilities, as aborted: it has no outcome, so it is in no loss and no baseline, but its score tells how
far the search has selected (`selections`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from pydantic import Field

from ludus.core.config import Config
from ludus.core.random import key, shuffled
from ludus.core.trajectory import Segment, StopReason, Trajectory, is_success
from ludus.remote.limits import run_all
from ludus.rollouts.branching import EpisodeRecord, Origin

SEARCH_SCORE = "search/score"
_CLOSE = 1e-9


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
    """Tool calls that a group may make, shared ones counted once."""
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
        """Its reward, or its score when it was held."""
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
    leaves = await run_all([play(first + i, None) for i in range(min(config.roots, attempts))])
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
        leaves += await run_all([play(start + i, origin) for i, origin in enumerate(origins)])
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


# Search over turns


async def search_turns(config: TreeConfig, first: int, draw: int, play: Play) -> list[Trajectory]:
    """Every candidate as an attempt, `first` and following; those that were not gone on from are aborted.

    When the budget of tokens or calls is spent, the best prefix is played to its end without further search.
    """
    leaves: list[Leaf] = []
    done: list[Leaf] = []
    beam: list[Leaf | None] = [None]  # None is the prompt
    depth = 0
    while beam:
        is_spent = any(
            limit is not None and spent >= limit
            for limit, spent in zip((config.max_tokens, config.max_calls), spent_by(leaves), strict=True)
        )
        width, candidates = (1, 1) if is_spent else (config.beam, config.candidates)
        origins = [
            None if one is None else Origin(one.trajectory, one.record, depth)
            for one in beam[:width]
            for _ in range(candidates)
        ]
        start = first + len(leaves)
        depth += 1
        new = await run_all([play(start + i, origin, depth) for i, origin in enumerate(origins)])
        leaves += new
        done += [one for one in new if one.trajectory.is_trainable]
        held = _different([one for one in new if one.record.score is not None])
        best = _best_first([*held, *done], key(draw, depth))[: config.beam]
        beam = [one for one in best if one.record.score is not None]
    return [leaf.trajectory for leaf in leaves]


def _different(held: Sequence[Leaf]) -> list[Leaf]:
    """The held leaves without duplicates: of equal actions at one prefix, the first."""
    found: dict[tuple[int, tuple[int, ...]], Leaf] = {}
    for one in held:
        parent = -1 if one.record.origin is None else one.record.origin.trajectory.attempt
        found.setdefault((parent, tuple(one.trajectory.actions[-1].tokens)), one)
    return list(found.values())


def _best_first(leaves: Sequence[Leaf], draw: int) -> list[Leaf]:
    """The best first. Of equals those that may still become better, and among these by chance."""
    mixed = [leaves[i] for i in shuffled(len(leaves), key=draw)]
    return sorted(mixed, key=lambda one: (-one.score, one.record.score is None))


@dataclass(frozen=True, slots=True)
class Selection:
    """Bookkeeping of the search for one finished attempt."""

    weight: float
    """How much likelier the policy is to play it than the search is to find it: the product over its turns of
    p(s) / (F(s)^k - F(s-)^k), with p and F of the scores of the k candidates there, so a rough estimate."""
    gain: float
    """The sum over its turns of (score - mean score of the candidates there). The candidates of a turn are the
    policy's own, so the reward less this is what the policy would have had on average without choosing."""


def selections(trajectories: Sequence[Trajectory]) -> dict[int, Selection]:
    """By attempt, for each that was played to its end; siblings that were not kept must be there as well."""
    by_attempt = {one.attempt: one for one in trajectories}
    beside: dict[tuple[int, int], list[float]] = {}
    for one in trajectories:
        if one.failure is None:
            beside.setdefault(_place(one), []).append(_score(one))
    found: dict[int, Selection] = {}
    for leaf in trajectories:
        if not leaf.is_trainable:
            continue
        weight, gain = 1.0, 0.0
        at: Trajectory | None = leaf
        while at is not None:
            score, scores = _score(at), beside[_place(at)]
            weight *= best_of_weight(score, scores)
            gain += score - sum(scores) / len(scores)
            at = by_attempt.get(at.branch.attempt) if at.branch and at.branch.segments else None
        found[leaf.attempt] = Selection(weight, gain)
    return found


def best_of_weight(score: float, scores: Sequence[float]) -> float:
    """p(s) / (F(s)^N - F(s-)^N): how much likelier the policy is to reach this score than the best of N is."""
    count = len(scores)
    below = sum(other < score - _CLOSE for other in scores) / count
    upto = sum(other <= score + _CLOSE for other in scores) / count
    return (upto - below) / max(_CLOSE, upto**count - below**count)


def _place(one: Trajectory) -> tuple[int, int]:
    """The prefix that a candidate was sampled at."""
    if one.branch is None or not one.branch.segments:
        return -1, 0
    return one.branch.attempt, one.branch.segments


def _score(one: Trajectory) -> float:
    return one.counts.get(SEARCH_SCORE, one.reward or 0.0)
