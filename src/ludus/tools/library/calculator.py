"""`calculator`: arithmetic on Python's own syntax tree (`ast`), never by `eval`.

Whole numbers and fractions are exact (0.1 + 0.2 is 0.3); roots, logarithms and angles are floats. The length of
the text and the depth of its nesting are bounded, and the size of a result is estimated before it is computed:
9**9**9 is refused without trying.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Iterable
from decimal import Context, Decimal, Inexact
from difflib import get_close_matches
from fractions import Fraction
from typing import Any

from ludus.core.failures import ToolFault
from ludus.tools.tool import tool

Number = int | Fraction | float

_MAX_CHARS = 2_000
_MAX_DEPTH = 60
_MAX_BITS = 20_000
"""About 6,000 digits, for a numerator and for a denominator."""
_MAX_EXPONENT = 5_000
_MAX_FACTORIAL = 2_000
_MAX_FRACTION_CHARS = 60

_NUMBER = re.compile(r"(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][+-]?[0-9]+)?")
_NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")
_TOKEN = re.compile(rf"\s+|{_NUMBER.pattern}(?![A-Za-z_])|{_NAME.pattern}|\*\*|//|[<>=!]=|[-+*/%()<>,]")
_SYNONYMS = str.maketrans(
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


class CalculationError(ValueError):
    """An expression that cannot be computed; the message is for the model that wrote it."""


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


def evaluate(text: str) -> Number | bool:
    """The value of `text`; `CalculationError` says what is wrong with it, and where."""
    if len(text) > _MAX_CHARS:
        raise CalculationError(f"the expression is too long: at most {_MAX_CHARS} characters")
    text = text.translate(_SYNONYMS)
    _check_tokens(text)
    text = re.sub(r"\s+", " ", text).strip()
    text = re.sub(r"(?<![\w.])0+(?=[0-9])", "", text)  # Python refuses leading zeros
    if not text:
        raise CalculationError("the expression is empty")
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise CalculationError(_syntax_problem(text, error)) from None
    except (RecursionError, MemoryError):
        raise CalculationError("the expression is nested too deeply") from None
    if isinstance(tree, ast.Compare) and all(type(op) in _COMPARISONS for op in tree.ops):
        operands = [_value(node, text, 0) for node in (tree.left, *tree.comparators)]
        pairs = zip(tree.ops, operands, operands[1:], strict=False)
        return all(_COMPARISONS[type(op)](left, right) for op, left, right in pairs)
    return _value(tree, text, 0)


def shown(value: Number | bool) -> str:
    """A value as a model reads it: exact where that is short, and otherwise with an approximation."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value)
    top, bottom = (Decimal(part) for part in value.as_integer_ratio())
    if bottom == 1:
        return str(top)  # str(int) refuses more than 4,300 digits
    try:
        return str(Context(prec=30, traps=[Inexact]).divide(top, bottom))
    except Inexact:
        about = f"about {Context(prec=15).divide(top, bottom)}"
    written = f"{top}/{bottom}"
    return f"{written} ({about})" if len(written) <= _MAX_FRACTION_CHARS else about


# Reading: which texts and which nodes of the syntax tree are understood


def _check_tokens(text: str) -> None:
    """Refuse what is no arithmetic, at its place, so that `ast` sees numbers, names and operators only."""
    place = 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            hint = _HINTS.get(text[place], "write * to multiply" if text[place] in ".0123456789" else "")
            problem = f"{text[place]!r} at character {place + 1} is not understood"
            raise CalculationError(f"{problem}: {hint}" if hint else problem)
        place = match.end()


def _syntax_problem(text: str, error: SyntaxError) -> str:
    for name in _NAME.finditer(text):
        if name.group() in _FUNCTIONS and text[name.end() :].lstrip()[:1] != "(":
            return f"{name.group()} is a function: write {name.group()}(...)"
    if "never closed" in error.msg:
        return "a closing parenthesis is missing"
    place = error.offset or 0
    if not 0 < place <= len(text):
        return "the expression ends too early"
    return f"{text[place - 1]!r} at character {place} does not belong there"


