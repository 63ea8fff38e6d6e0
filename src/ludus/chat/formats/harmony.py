"""Harmony, gpt-oss's channels: analysis is thought, commentary calls tools, final is the answer.

An action goes on from `<|start|>assistant`, and may hold several messages:

    <|channel|>analysis<|message|>I look it up.<|end|><|start|>assistant
    <|channel|>commentary to=functions.search <|constrain|>json<|message|>{"query": "x"}<|call|>
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ludus.chat.formats.base import (
    ParsedAction,
    before_any,
    main_argument,
    split_thinking,
    write_json,
)
from ludus.chat.formats.blocks import BlockFormat
from ludus.core.messages import ToolCall

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
_EDGES = re.compile("|".join(map(re.escape, (END, CALL, RETURN, START))))
_TO = re.compile(r"\bto=([^\s<]+)")


@dataclass(frozen=True, slots=True)
class _Message:
    header: str
    body: str
    has_body: bool

    @property
    def recipient(self) -> str:
        found = _TO.search(self.header)
        return found[1].removeprefix("functions.") if found else ""

    @property
    def is_thought(self) -> bool:
        return not self.recipient and f"{CHANNEL}analysis" in self.header


class HarmonyFormat(BlockFormat):
    """One call in a turn, which ends with it. What a final message says is the answer."""

    name: ClassVar[str] = "harmony"
    opens = (CHANNEL,)
    closes = CALL
    marks = (START, CHANNEL, MESSAGE, END, "<|constrain|>")
    turn_ends = (CALL, RETURN)
    example = f'{CHANNEL}commentary to=functions.tool <|constrain|>json{MESSAGE}{{"key": "value"}}'

    def parse(self, text: str) -> ParsedAction:
        messages = _messages(text)
        thought = _joined(one.body for one in messages if one.is_thought)
        calls = [self._call(one) for one in messages if one.recipient]
        said = _joined(one.body for one in messages if not (one.recipient or one.is_thought))
        if calls:
            more = [self.wrong("a turn holds one call")] if len(calls) > 1 else []
            return ParsedAction(said, (calls[0], *more), None, thought)
        if not any(one.has_body and not one.is_thought for one in messages):
            problem = (
                f"neither a call nor a final message follows: end with {CHANNEL}final{MESSAGE} and it"
            )
            return ParsedAction(said, (self.wrong(problem),), None, thought)
        return self.without_calls(said, thought)

    def read_block(self, body: str, start: int) -> tuple[Iterable[ToolCall], int]:
        """All of an action is made of blocks; `parse` reads them at once."""
        return self.parse(body[start:]).calls, len(body)

    def _call(self, message: _Message) -> ToolCall:
        name, body = message.recipient, message.body
        if not message.has_body:
            return self.wrong(f"{MESSAGE} and the arguments are missing", name)
        tool = self._tools.get(name)
        argument = None if tool is None else main_argument(tool)
        if argument is not None and "json" not in message.header and not body.startswith("{"):
            return ToolCall(name, {argument: body})  # code for a tool that takes code
        return self.json_call(name, body)

    def split_thinking(self, text: str) -> tuple[str, str, bool]:
        messages = _messages(text)
        rest = _joined(
            f"{one.header}{MESSAGE}{one.body}" if one.recipient else one.body
            for one in messages
            if not one.is_thought
        )
        return _joined(one.body for one in messages if one.is_thought), rest, True

    def certain_reply(self, text: str, parses_calls: bool) -> tuple[str, str]:
        messages = _messages(text)
        shown: list[str] = []
        thoughts: list[str] = []
        for number, one in enumerate(messages):
            if one.recipient or not one.has_body:
                break
            last = number == len(messages) - 1
            body = one.body[: before_any(one.body, (END, CALL, RETURN, START))] if last else one.body
            (thoughts if one.is_thought else shown).append(body)
        return _joined(thoughts), _joined(shown)

    def action_text(self, content: str, calls: Sequence[ToolCall]) -> str:
        thought, said, _ = split_thinking(content)
        return _after(thought, said if CHANNEL in said else self.render_action(said, calls))

    def render_action(self, text: str, calls: Sequence[ToolCall] = ()) -> str:
        if len(calls) > 1:
            raise ValueError(f"harmony writes one call in a turn, not {len(calls)}")
        thought, said, _ = split_thinking(text)
        if not calls:
            return _after(thought, f"{CHANNEL}final{MESSAGE}{said}")
        before = f"{CHANNEL}commentary{MESSAGE}{said}{END}{START}assistant" if said else ""
        return _after(thought, before + self.write_calls(calls))

    def write_calls(self, calls: Sequence[ToolCall]) -> str:
        return "".join(
            f"{CHANNEL}commentary to=functions.{call.name} <|constrain|>json{MESSAGE}"
            f"{write_json(call.arguments)}"
            for call in calls
        )


def _messages(text: str) -> list[_Message]:
    """The assistant's messages; what it writes as somebody else, and all after that, is not read."""
    found: list[_Message] = []
    for number, part in enumerate(_EDGES.split(text)):
        header, separator, body = part.partition(MESSAGE)
        role = header.partition("<|")[0].split()
        if number and role and role[0] != "assistant":
            break
        if part.strip():
            found.append(_Message(header, body if separator else part, bool(separator)))
    return found


def _joined(parts: Iterable[str]) -> str:
    return "\n".join(part for part in (one.strip() for one in parts) if part)


def _after(thought: str, messages: str) -> str:
    return f"{CHANNEL}analysis{MESSAGE}{thought}{END}{START}assistant{messages}" if thought else messages
