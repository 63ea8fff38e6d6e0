"""The calculator computes what Python computes, refuses what is too large, and says what is wrong."""

from __future__ import annotations

import asyncio
import math
from fractions import Fraction
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.core import Fault, Task, ToolContext, ToolFault, ToolResult
from ludus.tools.library.calculator import CalculationError, calculator, evaluate, shown


def answered(expression: str) -> ToolResult:
    return asyncio.run(calculator.call({"expression": expression}, ToolContext("e", Task.of("?"))))


class Pair(NamedTuple):
    """An expression as the calculator reads it, and as Python does with exact numbers."""

    ours: str
    python: str


numbers = (st.integers(0, 50) | st.decimals(0, 50, places=2, allow_nan=False)).map(
    lambda number: Pair(str(number), f"Fraction('{number}')")
)


def binary(left: Pair, operator: str, right: Pair) -> Pair:
    return Pair(f"{left.ours} {operator} {right.ours}", f"{left.python} {operator} {right.python}")


def floor_division(left: Pair, right: Pair) -> Pair:
    return Pair(f"(({left.ours})//({right.ours}))", f"Fraction(({left.python})//({right.python}))")


def power(base: Pair, exponent: int) -> Pair:
    return Pair(f"({base.ours}) ** {exponent}", f"Fraction({base.python}) ** {exponent}")


def call(name: str, first: Pair, second: Pair) -> Pair:
    if name in ("min", "max"):
        return Pair(f"{name}({first.ours}, {second.ours})", f"{name}({first.python}, {second.python})")
    return Pair(f"{name}({first.ours})", f"Fraction({name}({first.python}))")


def extended(inner: st.SearchStrategy[Pair]) -> st.SearchStrategy[Pair]:
    return st.one_of(
        st.builds(binary, inner, st.sampled_from(["+", "-", "*", "/", "%"]), inner),
        st.builds(floor_division, inner, inner),
        inner.map(lambda pair: Pair(f"({pair.ours})", f"({pair.python})")),
        inner.map(lambda pair: Pair(f"-{pair.ours}", f"-{pair.python}")),
        st.builds(power, inner, st.integers(-3, 3)),
        st.builds(call, st.sampled_from(["abs", "floor", "ceil", "min", "max"]), inner, inner),
    )


expressions = st.recursive(numbers, extended, max_leaves=8)


def by_python(expression: str) -> object:
    return eval(expression, {"Fraction": Fraction, "floor": math.floor, "ceil": math.ceil})


@given(expressions)
def test_it_agrees_with_python(expression: Pair) -> None:
    try:
        expected = by_python(expression.python)
    except ZeroDivisionError:
        with pytest.raises(CalculationError):
            evaluate(expression.ours)
        return
    assert evaluate(expression.ours) == expected


@given(expressions, st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), expressions)
def test_comparisons_agree_with_python(left: Pair, operator: str, right: Pair) -> None:
    try:
        expected = by_python(f"({left.python}) {operator} ({right.python})")
    except ZeroDivisionError:
        return
    assert evaluate(f"{left.ours} {operator} {right.ours}") is expected


@given(
    st.text(alphabet="0123456789.+-*/%()<>=!,eEpi sqrtlogfactorial^_", max_size=40)
    | st.text(max_size=20)
)
def test_no_text_breaks_it(text: str) -> None:
    try:
        shown(evaluate(text))
    except CalculationError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("0.1 + 0.2", "0.3"),
        ("1/3", "1/3 (about 0.333333333333333)"),
        ("sqrt(16/9) == 4/3", "true"),
        ("2**0.5", "1.4142135623730951"),
        ("-2**2", "-4"),
        ("2**-1", "0.5"),
        ("2**3**2", "512"),
        ("7 // -2", "-4"),
        ("-7 % 3", "2"),
        ("1 < 2 < 3", "true"),
        ("1 < 2 > 3", "false"),
        ("comb(52, 5)", "2598960"),
        ("factorial(20)", "2432902008176640000"),
        ("log(8, 2)", "3.0"),
        ("log10(10**400)", "400.0"),
        ("gcd(12, 18) + lcm(4, 6)", "18"),
        ("cbrt(-27)", "-3"),
        ("round(2/3, 4)", "0.6667"),
        ("10**-400", "1E-400"),
        ("2 \N{MULTIPLICATION SIGN} 3 \N{MINUS SIGN} 1", "5"),
        ("1e3", "1000"),
        ("max(1, 5/2, 2)", "2.5"),
    ],
)
def test_values(expression: str, expected: str) -> None:
    assert answered(expression).content == expected


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9",
        "factorial(10**9)",
        "2**(10**30)",
        "(1/3)**100000",
        "comb(10**9, 5*10**8)",
        "perm(10**9, 10**8)",
        "10**5000 * 10**5000",
        "1e999999999",
        "1e-999999999",
        "lcm(" + ",".join(f"10**400+{i}" for i in range(100)) + ")",
        "e**1000",
        "sin(10**400)",
        "(" * 1000,
        "1" * 3000,
        "2**" * 500 + "2",
    ],
)
def test_what_is_too_large_is_refused_without_trying(expression: str) -> None:
    result = answered(expression)
    assert result.fault is Fault.TOOL_RAISED
    assert result.content.startswith("Cannot compute that: ")


@pytest.mark.parametrize(
    ("expression", "hint"),
    [
        ("2^3", "write powers with **"),
        ("5!", "write factorial(n)"),
        ("1,000 + 1", "1_000"),
        ("fctorial(3)", "did you mean factorial?"),
        ("sqrt 2", "sqrt(...)"),
        ("pi(2)", "a constant"),
        ("1 +", "ends too early"),
        ("(1 + 2", "closing parenthesis"),
        ("1/0", "division by zero"),
        ("sqrt(-1)", "negative"),
        ("log(0)", "positive"),
        ("asin(2)", "not defined"),
        ("factorial(2.5)", "whole numbers"),
        ("round(1, 2, 3)", "takes 1 or 2 argument(s)"),
        ("", "empty"),
        ("__import__(1)", "'__import__'"),
        ("(1).real", "'.' at character 4"),
        ("x = 1", "nothing can be assigned"),
    ],
)
def test_errors_say_what_to_do(expression: str, hint: str) -> None:
    result = answered(expression)
    assert result.fault is Fault.TOOL_RAISED
    assert hint in result.content


def test_it_is_still_a_function() -> None:
    assert asyncio.run(calculator("1 + 1")) == "2"
    with pytest.raises(ToolFault):
        asyncio.run(calculator("1 +"))
