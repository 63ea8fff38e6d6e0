"""The functions and constants that the calculator knows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

from ludus.tools.library.numbers import (
    MOST_BITS,
    CalculationError,
    Number,
    as_float,
    checked,
    exact,
    shown,
    whole,
)

Function = Callable[[Sequence[Number]], Number]

_MOST_FACTORIAL = 2_000
_MOST_DIGITS = 400
_OF_ONE_FLOAT = (
    *("sin", "cos", "tan", "asin", "acos", "atan"),
    *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
    *("exp", "degrees", "radians"),
)

CONSTANTS: dict[str, Number] = {"pi": math.pi, "e": math.e, "tau": math.tau}


def _taking(fewest: int, most: int, name: str, compute: Callable[..., Number]) -> Function:
    def function(arguments: Sequence[Number]) -> Number:
        if not fewest <= len(arguments) <= most:
            count = (
                str(fewest)
                if fewest == most
                else f"{fewest} or more"
                if most > 9
                else f"{fewest} or {most}"
            )
            raise CalculationError(f"{name} takes {count} argument(s), not {len(arguments)}")
        try:
            return checked(compute(*arguments))
        except ZeroDivisionError:
            raise CalculationError(f"{name} divides by zero") from None
        except OverflowError:
            raise CalculationError(f"the result of {name} is too large") from None
        except CalculationError:
            raise
        except ValueError:
            given = ", ".join(shown(one)[:40] for one in arguments)
            raise CalculationError(f"{name}({given}) is not defined for real numbers") from None

    return function


def _in_floats(compute: Callable[..., float]) -> Callable[..., Number]:
    return lambda *arguments: compute(*(as_float(one) for one in arguments))


def _square_root(value: Number) -> Number:
    if value < 0:
        raise CalculationError("sqrt of a negative number is not real")
    return _root(value, 2) if not isinstance(value, float) else math.sqrt(value)


def _cube_root(value: Number) -> Number:
    if isinstance(value, float):
        return math.cbrt(value)
    return _root(value, 3) if value >= 0 else -_root(-value, 3)


def _root(value: int | Fraction, degree: int) -> Number:
    """The exact root of an exact number, where there is one."""
    top, bottom = Fraction(value).numerator, Fraction(value).denominator
    tops, bottoms = _whole_root(top, degree), _whole_root(bottom, degree)
    if tops**degree == top and bottoms**degree == bottom:
        return exact(Fraction(tops, bottoms))
    return math.sqrt(as_float(value)) if degree == 2 else math.cbrt(as_float(value))


def _whole_root(value: int, degree: int) -> int:
    if degree == 2:
        return math.isqrt(value)
    low, high = 0, 1 << (value.bit_length() // degree + 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**degree <= value else (low, middle - 1)
    return low


def _logarithm(value: Number, base: Number | None = None) -> Number:
    if base is not None:
        return _natural(value) / _natural(base)
    return _natural(value)


def _natural(value: Number) -> float:
    if value <= 0:
        raise CalculationError("a logarithm needs a positive number")
    if isinstance(value, Fraction):
        return math.log(value.numerator) - math.log(value.denominator)
    return math.log(value)


def _to_base(base: int, compute: Callable[[Number], float]) -> Callable[[Number], Number]:
    def logarithm(value: Number) -> Number:
        if value <= 0:
            raise CalculationError("a logarithm needs a positive number")
        return compute(value) if not isinstance(value, Fraction) else _natural(value) / math.log(base)

    return logarithm


def _factorial(value: Number) -> Number:
    count = whole(value, "factorial")
    if not 0 <= count <= _MOST_FACTORIAL:
        raise CalculationError(f"factorial takes whole numbers from 0 to {_MOST_FACTORIAL}")
    return math.factorial(count)


def _choices(name: str, compute: Callable[[int, int], int]) -> Callable[..., Number]:
    def function(of: Number, chosen: Number) -> Number:
        n, k = whole(of, name), whole(chosen, name)
        if n < 0 or k < 0:
            raise CalculationError(f"{name} takes whole numbers from 0")
        if k > n:
            return 0
        factors = min(k, n - k) if name == "comb" else k
        if factors > MOST_BITS or _bits(name, n, k, factors) > MOST_BITS:
            raise CalculationError(f"the result of {name} would have more than 6,000 digits")
        return compute(n, k)

    return function


def _bits(name: str, n: int, k: int, factors: int) -> float:
    """About how many bits the number of choices has."""
    if n.bit_length() > 60:
        return float(n.bit_length() * factors)
    nats = math.lgamma(n + 1) - math.lgamma(n - k + 1)
    return (nats - math.lgamma(k + 1) if name == "comb" else nats) / math.log(2)


def _whole_numbers(name: str, compute: Callable[..., int]) -> Callable[..., Number]:
    return lambda *arguments: compute(*(whole(one, name) for one in arguments))


def _least_multiple(*arguments: Number) -> Number:
    result = 1
    for one in arguments:
        result = math.lcm(result, whole(one, "lcm"))
        exact(Fraction(result))
    return result


def _rounded(value: Number, digits: Number = 0) -> Number:
    places = whole(digits, "round")
    if abs(places) > _MOST_DIGITS:
        raise CalculationError(f"round takes at most {_MOST_DIGITS} digits")
    if isinstance(value, float):
        return round(value, places) if places else round(value)
    scale = Fraction(10) ** places
    return exact(Fraction(round(value * scale)) / scale)


def _functions() -> dict[str, Function]:
    floats = {name: _in_floats(getattr(math, name)) for name in _OF_ONE_FLOAT}
    one: dict[str, Callable[..., Number]] = {
        **floats,
        "sqrt": _square_root,
        "cbrt": _cube_root,
        "ln": _logarithm,
        "log2": _to_base(2, math.log2),
        "log10": _to_base(10, math.log10),
        "factorial": _factorial,
        "abs": abs,
        "floor": math.floor,
        "ceil": math.ceil,
        "trunc": math.trunc,
        "isqrt": _whole_numbers("isqrt", math.isqrt),
    }
    many: dict[str, Callable[..., Number]] = {
        "min": lambda *several: min(several),
        "max": lambda *several: max(several),
        "gcd": _whole_numbers("gcd", math.gcd),
        "lcm": _least_multiple,
        "sum": lambda *several: sum(several),
        "hypot": _in_floats(math.hypot),
    }
    few = {
        "log": (1, 2, _logarithm),
        "round": (1, 2, _rounded),
        "atan2": (2, 2, _in_floats(math.atan2)),
        "comb": (2, 2, _choices("comb", math.comb)),
        "perm": (2, 2, _choices("perm", math.perm)),
        "mod": (2, 2, lambda a, b: a % b),
    }
    found = {name: _taking(1, 1, name, compute) for name, compute in one.items()}
    found |= {name: _taking(1, 1_000, name, compute) for name, compute in many.items()}
    found |= {name: _taking(low, high, name, compute) for name, (low, high, compute) in few.items()}
    return found


FUNCTIONS = _functions()
