"""Calls as a Python list, `[search(query='x', most=3)]`: LFM2; without tokens around it, Llama 3.2 and 4."""

from __future__ import annotations

import ast
import keyword
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

from ludus.chat.formats.base import ParsedAction, limited, split_thinking, unfinished
from ludus.chat.formats.blocks import BlockFormat
from ludus.core.messages import ToolCall, ToolSpec
from ludus.core.strict_json import BadJson, check_json

OPEN, CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
_LIST = re.compile(r"\[\s*[A-Za-z_][\w.-]*\s*\(")
_CONSTANTS = {"true": True, "false": False, "null": None}
MOST_CHARACTERS = 1 << 16
"""Longer lists are refused: Python's parser takes a hundred bytes for a character."""


class Lfm2Format(BlockFormat):
    """LFM2: the list stands between two tokens."""

    name: ClassVar[str] = "lfm2"
    opens = (OPEN,)
    closes = CLOSE
    marks = (OPEN, CLOSE)
    example = f"{OPEN}[tool(key='value')]{CLOSE}"
    gap = ""
    inline_stops: tuple[str, ...] = (CLOSE,)

    def unreachable(self, tools: Sequence[ToolSpec]) -> list[str]:
        return [tool.name for tool in tools if not all(map(_is_name, tool.name.split(".")))]

    def read_block(self, body: str, start: int) -> tuple[Iterable[ToolCall], int]:
        start += len(OPEN)
        stop = body.find(CLOSE, start)
        if stop < 0:
            return [self.wrong(f"{CLOSE} is missing")], len(body)
        return self.read_list(body[start:stop].strip()), stop + len(CLOSE)

    def read_list(self, text: str) -> list[ToolCall]:
        """The calls of a list."""
        if len(text) > MOST_CHARACTERS:
            return [self.wrong(f"it has more than {MOST_CHARACTERS} characters")]
        try:
            with warnings.catch_warnings(action="ignore"):  # escapes that Python does not know
                parsed = ast.parse(text, mode="eval").body
            listed = parsed.elts if isinstance(parsed, ast.List) else [parsed]
            return [_call(node) for node in listed] or [self.wrong("the list holds no call")]
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            problem = error.msg if isinstance(error, SyntaxError) else error
            return [self.wrong(f"the calls cannot be read ({problem or 'they are too deep'})")]

    def write_calls(self, calls: Sequence[ToolCall]) -> str:
        return f"{OPEN}{_written(calls)}{CLOSE}"


class PythonicFormat(Lfm2Format):
    """The action is a list of calls, and nothing else; anything else is the answer."""

    name: ClassVar[str] = "pythonic"
    opens = ("<|python_start|>",)
    closes = "<|python_end|>"
    marks = (*opens, closes)
    example = "[tool(key='value')]"
    inline_stops = ()

    def parse(self, text: str) -> ParsedAction:
        thought, body, closed = split_thinking(text)
        if not closed:
            return unfinished(thought)
        body = body.removeprefix(self.opens[0]).removesuffix(self.closes).strip()
        if _LIST.match(body) is None:
            return self.without_calls(body, thought)
        return ParsedAction("", limited(self.read_list(body)), None, thought)

    def certain(self, body: str) -> int:
        return 0 if not body or body[0] in "[<" else len(body)

    def render_action(self, text: str, calls: Sequence[ToolCall] = ()) -> str:
        """Text cannot stand beside calls; it is left out."""
        return _written(calls) if calls else text


def _call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("each entry is a call with named arguments, such as tool(key='value')")
    name = ".".join(_names(node.func))
    arguments: dict[str, Any] = {}
    for given in node.keywords:
        if given.arg is None:
            if not isinstance(given.value, ast.Dict):
                raise ValueError("** takes an object")
            arguments |= _value(given.value)
        else:
            arguments[given.arg] = _value(given.value)
    try:
        check_json(arguments)
    except BadJson as problem:
        raise ValueError(str(problem)) from None
    return ToolCall(name, arguments)


def _names(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.Attribute):
        yield from _names(node.value)
        yield node.attr
    elif isinstance(node, ast.Name):
        yield node.id
    else:
        raise ValueError("the name of a tool is missing")


def _value(node: ast.expr) -> Any:
    """A literal, in Python's words or in JSON's."""
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.List):
        return [_value(one) for one in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _value(key) for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("the keys of an object are strings")
        return dict(zip(keys, map(_value, node.values), strict=True))
    value = ast.literal_eval(node)
    if not (value is None or isinstance(value, (str, int, float))):
        raise ValueError(f"{type(value).__name__} is no kind of argument")
    return value


def _written(calls: Sequence[ToolCall]) -> str:
    return "[" + ", ".join(f"{call.name}({_arguments(call)})" for call in calls) + "]"


def _arguments(call: ToolCall) -> str:
    """Keyword arguments; those whose names are none go into one object."""
    plain = {k: v for k, v in call.arguments.items() if _is_name(k)}
    others = {k: v for k, v in call.arguments.items() if k not in plain}
    written = [f"{key}={value!r}" for key, value in plain.items()]
    return ", ".join([*written, *([f"**{others!r}"] if others else [])])


def _is_name(text: str) -> bool:
    return text.isascii() and text.isidentifier() and not keyword.iskeyword(text)
