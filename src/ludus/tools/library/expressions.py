"""Arithmetic from text, without `eval`: a small grammar, read and computed in one pass.

    comparison := sum (("<" | "<=" | ">" | ">=" | "==" | "!=") sum)*
    sum        := product (("+" | "-") product)*
    product    := signed (("*" | "/" | "//" | "%") signed)*
    signed     := ("+" | "-") signed | power
    power      := atom ["**" signed]
    atom       := number | constant | function "(" comparison ("," comparison)* ")" | "(" comparison ")"

Precedence is Python's. What is computed, and how large it may get, is decided in `numbers`; here the length of
the text and the depth of its nesting are bounded, so that no text costs more than it is long.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from fractions import Fraction
from typing import NamedTuple

from ludus.tools.library.functions import CONSTANTS, FUNCTIONS, Function
from ludus.tools.library.numbers import (
    BINARY,
    COMPARISONS,
    MOST_EXPONENT,
    CalculationError,
    Number,
    exact,
    negative,
    power,
)

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
