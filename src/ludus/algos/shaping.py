"""GRPO-RoC's resampling on correct: play too many attempts, keep a telling share of them.

Of a group's n attempts, `keep` stay. The correct and the incorrect ones keep their proportion. Incorrect ones
are drawn evenly, so that all ways of failing are seen; correct ones are drawn with probability inversely
proportional to their penalty, so that a right answer that was stumbled upon is imitated less.

    weight of a correct attempt = 1 / (penalty + floor)
    penalty                     = errors / calls (0.5 without a call) + min(1, surplus answers / turns)

Where both kinds are there and two or more stay, each keeps at least one: a group of equal rewards would
teach nothing. The floor keeps a clean attempt from having an endless weight; the paper leaves it open.

Shang et al., "rStar2-Agent: Agentic Reasoning Technical Report", 2025, arXiv:2508.20722.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from ludus.core.random import uniform

FLOOR = 0.1
"""How much likelier a clean attempt can be: 11 times one with penalty 1."""


def resample_on_correct(
    correct: Sequence[bool], penalties: Sequence[float], *, keep: int, key: int, floor: float = FLOOR
) -> list[int]:
    """The numbers of the attempts that stay, in order; a function of its arguments alone.

    Args:
        correct: Whether each attempt of the group succeeded.
        penalties: How untidy each was, from 0; used for the correct ones.
        keep: How many stay; all of them when there are no more.
        key: Decides the draw (`ludus.core.random.key`).
        floor: Added to every penalty before it divides.
    """
    if len(correct) != len(penalties):
        raise ValueError(f"{len(correct)} attempts were given {len(penalties)} penalties")
    if keep < 0 or floor <= 0 or any(not penalty >= 0 for penalty in penalties):
        raise ValueError("keep and penalties must be 0 or above, and floor above 0")
    right = [i for i, good in enumerate(correct) if good]
    wrong = [i for i, good in enumerate(correct) if not good]
    if keep >= len(correct):
        return list(range(len(correct)))
    some = _share(len(right), len(wrong), keep)
    weights = {i: 1 / (penalties[i] + floor) for i in right}
    chosen = _drawn(right, weights, some, key)
    return sorted(chosen + _drawn(wrong, dict.fromkeys(wrong, 1.0), keep - some, key))


def roc_penalty(*, calls: int, errors: int, answers: int, turns: int) -> float:
    """The paper's penalty: the share of tool calls that failed, and answers beyond the first per turn."""
    failing = errors / calls if calls else 0.5
    return failing + min(1.0, max(0, answers - 1) / max(1, turns))


def _share(right: int, wrong: int, keep: int) -> int:
    """How many of the `keep` are correct: in proportion, but one of each kind where that is possible."""
    some = math.floor(keep * right / (right + wrong) + 0.5)
    if keep >= 2:
        some = max(some, min(1, right))
        some = min(some, keep - min(1, wrong))
    return max(min(some, right), keep - wrong)


def _drawn(numbers: Sequence[int], weights: dict[int, float], count: int, key: int) -> list[int]:
    """`count` of the numbers without replacement, likelier with more weight.

    The smallest of exponential waiting times with the weights as rates: Efraimidis and Spirakis, "Weighted
    random sampling with a reservoir", 2006.
    """
    waiting = {i: -math.log1p(-uniform(key, i)) / weights[i] for i in numbers}
    return sorted(numbers, key=lambda i: (waiting[i], i))[:count]


def overlong_penalty(length_N: Tensor, *, longest: int, buffer: int) -> Tensor:
    """DAPO's overlong shaping: a price for coming close to the longest length, rising over a buffer.

                  0                                   length <= longest - buffer
        price  =  (longest - buffer - length) / buffer    up to the longest
                  -1                                  beyond

    Added to the total reward, it tells a policy that it is running out of room before it is cut.

    Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", 2025, arXiv:2503.14476,
    equation 13.
    """
    if not 0 < buffer <= longest:
        raise ValueError(f"the buffer must lie between 1 and the longest length {longest}, not {buffer}")
    return ((longest - buffer - length_N) / buffer).clamp(-1, 0)
