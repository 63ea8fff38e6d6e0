"""Advantages by nested loops, straight from the papers' formulas. No tensors, no packing, no vectorising.

Each function takes attempts (`ludus.algos.Attempt`, read as plain data) and returns one list per attempt with
one number per token.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

Tokens = list[list[float]]


def said(attempt: Any) -> list[int]:
    """The places of the tokens that the model said."""
    places, at = [], attempt.prompt
    for turn in attempt.turns:
        places += range(at, at + turn.action)
        at += turn.action + turn.observation
    return places


def length(attempt: Any) -> int:
    return attempt.prompt + sum(turn.action + turn.observation for turn in attempt.turns)


def everywhere(attempts: list[Any], number: Callable[[int], float]) -> Tokens:
    """The number of attempt i at each token that it said, 0 at the others."""
    return [
        [number(i) if place in said(attempt) else 0.0 for place in range(length(attempt))]
        for i, attempt in enumerate(attempts)
    ]


def total(attempt: Any) -> float:
    """The reward, and the penalties of what was said."""
    return attempt.reward + sum(attempt.penalties[place] for place in said(attempt) if attempt.penalties)


def siblings(attempts: list[Any], i: int) -> list[int]:
    return [j for j, other in enumerate(attempts) if other.group == attempts[i].group]


def spread_of(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def standardized(value: float, values: list[float], epsilon: float) -> float:
    if all(v == values[0] for v in values):
        return 0.0
    return (value - statistics.fmean(values)) / (spread_of(values) + epsilon)


def grpo(attempts: list[Any]) -> Tokens:
    """A_i = (r_i - mean(r)) / (std(r) + 1e-6) over the group."""
    return everywhere(
        attempts,
        lambda i: standardized(
            total(attempts[i]), [total(attempts[j]) for j in siblings(attempts, i)], 1e-6
        ),
    )


def dr_grpo(attempts: list[Any]) -> Tokens:
    """A_i = r_i - mean(r) over the group."""
    return everywhere(
        attempts,
        lambda i: (
            total(attempts[i]) - statistics.fmean(total(attempts[j]) for j in siblings(attempts, i))
        ),
    )


def rloo(attempts: list[Any]) -> Tokens:
    """A_i = r_i - mean of the others in the group; 0 where there are no others."""

    def advantage(i: int) -> float:
        others = [total(attempts[j]) for j in siblings(attempts, i) if j != i]
        return total(attempts[i]) - statistics.fmean(others) if others else 0.0

    return everywhere(attempts, advantage)


def reinforce(attempts: list[Any]) -> Tokens:
    """A_i = r_i - mean over the set."""
    return everywhere(
        attempts,
        lambda i: (
            total(attempts[i])
            - statistics.fmean(total(other) for other in attempts if other.set == attempts[i].set)
        ),
    )


def whitened(attempts: list[Any], values: Tokens) -> Tokens:
    """(x - mean) / (std + 1e-8) over all said tokens of the attempts of one set, token by token."""
    result = [[0.0] * length(attempt) for attempt in attempts]
    for i, attempt in enumerate(attempts):
        pool = [
            values[j][place]
            for j, other in enumerate(attempts)
            if other.set == attempt.set
            for place in said(other)
        ]
        for place in said(attempt):
            result[i][place] = standardized(values[i][place], pool, 1e-8)
    return result


def token_rewards(attempt: Any) -> dict[int, float]:
    """By place: a turn's pay on its last token, the rest of the total on the last token said."""
    rewards = {place: attempt.penalties[place] if attempt.penalties else 0.0 for place in said(attempt)}
    paid, at = 0.0, attempt.prompt
    for turn in attempt.turns:
        if turn.action:
            rewards[at + turn.action - 1] += turn.reward
            paid += turn.reward
        at += turn.action + turn.observation
    if rewards:
        rewards[max(rewards)] += attempt.reward - paid
    return rewards


def reinforce_pp(attempts: list[Any], discount: float) -> Tokens:
    """G_t = sum over later said tokens of discount^(steps) r, then whitened over the set."""
    returns = [[0.0] * length(attempt) for attempt in attempts]
    for i, attempt in enumerate(attempts):
        rewards, places = token_rewards(attempt), said(attempt)
        for first, place in enumerate(places):
            returns[i][place] = sum(
                discount**steps * rewards[later] for steps, later in enumerate(places[first:])
            )
    return whitened(attempts, returns)


def reinforce_pp_baseline(attempts: list[Any]) -> Tokens:
    """The reward less the group's mean, then whitened over the set."""
    return whitened(attempts, dr_grpo(attempts))


def turn_at(attempt: Any, place: int) -> int:
    """The turn during which a token was said, or after which it was heard; silent turns are no turns."""
    at, number = attempt.prompt, -1
    for turn in attempt.turns:
        at += turn.action + turn.observation
        number += turn.action > 0
        if place < at:
            return number
    raise AssertionError("past the end")


