"""What an action format is: a grammar in which a model says what it wants done."""

from __future__ import annotations

import copy
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from ludus.core.failures import ConfigError, Fault
from ludus.core.messages import Message, Role, ToolCall, ToolResult, ToolSpec

THINK = ("<think>", "</think>")
_SPACE = re.compile(r"\s*")
MAX_CALLS = 64
"""More calls than this in one action are garbage, or an attack: the rest becomes one malformed call."""


@dataclass(frozen=True, slots=True)
class ParsedAction:
    """What an action says. It holds calls, or an answer, or neither; never both."""

    text: str
    """What was said beside the calls, the thinking left out."""
    calls: tuple[ToolCall, ...] = ()
    answer: str | None = None
    thought: str = ""


class ActionFormat(ABC):
    """How calls are written, read and answered. Without state: one object serves all episodes."""

    name: ClassVar[str]
    stops: tuple[str, ...] = ()
    """Strings that end an action, beside the tokenizer's stop tokens."""
    marks: tuple[str, ...] = ()
    """What an action may contain as special tokens, where the tokenizer has them."""
    inline_stops: tuple[str, ...] = ()
    """What ends a call where its result is appended to the same turn; without any, a format cannot do that."""
    inline: bool = False
    """Whether results are appended to the assistant's own turn. Calls may then stand inside a thought."""
    answer_tag: str | None = None
    """A tag that the answer may stand in, where all text without calls is one."""
    result_role: Role = "tool"
    """Who is shown to say a result. With "user", the renderer makes a user's message of it."""
    result_frame: tuple[str, str] = ("<tool_response>\n", "\n</tool_response>")
    """What encloses a result that is shown as a user's message. Only there is it taken for our own words:
    a user who writes the same has written text."""

    def inlined(self) -> Self:
        """The same format, for results that are appended to the turn that made the call."""
        if not self.inline_stops:
            raise ConfigError(
                f'the format {self.name!r} has nothing that ends a call, so agent.turns cannot be "inline": '
                "choose tags, hermes or fenced"
            )
        made = copy.copy(self)
        made.inline = True
        made.stops = tuple(dict.fromkeys((*self.stops, *self.inline_stops)))
        return made

    def divide(self, text: str) -> tuple[str, str, bool]:
        """`(thought, rest, closed)`: what is searched for calls is `rest`.

        Inline, a thought may go on over several actions, and may call: all of the text is searched.
        """
        return ("", text, True) if self.inline else split_thinking(text)

    def without_calls(self, text: str, thought: str) -> ParsedAction:
        """An action that calls nothing, and so answers: with the text of the last answer tag, or all of it."""
        if self.inline and is_thinking(text):
            return unfinished(text)
        answer = text.rpartition(THINK[1])[2].strip() if self.inline else text
        before, closing, _ = answer.rpartition(f"</{self.answer_tag}>")
        _, opening, inside = before.rpartition(f"<{self.answer_tag}>")
        if self.answer_tag is not None and opening and closing:
            answer = inside.strip()
        return ParsedAction(text, (), answer, thought)

    def bind(self, tools: Sequence[ToolSpec]) -> Self:
        """The format for exactly these tools, where its grammar depends on them."""
        return self

    def unreachable(self, tools: Sequence[ToolSpec]) -> list[str]:
        """The tools among these that cannot be called in this format."""
        return []

    @abstractmethod
    def parse(self, text: str) -> ParsedAction:
        """What `text` asks for. Never raises: a call that cannot be read is one with a fault."""

    @abstractmethod
    def describe(self, tools: Sequence[ToolSpec]) -> str:
        """What the model has to be told, where the chat template does not tell it."""

    @abstractmethod
    def render_action(self, text: str, calls: Sequence[ToolCall] = ()) -> str:
        """An action as the model would write it. Without calls, `text` is the final answer."""

    def render_result(self, call: ToolCall, result: ToolResult) -> Message:
        """The message in which a result goes back to the model: always a tool's, framed by the renderer."""
        return Message(
            "tool",
            result.content,
            name=call.name or None,
            tool_call_id=call.id or None,
            media=result.media,
        )


def malformed(problem: str, name: str = "") -> ToolCall:
    """A call that could not be read; `problem` tells the model what was wrong and how to write it."""
    return ToolCall(name, fault=Fault.MALFORMED_CALL, problem=problem)


def limited(calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
    """At most `MAX_CALLS` of them, the last one saying that the rest was not read."""
    if len(calls) <= MAX_CALLS:
        return tuple(calls)
    rest = malformed(f"an action may hold at most {MAX_CALLS} calls; those after it were not read")
    return (*calls[: MAX_CALLS - 1], rest)


def split_thinking(text: str) -> tuple[str, str, bool]:
    """`(thought, rest, closed)`: the `<think>` blocks an action opens with, and what follows them."""
    opening, closing = THINK
    thoughts: list[str] = []
    position = skip_space(text, 0)
    while text.startswith(opening, position):
        start = position + len(opening)
        stop = text.find(closing, start)
        thoughts.append(text[start : stop if stop >= 0 else len(text)].strip())
        if stop < 0:
            return "\n".join(thoughts), "", False
        position = skip_space(text, stop + len(closing))
    return "\n".join(thoughts), text[position:].rstrip(), True


def is_thinking(text: str) -> bool:
    """Whether a thought is open at the end of `text`."""
    return text.rfind(THINK[0]) > text.rfind(THINK[1])


def skip_space(text: str, start: int) -> int:
    """Where the white space at `start` ends."""
    match = _SPACE.match(text, start)
    return match.end() if match else start


def unfinished(thought: str) -> ParsedAction:
    """An action that ended before its thinking did: nothing in it was meant to be done."""
    problem = f"the thinking was not finished: close it with {THINK[1]} and then act"
    return ParsedAction("", (malformed(problem),), None, thought)
