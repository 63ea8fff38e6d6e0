"""An episode as steps: what was thought, what was called, what came back. Filters and methods read these."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ludus.chat.formats.base import ParsedAction, split_thinking
from ludus.core.messages import Message, ToolCall
from ludus.core.trajectory import Trajectory
from ludus.tools.versions import Unkeyable, canonical

Parse = Callable[[str], ParsedAction]
"""Reads an action's text in the format that it was written in (`ActionFormat.parse`)."""

_MARKUP = re.compile(r"<tool_call>.*?(?:</tool_call>|$)|```.*?(?:```|$)|<\|python_tag\|>.*", re.S)
"""How calls look in the usual formats, for episodes of which no format is known."""

CLOSE = 1e-9
"""Qualities that differ by less are the same."""


@dataclass(frozen=True, slots=True)
class EpisodeStep:
    """One action of an episode, and what was observed after it."""

    said: str
    """The text of the action outside its calls, thinking included."""
    calls: tuple[ToolCall, ...]
    results: tuple[Message, ...]
    """Results of the calls, and whatever else the model read before its next action."""

    @property
    def is_answer(self) -> bool:
        return not self.calls

    @property
    def is_complete(self) -> bool:
        """Whether it has a thought, an action and an observation. An answer is an action that ends an episode:
        it needs no observation, and its text is both."""
        if self.is_answer:
            return bool(self.said.strip())
        return bool(self.said.strip()) and bool(self.results)


def steps_of(trajectory: Trajectory, parse: Parse | None = None) -> list[EpisodeStep]:
    steps: list[EpisodeStep] = []
    for message in trajectory.messages[len(trajectory.asked) :]:
        if message.role == "assistant":
            said = _outside_calls(message, parse)
            steps.append(EpisodeStep(said, message.tool_calls, ()))
        elif steps:
            last = steps[-1]
            steps[-1] = EpisodeStep(last.said, last.calls, (*last.results, message))
    return steps


def _outside_calls(message: Message, parse: Parse | None) -> str:
    if not message.tool_calls:
        return message.content
    if parse is not None:
        parsed = parse(message.content)
        return f"{parsed.thought}\n{parsed.text}".strip()
    thought, rest, _ = split_thinking(message.content)
    return f"{thought}\n{_MARKUP.sub('', rest)}".strip()


def call_text(call: ToolCall) -> str:
    """A call as text in which equal calls are equal."""
    try:
        return f"{call.name}({canonical(call.arguments)})"
    except Unkeyable:
        return f"{call.name}({call.arguments!r:.2000})"


def action_set(steps: Sequence[EpisodeStep]) -> frozenset[str]:
    """The set of an episode's actions: its calls with their arguments, and its answers."""
    called = {call_text(call) for step in steps for call in step.calls}
    answers = {f"say {' '.join(step.said.split())}" for step in steps if step.is_answer}
    return frozenset(called | answers)


def count_calls(steps: Sequence[EpisodeStep]) -> int:
    return sum(len(step.calls) for step in steps)


def complete_share(steps: Sequence[EpisodeStep], *, needs_thought: bool = True) -> float:
    """The share of steps with thought, action and observation; or with the latter two."""
    if not steps:
        return 0.0
    if needs_thought:
        return sum(step.is_complete for step in steps) / len(steps)
    return sum(step.is_answer or bool(step.results) for step in steps) / len(steps)


def quality_of(steps: Sequence[EpisodeStep], *, needs_thought: bool = True) -> float:
    """0.5 · max(0, 1 − 0.1 · calls) + 0.5 · share of complete turns."""
    brevity = max(0.0, 1 - 0.1 * count_calls(steps))
    return 0.5 * brevity + 0.5 * complete_share(steps, needs_thought=needs_thought)
