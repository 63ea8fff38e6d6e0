"""Search over turns (TSR): at each turn several candidates; the best prefixes are held and gone on from.

    turn t:  for each of the `beam` prefixes that were kept, `candidates` branches sample one action each, from
             the prefix's forked KV, and do it in a forked (or replayed) environment; each is then held
    score:   the recipe's rewards, as if the episode ended there: those of the environment, of a process reward
             model or judge, or a value, by the name of any reward (`tree.score`)
    keep:    the best `beam` of all, finished episodes among them; of equal actions at one prefix, one

It ends when the best are all finished. What was not kept stays in the group, with its tokens and
log-probabilities, as aborted: it has no outcome, so it is in no loss and no baseline, but its score tells how
far the search has selected (`selections`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ludus.core.random import key, shuffled
from ludus.core.trajectory import Trajectory
from ludus.rollouts.branching import Origin
from ludus.rollouts.tree import Leaf, Play, TreeConfig, at_once, spent_by

SEARCH_SCORE = "search/score"
_CLOSE = 1e-9


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
        new = await at_once([play(start + i, origin, depth) for i, origin in enumerate(origins)])
        leaves += new
        done += [one for one in new if one.trajectory.is_trainable]
        held = _different([one for one in new if one.record.score is not None])
        best = _ranked([*held, *done], key(draw, depth))[: config.beam]
        beam = [one for one in best if one.record.score is not None]
    return [leaf.trajectory for leaf in leaves]


def _different(held: Sequence[Leaf]) -> list[Leaf]:
    """Of candidates that took the same action at the same prefix, the first."""
    found: dict[tuple[int, tuple[int, ...]], Leaf] = {}
    for one in held:
        parent = -1 if one.record.origin is None else one.record.origin.trajectory.attempt
        found.setdefault((parent, tuple(one.trajectory.actions[-1].tokens)), one)
    return list(found.values())


def _ranked(leaves: Sequence[Leaf], draw: int) -> list[Leaf]:
    """The best first. Of equals those that may still become better, and among these by chance."""
    mixed = [leaves[i] for i in shuffled(len(leaves), key=draw)]
    return sorted(mixed, key=lambda one: (-one.score, one.record.score is None))


@dataclass(frozen=True, slots=True)
class Selection:
    """What the search has done to one finished attempt."""

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
