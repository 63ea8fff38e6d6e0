"""Llama 3: an action that calls is JSON with `name` and `parameters`, perhaps after `<|python_tag|>`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from ludus.chat.formats.base import (
    MAX_CALLS,
    ActionFormat,
    ParsedAction,
    before_any,
    limited,
    malformed,
    read_call,
    split_thinking,
    unfinished,
    write_json,
)
from ludus.core.messages import ToolCall, ToolSpec
from ludus.core.strict_json import BadJson, read_json

TAG = "<|python_tag|>"
EXAMPLE = '{"name": "tool", "parameters": {"key": "value"}}'
_BETWEEN = re.compile(r"[\s;,]*")


class Llama3Format(ActionFormat):
    """`{"name": ..., "parameters": {...}}`, several separated by `;`. Anything else is the answer.

    `<|python_tag|>` separates text and calls in one action: the calls follow it.
    """

    name: ClassVar[str] = "llama3"
    marks = (TAG,)

    def __init__(self, *, answer: str | None = "answer") -> None:
        """`answer` names a tag that an answer may stand in: `<answer>42</answer>` answers "42".

        Text without the tag is an answer as a whole; None reads no tag.
        """
        self.answer_tag = answer

    def parse(self, text: str) -> ParsedAction:
        thought, body, closed = split_thinking(text)
        if not closed:
            return unfinished(thought)
        before, tag, after = body.partition(TAG)
        if not tag and not body.startswith("{"):
            return self.without_calls(body, thought)
        calls = _calls_in(after if tag else body)
        if not tag and not calls:
            return self.without_calls(body, thought)
        outside = before.strip() if tag else ""
        return ParsedAction(outside, limited(calls or [_nothing()]), None, thought)

    def certain(self, body: str) -> int:
        return 0 if body.startswith("{") else before_any(body, (TAG,))

    def describe(self, tools: Sequence[ToolSpec]) -> str:
        if not tools:
            return ""
        listed = "\n\n".join(write_json(tool.as_openai()) for tool in tools)
        return (
            "You have access to the following functions. To call one, respond with nothing but JSON of "
            f"the form {EXAMPLE}. Separate several calls by a semicolon. Do not use variables. When you "
            f"need no more calls, write the final answer as plain text.\n\n{listed}"
        )

    def render_action(self, text: str, calls: Sequence[ToolCall] = ()) -> str:
        if not calls:
            return text
        written = "; ".join(
            write_json({"name": call.name, "parameters": call.arguments}) for call in calls
        )
        return f"{text}{TAG}{written}" if text else written


def _calls_in(text: str) -> list[ToolCall]:
    """The calls in `text`; none when it is JSON that names no tool, which an answer may well be."""
    calls: list[ToolCall] = []
    position = _after_separators(text, 0)
    while position < len(text) and len(calls) <= MAX_CALLS:
        try:
            value, position = read_json(text, position)
        except BadJson as problem:
            return [*calls, malformed(f"the call cannot be read: {problem}; write {EXAMPLE}")]
        if not calls and isinstance(value, dict) and "name" not in value:
            return []
        calls.append(read_call(value, EXAMPLE))
        position = _after_separators(text, position)
    return calls


def _after_separators(text: str, position: int) -> int:
    match = _BETWEEN.match(text, position)
    return match.end() if match else position


def _nothing() -> ToolCall:
    return malformed(f"no call follows {TAG}; write {EXAMPLE}")
