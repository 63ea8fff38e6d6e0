"""Problems that ask for a function: small algorithms (`functions`), and pipelines made of a few steps.

A pipeline chooses items, changes each, and makes one result of them; every combination of steps is a problem.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

from ludus.core.random import key, shuffled
from ludus.worlds.code.functions import TESTED

_CASES = 8
"""Hidden tests of a pipeline."""


@dataclass(frozen=True, slots=True)
class CodeProblem:
    """A function to write: what the agent is shown, the gold solution, and what it is tested on."""

    name: str
    subtask: str
    shown: str
    """Signature and docstring, with one example."""
    solution: str
    cases: tuple[dict[str, Any], ...]
    """Calls with their results: `{"args": [...], "expected": ...}`; the first one is the example."""


_PICKS = {
    "even": ("that are even", "n % 2 == 0"),
    "odd": ("that are odd", "n % 2 == 1"),
    "positive": ("above 0", "n > 0"),
    "negative": ("below 0", "n < 0"),
    "small": ("from -5 to 5", "-5 <= n <= 5"),
    "threes": ("that can be divided by 3", "n % 3 == 0"),
}
_CHANGES = {
    "squares": ("the square", "n * n"),
    "doubles": ("the double", "2 * n"),
    "sizes": ("the absolute value", "abs(n)"),
    "opposites": ("the negative", "-n"),
    "successors": ("the number plus 1", "n + 1"),
    "last_digits": ("the last decimal digit (without the sign)", "abs(n) % 10"),
}
_RESULTS = {
    "sum": ("their sum", "sum(found)"),
    "highest": ("the highest of them, or 0 if there are none", "max(found, default=0)"),
    "lowest": ("the lowest of them, or 0 if there are none", "min(found, default=0)"),
    "distinct": ("how many different ones there are", "len(set(found))"),
    "sorted": ("all of them in descending order", "sorted(found, reverse=True)"),
    "span": ("the highest minus the lowest, or 0 if there are none", "max(found) - min(found) if found else 0"),
    "reversed": ("all of them, from the last to the first", "found[::-1]"),
}  # fmt: skip
_WORD_PICKS = {
    "long": ("with more than 4 letters", "len(word) > 4"),
    "short": ("with at most 3 letters", "len(word) <= 3"),
    "vowel": ("that begin with a vowel", 'word[0].lower() in "aeiou"'),
    "capital": ("that begin with a capital letter", "word[0].isupper()"),
    "closed": ("that begin and end with the same letter, in any case", "word[0].lower() == word[-1].lower()"),
}  # fmt: skip
_WORD_CHANGES = {
    "mirrored": ("written backwards", "word[::-1]"),
    "shouted": ("in capitals", "word.upper()"),
    "beheaded": ("without its first letter", "word[1:]"),
    "initials": ("cut down to its first letter", "word[0]"),
    "doubled": ("written twice, without a space", "word * 2"),
}
_WORD_RESULTS = {
    "joined": ('joined by "-"', '"-".join(found)'),
    "longest": ("of these the longest, the first of equals, or ''", 'max(found, key=len, default="")'),
    "ordered": ("as a list in alphabetical order (Python's)", "sorted(found)"),
    "letters": ("and then the number of letters of all of them", "sum(map(len, found))"),
    "counted": ("as a dictionary with how often each occurs", "{word: found.count(word) for word in found}"),
}  # fmt: skip
_WORDS = (
    "Ada", "and", "otto", "went", "on", "a", "trip", "to", "Oslo", "with", "Anna", "Level", "eagles", "Eve",
    "area", "river", "stones", "I", "saw", "noon",
)  # fmt: skip


@cache
def problems(split: str) -> tuple[CodeProblem, ...]:
    """Those of a split, "train" or "held_out": of each kind a fixed fifth is held out."""
    chosen: list[CodeProblem] = []
    for kind in (_algorithms(), _pipelines("numbers"), _pipelines("words")):
        found = list(kind)
        order = shuffled(len(found), key("code", found[0].subtask))
        count = len(found) // 5
        chosen += [found[i] for i in (order[:count] if split == "held_out" else order[count:])]
    return tuple(chosen)


def _algorithms() -> Iterator[CodeProblem]:
    for function, arguments in TESTED.items():
        source = textwrap.dedent(inspect.getsource(function))
        yield _problem("algorithms", source[source.index("def ") :], arguments)


def _pipelines(kind: str) -> Iterator[CodeProblem]:
    of_words = kind == "words"
    picks, changes, results = (
        (_WORD_PICKS, _WORD_CHANGES, _WORD_RESULTS) if of_words else (_PICKS, _CHANGES, _RESULTS)
    )
    for pick, (which, condition) in picks.items():
        for change, (what, changed) in changes.items():
            for result, (outcome, value) in results.items():
                name = f"{result}_{change}_of_{pick}"
                draw = Random(key("code", kind, name))
                cases: list[tuple[Any, ...]]
                if of_words:
                    text = f"Take the words of the text {which}, each {what}, {outcome}."
                    head, loop = f"def {name}(text: str):", "for word in text.split()"
                    cases = [
                        (" ".join(draw.choices(_WORDS, k=draw.randint(3, 9))),) for _ in range(_CASES)
                    ]
                    cases[-1] = ("",)
                else:
                    text = f"Take {what} of each of the numbers {which}. Return {outcome}."
                    head, loop = f"def {name}(numbers: list[int]):", "for n in numbers"
                    cases = [
                        ([draw.randint(-20, 20) for _ in range(draw.randint(4, 9))],)
                        for _ in range(_CASES)
                    ]
                    cases[-1] = ([],)
                body = f"    found = [{changed} {loop} if {condition}]\n    return {value}\n"
                yield _problem(kind, f'{head}\n    """{text}"""\n{body}', cases)


def _problem(subtask: str, source: str, arguments: list[tuple[Any, ...]]) -> CodeProblem:
    """The results are those of the gold solution, which is our own code and runs here."""
    scope: dict[str, Any] = {}
    exec(compile(source, "solution", "exec", dont_inherit=True), scope)
    name = source[len("def ") : source.index("(")]
    cases = tuple({"args": list(one), "expected": scope[name](*deepcopy(one))} for one in arguments)
    example = f">>> {name}({', '.join(map(repr, arguments[0]))})\n    {cases[0]['expected']!r}"
    head, documented, body = source.split('"""')
    shown = f'{head}"""{documented}\n\n    {example}\n    """\n'
    return CodeProblem(name, subtask, shown, f"{shown}{body.lstrip(chr(10))}", cases)
