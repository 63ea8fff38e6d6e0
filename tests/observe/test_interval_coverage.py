"""How often an interval of 20 tasks holds the truth, for tasks of many kinds; the seeds are fixed."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from ludus.observe import all_at_k, mean_interval, pass_at_k
from ludus.observe.statistics import t_quantile

TASKS, STUDIES = 20, 400
Draw = Callable[[np.random.Generator, int], np.ndarray]


def beta(a: float, b: float) -> Draw:
    return lambda generator, size: generator.beta(a, b, size)


def constant(chance: float) -> Draw:
    return lambda generator, size: np.full(size, chance)


def solved_or_not(share: float, high: float, low: float) -> Draw:
    return lambda generator, size: np.where(generator.random(size) < share, high, low)


CHANCES: dict[str, Draw] = {
    "even": beta(1, 1),
    "easy or hard": beta(0.5, 0.5),
    "easy": beta(5, 1),
    "hard": beta(1, 5),
    "nearly solved": beta(1, 0.2),
    "hopeless but for some": beta(0.2, 1),
    "rarely": beta(0.3, 3),
    "alike": constant(0.5),
    "alike and low": constant(0.05),
    "alike and high": constant(0.97),
    "one in five": solved_or_not(0.2, 0.9, 0.05),
    "all but one in ten": solved_or_not(0.9, 0.98, 0.1),
}
"""How likely tasks are solved by an attempt."""


@pytest.mark.parametrize("name", CHANCES)
@pytest.mark.parametrize(("attempts", "k"), [(1, 1), (4, 1), (4, 2), (4, 4), (8, 4)])
def test_intervals_of_pass_at_k_and_pass_to_the_k_cover_the_truth(
    name: str, attempts: int, k: int
) -> None:
    generator = np.random.default_rng([attempts, k, *name.encode()])
    chances = CHANCES[name](generator, 200_000)
    truths = {"pass@k": float(np.mean(1 - (1 - chances) ** k)), "pass^k": float(np.mean(chances**k))}
    estimates = {"pass@k": partial(pass_at_k, attempts), "pass^k": partial(all_at_k, attempts)}
    covered = dict.fromkeys(truths, 0)
    for _ in range(STUDIES):
        successes = generator.binomial(attempts, CHANCES[name](generator, TASKS))
        for kind, truth in truths.items():
            values = [estimates[kind](int(count), k) for count in successes]
            found = mean_interval(values, within=(0, 1))
            assert found.low is not None and found.high is not None
            covered[kind] += found.low <= truth <= found.high
    # three standard errors of a share of 0.95 over these studies
    least = 0.95 - 3 * math.sqrt(0.95 * 0.05 / STUDIES)
    assert {kind: count / STUDIES for kind, count in covered.items() if count < least * STUDIES} == {}


def test_the_interval_is_not_wide_for_its_own_sake() -> None:
    """Of tasks that are easy or hard, it is about as wide as the spread of the mean over studies asks for."""
    generator = np.random.default_rng(0)
    means, widths = [], []
    for _ in range(STUDIES):
        values = generator.binomial(4, generator.beta(0.5, 0.5, TASKS)) / 4
        found = mean_interval(values.tolist(), within=(0, 1))
        assert found.low is not None and found.high is not None
        means.append(found.value)
        widths.append(found.high - found.low)
    needed = 2 * 1.96 * float(np.std(means))
    assert 0.95 < float(np.mean(widths)) / needed < 1.2


@pytest.mark.parametrize(
    ("freedom", "tabled"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (9, 2.262), (19, 2.093), (120, 1.980)],
)
def test_quantiles_of_students_t_are_the_tables(freedom: int, tabled: float) -> None:
    assert t_quantile(0.975, freedom) == pytest.approx(tabled, rel=3e-3)
    assert t_quantile(0.025, freedom) == pytest.approx(-tabled, rel=3e-3)
