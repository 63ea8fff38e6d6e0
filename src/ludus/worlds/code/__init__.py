"""Code: write a function from its signature and docstring; hidden tests decide.

The agent may try things with the sandboxed tool `python`, and submits the function as its answer, in a Python
block, or by the tool `submit`. Tests run in other processes than the function, which sees none of them. Out of
the box there are problems of our own (`problems`); files in HumanEval's form are read from LUDUS_HUMANEVAL.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Generator, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any, Literal

from ludus.core.failures import ConfigError
from ludus.core.messages import ToolCall, ToolResult
from ludus.core.random import key, shuffled
from ludus.core.task import Task
from ludus.core.trajectory import Trajectory
from ludus.envs.world import World
from ludus.rewards.code_tests import UnitTests
from ludus.rewards.code_tests.fault_attribution import SandboxFactory
from ludus.rewards.code_tests.test_cases import code_of
from ludus.rewards.scores import Parts
from ludus.tools import tool
from ludus.worlds import data_path, files_of, read_rows
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


HUMANEVAL = "LUDUS_HUMANEVAL"
_PROMPT = """Write this Python function. Give the whole function in a ```python block as your answer.

```python
{shown}
```"""
_EXAMPLE = re.compile(r"^\s*>>> (.+)$", re.MULTILINE)


@tool
async def submit(code: str) -> ToolResult:
    """Submit the finished function, which ends the episode.

    Args:
        code: Python source with the whole function, and what it needs.
    """
    return ToolResult("submitted", terminated=True)


# Rewards


@dataclass(kw_only=True, eq=False)
class FunctionTests(UnitTests):
    """The task's hidden tests on the function that was submitted, or on the answer where none was.

    With `credit="all"` (the default) 1 if it passes all of them, with "share" the share; `success` is logged
    either way. `preamble` in the task's metadata stands before the function, as in HumanEval.
    """

    credit: Literal["share", "all"] = "all"
    seconds: float = 5.0
    total_seconds: float = 30.0
    name: str = "success"

    async def score(self, trajectory: Trajectory, task: Task, envs: Mapping[str, Any]) -> Parts:
        parts = await super().score(trajectory, task, envs)
        passed_all = parts[f"{self.name}_passed"] == parts[f"{self.name}_total"]
        return {**parts, "success": float(passed_all)}

    def _answer_of(self, trajectory: Trajectory) -> str:
        return submitted(trajectory)

    async def _score_answer(self, task: Task, answer: str, sandboxes: SandboxFactory) -> Parts:
        preamble = task.metadata.get("preamble", "")
        code = f"{preamble}\n{code_of(answer, ('python', 'py', 'python3'))}" if preamble else answer
        return await super()._score_answer(task, code, sandboxes)


success = FunctionTests()
share = FunctionTests(credit="share", name="share")


def submitted(trajectory: Trajectory) -> str:
    """The code of the last `submit`, or else the answer."""
    calls = [call for call in trajectory.calls if call.name == "submit" and call.fault is None]
    return str(calls[-1].arguments.get("code", "")) if calls else trajectory.answer or ""


# Tasks


def training_tasks() -> list[Task]:
    """Four fifths of the algorithms and pipelines."""
    return [_own(one, "train", number) for number, one in enumerate(problems("train"))]


def held_out_tasks() -> list[Task]:
    """The others: no training task asks for one of these functions."""
    return [_own(one, "held-out", number) for number, one in enumerate(problems("held_out"))]


def _own(problem: CodeProblem, split: str, number: int) -> Task:
    return Task.of(
        _PROMPT.format(shown=problem.shown.rstrip()),
        id=f"code-{split}-{number}",
        subtask=problem.subtask,
        tests=list(problem.cases),
        entry_point=problem.name,
        shown=problem.shown,
        solution=problem.solution,
    )


def humaneval_tasks() -> list[Task]:
    """The problems of LUDUS_HUMANEVAL: rows with `prompt`, `entry_point`, `canonical_solution` and `test`."""
    place = data_path(HUMANEVAL, "a file in HumanEval's form, or its folder (docs/envs/code.md)")
    tasks = []
    for file in files_of(place, ""):
        for number, row in enumerate(read_rows(file)):
            if missing := [name for name in ("prompt", "entry_point", "test") if name not in row]:
                raise ConfigError(
                    f"{file}, row {number + 1} has no {missing[0]!r}: it is no task of HumanEval"
                )
            prompt, function = str(row["prompt"]), str(row["entry_point"])
            preamble = prompt[: _definition(prompt, function, f"{file}, row {number + 1}")]
            solution = row.get("canonical_solution")
            tasks.append(
                Task.of(
                    _PROMPT.format(shown=prompt.strip()),
                    id=f"humaneval-{number}",
                    subtask="humaneval",
                    tests=f"{preamble}\n{row['test']}",  # helpers of the prompt are the tests' own here
                    entry_point=function,
                    preamble=preamble.strip(),
                    shown=prompt,
                    solution=None if solution is None else f"{prompt}{solution}",
                )
            )
    return tasks


def _definition(prompt: str, function: str, where: str) -> int:
    found = list(re.finditer(rf"^def {re.escape(function)}\(", prompt, re.MULTILINE))
    if not found:
        raise ConfigError(f"{where}: the prompt does not define {function}")
    return found[-1].start()


# The demonstrator


def expert(task: Task) -> Generator[ToolCall | str, str, None]:
    """Tries the gold solution on the example of the docstring, and answers with it."""
    solution = str(task.metadata["solution"]).strip()
    example = _EXAMPLE.search(str(task.metadata["shown"]))
    if example is not None:
        call = re.sub(r"(?<=\))\s+#.*$", "", example[1])  # without a comment behind it
        yield ToolCall("python", {"code": f"{solution}\n\nprint({call.strip()})"})
    yield f"```python\n{solution}\n```"


WORLD = World(
    "code",
    "Write a function from its docstring; hidden tests decide. HumanEval by path.",
    rewards=(success,),
    training_tasks=training_tasks,
    held_out_tasks=held_out_tasks,
    expert=expert,
    tools=("python",),
    max_turns=5,
)
