"""Mistral's calls, after `[TOOL_CALLS]`: a name with JSON arguments, or a list of JSON objects."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from ludus.chat.formats.base import read_call, skip_space, write_json
from ludus.chat.formats.blocks import BlockFormat
from ludus.core.messages import ToolCall
from ludus.core.strict_json import BadJson, read_json

OPEN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAMED = re.compile(r"\s*([^\s\[{]*)(?:\[CALL_ID\]([A-Za-z0-9_-]+))?\s*(?:\[ARGS\])?\s*")


class MistralFormat(BlockFormat):
    """Mistral Small 3.2, Devstral, Magistral, Ministral 3: `[TOOL_CALLS]name[ARGS]{...}` for each call."""

    name: ClassVar[str] = "mistral"
    opens = (OPEN,)
    closes = ARGS
    marks = (OPEN, ARGS, CALL_ID)
    example = f'{OPEN}tool{ARGS}{{"key": "value"}}'
    gap = ""

    def read_block(self, body: str, start: int) -> tuple[Iterable[ToolCall], int]:
        named = _NAMED.match(body, start + len(OPEN))
        name, id, at = (named[1], named[2] or "", named.end()) if named else ("", "", start + len(OPEN))
        value, stop, problem = _json_at(body, at)
        if problem:
            return [self.wrong(f"the call cannot be read: {problem}", name)], stop
        call = read_call({"name": name, "arguments": value}, self.example)
        return [replace(call, id=id)], stop

    def write_calls(self, calls: Sequence[ToolCall]) -> str:
        return "".join(f"{OPEN}{call.name}{ARGS}{write_json(call.arguments)}" for call in calls)


class MistralListFormat(MistralFormat):
    """Mistral 7B v0.3, Nemo, Large: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`."""

    name: ClassVar[str] = "mistral_list"
    example = f'{OPEN}[{{"name": "tool", "arguments": {{"key": "value"}}}}]'

    def read_block(self, body: str, start: int) -> tuple[Iterable[ToolCall], int]:
        value, stop, problem = _json_at(body, skip_space(body, start + len(OPEN)))
        if not problem and not (isinstance(value, list) and value):
            problem = "a list of calls must follow"
        if problem:
            return [self.wrong(f"the calls cannot be read: {problem}")], stop
        return [read_call(one, self.example) for one in value], stop

    def write_calls(self, calls: Sequence[ToolCall]) -> str:
        listed = [{"name": call.name, "arguments": call.arguments} for call in calls]
        return f"{OPEN}{write_json(listed)}"


def _json_at(body: str, start: int) -> tuple[Any, int, str]:
    """The JSON value at `start` and where to read on, or what is wrong with it."""
    try:
        return *read_json(body, start), ""
    except BadJson as problem:
        following = body.find(OPEN, start)
        return None, following if following >= 0 else len(body), str(problem)
