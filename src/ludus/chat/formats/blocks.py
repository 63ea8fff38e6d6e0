"""Formats whose calls stand in blocks behind a mark, with text around them; arguments typed by their schema."""

from __future__ import annotations

import copy
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

from ludus.chat.formats.base import (
    MAX_CALLS,
    ActionFormat,
    ParsedAction,
    before_any,
    limited,
    malformed,
    skip_space,
    unfinished,
    write_json,
)
from ludus.core.messages import Json, ToolCall, ToolSpec
from ludus.core.strict_json import BadJson, whole_json

Write = Callable[[Any], str]
_PYTHON = {"True": True, "False": False, "None": None}


class BlockFormat(ActionFormat):
    """A family's own format. Subclasses read the block that begins at a mark, and write calls."""

    opens: ClassVar[tuple[str, ...]]
    """Marks that begin a block."""
    closes: ClassVar[str]
    """The mark that ends one: alone, it is a call whose beginning is missing."""
    example: ClassVar[str]
    """A call as the model is told to write it."""
    gap: ClassVar[str] = "\n"
    """What separates text and calls."""

    def __init__(self, *, answer: str | None = "answer") -> None:
        """`answer` names a tag that an answer may stand in: `<answer>42</answer>` answers "42".

        Text without the tag is an answer as a whole; None reads no tag.
        """
        self.answer_tag = answer
        self._tools: Mapping[str, ToolSpec] = {}
        self._opening = re.compile("|".join(re.escape(mark) for mark in self.opens))

    def bind(self, tools: Sequence[ToolSpec]) -> Self:
        made = copy.copy(self)
        made._tools = {tool.name: tool for tool in tools}
        return made

    @abstractmethod
    def read_block(self, body: str, start: int) -> tuple[Iterable[ToolCall], int]:
        """The calls of the block that begins at `start`, and where to read on."""

    @abstractmethod
    def write_calls(self, calls: Sequence[ToolCall]) -> str:
        """These calls, as one action holds them."""

    def parse(self, text: str) -> ParsedAction:
        thought, body, closed = self.split_thought(text)
        if not closed:
            return unfinished(thought)
        outside: list[str] = []
        calls: list[ToolCall] = []
        position = 0
        while len(calls) <= MAX_CALLS and (found := self._opening.search(body, position)):
            outside.append(body[position : found.start()])
            read, position = self.read_block(body, found.start())
            calls.extend(read)
        rest = body[position:]
        if not calls and self.closes in rest:
            calls.append(self.wrong(f"{self.opens[0]} is missing before {self.closes}"))
        text_outside = "".join([*outside, rest]).strip()
        if not calls:
            return self.without_calls(text_outside, thought)
        return ParsedAction(text_outside, limited(calls), None, thought)

    def certain(self, body: str) -> int:
        return before_any(body, self.opens)

    def describe(self, tools: Sequence[ToolSpec]) -> str:
        if not tools:
            return ""
        listed = "\n".join(write_json(tool.as_openai()) for tool in tools)
        return (
            "# Tools\n\nYou may call one or more functions. You are given their signatures within "
            f"<tools></tools>:\n<tools>\n{listed}\n</tools>\n\nWrite a call as\n{self.example}\n"
            "When you need no more calls, write the final answer as plain text."
        )

    def render_action(self, text: str, calls: Sequence[ToolCall] = ()) -> str:
        if not calls:
            return text
        return f"{text}{self.gap if text else ''}{self.write_calls(calls)}"

    def wrong(self, problem: str, name: str = "") -> ToolCall:
        """A call that cannot be read, and how to write it."""
        return malformed(f"{problem}; write {self.example}", name)

    def cut(self, body: str, start: int, *closings: str) -> int:
        """Where a block that cannot be read ends: after the first of these closings, or with the action."""
        ends = [at + len(closing) for closing in closings if (at := body.find(closing, start)) >= 0]
        return min(ends, default=len(body))

    def call(self, name: str, written: Sequence[tuple[str, str]]) -> ToolCall:
        """The call of arguments that were written as text, each typed by the tool's schema."""
        name = name.strip()
        if not name or "\n" in name:
            return self.wrong("the name of a tool is missing")
        keys = [key for key, _ in written]
        if len(set(keys)) < len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            return self.wrong(f"the argument {twice!r:.80} is given twice", name)
        tool = self._tools.get(name)
        schemas = (tool.parameters.get("properties") or {}) if tool is not None else {}
        return ToolCall(name, {key: typed(text, schemas.get(key)) for key, text in written})

    def json_call(self, name: str, text: str) -> ToolCall:
        """The call of arguments that are a JSON object."""
        try:
            arguments = whole_json(text) if text.strip() else {}
        except BadJson as problem:
            return self.wrong(f"the arguments cannot be read: {problem}", name)
        if not isinstance(arguments, dict):
            return self.wrong("the arguments must be a JSON object", name)
        name = name.strip()
        return ToolCall(name, arguments) if name else self.wrong("the name of a tool is missing")


def typed(text: str, schema: Any) -> Any:
    """An argument's text as its schema has it: the JSON value that it is, or the text where that is allowed.

    What is neither stays text, and the tool's own check tells the model what it must be.
    """
    kinds = _kinds(schema) if isinstance(schema, dict) else {"string"}
    if kinds == {"string"}:
        return text
    body = text.strip()
    try:
        value = _PYTHON[body] if body in _PYTHON else whole_json(body)
    except BadJson:
        return text
    if not kinds:
        return text if isinstance(value, str) else value
    return value if "string" not in kinds or _kind(value) & kinds else text


def _kind(value: Any) -> set[str]:
    """The JSON types of a value that is no text."""
    if isinstance(value, int) and not isinstance(value, bool):
        return {"integer", "number"}
    names = {bool: "boolean", float: "number", list: "array", dict: "object", type(None): "null"}
    return {names[type(value)]} if type(value) in names else set()


def _kinds(schema: Json) -> set[str]:
    """The types that a schema allows, as far as it says; empty where it does not."""
    given = schema.get("type")
    if given is not None:
        return {given} if isinstance(given, str) else set(given)
    for key in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(key), list):
            return {kind for one in options if isinstance(one, dict) for kind in _kinds(one)}
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return {"string"} if values and all(isinstance(one, str) for one in values) else set()


def as_text(value: Any, write: Write = write_json) -> str:
    """An argument in a format that writes text as it is; `write` writes what is no text."""
    return value if isinstance(value, str) else write(value)


def after_space(body: str, start: int, text: str) -> int | None:
    """Where `text` ends that stands at `start` behind white space; None where it does not."""
    at = skip_space(body, start)
    return at + len(text) if body.startswith(text, at) else None
