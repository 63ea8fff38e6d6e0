"""Numbers: what is read, what is equal, and that hostile sizes cost nothing."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.core import InfraError
from ludus.rewards import numeric
from ludus.rewards.text_rewards import close, last_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        ("The answer is 1,234.5.", "1234.5"),
        ("first 7, then 12,345,678", 12345678),
        ("1,2,3", 3),
        ("-3", -3),
        ("\u22123", -3),
        ("x=-3", -3),
        ("5-3", 3),
        ("(-3)", -3),
        ("+7", 7),
        (".5", "0.5"),
        ("3.", 3),
        ("-$1,000.50", "-1000.5"),
        ("50%", "0.5"),
        ("12.5 %", "0.125"),
        (r"50\%", "0.5"),
        ("3/4", "0.75"),
        ("1 1/2", "1.5"),
        ("-1 1/2", "-1.5"),
        (r"so $\frac{3}{4}$", "0.75"),
        (r"\dfrac{-1}{ 4 }", "-0.25"),
        ("1.5e-3", "0.0015"),
        ("1.5E3", 1500),
        ("1.5 × 10^-3", "0.0015"),
        (r"2\times 10^{6}", 2_000_000),
        ("2 * 10**3", 2000),
        ("2024-01-05", 5),
        ("#### 18", 18),
        ("007", 7),
        ("5kg", 5),
        ("1e999", "1e999"),
    ],
)
def test_numbers_that_are_read(text, value):
    found = last_number(text)
    assert found is not None
    assert close(found, Decimal(str(value)), rel_tol=1e-40)


@pytest.mark.parametrize(
    "text", ["", "none", "x2", "v1.2.3", "1/0", "nan", "inf", "-", "1e99999999999999999999999", "²"]
)
def test_texts_without_a_number(text):
    assert last_number(text) is None
    assert numeric(text, 1) == 0.0


@given(st.integers() | st.decimals(allow_nan=False, allow_infinity=False, places=6))
def test_every_number_equals_itself_however_it_is_written(value):
    assert numeric(f"I think {value}", value) == 1.0
    assert numeric(f"{value:,}", str(value)) == 1.0
    assert numeric(f"= {value:f}.", [0.123, value]) == 1.0


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_equals_itself(value):
    assert numeric(repr(value), value) == 1.0


@given(st.fractions(max_denominator=10**6))
def test_every_fraction_equals_itself(value):
    assert numeric(f"{value.numerator}/{value.denominator}", value) == 1.0


@given(st.decimals(-1000, 1000, places=3), st.decimals(-1000, 1000, places=3), st.floats(0, 1))
def test_closeness_is_symmetric_and_agrees_with_exact_arithmetic(one, other, tolerance):
    expected = abs(Fraction(one) - Fraction(other)) <= Fraction(repr(tolerance)) * max(
        abs(Fraction(one)), abs(Fraction(other))
    )
    assert close(one, other, tolerance) == close(other, one, tolerance) == expected


@pytest.mark.parametrize(
    ("answer", "target", "options", "score"),
    [
        ("1000001", 1_000_000, {}, 0.0),
        ("1000001", 1_000_000, {"rel_tol": 1e-5}, 1.0),
        ("0.333333", "1/3", {}, 1.0),
        ("0.333", "1/3", {}, 0.0),
        ("0.333", "1/3", {"abs_tol": 0.001}, 1.0),
        ("98", 100, {"abs_tol": 2}, 1.0),
        ("97", 100, {"abs_tol": 2}, 0.0),
        ("0.0", 0, {}, 1.0),
        ("1e-300", 0, {}, 0.0),
        ("50%", 50, {}, 0.0),
        ("50%", 50, {"percent": "plain"}, 1.0),
        ("3.0", 3, {}, 1.0),
        ("3", [1, 2], {}, 0.0),
        ("1e999999999", "1e999999998", {}, 0.0),
    ],
)
def test_tolerances(answer, target, options, score):
    assert numeric.using(**options)(answer, target) == score


@pytest.mark.parametrize("target", [None, "none", True, float("nan"), [], {"a": 1}])
async def test_a_target_without_a_number_fails_the_episode(episode, target):
    trajectory = episode("3", target)
    with pytest.raises(InfraError, match="target"):
        await numeric.score(trajectory, trajectory.task, {})


@pytest.mark.parametrize(
    "text",
    [
        "9" * 10**6,
        "1 " * 10**6,
        "1" + " " * 10**6,
        "1,111" * 10**5,
        "1/" * 10**6,
        "-" * 10**6,
        r"\frac{1" * 10**5,
        "1e" + "9" * 10**6,
        "1*10^" * 10**5,
        "1" * 90_000 + " " + "1" * 9_000,
        "." * 10**6,
    ],
    ids=lambda text: text[:8],
)
@pytest.mark.timeout(10)
def test_hostile_sizes_return_at_once(text):
    assert numeric(text, "7") == 0.0
    assert numeric("7", 10**5000) == 0.0


def test_the_end_of_a_long_text_is_what_counts():
    assert numeric("12 " * 10**6 + "= 41", 41) == 1.0


@pytest.mark.parametrize(
    ("options", "answer", "parts"),
    [
        ({}, "first 7, then 42", {"numeric": 1.0, "numeric_read": 42.0}),
        ({"name": "sum"}, "42 or 41", {"sum": 0.0, "sum_read": 41.0}),
        ({"percent": "plain"}, "42%", {"numeric": 1.0, "numeric_read": 42.0}),
        ({}, "4200%", {"numeric": 1.0, "numeric_read": 42.0}),
        ({}, "no idea", {"numeric": 0.0}),
        ({}, "1e999", {"numeric": 0.0}),  # no float
    ],
)
async def test_the_number_that_was_read_is_a_part(episode, options, answer, parts):
    one = episode(answer, target=42)
    assert await numeric.using(**options).score(one, one.task, {}) == parts
