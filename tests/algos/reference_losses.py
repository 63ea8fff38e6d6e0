"""Losses, divergences and averages by plain arithmetic, one token at a time, straight from the formulas.

Where a formula stops a gradient, the reference takes the stopped quantity as an argument of its own: `held` is
the value of the log-probability that the gradient does not see. Differentiating in `new` alone, by finite
differences, then gives the gradient that the formula asks for.
"""

from __future__ import annotations

import math


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def policy_gradient(new: float, old: float, advantage: float) -> float:
    """-A log p."""
    return -advantage * new


def clipped(new: float, old: float, advantage: float, low: float, high: float) -> float:
    """-min(w A, clip(w, 1 - low, 1 + high) A), w = p / p_old."""
    ratio = math.exp(new - old)
    return -min(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage)


def dual_clip(new: float, old: float, advantage: float, low: float, high: float, dual: float) -> float:
    """For A < 0: -max(min(w A, clip(w) A), c A); the clipped surrogate otherwise."""
    ratio = math.exp(new - old)
    inner = min(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage)
    return -max(inner, dual * advantage) if advantage < 0 else -inner


def cispo(new: float, held: float, old: float, advantage: float, low: float, high: float) -> float:
    """-sg(clip(w, 1 - low, 1 + high)) A log p."""
    return -clip(math.exp(held - old), 1 - low, 1 + high) * advantage * new


def gspo_objective(
    new: list[list[float]], old: list[list[float]], advantages: list[float], low: float, high: float
) -> float:
    """The paper's equation: the mean over sequences of -min(s A, clip(s) A), s the geometric-mean ratio."""
    terms = []
    for p, q, advantage in zip(new, old, advantages, strict=True):
        s = math.exp(sum(a - b for a, b in zip(p, q, strict=True)) / len(p))
        terms.append(-min(s * advantage, clip(s, 1 - low, 1 + high) * advantage))
    return sum(terms) / len(terms)


def gspo_token(
    new: float, held: float, sequence_ratio: float, advantage: float, low: float, high: float
) -> float:
    """GSPO-token: s_t = sg(s) p_t / sg(p_t), clipped as s is."""
    ratio = sequence_ratio * math.exp(new - held)
    return -min(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage)


def value_loss(value: float, old: float, target: float, bound: float | None) -> float:
    """max((V - R)^2, (clip(V, V_old - e, V_old + e) - R)^2) / 2."""
    free = (value - target) ** 2
    if bound is None:
        return free / 2
    return max(free, (clip(value, old - bound, old + bound) - target) ** 2) / 2


def k1(new: float, reference: float) -> float:
    return new - reference


def k2(new: float, reference: float) -> float:
    return (new - reference) ** 2 / 2


def k3(new: float, reference: float) -> float:
    return math.exp(reference - new) - (reference - new) - 1


def importance(
    old: list[float], behaviour: list[float], level: str, low: float, high: float, mode: str
) -> list[float]:
    """The weights of one sequence's tokens: the ratio p_old / p_behaviour, capped or cut out."""
    differences = [p - q for p, q in zip(old, behaviour, strict=True)]
    if level == "sequence":
        differences = [sum(differences)] * len(differences)
    ratios = [math.exp(d) for d in differences]
    if mode == "truncate":
        return [min(r, high) for r in ratios]
    return [r if low <= r <= high else 0.0 for r in ratios]


def weights(masks: list[list[bool]], aggregation: str, constant: int = 0) -> list[float]:
    """The weight of each token of each trajectory, laid end to end."""
    speaking = sum(any(mask) for mask in masks)
    actions = sum(sum(mask) for mask in masks)
    result = []
    for mask in masks:
        for said in mask:
            if not said:
                result.append(0.0)
            elif aggregation == "token":
                result.append(1 / actions)
            elif aggregation == "sequence":
                result.append(1 / speaking / sum(mask))
            elif aggregation == "sequence_sum":
                result.append(1 / speaking)
            else:
                result.append(1 / speaking / constant)
    return result
