"""Code: write a function from its signature and docstring; hidden tests decide.

The agent may try things with the sandboxed tool `python`, and submits the function as its answer, in a Python
block, or by the tool `submit`. Tests run in other processes than the function, which sees none of them. Out of
the box there are problems of our own (`problems`); files in HumanEval's form are read from LUDUS_HUMANEVAL.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from typing import Any, Literal

from ludus.core.failures import ConfigError
from ludus.core.messages import ToolCall, ToolResult
from ludus.core.task import Task
from ludus.core.trajectory import Trajectory
from ludus.envs.world import World
from ludus.rewards.code_tests import UnitTests
from ludus.rewards.code_tests.fault_attribution import SandboxFactory
from ludus.rewards.code_tests.test_cases import code_of
from ludus.rewards.scores import Parts
from ludus.tools import tool
from ludus.worlds.code.problems import CodeProblem, problems
from ludus.worlds.data import data_path, files_of, read_rows

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


class FunctionTests(UnitTests):
    """The task's hidden tests on the function that was submitted, or on the answer where none was.

    With `credit="all"` (the default) 1 if it passes all of them, with "share" the share; `success` is logged
    either way. `preamble` in the task's metadata stands before the function, as in HumanEval.
    """

    def __init__(
        self, *, credit: Literal["all", "share"] = "all", name: str = "success", weight: float = 1.0
    ) -> None:
        super().__init__(credit=credit, seconds=5.0, total_seconds=30.0, name=name, weight=weight)

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