def _value(node: ast.expr, text: str, depth: int) -> Number:
    if depth > _MAX_DEPTH:
        raise CalculationError(f"the expression is nested more than {_MAX_DEPTH} deep")
    match node:
        case ast.Constant():
            return _literal(text[node.col_offset : node.end_col_offset])
        case ast.BinOp():
            # Down the left side in a loop: a long sum is not a deep one.
            pending: list[ast.BinOp] = []
            left: ast.expr = node
            while isinstance(left, ast.BinOp):
                pending.append(left)
                left = left.left
            value = _value(left, text, depth + 1)
            for one in reversed(pending):
                right = _value(one.right, text, depth + 1)
                value = _computed("the operation", _OPERATORS[type(one.op)], value, right)
            return value
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand, text, depth + 1)
        case ast.UnaryOp(op=ast.UAdd()):
            return _value(node.operand, text, depth + 1)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.Name(id=name) if name in _FUNCTIONS:
            raise CalculationError(f"{name} is a function: write {name}(...)")
        case ast.Name(id=name):
            raise CalculationError(_unknown("name", name, _CONSTANTS))
        case ast.Call(func=ast.Name(id=name)) if name in _FUNCTIONS:
            return _call(name, [_value(argument, text, depth + 1) for argument in node.args])
        case ast.Call(func=ast.Name(id=name)) if name in _CONSTANTS:
            raise CalculationError(f"{name} is a constant, not a function; write * to multiply")
        case ast.Call(func=ast.Name(id=name)):
            raise CalculationError(_unknown("function", name, _FUNCTIONS))
        case ast.Compare():
            raise CalculationError("a comparison stands alone; it is no number to go on with")
        case ast.Tuple():
            raise CalculationError("a comma is only for arguments; write 1000 or 1_000, not 1,000")
    what = text[node.col_offset : node.end_col_offset][:40]
    raise CalculationError(f"{what!r} at character {node.col_offset + 1} is not understood")


def _literal(written: str) -> Number:
    digits, _, exponent = written.replace("_", "").lower().partition("e")
    if not _NUMBER.fullmatch(written):
        raise CalculationError(f"{written[:40]!r} is no number")
    if exponent and (len(exponent) > 8 or abs(int(exponent)) > _MAX_EXPONENT):
        raise CalculationError(f"the number {written[:30]} is too large or too small")
    return _checked(Fraction(f"{digits}e{exponent or 0}"))


def _unknown(kind: str, name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name[:40], known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(known))}"
    return f"there is no {kind} {name[:40]!r}; {hint}"


def _call(name: str, arguments: list[Number]) -> Number:
    fewest, most, function = _FUNCTIONS[name]
    if not fewest <= len(arguments) <= most:
        count = f"{fewest} or more" if most > 9 else " or ".join(map(str, range(fewest, most + 1)))
        raise CalculationError(f"{name} takes {count} argument(s), not {len(arguments)}")
    return _computed(name, function, *arguments)


# Computing: exact while it can be, and within bounds


def _computed(name: str, function: Callable[..., Number], *arguments: Number) -> Number:
    try:
        return _checked(function(*arguments))
    except CalculationError:
        raise
    except ZeroDivisionError:
        raise CalculationError("division by zero") from None
    except OverflowError:
        raise CalculationError(f"the result of {name} is too large") from None
    except ValueError:
        given = ", ".join(shown(one)[:40] for one in arguments)
        raise CalculationError(f"{name}({given}) is not defined for real numbers") from None


