r"""Maths with Python: word problems and arithmetic, solved with the sandboxed tool `python`.

Out of the box it asks problems of its own, of graded difficulty (`problems`). GSM8K and MATH are read from the
files that LUDUS_GSM8K and LUDUS_MATH name (a file or a folder). The final answer stands in `\boxed{}`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from itertools import islice
from random import Random
from typing import Any, Literal

from ludus.core.messages import ToolCall
from ludus.core.random import key
from ludus.core.task import Task
from ludus.core.trajectory import Trajectory
from ludus.envs.world import World
from ludus.rewards import reward
from ludus.rewards.conduct import made_calls
from ludus.rewards.text_rewards import close, last_number, maths
from ludus.worlds import data_path
from ludus.worlds.maths.files import final_answer, program_of, question_and_solution, rows_of, words_of

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


GSM8K = "LUDUS_GSM8K"
MATH = "LUDUS_MATH"
HELD_OUT, TRAINING = 25, 400
"""Problems of each kind and level."""
_PROMPT = "{question}\n\nPut the final answer in \\boxed{{}}."
_MOST_ANSWER = 10_000
_NUMBER = re.compile(r"-?\$?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]+)?")


# Tasks


def training_tasks() -> list[Task]:
    """Problems of our own: two kinds, four levels."""
    return [task for kind in KINDS for level in DIGITS for task in _own(kind, level, "train")]


def held_out_tasks() -> list[Task]:
    """Other problems of the same kinds; none of them is a training problem."""
    return [task for kind in KINDS for level in DIGITS for task in _own(kind, level, "held_out")]


def gsm8k_training_tasks() -> list[Task]:
    """GSM8K's training split, from LUDUS_GSM8K."""
    return _from_files(GSM8K, "gsm8k", "train")


def gsm8k_held_out_tasks() -> list[Task]:
    """GSM8K's test split."""
    return _from_files(GSM8K, "gsm8k", "held_out")


def math_training_tasks() -> list[Task]:
    """MATH's training split, from LUDUS_MATH."""
    return _from_files(MATH, "math", "train")


def math_held_out_tasks() -> list[Task]:
    """MATH's test split, or MATH-500."""
    return _from_files(MATH, "math", "held_out")


def _own(kind: str, level: int, split: str) -> list[Task]:
    held_out = _distinct(kind, level, "held_out", HELD_OUT, frozenset())
    chosen = held_out
    if split == "train":
        chosen = _distinct(kind, level, split, TRAINING, frozenset(one.text for one in held_out))
    return [
        Task.of(
            _PROMPT.format(question=one.text),
            str(one.answer),
            id=f"maths-{kind}-{level}-{split.replace('_', '-')}-{number}",
            subtask=f"{kind}, level {level}",
            program=one.program,
        )
        for number, one in enumerate(chosen)
    ]


@cache
def _distinct(
    kind: str, level: int, split: str, count: int, without: frozenset[str]
) -> tuple[Problem, ...]:
    seen = set(without)
    new = (p for p in problems(kind, level, split) if p.text not in seen and not seen.add(p.text))  # type: ignore[func-returns-value]
    return tuple(islice(new, count))


def _from_files(variable: str, name: str, split: str) -> list[Task]:
    place = data_path(variable, f"the files of {name.upper()}, or their folder (docs/envs/maths.md)")
    tasks = []
    for number, (where, row) in enumerate(rows_of(place, split)):
        question, solution, final = question_and_solution(row, where)
        topic, level = row.get("subject") or row.get("type"), row.get("level")
        level = "" if level is None else str(level).removeprefix("Level ").strip()
        tasks.append(
            Task.of(
                _PROMPT.format(question=question),
                final,
                id=f"{name}-{'train' if split == 'train' else 'test'}-{number}",
                subtask=f"{topic}, level {level}" if topic and level else str(topic or name),
                question=question,
                solution=solution,
            )
        )
    return tasks


# Rewards


async def is_right(answer: str, target: Any) -> bool:
    r"""Whether an answer's `\boxed{}` (or what follows `####`, or its last number) is the target's.

    A whole number has to be met exactly, up to what a float loses. Targets that are no plain number are
    compared as mathematics (`math-verify`).
    """
    wanted, found = final_answer(str(target)), final_answer(answer[-_MOST_ANSWER:])
    if not _NUMBER.fullmatch(wanted) or (number := last_number(wanted, "plain")) is None:
        is_box = "\\boxed" in answer or "####" in answer
        return bool(await maths(f"\\boxed{{{found}}}" if is_box else found, f"\\boxed{{{wanted}}}"))
    value = last_number(found, "plain")
    if value is None:
        return False
    is_whole = number == number.to_integral_value()
    return close(value, number, 0.0, 1e-6) if is_whole else close(value, Decimal(number))


@reward(name="success", timeout=None)
async def success(answer: str, target: Any) -> float:
    """1 for the right answer, with or without the tool."""
    return float(await is_right(answer, target))


@reward(name="agentfly", timeout=None)
async def agentfly(trajectory: Trajectory, answer: str, target: Any) -> dict[str, float]:
    """AgentFly (B.1): 0.1 if a tool was called, 1.0 if the answer is right as well, otherwise 0."""
    right, called = await is_right(answer, target), bool(made_calls(trajectory))
    return {"reward": (1.0 if right else 0.1) if called else 0.0, "success": float(right)}


@reward(name="vt_math", timeout=None)
async def vt_math(
    trajectory: Trajectory,
    answer: str,
    target: Any,
    *,
    tool_term: Literal["called", "printed"] = "called",
) -> dict[str, float]:
    """VT-Math (VerlTool, F.1): R_acc + R_tool, 1 or -1 for the answer, and -0.25 in the second term.

    The paper prints the second term with the condition of the first, so that a wrong answer is paid -1.25
    (`tool_term="printed"`); its text calls it an incentive to use tools, so here it is -0.25 without a call.
    """
    right = await is_right(answer, target)
    fine = right if tool_term == "printed" else bool(made_calls(trajectory))
    return {"reward": (1.0 if right else -1.0) - (0.0 if fine else 0.25), "success": float(right)}


# The demonstrator


def expert(task: Task) -> Generator[ToolCall | str, str, None]:
    """Runs the problem's program and answers what it prints; a solution that has none is given in words.

    GSM8K's programs are made of its calculator annotations, which lead to the answer in 97% of the rows; MATH
    has none. Rows of other sets may bring a `program`.
    """
    solution = str(task.metadata.get("solution", task.target))
    program = task.metadata.get("program")
    if program is None:
        question = str(task.metadata.get("question", task.messages[-1].content))
        program = program_of(question, solution, final_answer(str(task.target)))
    if program is None:
        yield words_of(solution)
        return
    printed = yield ToolCall("python", {"code": program})
    yield f"The answer is \\boxed{{{_shown(printed)}}}."


def _shown(printed: str) -> str:
    """A number as one writes it: 10.0 is 10, and 0.30000000000000004 is 0.3."""
    text = printed.strip().rsplit("\n", 1)[-1]
    try:
        return f"{float(text):.6f}".rstrip("0").rstrip(".") if "." in text or "e" in text else text
    except ValueError:
        return text


WORLD = World(
    "maths",
    "Arithmetic and word problems with Python; GSM8K and MATH by path.",
    rewards=(success,),
    training_tasks=training_tasks,
    held_out_tasks=held_out_tasks,
    expert=expert,
    tools=("python",),
    max_turns=4,
)
