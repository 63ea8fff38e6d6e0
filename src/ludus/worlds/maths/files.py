"""GSM8K and MATH from files that users have: questions, final answers, and programs from worked solutions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from pathlib import Path
from typing import Any

from ludus.core.failures import ConfigError
from ludus.core.random import key
from ludus.tools.library.calculator import CalculationError, evaluate
from ludus.worlds import files_of, read_rows

_WORDS = {"train": ("train",), "held_out": ("test", "held_out", "eval", "500")}
"""Words in names of files for each split."""
_HELD_OUT_SHARE = 10
"""Of a file that is not split, one row in so many is held out."""


def rows_of(place: Path, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a split, each with where it stands.

    In a folder, the files whose names say so; of a single file, a fixed tenth is held out, unless its name says
    which split it is.
    """
    own, other = _WORDS[split], _WORDS["held_out" if split == "train" else "train"]
    says_own, says_other = (any(word in place.name.lower() for word in words) for words in (own, other))
    is_whole = place.is_file() and not says_own and not says_other
    files = [] if place.is_file() and says_other and not says_own else files_of(place, *own)
    if not files:
        raise ConfigError(f"{place} has no {split} split: no file with {' or '.join(own)} in its name")
    for file in files:
        for number, row in enumerate(read_rows(file)):
            is_held_out = key("maths", file.name, number) % _HELD_OUT_SHARE == 0
            if not is_whole or is_held_out == (split == "held_out"):
                yield f"{file}, row {number + 1}", row


def question_and_solution(row: dict[str, Any], where: str) -> tuple[str, str, str]:
    """The question, the worked solution and the final answer of a row of GSM8K, MATH, MATH-500 or DeepMath."""
    question = _first(row, "question", "problem", "prompt")
    solution = _first(row, "solution", "answer", "final_answer", "target")
    # MATH-500 and DeepMath have a column for the final answer; GSM8K's `answer` is the solution
    own = _first(row, "final_answer", *(("answer",) if "solution" in row else ()))
    final = str(own) if own is not None else final_answer(str(solution))
    if not isinstance(question, str) or solution is None or not final.strip():
        raise ConfigError(
            f"{where} is no problem: it needs question and answer, or problem and solution"
        )
    return question, str(solution), final.strip()


def _first(row: dict[str, Any], *names: str) -> Any:
    """The first of these fields that says something; 0 does."""
    return next((row[name] for name in names if row.get(name) not in (None, "")), None)


def final_answer(text: str) -> str:
    r"""The final answer of a text: the last `\boxed{...}`, what follows the last `####`, or else all of it."""
    start = text.rfind("\\boxed{")
    if start >= 0:
        depth, begin = 0, start + len("\\boxed")
        for end in range(begin, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[begin + 1 : end].strip()
    _, mark, after = text.rpartition("####")
    return after.strip() if mark else text.strip()


# GSM8K's calculator annotations, <<48/2=24>>, as a program

_STEP = re.compile(r"<<([^<>=]*)=([^<>]*)>>")
_RESULT = re.compile(r"\s*=\s*\$?\s*<<[^<>]*>>\s*\$?[\d,]*\.?\d*")
_LITERAL = re.compile(r"(?<![\w.])(?:\d+(?:\.\d*)?|\.\d+)")
_BINARY = re.compile(r"(?<=[\w).])(\*\*|[-+*/])")
_OPERAND = r"\(?\s*\$?\s*(?:\d[\d,]*(?:\.\d+)?|\.\d+)\s*%?\s*\)?"
_EQUATION = re.compile(
    rf"({_OPERAND}(?:\s*[-+*/xX×÷−–]\s*{_OPERAND})+)\s*=\s*\$?\s*(\d[\d,]*(?:\.\d+)?)"
)
_ARITHMETIC = str.maketrans(
    {"x": "*", "X": "*", "×": "*", "÷": "/", "−": "-", "–": "-", ",": "", "$": "", " ": ""}
)


def program_of(question: str, solution: str, target: str) -> str | None:
    """The Python program that a solution's annotations amount to; None where they do not reach the answer.

    A line of the solution becomes a comment, an annotation an assignment; in a line without one, so do
    equations in the text that hold. A number that an earlier step gave, and that the question does not have, is
    written as its variable. What is printed is the last result that is the final answer.
    """
    given = {_decimal(text) for text in _LITERAL.findall(question.replace(",", ""))}
    names: dict[Decimal, str] = {}
    values: dict[str, Fraction] = {}
    lines: list[str] = []
    for line in solution.split("####")[0].split("\n"):
        line = line if "<<" in line else _EQUATION.sub(_annotated, line)
        steps = [
            (arithmetic, right)
            for left, right in _STEP.findall(line)
            for arithmetic in _readings(left)[:1]
        ]
        if steps:
            lines.append(f"# {' '.join(_STEP.sub('', _RESULT.sub('', line)).split())}")
        for expression, right in steps:
            name = f"x{len(values) + 1}"
            with_names = _LITERAL.sub(lambda m: _named(m[0], names, given), expression)
            lines.append(f"{name} = " + _BINARY.sub(r" \1 ", with_names))
            values[name] = _value(expression)
            if (written := _decimal(right.translate(_ARITHMETIC))) is not None:
                names[written] = name
    wanted = _decimal(target.translate(_ARITHMETIC))
    fitting = [name for name, value in values.items() if wanted is not None and _is_close(value, wanted)]
    return "\n".join([*lines, f"print({fitting[-1]})"]) if fitting else None


def words_of(solution: str) -> str:
    r"""A solution without annotations, with its final answer in `\boxed{}`."""
    text = _STEP.sub("", solution).split("####")[0].strip()
    return text if "\\boxed" in text else f"{text}\n\\boxed{{{final_answer(solution)}}}".strip()


def _annotated(match: re.Match[str]) -> str:
    """An equation in the text as an annotation, if it holds."""
    result = _decimal(match[2].translate(_ARITHMETIC))
    for expression in _readings(match[1]):
        if result is not None and _is_close(_value(expression), result):
            return f"{match[1]} = <<{expression}={match[2]}>>{match[2]}"
    return match[0]


def _readings(text: str) -> list[str]:
    """Readings of plain arithmetic as Python; 25% is 25/100, or 25 where the result is in percent."""
    plain = re.sub(r"(?<![\d.])0+(?=\d)", "", "".join(text.translate(_ARITHMETIC).split()))
    found = []
    for reading in dict.fromkeys((re.sub(r"([\d.]+)%", r"\1/100", plain), plain.replace("%", ""))):
        try:
            _value(reading)
        except (CalculationError, OverflowError):
            continue
        found.append(reading)
    return found


def _value(expression: str) -> Fraction:
    return Fraction(evaluate(expression))


def _is_close(value: Fraction, wanted: Decimal) -> bool:
    return abs(value - Fraction(wanted)) <= Fraction(1, 10**6)


def _named(literal: str, names: dict[Decimal, str], given: set[Decimal | None]) -> str:
    value = _decimal(literal)
    return names[value] if value is not None and value in names and value not in given else literal


def _decimal(text: str) -> Decimal | None:
    try:
        return Decimal(text.rstrip("%.")).normalize()
    except InvalidOperation:
        return None