def _checked(value: Number) -> Number:
    """`value` in its simplest form, if it is finite and not too long."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise CalculationError("the result is not a finite number")
        return value
    value = Fraction(value)
    _check_bits(max(value.numerator.bit_length(), value.denominator.bit_length()))
    return value.numerator if value.denominator == 1 else value


def _check_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise CalculationError("the result has more than 6,000 digits")


def _whole(value: Number, what: str) -> int:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, int):
        raise CalculationError(f"{what} takes whole numbers, not {shown(value)}")
    return value


def _exact(function: Callable[[Any, Any], Number]) -> Callable[[Number, Number], Number]:
    """An operator between fractions; between floats where one of them is a float."""

    def operate(left: Number, right: Number) -> Number:
        if isinstance(left, float) or isinstance(right, float):
            return function(float(left), float(right))
        return function(Fraction(left), Fraction(right))

    return operate


def _power(base: Number, exponent: Number) -> Number:
    if base == 0 and exponent < 0:
        raise CalculationError("0 cannot be raised to a negative power")
    if isinstance(exponent, int) and not isinstance(base, float):
        base = Fraction(base)
        if base in (0, 1, -1):
            return base ** (exponent % 2 if base == -1 else min(abs(exponent), 1))
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        _check_bits((bits - 1) * abs(exponent))
        return base**exponent
    if base < 0 and not float(exponent).is_integer():
        raise CalculationError("a negative number has no real power of that kind")
    return float(float(base) ** float(exponent))


def _root(value: Number, degree: int) -> Number:
    """The exact root of an exact number where there is one; else a float."""
    if value < 0:
        if degree == 2:
            raise CalculationError("sqrt of a negative number is not real")
        return -_root(-value, degree)
    if not isinstance(value, float):
        root = Fraction(*(_whole_root(part, degree) for part in value.as_integer_ratio()))
        if root**degree == value:
            return root
    return math.sqrt(value) if degree == 2 else math.cbrt(value)


def _whole_root(value: int, degree: int) -> int:
    """The largest integer whose power is at most `value`."""
    low, high = 0, 1 << (value.bit_length() // degree + 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if middle**degree <= value else (low, middle - 1)
    return low


def _log(value: Number, base: Number | None = None) -> float:
    if value <= 0:
        raise CalculationError("a logarithm needs a positive number")
    if isinstance(value, Fraction):
        return _log(value.numerator, base) - _log(value.denominator, base)
    if base in (2, 10):
        return math.log2(value) if base == 2 else math.log10(value)
    return math.log(value) if base is None else math.log(value) / _log(base)


def _factorial(value: Number) -> int:
    count = _whole(value, "factorial")
    if not 0 <= count <= _MAX_FACTORIAL:
        raise CalculationError(f"factorial takes whole numbers from 0 to {_MAX_FACTORIAL}")
    return math.factorial(count)


def _comb(of: Number, chosen: Number) -> int:
    n, k = _whole(of, "comb"), _whole(chosen, "comb")
    _check_bits(min(n, min(k, n - k) * n.bit_length()))  # 2**n is more, and so is n**k
    return math.comb(n, k)


def _perm(of: Number, chosen: Number) -> int:
    n, k = _whole(of, "perm"), _whole(chosen, "perm")
    _check_bits(min(n, k) * n.bit_length())
    return math.perm(n, k)


def _round(value: Number, digits: Number = 0) -> Number:
    places = _whole(digits, "round")
    if abs(places) > 400:
        raise CalculationError("round takes at most 400 digits")
    if isinstance(value, float):
        return round(value, places) if places else round(value)
    scale = Fraction(10) ** places
    return Fraction(round(value * scale)) / scale


def _lcm(*several: Number) -> Number:
    result = 1
    for one in several:
        result = math.lcm(result, _whole(one, "lcm"))
        _checked(result)
    return result


_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Number]] = {
    ast.Add: _exact(operator.add),
    ast.Sub: _exact(operator.sub),
    ast.Mult: _exact(operator.mul),
    ast.Div: _exact(operator.truediv),
    ast.FloorDiv: _exact(operator.floordiv),
    ast.Mod: _exact(operator.mod),
    ast.Pow: _power,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_CONSTANTS: dict[str, Number] = {"pi": math.pi, "e": math.e, "tau": math.tau}
_FLOATS = (
    *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
    *("exp", "degrees", "radians"),
)
_FUNCTIONS: dict[str, tuple[int, int, Callable[..., Number]]] = {
    **{name: (1, 1, getattr(math, name)) for name in _FLOATS},
    "sqrt": (1, 1, lambda x: _root(x, 2)),
    "cbrt": (1, 1, lambda x: _root(x, 3)),
    "isqrt": (1, 1, lambda x: math.isqrt(_whole(x, "isqrt"))),
    "ln": (1, 1, _log),
    "log": (1, 2, _log),
    "log2": (1, 1, lambda x: _log(x, 2)),
    "log10": (1, 1, lambda x: _log(x, 10)),
    "abs": (1, 1, abs),
    "floor": (1, 1, math.floor),
    "ceil": (1, 1, math.ceil),
    "trunc": (1, 1, math.trunc),
    "round": (1, 2, _round),
    "mod": (2, 2, operator.mod),
    "atan2": (2, 2, math.atan2),
    "hypot": (1, 1_000, math.hypot),
    "min": (1, 1_000, lambda *several: min(several)),
    "max": (1, 1_000, lambda *several: max(several)),
    "sum": (1, 1_000, lambda *several: sum(several)),
    "gcd": (1, 1_000, lambda *several: math.gcd(*(_whole(one, "gcd") for one in several))),
    "lcm": (1, 1_000, _lcm),
    "factorial": (1, 1, _factorial),
    "comb": (2, 2, _comb),
    "perm": (2, 2, _perm),
}
