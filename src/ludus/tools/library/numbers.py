"""Numbers that stay exact while they can, and never grow beyond a bound.

Whole numbers and fractions are exact (0.1 + 0.2 is 0.3); roots, logarithms and angles are floats. The size of a
result is estimated before it is computed: 9**9**9 is refused without trying.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction

MOST_BITS = 20_000
"""About 6,000 digits, for a numerator and for a denominator."""
MOST_EXPONENT = 5_000
_LONG_DECIMAL = 30
_SHOWN = Context(prec=15)

Number = int | Fraction | float


class CalculationError(ValueError):
    """What is wrong with an expression, in words for the one who wrote it."""


def exact(value: Fraction) -> Number:
    """A fraction in its simplest form, within bounds."""
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MOST_BITS:
        raise CalculationError("the result has more than 6,000 digits")
    return value.numerator if value.denominator == 1 else value


def checked(value: Number) -> Number:
    """`value`, if it is a number that can be gone on with."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise CalculationError("the result is not a finite number")
        return value
    return exact(Fraction(value))


def as_float(value: Number) -> float:
    """`value` as a float; what is beyond a float's range is refused."""
    try:
        return float(value)
    except OverflowError:
        raise CalculationError("a number is too large for this function") from None


def whole(value: Number, what: str) -> int:
    """`value` as an integer, where only an integer makes sense."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, int):
        raise CalculationError(f"{what} takes whole numbers, not {shown(value)}")
    return value


def negative(value: Number) -> Number:
    return -value


def power(base: Number, exponent: Number) -> Number:
    """`base ** exponent`, exact for whole exponents of exact numbers."""
    if base == 0 and exponent < 0:
        raise CalculationError("0 cannot be raised to a negative power")
    if isinstance(exponent, int) and not isinstance(base, float):
        return _whole_power(Fraction(base), exponent)
    if base < 0 and not as_float(exponent).is_integer():
        raise CalculationError("a negative number has no real power of that kind")
    try:
        return checked(as_float(base) ** as_float(exponent))
    except OverflowError:
        raise CalculationError("the result is too large") from None


def _whole_power(base: Fraction, exponent: int) -> Number:
    if abs(base) == 1 or base == 0:
        return exact(base ** (exponent % 2 if base == -1 else min(abs(exponent), 1)))
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if (bits - 1) * abs(exponent) > MOST_BITS:
        raise CalculationError("the result of ** would have more than 6,000 digits")
    return exact(base**exponent)


def _arithmetic(apply: Callable[[Number, Number], Number]) -> Callable[[Number, Number], Number]:
    def applied(left: Number, right: Number) -> Number:
        if isinstance(left, float) or isinstance(right, float):
            left, right = as_float(left), as_float(right)
        else:
            left, right = Fraction(left), Fraction(right)
        try:
            return checked(apply(left, right))
        except ZeroDivisionError:
            raise CalculationError("division by zero") from None
        except OverflowError:
            raise CalculationError("the result is too large") from None

    return applied


BINARY: dict[str, Callable[[Number, Number], Number]] = {
    "+": _arithmetic(operator.add),
    "-": _arithmetic(operator.sub),
    "*": _arithmetic(operator.mul),
    "/": _arithmetic(operator.truediv),
    "//": _arithmetic(operator.floordiv),
    "%": _arithmetic(operator.mod),
}
COMPARISONS: dict[str, Callable[[Number | bool, Number | bool], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}


def shown(value: Number | bool) -> str:
    """A value as a model reads it: exact where that is short, and otherwise with an approximation."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, int):
        return str(Decimal(value))
    decimal = _terminating(value)
    if decimal is not None:
        return decimal
    about = _SHOWN.divide(Decimal(value.numerator), Decimal(value.denominator))
    written = f"{Decimal(value.numerator)}/{Decimal(value.denominator)}"
    return f"{written} (about {about})" if len(written) <= 2 * _LONG_DECIMAL else f"about {about}"


def _terminating(value: Fraction) -> str | None:
    """The decimal that a fraction equals, unless it is long or never ends."""
    rest, places = value.denominator, 0
    for prime in (2, 5):
        count = 0
        while rest % prime == 0 and count <= MOST_EXPONENT:
            rest //= prime
            count += 1
        places = max(places, count)
    if rest != 1:
        return None
    digits = Decimal(value.numerator * 10**places // value.denominator)
    if len(digits.as_tuple().digits) > _LONG_DECIMAL:
        return None
    return str(digits.scaleb(-places, Context(prec=_LONG_DECIMAL + 5))) if places <= 400 else None
