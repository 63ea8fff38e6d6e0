"""How sure one can be of a measurement: pass@k, intervals, paired tests. Pure; numpy only.

The unit is the task. Attempts at one task resemble each other, so intervals are over whole tasks and
not over single episodes: ten attempts at each of twenty tasks are twenty observations, not two hundred.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_DRAWN_AT_ONCE = 2_000_000
"""Bounds the memory of a permutation test: this many signs are drawn at a time."""
_LARGEST_EXACT_SUM = 200_000
_MOST_ENUMERATED = 20
_SIGN_FLIPS = 100_000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number, and the interval it is known within; `low` and `high` are None where nothing is known."""

    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.3f}"
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def pass_at_k(attempts: int, successes: int, k: int) -> float:
    """The chance that at least one of `k` attempts succeeds, estimated without bias from `attempts`.

    1 - C(n - c, k) / C(n, k), the share of subsets of k attempts with a success among them (Chen et al.,
    "Evaluating large language models trained on code", 2021, arXiv:2107.03374).
    """
    _check_counts(attempts, successes, k)
    return 1.0 - math.comb(attempts - successes, k) / math.comb(attempts, k)


def all_at_k(attempts: int, successes: int, k: int) -> float:
    """The chance that all of `k` attempts succeed, estimated without bias: C(c, k) / C(n, k).

    Known as pass^k: how far one can rely on an agent (Yao et al., "τ-bench", 2024, arXiv:2406.12045).
    """
    _check_counts(attempts, successes, k)
    return math.comb(successes, k) / math.comb(attempts, k)


def average_at_k(values: Sequence[float], k: int) -> float:
    if not 1 <= k <= len(values):
        raise ValueError(f"average@{k} needs at least {max(k, 1)} attempts, and there are {len(values)}")
    return sum(values[:k]) / k


def mean_interval(
    totals: Sequence[float],
    counts: Sequence[float] | None = None,
    *,
    level: float = 0.95,
    within: tuple[float, float] | None = None,
) -> Estimate:
    """The mean over tasks, with an interval of Student's t.

    `totals` are one number for each task; with `counts` the mean is sum(totals) / sum(counts), which
    weighs every episode the same where tasks have lost some.

    Where the bounds `within` which a single value lies are known, the interval is computed with one more task
    at either bound (Agresti and Caffo 2000, for shares): a few tasks that have all come out alike, as near 0
    and 1 they do, say little of how far apart others are. Where all sit on one of the bounds, it is the exact
    one for a share (Clopper and Pearson 1934). One task alone has no interval; nor have tasks without bounds
    that are all the same. tests/observe/test_interval_coverage.py measures how often it holds the truth.
    """
    tops = np.asarray(totals, dtype=np.float64)
    bottoms = np.ones_like(tops) if counts is None else np.asarray(counts, dtype=np.float64)
    if tops.ndim != 1 or tops.size == 0 or tops.shape != bottoms.shape:
        raise ValueError("an interval needs a total (and a count, if any) for at least one task")
    if not 0 < level < 1 or bottoms.min() <= 0:
        raise ValueError("the level lies between 0 and 1, and counts are positive")
    value = float(tops.sum() / bottoms.sum())
    means, weights = tops / bottoms, bottoms / bottoms.mean()
    is_same = np.ptp(means) == 0
    if tops.size == 1 or (is_same and within is None):
        return Estimate(value)
    if within is None:
        return Estimate(value, *_t_interval(means, weights, level, tops.size))
    bottom, top = within
    if is_same and value in within:
        reach = (top - bottom) * (1 - ((1 - level) / 2) ** (1 / tops.size))
        return Estimate(value, *((bottom, bottom + reach) if value == bottom else (top - reach, top)))
    means, weights = np.append(means, within), np.append(weights, (1.0, 1.0))
    low, high = _t_interval(means, weights, level, tops.size)
    return Estimate(value, max(bottom, low), min(top, high))


def _t_interval(means: Floats, weights: Floats, level: float, tasks: int) -> tuple[float, float]:
    """Student's t interval around the weighted mean, with the degrees of freedom of `tasks`."""
    mean = float((weights * means).sum() / weights.sum())
    spread = float(((weights * (means - mean)) ** 2).sum()) / (len(means) - 1)
    reach = t_quantile((1 + level) / 2, tasks - 1) * math.sqrt(spread / len(means))
    return mean - reach, mean + reach


def t_quantile(share: float, freedom: int) -> float:
    """Below which a share of Student's t with so many degrees of freedom lies.

    Exact for 1 and 2, otherwise by an expansion in 1 / freedom around the normal's (Abramowitz and Stegun
    26.7.5), which has an error below 0.3% at a share of 0.975.
    """
    if freedom == 1:
        return math.tan(math.pi * (share - 0.5))
    if freedom == 2:
        return (2 * share - 1) / math.sqrt(2 * share * (1 - share))
    z = NormalDist().inv_cdf(share)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / freedom**power for power, term in enumerate(terms, start=1))


