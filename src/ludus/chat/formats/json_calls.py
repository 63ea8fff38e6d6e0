"""Calls as JSON: in `<tool_call>` tags (Hermes, Qwen), or alone, perhaps after `<|python_tag|>` (Llama 3)."""

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
    skip_space,
    split_thinking,
    unfinished,
    write_json,
)
from ludus.core.messages import ToolCall, ToolSpec
from ludus.core.strict_json import BadJson, read_json

OPEN, CLOSE = "<tool_call>", "</tool_call>"
EXAMPLE = f'{OPEN}\n{{"name": "tool", "arguments": {{"key": "value"}}}}\n{CLOSE}'


TAG = "<|python_tag|>"
LLAMA_EXAMPLE = '{"name": "tool", "parameters": {"key": "value"}}'
_BETWEEN = re.compile(r"[\s;,]*")


class _JsonCalls(ActionFormat):
    def __init__(self, *, answer: str | None = "answer") -> None:
        """`answer` names a tag that an answer may stand in: `<answer>42</answer>` answers "42".

        Text without the tag is an answer as a whole; None reads no tag.
        """
        self.answer_tag = answer


class HermesFormat(_JsonCalls):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them, text around."""

    name: ClassVar[str] = "hermes"
    marks = (OPEN, CLOSE)
    inline_stops = (CLOSE,)

    def parse(self, text: str) -> ParsedAction:
        thought, body, closed = self.split_thought(text)
        if not closed:
            return unfinished(thought)
        outside: list[str] = []
        calls: list[ToolCall] = []
        position = 0
        while len(calls) <= MAX_CALLS and (start := body.find(OPEN, position)) >= 0:
            outside.append(body[position:start])
            call, position = _call_at(body, start + len(OPEN))
            calls.append(call)
        rest = body[position:]
        if not calls and CLOSE in rest:
            calls.append(malformed(f"{OPEN} is missing before {CLOSE}; write {EXAMPLE}"))
        text_outside = "".join([*outside, rest]).strip()
        if not calls:
            return self.without_calls(text_outside, thought)
        return ParsedAction(text_outside, limited(calls), None, thought)

    def certain(self, body: str) -> int:
        return before_any(body, (OPEN,))

    def describe(self, tools: Sequence[ToolSpec]) -> str:
        if not tools:
            return ""
        listed = "\n".join(write_json(tool.as_openai()) for tool in tools)
        return (
            "# Tools\n\nYou may call one or more functions. You are given their signatures within "
            f"<tools></tools>:\n<tools>\n{listed}\n</tools>\n\n"
            "For each call, write a JSON object with the function's name and arguments within "
            f"{OPEN}{CLOSE}:\n{EXAMPLE}\n"
            "When you need no more calls, write the final answer as plain text."
        )

    def render_action(self, text: str, calls: Sequence[ToolCall] = ()) -> str:
        written = [
            f"{OPEN}\n{write_json({'name': call.name, 'arguments': call.arguments})}\n{CLOSE}"
            for call in calls
        ]
        return "\n".join([text, *written] if text else written)


def _call_at(text: str, start: int) -> tuple[ToolCall, int]:
    """The call whose JSON begins at `start`, and where to read on."""
    try:
        # The value decides where the call ends: its strings may well hold the closing tag.
        value, stop = read_json(text, skip_space(text, start))
    except BadJson as error:
        problem = str(error)
    else:
        stop = skip_space(text, stop)
        if text.startswith(CLOSE, stop):
            return read_call(value, EXAMPLE), stop + len(CLOSE)
        problem = "something follows the JSON object"
    stop = text.find(CLOSE, start)
    if stop < 0:
        return malformed(f"{CLOSE} is missing; write {EXAMPLE}"), len(text)
    return malformed(f"the call cannot be read: {problem}; write {EXAMPLE}"), stop + len(CLOSE)


class Llama3Format(_JsonCalls):
    """`{"name": ..., "parameters": {...}}`, several separated by `;`. Anything else is the answer.

    `<|python_tag|>` separates text and calls in one action: the calls follow it.
    """

    name: ClassVar[str] = "llama3"
    marks = (TAG,)

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
        calls = calls or [malformed(f"no call follows {TAG}; write {LLAMA_EXAMPLE}")]
        return ParsedAction(outside, limited(calls), None, thought)

    def certain(self, body: str) -> int:
        return 0 if body.startswith("{") else before_any(body, (TAG,))

    def describe(self, tools: Sequence[ToolSpec]) -> str:
        if not tools:
            return ""
        listed = "\n\n".join(write_json(tool.as_openai()) for tool in tools)
        return (
            "You have access to the following functions. To call one, respond with nothing but JSON of "
            f"the form {LLAMA_EXAMPLE}. Separate several calls by a semicolon. Do not use variables. When you "
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
            return [*calls, malformed(f"the call cannot be read: {problem}; write {LLAMA_EXAMPLE}")]
        if not calls and isinstance(value, dict) and "name" not in value:
            return []
        calls.append(read_call(value, LLAMA_EXAMPLE))
        position = _after_separators(text, position)
    return calls


def _after_separators(text: str, position: int) -> int:
    match = _BETWEEN.match(text, position)
    return match.end() if match else position
