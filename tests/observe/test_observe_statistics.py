"""Statistics against what they mean: every subset listed, every sign flipped, the truth simulated."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.observe import Estimate, all_at_k, average_at_k, mean_interval, paired_test, pass_at_k
from ludus.observe.statistics import flip_test, sign_test


@pytest.mark.parametrize("attempts", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets(attempts: int) -> None:
    for successes in range(attempts + 1):
        outcomes = [True] * successes + [False] * (attempts - successes)
        for k in range(1, attempts + 1):
            subsets = list(combinations(outcomes, k))
            some = sum(any(subset) for subset in subsets) / len(subsets)
            every = sum(all(subset) for subset in subsets) / len(subsets)
            assert pass_at_k(attempts, successes, k) == pytest.approx(some)
            assert all_at_k(attempts, successes, k) == pytest.approx(every)


def test_pass_at_k_is_unbiased() -> None:
    """Its mean over all outcomes of n attempts is the true chance 1 - (1 - p)^k."""
    for chance, attempts, k in [(0.3, 6, 2), (0.05, 9, 4), (0.8, 5, 5)]:
        expected = sum(
            math.comb(attempts, c)
            * chance**c
            * (1 - chance) ** (attempts - c)
            * pass_at_k(attempts, c, k)
            for c in range(attempts + 1)
        )
        assert expected == pytest.approx(1 - (1 - chance) ** k)


def test_pass_at_k_of_many_attempts_does_not_overflow() -> None:
    assert pass_at_k(100_000, 1, 100) == pytest.approx(0.001)


@pytest.mark.parametrize("counts", [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0), (0, 0, 1)])
def test_impossible_counts_are_refused(counts: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="attempts"):
        pass_at_k(*counts)


def test_average_at_k_is_of_the_first_attempts() -> None:
    assert average_at_k([1, 0, 0, 1], 2) == 0.5
    assert average_at_k([1, 0, 0, 0], 4) == 0.25
    with pytest.raises(ValueError, match="attempts"):
        average_at_k([1.0], 2)


# 16 bits: one less such a number is exact, so that what is mirrored is the same values from the other side.
@given(st.lists(st.floats(0, 1, width=16), min_size=2, max_size=30), st.booleans())
def test_an_interval_holds_its_mean(values: list[float], is_bounded: bool) -> None:
    found = mean_interval(values, within=(0, 1) if is_bounded else None)
    if len(set(values)) == 1 and not is_bounded:
        assert found.low is None and found.high is None
        return
    assert found.low is not None and found.high is not None
    assert found.low - 1e-9 <= found.value <= found.high + 1e-9
    assert found.value == pytest.approx(sum(values) / len(values))
    if is_bounded:
        assert 0 <= found.low < found.high <= 1
        mirrored = mean_interval([1 - value for value in values], within=(0, 1))
        assert mirrored.low == pytest.approx(1 - found.high, abs=1e-9)
        assert mirrored.high == pytest.approx(1 - found.low, abs=1e-9)


def test_intervals_over_tasks_cover_the_truth() -> None:
    """Attempts at a task are alike: the interval must allow for it, and one over episodes would not."""
    generator = np.random.default_rng(1)
    covered = naive = 0
    for _ in range(300):
        chances = generator.beta(0.5, 0.5, size=40)  # easy and hard tasks; their mean is a half
        successes = generator.binomial(8, chances)
        found = mean_interval(successes.tolist(), [8.0] * 40)
        assert found.low is not None and found.high is not None
        covered += found.low <= 0.5 <= found.high
        naive += abs(found.value - 0.5) < 1.96 * math.sqrt(found.value * (1 - found.value) / 320)
    assert 0.88 < covered / 300 < 0.99
    assert naive / 300 < 0.75, "treating episodes as independent would be far too sure"


def test_tasks_that_lost_attempts_weigh_less() -> None:
    assert mean_interval([4, 0], [4, 1]).value == pytest.approx(0.8)
    assert mean_interval([1.0, 0.0]).value == pytest.approx(0.5)


def test_one_task_has_no_interval_and_no_success_is_not_certainty() -> None:
    assert mean_interval([0.5]) == Estimate(0.5)
    never = mean_interval([0.0] * 20, within=(0, 1))
    assert never.low == 0 and never.high == pytest.approx(1 - 0.025 ** (1 / 20))
    assert mean_interval([0.0] * 20) == Estimate(0.0), "of unknown bounds, nothing is known"
    always = mean_interval([1.0] * 20, within=(0, 1))
    assert always.high == 1 and always.low == pytest.approx(0.025 ** (1 / 20))


@pytest.mark.parametrize("wrong", [([], None, 0.95), ([1.0], [0.0], 0.95), ([1.0, 2.0], None, 1.0)])
def test_intervals_of_nothing_are_refused(wrong: tuple[list[float], list[float] | None, float]) -> None:
    totals, counts, level = wrong
    with pytest.raises(ValueError):
        mean_interval(totals, counts, level=level)


def by_listing(differences: list[Fraction]) -> float:
    """The permutation test straight from its definition."""
    seen = abs(sum(differences))
    sums = [abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
            for signs in product((1, -1), repeat=len(differences))]  # fmt: skip
    return sum(total >= seen for total in sums) / len(sums)


FRACTIONS = st.builds(Fraction, st.integers(-8, 8), st.sampled_from([1, 2, 3, 4, 8]))


@given(st.lists(FRACTIONS, min_size=1, max_size=9))
def test_the_flip_test_is_the_enumeration_of_all_signs(differences: list[Fraction]) -> None:
    expected = by_listing(differences)
    assert flip_test(differences) == (pytest.approx(expected), True)
    p_floats, is_exact = flip_test([float(difference) for difference in differences])
    assert is_exact and p_floats == pytest.approx(expected)


def test_the_flip_test_of_many_tasks() -> None:
    """All of 40 tasks a little better: exactly two of 2^40 sign patterns are as extreme."""
    p, is_exact = flip_test([Fraction(1, 8)] * 40)
    assert is_exact and p == pytest.approx(2 / 2**40)
    generator = np.random.default_rng(0)
    noise = [float(value) for value in generator.normal(size=60)]
    p_drawn, is_exact = flip_test(noise)
    assert not is_exact and 0 < p_drawn <= 1
    assert p_drawn == pytest.approx(
        math.erfc(abs(sum(noise)) / math.sqrt(2 * sum(x * x for x in noise))), abs=0.02
    )
    huge = [Fraction(1, prime) for prime in (999_983, 999_979, 999_961)] * 10
    assert flip_test(huge) == (pytest.approx(0.0, abs=1e-3), False), (
        "no exact count of endless fractions"
    )


@pytest.mark.parametrize(("wins", "losses"), [(0, 0), (1, 0), (3, 3), (9, 1), (0, 6), (400, 300)])
def test_the_sign_test_is_the_binomial_one(wins: int, losses: int) -> None:
    played = wins + losses
    heads = [math.comb(played, count) for count in range(played + 1)]
    fair = abs(wins - losses)
    expected = Fraction(
        sum(h for count, h in enumerate(heads) if abs(2 * count - played) >= fair), 2**played
    )
    assert sign_test(wins, losses) == pytest.approx(float(expected))


def test_a_paired_comparison_is_sharper_than_two_intervals() -> None:
    """Tasks differ much, models little: by task the difference is plain, side by side it is not."""
    hard = [Fraction(number, 20) for number in range(20)]
    better = [chance + Fraction(1 + number % 2, 40) for number, chance in enumerate(hard)]
    found = paired_test(better, hard)
    assert found.difference.value == pytest.approx(0.0375)
    assert found.difference.low is not None and found.difference.low > 0.025
    assert (found.wins, found.losses, found.ties) == (20, 0, 0)
    assert found.p_flip == pytest.approx(2 / 2**20) and found.is_exact
    alone, other = mean_interval([float(x) for x in better]), mean_interval([float(x) for x in hard])
    assert alone.low is not None and other.high is not None and alone.low < other.high


def test_a_comparison_with_itself_finds_nothing() -> None:
    same = [Fraction(1, 2), Fraction(0), Fraction(1)]
    found = paired_test(same, same)
    assert (found.ties, found.p_flip, found.p_sign) == (3, 1.0, 1.0)
    with pytest.raises(ValueError, match="same tasks"):
        paired_test(same, same[:2])
