"""Workflow memory: how similar tasks were done before, given to the agent at the start of a task.

A workflow is what a successful episode did, without its detours: calls that were refused and repeats are left
out, an argument that came from the task or a result stands as such, and where several episodes did the same
with different arguments, the argument is left open. At the start of a task the workflows whose goals are most
like it go into the system message. Held-out measurements do without, unless a recipe asks for it: otherwise
they would measure the memory.

Wang et al., "Agent Workflow Memory", 2024, arXiv:2409.07429.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import Field, TypeAdapter, ValidationError

from ludus.core.config import Config, Place
from ludus.core.failures import ConfigError
from ludus.core.messages import Json, Message
from ludus.core.task import Task
from ludus.core.trajectory import Trajectory, is_success
from ludus.core.user_files import read_user_json
from ludus.rollouts.task_files import map_tasks

_WORD = re.compile(r"\w+")
_MOST_GOALS = 5
_MOST_STEPS = 30
_SHOWN_CHARS = 80
HEADER = "How similar tasks were done before:"


class WorkflowConfig(Config):
    """Workflows of earlier runs that go into the prompt (docs/synthesis_tools.md)."""

    file: Place
    """The file that `ludus synth workflows` has written."""
    best: int = Field(default=3, ge=1)
    """How many go into a prompt: those whose goals are most like the task."""
    least_similarity: float = Field(default=0.2, ge=0, le=1)
    """Workflows less like the task than this are left out."""
    held_out: bool = False
    """Whether held-out tasks get them too."""


@dataclass(frozen=True, slots=True)
class WorkflowStep:
    """A call; a text in angle brackets stands for a value that differs from task to task."""

    tool: str
    arguments: Json = field(default_factory=dict)

    def __str__(self) -> str:
        given = ", ".join(f"{name}={_shown(value)}" for name, value in self.arguments.items())
        return f"{self.tool}({given})"


@dataclass(frozen=True, slots=True)
class Workflow:
    """Steps that worked, and what they were good for."""

    goals: tuple[str, ...]
    """Requests of the tasks."""
    steps: tuple[WorkflowStep, ...]
    episodes: int = 1
    """How many successes did so."""
    turns: float = 0.0
    """How many turns these took, on average."""

    def __str__(self) -> str:
        return f"{self.goals[0]} {'; '.join(map(str, self.steps))}"


_FILE = TypeAdapter(list[Workflow])


def extract_workflows(trajectories: Iterable[Trajectory]) -> list[Workflow]:
    """The workflows of the successes among these episodes, those that did the same as one."""
    alike: dict[tuple[str, tuple[str, ...]], list[tuple[Trajectory, list[WorkflowStep]]]] = {}
    for one in trajectories:
        steps = _steps(one) if is_success(one) else []
        if steps and len(steps) <= _MOST_STEPS:
            kind = " ".join(sorted(set(_words(_goal(one.task)))))
            alike.setdefault((kind, tuple(step.tool for step in steps)), []).append((one, steps))
    found = [_joined(episodes) for episodes in alike.values()]
    return sorted(_distinct(found), key=lambda one: (-one.episodes, one.turns, one.goals))


def save_workflows(path: str | Path, workflows: Sequence[Workflow]) -> None:
    """A file that people can read and change."""
    Path(path).write_bytes(_FILE.dump_json(list(workflows), indent=1))


def load_workflows(path: str | Path) -> list[Workflow]:
    """The workflows of a file; `ConfigError` says what is wrong with it."""
    raw = read_user_json(path)
    try:
        found = _FILE.validate_python(raw)
    except ValidationError as error:
        raise ConfigError(f"{path} is no file of workflows: {error}") from None
    if any(not one.goals or not one.steps for one in found):
        raise ConfigError(f"{path}: a workflow needs goals and steps")
    return found


def similar_workflows(
    workflows: Sequence[Workflow], task: Task, config: WorkflowConfig
) -> list[Workflow]:
    """The workflows whose goals are most like the task, the most like first; of equal ones the shorter."""
    rarity = _rarity(workflows)
    asked = _vector(_goal(task), rarity)
    scored = [
        (max(_cosine(asked, _vector(goal, rarity)) for goal in one.goals), one) for one in workflows
    ]
    good = [pair for pair in scored if pair[0] >= config.least_similarity]
    good.sort(key=lambda pair: (-round(pair[0], 6), pair[1].turns, -pair[1].episodes, str(pair[1])))
    return [one for _, one in good[: config.best]]


def with_workflows(tasks: Sequence[Task], config: WorkflowConfig) -> Sequence[Task]:
    """Copy of the tasks, each with the most similar workflows in its system message."""
    workflows = load_workflows(config.file)
    return map_tasks(lambda task: _told(task, similar_workflows(workflows, task, config)), tasks)


def _told(task: Task, found: Sequence[Workflow]) -> Task:
    if not found:
        return task
    lines = [f"{number}. {one}" for number, one in enumerate(found, start=1)]
    text = "\n".join([HEADER, *lines])
    system = [message for message in task.messages if message.role == "system"]
    if any(HEADER in message.content for message in system):
        return task  # has them already
    rest = [message for message in task.messages if message.role != "system"]
    if system:
        first = replace(system[0], content=f"{system[0].content}\n\n{text}")
        return replace(task, messages=(first, *system[1:], *rest))
    return replace(task, messages=(Message("system", text), *rest))


# From an episode to steps


def _steps(trajectory: Trajectory) -> list[WorkflowStep]:
    """The calls that were of use, each argument by where it came from."""
    said = _goal(trajectory.task)
    read: list[tuple[str, str]] = []
    results = {m.tool_call_id: m.content for m in trajectory.messages if m.role == "tool"}
    steps: list[WorkflowStep] = []
    for action in trajectory.actions:
        refused = Counter(action.faulted)
        for call in action.calls:
            if refused[call.name] > 0:
                refused[call.name] -= 1
                continue
            given = {name: _origin(name, value, said, read) for name, value in call.arguments.items()}
            step = WorkflowStep(call.name, given)
            if not steps or steps[-1] != step:
                steps.append(step)
            read.append((call.name, results.get(call.id, "")))
    return steps


def _origin(name: str, value: Any, said: str, read: Sequence[tuple[str, str]]) -> Any:
    text = value if isinstance(value, str) else json.dumps(value)
    if len(text) < 2 or isinstance(value, bool):  # too short to tell where it came from
        return value
    if _holds(said, text):
        return f"<{name} from the task>"
    for tool, result in reversed(read):
        if _holds(result, text):
            return f"<{name} from {tool}>"
    return value


def _holds(text: str, part: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(part)}(?!\w)", text, re.IGNORECASE) is not None


def _joined(episodes: Sequence[tuple[Trajectory, list[WorkflowStep]]]) -> Workflow:
    """Episodes that made the same calls: what they agree on stands, what they do not is left open."""
    goals = tuple(dict.fromkeys(_goal(one.task) for one, _ in episodes))[:_MOST_GOALS]
    steps = []
    for same in zip(*(steps for _, steps in episodes), strict=True):
        names = [name for name in same[0].arguments if all(name in one.arguments for one in same)]
        steps.append(WorkflowStep(same[0].tool, {name: _agreed(name, same) for name in names}))
    turns = sum(one.turns for one, _ in episodes) / len(episodes)
    return Workflow(goals, tuple(steps), len(episodes), turns)


def _agreed(name: str, same: Sequence[WorkflowStep]) -> Any:
    values = [one.arguments[name] for one in same]
    return values[0] if all(value == values[0] for value in values) else f"<{name}>"


def _distinct(workflows: Sequence[Workflow]) -> list[Workflow]:
    """Without those whose steps another has too, for other words of the same goal: their goals are joined."""
    found: dict[tuple[str, ...], Workflow] = {}
    for one in workflows:
        key = tuple(map(str, one.steps))
        other = found.get(key)
        if other is not None:
            count = one.episodes + other.episodes
            turns = (one.turns * one.episodes + other.turns * other.episodes) / count
            goals = tuple(dict.fromkeys((*other.goals, *one.goals)))[:_MOST_GOALS]
            one = Workflow(goals, one.steps, count, turns)
        found[key] = one
    return list(found.values())


# Likeness of goals


def _goal(task: Task) -> str:
    said = [message.content for message in task.messages if message.role == "user"]
    return said[-1] if said else ""


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _rarity(workflows: Sequence[Workflow]) -> dict[str, float]:
    """Weight of each word: low where most goals have it."""
    counts = Counter(word for one in workflows for goal in one.goals for word in set(_words(goal)))
    total = sum(len(one.goals) for one in workflows)
    return {word: math.log((1 + total) / count) for word, count in counts.items()}


def _vector(text: str, rarity: dict[str, float]) -> dict[str, float]:
    usual = max(rarity.values(), default=1.0)
    return {word: count * rarity.get(word, usual) for word, count in Counter(_words(text)).items()}


def _cosine(one: dict[str, float], other: dict[str, float]) -> float:
    product = sum(weight * other.get(word, 0.0) for word, weight in one.items())
    lengths = math.hypot(*one.values()) * math.hypot(*other.values())
    return product / lengths if lengths else 0.0


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) and value.startswith("<") else json.dumps(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."