@dataclass(frozen=True, slots=True)
class PairedTest:
    """Two models on the same tasks: the mean difference by task, and how likely chance alone is.

    `p_flip` is the sign-flip permutation test of the mean difference, two-sided; `p_sign` the sign test,
    which counts wins and losses and ignores how large they are. `is_exact` says whether `p_flip` covers
    every assignment of signs, as against a random sample of them.
    """

    difference: Estimate
    wins: int
    losses: int
    ties: int
    p_flip: float
    p_sign: float
    is_exact: bool


def paired_test(
    first: Sequence[Fraction | float],
    second: Sequence[Fraction | float],
    *,
    level: float = 0.95,
) -> PairedTest:
    """Compare two models by their means on each task, `first` minus `second`, in the same order of tasks.

    Means given as fractions (3 of 8 attempts) are compared exactly, for any number of tasks.
    """
    if len(first) != len(second) or not first:
        raise ValueError("a paired comparison needs the same tasks, at least one, on both sides")
    differences = [a - b for a, b in zip(first, second, strict=True)]
    p_flip, is_exact = flip_test(differences)
    wins, losses = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    floats = [float(difference) for difference in differences]
    return PairedTest(
        difference=mean_interval(floats, level=level),
        wins=wins,
        losses=losses,
        ties=len(differences) - wins - losses,
        p_flip=p_flip,
        p_sign=sign_test(wins, losses),
        is_exact=is_exact,
    )


def sign_test(wins: int, losses: int) -> float:
    """How likely a split at least this uneven is when both sides are even; ties are left out before."""
    if wins < 0 or losses < 0:
        raise ValueError("wins and losses are counts")
    played = wins + losses
    tail = sum(math.comb(played, count) for count in range(min(wins, losses) + 1))
    return min(1.0, float(Fraction(2 * tail, 2**played)))


def flip_test(differences: Sequence[Fraction | float], *, seed: int = 0) -> tuple[float, bool]:
    """How likely a sum at least this far from 0 is when every difference could have had either sign.

    Two-sided, and whether the answer is exact. Fractions with a small common denominator are counted out
    for any number of tasks, up to 20 other numbers by listing all signs, more of them by drawing signs.
    """
    if not differences or not all(math.isfinite(difference) for difference in differences):
        raise ValueError("a permutation test needs at least one difference, all of them finite")
    whole = _whole_numbers(differences)
    if whole is not None:
        return _counted_out([abs(number) for number in whole if number], abs(sum(whole))), True
    sizes = np.asarray([abs(float(difference)) for difference in differences if difference != 0])
    observed = abs(math.fsum(float(difference) for difference in differences))
    slack = 1e-12 * float(sizes.sum())  # sums of floats in another order differ in the last bits
    if sizes.size <= _MOST_ENUMERATED:
        sums = np.zeros(1)
        for size in sizes:
            sums = np.concatenate([sums + size, sums - size])
        return float(np.mean(np.abs(sums) >= observed - slack)), True
    return _drawn_flips(sizes, observed - slack, seed), False


def _whole_numbers(differences: Sequence[Fraction | float]) -> list[int] | None:
    """The differences as multiples of a common unit, where they are fractions and these are countable."""
    fractions = [difference for difference in differences if isinstance(difference, Fraction)]
    if len(fractions) != len(differences):
        return None
    unit = math.lcm(*(fraction.denominator for fraction in fractions))
    whole = [int(fraction * unit) for fraction in fractions]
    shared = math.gcd(*whole) or 1
    whole = [number // shared for number in whole]
    return whole if sum(map(abs, whole)) <= _LARGEST_EXACT_SUM else None


def _counted_out(sizes: Sequence[int], observed: int) -> float:
    """The distribution of the sum of ±sizes, one size after the other; its tails from `observed` on."""
    reach = sum(sizes)
    chances = np.zeros(2 * reach + 1)
    chances[reach] = 1.0
    for size in sizes:
        moved = np.zeros_like(chances)
        moved[size:] += chances[:-size] / 2
        moved[:-size] += chances[size:] / 2
        chances = moved
    if observed == 0:
        return 1.0
    return min(1.0, float(chances[: reach - observed + 1].sum() + chances[reach + observed :].sum()))


def _drawn_flips(sizes: Floats, least: float, seed: int) -> float:
    generator = np.random.default_rng(seed)
    at_once = max(1, _DRAWN_AT_ONCE // sizes.size)
    extreme = 0
    for start in range(0, _SIGN_FLIPS, at_once):
        count = min(at_once, _SIGN_FLIPS - start)
        signs = generator.integers(0, 2, size=(count, sizes.size)) * 2 - 1
        extreme += int((np.abs(signs @ sizes) >= least).sum())
    return (extreme + 1) / (_SIGN_FLIPS + 1)  # what was seen is one of the possible assignments


def _check_counts(attempts: int, successes: int, k: int) -> None:
    if not 0 <= successes <= attempts:
        raise ValueError(f"{successes} successes of {attempts} attempts make no sense")
    if not 1 <= k <= attempts:
        raise ValueError(f"k = {k} needs at least {max(k, 1)} attempts, and there are {attempts}")
