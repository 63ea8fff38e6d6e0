"""Tasks on the homepage, which need no other site, and their demonstrator; how a demonstrator reads a page."""

from __future__ import annotations

import ast
import re
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from ludus.core.messages import Message, ToolCall
from ludus.core.random import key
from ludus.core.task import Task

HOMEPAGE = "http://homepage.com"
SYSTEM = """You use a web browser to reach an objective. You see the page as an accessibility tree: each line \
has the id of an element in brackets, its role and its name. An action is one of these:
- click [id]: click on an element
- type [id] [content] [0 or 1]: type the content into a field; 1 presses Enter afterwards
- hover [id]: move the mouse over an element
- press [key_comb]: press keys, for example press [Ctrl+a]
- scroll [down] or scroll [up]
- new_tab, tab_focus [tab_index], close_tab
- goto [url], go_back, go_forward
- stop [answer]: when you are done; without an answer if none was asked for, and stop [N/A] if it is impossible
A calculator and a scratchpad are linked from http://homepage.com."""

_LINE = re.compile(r"""^(\t*)\[(\d+)\] (\S+) ('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")(.*)$""", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Line:
    """An element of the tree."""

    depth: int
    number: int
    role: str
    name: str
    state: str


class SeenPage:
    """An observation, read."""

    def __init__(self, text: str) -> None:
        tree, _, told = text.rpartition("\nOBJECTIVE: ")
        self.objective = told.partition("\nPREVIOUS ACTION:")[0]
        self.quoted = re.findall(r'"([^"]*)"', self.objective)
        self.lines = [
            Line(len(tabs), int(number), role, str(ast.literal_eval(name)), state)
            for tabs, number, role, name, state in _LINE.findall(tree.rpartition("OBSERVATION:")[2])
        ]

    def all(self, *roles: str) -> list[Line]:
        return [one for one in self.lines if one.role in roles]

    def has(self, role: str, name: str) -> bool:
        return any(one.name.strip() == name for one in self.all(role))

    def id(self, role: str, name: str | None = None) -> int:
        """The first element of a role and a name."""
        for one in self.all(role):
            if name is None or one.name.strip() == name:
                return one.number
        raise LookupError(f"there is no {role} {name!r}")

    def words(self, pattern: str) -> list[str]:
        return re.findall(pattern, self.objective)


def act(action: str) -> ToolCall:
    """A call of the tool."""
    return ToolCall("step", {"action": action})


TRAINING, HELD_OUT = 300, 60
_WORDS = (
    "lantern", "harbor", "violet", "granite", "meadow", "copper", "saffron", "thistle", "walnut", "glacier",
    "ember", "juniper", "marble", "orchid", "pepper", "quartz",
)  # fmt: skip


def training_tasks() -> list[Task]:
    """Calculations and notes, with the homepage's calculator and scratchpad."""
    return [_task("train", number, HELD_OUT + number) for number in range(TRAINING)]


def held_out_tasks() -> list[Task]:
    """The tasks with other numbers and words."""
    return [_task("held-out", number, number) for number in range(HELD_OUT)]


def _task(split: str, number: int, draw: int) -> Task:
    """`draw` decides all; it is in the first number of a calculation and in a note: none occurs twice."""
    other, third = 11 + key("browser", draw, 0) % 89, 2 + key("browser", draw, 1) % 97
    sign = "+-*"[key("browser", draw, 2) % 3]
    first = 100 + draw
    value = {"+": first * other + third, "-": first * other - third, "*": first * other * third}[sign]
    expression = f"{first} * {other} {sign} {third}"
    note = f"{_WORDS[key('browser', draw, 3) % len(_WORDS)]} {first}"
    saved = {
        "url": f"{HOMEPAGE}/scratchpad.html",
        "locator": "document.querySelector('#saved').innerText",
    }
    kind = ("calculate", "note", "calculate-and-note")[draw % 3]
    if kind == "calculate":
        objective = f"What is {expression}? Answer with the number."
        evaluation: dict[str, Any] = {
            "eval_types": ["string_match"],
            "reference_answers": {"exact_match": str(value)},
        }
    elif kind == "note":
        objective = f'Save the note "{note}" on the scratchpad.'
        target = {**saved, "required_contents": {"exact_match": note}}
        evaluation = {"eval_types": ["program_html"], "program_html": [target]}
    else:
        objective = f"Calculate {expression}, and save the result on the scratchpad."
        target = {**saved, "required_contents": {"exact_match": str(value)}}
        evaluation = {"eval_types": ["program_html"], "program_html": [target]}
    return Task(
        f"browser-{split}-{number}",
        (Message("system", SYSTEM),),
        envs={"browser": {"url": HOMEPAGE, "objective": objective, "evaluation": evaluation}},
        metadata={"subtask": kind},
    )


def expert(task: Task) -> Generator[ToolCall | None, str, None]:
    """A demonstrator for these tasks: reads the tree, clicks, types, answers."""
    seen = SeenPage((yield None))
    text = seen.quoted[0] if seen.quoted else ""
    if not text:
        (expression,) = seen.words(r"\d[\d +*-]+\d")
        seen = SeenPage((yield act(f"click [{seen.id('link', 'Calculator')}]")))
        seen = SeenPage((yield act(f"type [{seen.id('textbox', 'Expression')}] [{expression}] [1]")))
        text = next(one.name for one in seen.all("StaticText")[::-1] if re.fullmatch(r"-?\d+", one.name))
        if task.metadata["subtask"] == "calculate":
            yield act(f"stop [{text}]")
            return
        seen = SeenPage((yield act(f"click [{seen.id('link', 'Homepage')}]")))
    seen = SeenPage((yield act(f"click [{seen.id('link', 'Scratchpad')}]")))
    seen = SeenPage((yield act(f"type [{seen.id('textbox', 'Note')}] [{text}] [0]")))
    yield act(f"click [{seen.id('button', 'Save')}]")
    yield act("stop []")
