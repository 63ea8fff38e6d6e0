"""Arithmetic and word problems of graded difficulty, each with a Python program that solves it.

A level is the number of digits: what a model does in its head at level 1 it cannot at level 4, and a program
can. So the set shows from where on the tool pays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from ludus.core.random import key

DIGITS = {1: 2, 2: 3, 3: 5, 4: 9}
"""Digits of the numbers at each level."""
_NAMES = ("Ada", "Bela", "Chen", "Dora", "Emil", "Femi", "Gita", "Hugo", "Ines", "Jomo", "Kim", "Lena")
_THINGS = ("apples", "bolts", "books", "bricks", "candles", "coins", "cups", "nails", "pens", "tiles")


@dataclass(frozen=True, slots=True)
class Problem:
    """A question, its answer, and a program that prints it."""

    text: str
    answer: int
    program: str


Template = Callable[[Random, int], Problem]
"""Draws a problem whose numbers have so many digits."""


def problems(kind: str, level: int, split: str) -> Iterator[Problem]:
    """Endlessly many, in an order that kind, level and split decide."""
    templates, draw = KINDS[kind], Random(key("maths", kind, level, split))
    while True:
        for template in templates:
            yield template(draw, DIGITS[level])


def _number(draw: Random, digits: int) -> int:
    return draw.randrange(10 ** (digits - 1), 10**digits)


def _small(draw: Random, digits: int) -> int:
    """A second factor, of about half as many digits."""
    return draw.randrange(3, 10 ** ((digits + 1) // 2))


# Arithmetic


def _product_and_sum(draw: Random, digits: int) -> Problem:
    a, b, c = (_number(draw, digits) for _ in range(3))
    return Problem(f"Compute {a} * {b} + {c}.", a * b + c, f"print({a} * {b} + {c})")


def _difference_times(draw: Random, digits: int) -> Problem:
    a, b, c = (_number(draw, digits) for _ in range(3))
    return Problem(f"Compute ({a} - {b}) * {c}.", (a - b) * c, f"print(({a} - {b}) * {c})")


def _remainder(draw: Random, digits: int) -> Problem:
    a, b, c = _number(draw, digits), _number(draw, digits), _small(draw, digits)
    text = f"What is the remainder when {a} * {b} is divided by {c}?"
    return Problem(text, a * b % c, f"print({a} * {b} % {c})")


def _quotient(draw: Random, digits: int) -> Problem:
    a, b, c = _number(draw, digits), _number(draw, digits), _small(draw, digits)
    text = f"Divide {a} * {b} by {c} and round down. What is the result?"
    return Problem(text, a * b // c, f"print({a} * {b} // {c})")


def _digit_sum(draw: Random, digits: int) -> Problem:
    a, b = _number(draw, digits), _number(draw, digits)
    text = f"What is the sum of the decimal digits of {a} * {b}?"
    program = f"print(sum(int(digit) for digit in str({a} * {b})))"
    return Problem(text, sum(map(int, str(a * b))), program)


def _greatest_divisor(draw: Random, digits: int) -> Problem:
    common, a, b = _small(draw, digits), _small(draw, digits), _small(draw, digits)
    text = f"What is the greatest common divisor of {common * a} and {common * b}?"
    program = f"import math\nprint(math.gcd({common * a}, {common * b}))"
    return Problem(text, math.gcd(common * a, common * b), program)


# Word problems


def _crates(draw: Random, digits: int) -> Problem:
    who, what = draw.choice(_NAMES), draw.choice(_THINGS)
    crates, each = _small(draw, digits), _number(draw, digits)
    sold = draw.randrange(1, crates * each)
    text = (
        f"{who} has {crates} crates with {each} {what} in each. {who} sells {sold} of the {what}. "
        "How many are left?"
    )
    return Problem(text, crates * each - sold, f"total = {crates} * {each}\nprint(total - {sold})")


def _earnings(draw: Random, digits: int) -> Problem:
    who, what = draw.choice(_NAMES), draw.choice(_THINGS)
    price, cost, count, rent = (_small(draw, digits) + 2 for _ in range(4))
    price += cost
    text = (
        f"{who} buys {count} {what} for {cost} dollars each and sells all of them for {price} dollars each. "
        f"The stall costs {rent} dollars. How many dollars does {who} earn? (A loss is a negative number.)"
    )
    program = f"profit = {count} * ({price} - {cost})\nprint(profit - {rent})"
    return Problem(text, count * (price - cost) - rent, program)


def _savings(draw: Random, digits: int) -> Problem:
    who, start, rate = draw.choice(_NAMES), _number(draw, digits), draw.randrange(2, 10)
    years = draw.randrange(1, 3) if digits < 3 else draw.randrange(2, 2 * digits)
    value = start
    for _ in range(years):
        value += value * rate // 100
    text = (
        f"{who} has {start} dollars in a bank. At the end of each year the bank adds {rate} percent of what "
        f"is there, rounded down to whole dollars. How many dollars are there after {years} years?"
    )
    program = (
        f"money = {start}\nfor year in range({years}):\n    money += money * {rate} // 100\nprint(money)"
    )
    return Problem(text, value, program)


def _training(draw: Random, digits: int) -> Problem:
    who, first, more = draw.choice(_NAMES), _number(draw, digits), _small(draw, digits)
    days = draw.randrange(3, 6) if digits < 3 else draw.randrange(7, 10 ** (digits // 2))
    text = (
        f"{who} walks {first} steps on the first day, and each day {more} steps more than on the day before. "
        f"How many steps are that in {days} days altogether?"
    )
    program = f"print(sum({first} + day * {more} for day in range({days})))"
    return Problem(text, days * first + more * days * (days - 1) // 2, program)


def _lights(draw: Random, digits: int) -> Problem:
    a, b = _small(draw, digits) + 1, _small(draw, digits) + 2
    seconds = math.lcm(a, b) * draw.randrange(2, 9) + draw.randrange(a)
    text = (
        f"One light flashes every {a} seconds, another every {b} seconds. They have just flashed together. "
        f"How often do they flash together in the next {seconds} seconds?"
    )
    program = f"import math\nprint({seconds} // math.lcm({a}, {b}))"
    return Problem(text, seconds // math.lcm(a, b), program)


def _members(draw: Random, digits: int) -> Problem:
    last, a, b = _number(draw, digits), _small(draw, digits), _small(draw, digits) + 1
    text = (
        f"The members of a club have the numbers from 1 to {last}. Everybody whose number can be divided by "
        f"{a} or by {b} gets a prize. How many prizes are needed?"
    )
    program = (
        f"import math\nlast, a, b = {last}, {a}, {b}\n"
        "print(last // a + last // b - last // math.lcm(a, b))"
    )
    return Problem(text, last // a + last // b - last // math.lcm(a, b), program)


KINDS: dict[str, tuple[Template, ...]] = {
    "arithmetic": (
        _product_and_sum,
        _difference_times,
        _remainder,
        _quotient,
        _digit_sum,
        _greatest_divisor,
    ),
    "words": (_crates, _earnings, _savings, _training, _lights, _members),
}
