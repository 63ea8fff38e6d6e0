"""Numbers that stay exact while they can, and never grow beyond a bound.

Whole numbers and fractions are exact (0.1 + 0.2 is 0.3); roots, logarithms and angles are floats. The size of a
result is estimated before it is computed: 9**9**9 is refused without trying.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from decimal import Context, Decimal
from difflib import get_close_matches
from fractions import Fraction
from typing import NamedTuple

from ludus.core.failures import ToolFault
from ludus.tools.tool import tool

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


# The functions and constants that the calculator knows.

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


# Arithmetic from text, without `eval`: a small grammar, read and computed in one pass.
#
#     comparison := sum (("<" | "<=" | ">" | ">=" | "==" | "!=") sum)*
#     sum        := product (("+" | "-") product)*
#     product    := signed (("*" | "/" | "//" | "%") signed)*
#     signed     := ("+" | "-") signed | power
#     power      := atom ["**" signed]
#     atom       := number | constant | function "(" comparison ("," comparison)* ")" | "(" comparison ")"
#
# Precedence is Python's. What is computed, and how large it may get, is decided in `numbers`; here the
# length of the text and the depth of its nesting are bounded, so that no text costs more than it is long.

MOST_CHARS = 2_000
_DEEPEST = 60
_TOKEN = re.compile(
    r"(?P<space>\s+)"
    r"|(?P<number>(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][+-]?[0-9]+)?)"
    r"|(?P<name>[A-Za-z_][A-Za-z_0-9]*)"
    r"|(?P<symbol>\*\*|//|<=|>=|==|!=|[-+*/%()<>,])"
)
_WRITTEN_OTHERWISE = str.maketrans(
    {
        "\N{MINUS SIGN}": "-",
        "\N{MULTIPLICATION SIGN}": "*",
        "\N{DIVISION SIGN}": "/",
        "π": " pi ",
        "·": "*",
    }
)
_HINTS = {
    "^": "write powers with **",
    "!": "write factorial(n)",
    "=": "compare with ==; nothing can be assigned",
    "$": "leave currency signs out",
    "[": "use round parentheses",
    "{": "use round parentheses",
    "√": "write sqrt(x)",
    "²": "write **2",
    "³": "write **3",
}


class _Token(NamedTuple):
    kind: str
    text: str
    place: int


_END = "end"


def evaluate(text: str) -> Number | bool:
    """The value of `text`; `CalculationError` says what is wrong with it, and where."""
    if len(text) > MOST_CHARS:
        raise CalculationError(f"the expression is too long: at most {MOST_CHARS} characters")
    return _Reader(_tokens(text.translate(_WRITTEN_OTHERWISE))).whole()


def _tokens(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    place = 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            hint = _HINTS.get(text[place])
            raise CalculationError(
                f"{text[place]!r} at character {place + 1} is not understood"
                + (f": {hint}" if hint else "")
            )
        kind = match.lastgroup or ""
        if kind != "space":
            tokens.append(_Token(kind, match.group(), place))
        place = match.end()
    return [*tokens, _Token(_END, "", len(text))]


class _Reader:
    """Reads tokens from left to right, and computes as it goes."""

    def __init__(self, tokens: Sequence[_Token]) -> None:
        self._tokens, self._next, self._depth = tokens, 0, 0

    def whole(self) -> Number | bool:
        if self._peek().kind == _END:
            raise CalculationError("the expression is empty")
        value = self._comparison()
        token = self._peek()
        if token.text == ",":
            raise CalculationError("a comma is only for arguments; write 1000 or 1_000, not 1,000")
        if token.kind != _END:
            raise CalculationError(
                f"{token.text!r} at character {token.place + 1} does not belong there"
            )
        return value

    def _comparison(self) -> Number | bool:
        left = self._sum()
        if self._peek().text not in COMPARISONS:
            return left
        holds = True
        while self._peek().text in COMPARISONS:
            compare = COMPARISONS[self._take().text]
            right = self._sum()
            holds = compare(left, right) and holds
            left = right
        return holds

    def _sum(self) -> Number:
        return self._left_to_right(("+", "-"), self._product)

    def _product(self) -> Number:
        return self._left_to_right(("*", "/", "//", "%"), self._signed)

    def _left_to_right(self, symbols: Sequence[str], operand: Callable[[], Number]) -> Number:
        value = operand()
        while self._peek().text in symbols:
            apply = BINARY[self._take().text]
            value = apply(value, operand())
        return value

    def _signed(self) -> Number:
        sign = 1
        while self._peek().text in ("+", "-"):
            sign = -sign if self._take().text == "-" else sign
        value = self._power()
        return negative(value) if sign < 0 else value

    def _power(self) -> Number:
        base = self._atom()
        if self._peek().text != "**":
            return base
        self._take()
        self._enter()
        exponent = self._signed()
        self._depth -= 1
        return power(base, exponent)

    def _atom(self) -> Number:
        token = self._take()
        if token.kind == "number":
            return _literal(token)
        if token.kind == "name":
            return self._named(token)
        if token.text == "(":
            value = self._plain(self._inside())
            self._close()
            return value
        if token.kind == _END:
            raise CalculationError("the expression ends too early")
        raise CalculationError(f"{token.text!r} at character {token.place + 1} does not belong there")

    def _named(self, token: _Token) -> Number:
        if self._peek().text == "(":
            function = _function(token.text)
            self._take()
            arguments: list[Number] = []
            if self._peek().text != ")":
                arguments.append(self._plain(self._inside()))
                while self._peek().text == ",":
                    self._take()
                    arguments.append(self._plain(self._inside()))
            self._close()
            return function(arguments)
        if token.text in CONSTANTS:
            return CONSTANTS[token.text]
        if token.text in FUNCTIONS:
            raise CalculationError(f"{token.text} is a function: write {token.text}(...)")
        raise CalculationError(_unknown("name", token.text, CONSTANTS))

    def _inside(self) -> Number | bool:
        self._enter()
        value = self._comparison()
        self._depth -= 1
        return value

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise CalculationError(f"the expression is nested more than {_DEEPEST} deep")

    def _close(self) -> None:
        token = self._take()
        if token.text != ")":
            where = "at the end" if token.kind == _END else f"at character {token.place + 1}"
            raise CalculationError(f"a closing parenthesis is missing {where}")

    def _plain(self, value: Number | bool) -> Number:
        if isinstance(value, bool):
            raise CalculationError("a comparison stands alone; it is no number to go on with")
        return value

    def _peek(self) -> _Token:
        return self._tokens[self._next]

    def _take(self) -> _Token:
        token = self._tokens[self._next]
        self._next = min(self._next + 1, len(self._tokens) - 1)
        return token


def _literal(token: _Token) -> Number:
    digits, _, exponent = token.text.replace("_", "").lower().partition("e")
    if exponent and (len(exponent) > 8 or abs(int(exponent)) > MOST_EXPONENT):
        raise CalculationError(f"the number {token.text[:30]} is too large or too small")
    return exact(Fraction(digits + (f"e{exponent}" if exponent else "")))


def _function(name: str) -> Function:
    if name not in FUNCTIONS:
        if name in CONSTANTS:
            raise CalculationError(f"{name} is a constant, not a function; write * to multiply")
        raise CalculationError(_unknown("function", name, FUNCTIONS))
    return FUNCTIONS[name]


def _unknown(
    kind: str, name: str, known: Sequence[str] | dict[str, Function] | dict[str, Number]
) -> str:
    near = get_close_matches(name[:40], list(known), n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(known))}"
    return f"there is no {kind} {name[:40]!r}; {hint}"


# `calculator`: arithmetic, exact where that is natural, and never by `eval`.


@tool
async def calculator(expression: str) -> str:
    """Compute an arithmetic expression, such as (1 + 2/3) * sqrt(2) or comb(52, 5) > 10**6.

    Operators: + - * / // % ** and comparisons. Functions: sqrt, cbrt, exp, ln, log(x, base), log2, log10, sin,
    cos, tan and their inverses, abs, round(x, digits), floor, ceil, min, max, sum, gcd, lcm, factorial, comb,
    perm, hypot, mod. Constants: pi, e, tau. Whole numbers and fractions are exact.

    Args:
        expression: The expression to compute.
    """
    try:
        return shown(evaluate(expression))
    except CalculationError as error:
        raise ToolFault(f"Cannot compute that: {error}.") from None
