"""GRPO-RoC's resampling and DAPO's overlong shaping."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference_advantages import overlong

from ludus.algos import overlong_penalty, resample_on_correct, roc_penalty

attempts = st.lists(st.tuples(st.booleans(), st.floats(0, 2)), max_size=16)


@given(attempts, st.integers(0, 16), st.integers(0, 2**62))
def test_what_stays(group: list[tuple[bool, float]], keep: int, key: int) -> None:
    correct, penalties = [good for good, _ in group], [penalty for _, penalty in group]
    kept = resample_on_correct(correct, penalties, keep=keep, key=key)
    assert kept == sorted(set(kept)) and len(kept) == min(keep, len(group))
    assert kept == resample_on_correct(correct, penalties, keep=keep, key=key)
    right = sum(correct[i] for i in kept)
    if len(group) > keep:
        exact = keep * sum(correct) / len(group)
        mixed = 0 < sum(correct) < len(group)
        # in proportion, but for the one of each kind that a mixed group keeps
        assert abs(right - exact) <= (1 if mixed and keep >= 2 else 0.5)
        if mixed and keep >= 2:
            assert 0 < right < keep


def test_the_papers_setting_halves_both_kinds() -> None:
    correct = [True] * 10 + [False] * 6
    for key in range(20):
        kept = resample_on_correct(correct, [0.0] * 16, keep=8, key=key)
        assert sum(correct[i] for i in kept) == 5


@pytest.mark.parametrize("odd", [True, False])
def test_the_only_one_of_its_kind_stays(odd: bool) -> None:
    """In proportion it would go; without it the group would teach nothing."""
    for key in range(5):
        kept = resample_on_correct([not odd] * 15 + [odd], [0.0] * 16, keep=4, key=key)
        assert 15 in kept and len(kept) == 4


def test_clean_successes_are_preferred_and_failures_drawn_evenly() -> None:
    """One of two successes stays: with weights 1 / 0.1 and 1 / 1.1 the clean one in 11 of 12 draws."""
    draws = 3000
    chosen = Counter(
        i
        for key in range(draws)
        for i in resample_on_correct([True, True, False, False], [0.0, 1.0, 0.0, 1.0], keep=2, key=key)
    )
    assert chosen[0] / draws == pytest.approx(11 / 12, abs=0.025)
    assert chosen[2] / draws == pytest.approx(1 / 2, abs=0.04)


def test_untidiness_as_in_the_paper() -> None:
    assert roc_penalty(calls=4, errors=1, answers=1, turns=3) == 0.25
    assert roc_penalty(calls=0, errors=0, answers=1, turns=1) == 0.5
    assert roc_penalty(calls=2, errors=0, answers=3, turns=4) == 0.5
    assert roc_penalty(calls=2, errors=2, answers=9, turns=4) == 2.0
    assert roc_penalty(calls=1, errors=0, answers=0, turns=0) == 0.0


def test_resampling_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="2 attempts were given 1"):
        resample_on_correct([True, False], [0.0], keep=1, key=0)
    for penalty in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="0 or above"):
            resample_on_correct([True], [penalty], keep=1, key=0)


@given(st.lists(st.integers(0, 60), max_size=8), st.integers(1, 40), st.integers(1, 40))
def test_overlong_shaping(lengths: list[int], longest: int, buffer: int) -> None:
    buffer = min(buffer, longest)
    found = overlong_penalty(torch.tensor(lengths, dtype=torch.float64), longest=longest, buffer=buffer)
    expected = [overlong(n, longest, buffer) for n in lengths]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_overlong_shaping_takes_whole_numbers_and_checks_its_buffer() -> None:
    assert overlong_penalty(torch.tensor([5, 9, 12]), longest=10, buffer=2).tolist() == [0, -0.5, -1]
    with pytest.raises(ValueError, match="between 1 and the longest"):
        overlong_penalty(torch.tensor([5]), longest=10, buffer=11)