def gae(
    attempts: list[Any],
    *,
    discount: float,
    lam: float,
    discount_per: str = "token",
    lam_per: str = "token",
    bootstrap: bool = False,
    skip_observations: bool = True,
) -> tuple[Tokens, Tokens]:
    """A_t = sum over l of (gamma lambda)^l delta_(t+l), delta_t = r_t + gamma V_(t+1) - V_t.

    t counts the steps: what was said, or everything from the first to the last said token. The double sum is
    written out, so that it shares no recursion with anything. Returns (advantages, value targets).
    """
    advantages = [[0.0] * length(attempt) for attempt in attempts]
    targets = [[0.0] * length(attempt) for attempt in attempts]
    for i, attempt in enumerate(attempts):
        places = said(attempt)
        if not places:
            continue
        steps = places if skip_observations else list(range(places[0], places[-1] + 1))
        rewards = token_rewards(attempt)

        def factor(number: float, per: str, k: int, attempt: Any = attempt, steps: Any = steps) -> float:
            """What the step from k to k + 1 costs."""
            if per == "token" or k + 1 == len(steps):
                return number
            return number if turn_at(attempt, steps[k]) != turn_at(attempt, steps[k + 1]) else 1.0

        deltas = []
        for k, place in enumerate(steps):
            if k + 1 < len(steps):
                later = attempt.values[steps[k + 1]]
            elif bootstrap and attempt.truncated:
                deltas.append(0.0)  # the value of the last state stands for what comes after
                continue
            else:
                later = 0.0
            gamma = factor(discount, discount_per, k)
            deltas.append(rewards.get(place, 0.0) + gamma * later - attempt.values[place])
        for k, place in enumerate(steps):
            decay = 1.0
            for m in range(k, len(steps)):
                advantages[i][place] += decay * deltas[m]
                decay *= factor(discount, discount_per, m) * factor(lam, lam_per, m)
            targets[i][place] = advantages[i][place] + attempt.values[place]
    return advantages, targets


def turn_returns(attempt: Any, discount: float) -> list[float]:
    """R_u = sum over k >= u of discount^(k - u) r_k, where r_k is what landed on the tokens of turn k."""
    tokens = token_rewards(attempt)
    rewards = [
        sum(reward for place, reward in tokens.items() if turn_at(attempt, place) == number)
        for number in range(sum(turn.action > 0 for turn in attempt.turns))
    ]
    return [
        sum(discount ** (k - u) * rewards[k] for k in range(u, len(rewards)))
        for u in range(len(rewards))
    ]


def by_turn(attempts: list[Any], number: Callable[[int, int], float]) -> Tokens:
    result = [[0.0] * length(attempt) for attempt in attempts]
    for i, attempt in enumerate(attempts):
        at = attempt.prompt
        spoken = 0
        for turn in attempt.turns:
            for place in range(at, at + turn.action):
                result[i][place] = number(i, spoken)
            spoken += turn.action > 0
            at += turn.action + turn.observation
    return result


def turn_grpo(attempts: list[Any], discount: float, normalise: bool) -> Tokens:
    """Turn u against every sibling once: at its turn u, or at its last turn if it was over before.

    A sibling that never acted stands for itself with its total.
    """
    returns = [turn_returns(attempt, discount) for attempt in attempts]

    def at(j: int, u: int) -> float:
        return returns[j][min(u, len(returns[j]) - 1)] if said(attempts[j]) else total(attempts[j])

    def advantage(i: int, u: int) -> float:
        pool = [at(j, u) for j in siblings(attempts, i)]
        if normalise:
            return standardized(returns[i][u], pool, 1e-6)
        return returns[i][u] - statistics.fmean(pool)

    return by_turn(attempts, advantage)


def anchors(attempt: Any) -> list[int]:
    return [turn.anchor for turn in attempt.turns if turn.action]


def gigpo(attempts: list[Any], discount: float, step_weight: float, normalise: bool) -> Tokens:
    """A = A_episode + omega A_step; steps are compared where the group stood in the same state."""
    returns = [turn_returns(attempt, discount) for attempt in attempts]

    def compared(value: float, pool: list[float]) -> float:
        return standardized(value, pool, 1e-6) if normalise else value - statistics.fmean(pool)

    def advantage(i: int, u: int) -> float:
        group = siblings(attempts, i)
        episode = compared(total(attempts[i]), [total(attempts[j]) for j in group])
        anchor = anchors(attempts[i])[u]
        if anchor < 0:
            return episode
        pool = [
            returns[j][k]
            for j in group
            for k, other in enumerate(anchors(attempts[j]))
            if other == anchor
        ]
        return episode + step_weight * compared(returns[i][u], pool)

    return by_turn(attempts, advantage)


def overlong(tokens: int, longest: int, buffer: int) -> float:
    """DAPO, equation 13."""
    if tokens <= longest - buffer:
        return 0.0
    if tokens <= longest:
        return ((longest - buffer) - tokens) / buffer
    return -1.0
