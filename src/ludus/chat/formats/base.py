"""Action formats: the grammar in which a model writes tool calls and answers."""

from __future__ import annotations

import copy
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from ludus.core.failures import ConfigError, Fault
from ludus.core.messages import Json, Message, Role, ToolCall, ToolResult, ToolSpec
from ludus.core.strict_json import BadJson, whole_json

THINK = ("<think>", "</think>")
_SPACE = re.compile(r"\s*")
MAX_CALLS = 64
"""More calls than this in one action are garbage, or an attack: the rest becomes one malformed call."""


@dataclass(frozen=True, slots=True)
class ParsedAction:
    """A parsed action. It holds calls, or an answer, or neither; never both."""

    text: str
    """The text outside the calls, without the thinking."""
    calls: tuple[ToolCall, ...] = ()
    answer: str | None = None
    thought: str = ""


class ActionFormat(ABC):
    """How calls are written, read and answered. Without state: one object serves all episodes."""

    name: ClassVar[str]
    stops: tuple[str, ...] = ()
    """Strings that end an action, beside the tokenizer's stop tokens."""
    marks: tuple[str, ...] = ()
    """Special tokens that an action may contain, where the tokenizer has them."""
    turn_ends: tuple[str, str] | None = None
    """Control tokens that end an action with calls, and one without, where no one token ends every turn."""
    inline_stops: tuple[str, ...] = ()
    """Stops of a call whose result is appended to the same turn; without any, a format cannot do that."""
    inline: bool = False
    """Whether results are appended to the assistant's own turn. Calls may then stand inside a thought."""
    answer_tag: str | None = None
    """A tag that the answer may stand in, where all text without calls is one."""
    result_role: Role = "tool"
    """The role of a result's message. With "user", the renderer makes a user's message of it."""
    result_frame: tuple[str, str] = ("<tool_response>\n", "\n</tool_response>")
    """Text around a result that is shown as a user's message. Only there is it taken for our own words:
    a user who writes the same has written text."""

    def inlined(self) -> Self:
        """This format, for results that are appended to the turn that made the call."""
        if not self.inline_stops:
            raise ConfigError(
                f'the format {self.name!r} has nothing that ends a call, so agent.turns cannot be "inline": '
                "choose tags, hermes or fenced"
            )
        made = copy.copy(self)
        made.inline = True
        made.stops = tuple(dict.fromkeys((*self.stops, *self.inline_stops)))
        return made

    def split_thought(self, text: str) -> tuple[str, str, bool]:
        """`(thought, rest, closed)`: what is searched for calls is `rest`.

        Inline, a thought may go on over several actions, and may call: all of the text is searched.
        """
        return ("", text, True) if self.inline else self.split_thinking(text)

    def split_thinking(self, text: str) -> tuple[str, str, bool]:
        """`(thought, rest, closed)` of a whole action."""
        return split_thinking(text)

    def certain_reply(self, text: str, parses_calls: bool) -> tuple[str, str]:
        """The thought and the text of a reply that begins so, as far as no further text can change them."""
        thought, start = certain_thought(text)
        if start is None:
            return thought, ""
        body = text[start:]
        if parses_calls:
            body = body[: 0 if self.inline else self.certain(body)]
        return thought, body

    def action_text(self, content: str, calls: Sequence[ToolCall]) -> str:
        """A message as an action's text: as it was sampled, or its calls written as the format has them."""
        if calls and not self.parse(content).calls:
            return self.render_action(content, calls)
        return content

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
        """Parse the text of an action. Never raises: a call that cannot be read is one with a fault."""

    def certain(self, body: str) -> int:
        """How many characters of a reply's beginning are text in it, whatever follows them.

        `body` is what comes after the thinking. A stream shows so much early; a format that does not say holds
        all of it back until the end.
        """
        return 0

    @abstractmethod
    def describe(self, tools: Sequence[ToolSpec]) -> str:
        """The instructions for the model, where the chat template does not give them."""

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


def certain_thought(text: str) -> tuple[str, int | None]:
    """What `split_thinking` will find as the thought, and where the rest begins; None while that is open."""
    opening, closing = THINK
    thoughts: list[str] = []
    position = skip_space(text, 0)
    while text.startswith(opening, position):
        start = position + len(opening)
        stop = text.find(closing, start)
        if stop < 0:
            inside = text[start : before_any(text, (closing,), start)]
            return "\n".join([*thoughts, inside.strip()]), None
        thoughts.append(text[start:stop].strip())
        position = skip_space(text, stop + len(closing))
    is_open = opening.startswith(text[position:])
    return "\n".join(thoughts), None if is_open else position


def is_thinking(text: str) -> bool:
    """Whether a thought is open at the end of `text`."""
    return text.rfind(THINK[0]) > text.rfind(THINK[1])


def before_any(text: str, marks: Sequence[str], start: int = 0) -> int:
    """Where the first of these marks begins in `text`, or might begin once more text follows."""
    return min((_place(text, mark, start) for mark in marks), default=len(text))


def _place(text: str, mark: str, start: int) -> int:
    """Where `mark` stands; else where the longest end of `text` begins that `mark` begins with."""
    found = text.find(mark, start)
    if found >= 0:
        return found
    first = max(start, len(text) - len(mark) + 1)
    return next((at for at in range(first, len(text)) if mark.startswith(text[at:])), len(text))


def skip_space(text: str, start: int) -> int:
    """Where the white space at `start` ends."""
    match = _SPACE.match(text, start)
    return match.end() if match else start


def unfinished(thought: str) -> ParsedAction:
    """An action that ended before its thinking did: nothing in it was meant to be done."""
    problem = f"the thinking was not finished: close it with {THINK[1]} and then act"
    return ParsedAction("", (malformed(problem),), None, thought)


# Calls written as JSON, parsed from text that may be anything.

_KEYS = frozenset({"name", "arguments", "parameters", "id", "type"})


def read_call(value: Any, example: str) -> ToolCall:
    """The call that an object such as `example` means. `parameters` will do for `arguments`."""
    if not isinstance(value, dict):
        return malformed(f"a call is a JSON object; write {example}")
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        return malformed(f'the key "name" must hold the name of a tool; write {example}')
    unknown = sorted(set(value) - _KEYS)
    if unknown:
        return malformed(
            f'unknown key "{unknown[0]:.80}" beside "name"; what the tool takes goes into '
            f'"arguments": write {example}',
            name,
        )
    if "arguments" in value and "parameters" in value:
        return malformed(f'give "arguments" or "parameters", not both; write {example}', name)
    try:
        arguments = _arguments(value.get("arguments", value.get("parameters")))
    except BadJson as problem:
        return malformed(f"the arguments cannot be read: {problem}; write {example}", name)
    return ToolCall(name.strip(), arguments)


def write_json(value: Any) -> str:
    """JSON the way chat templates write it: spaces after separators, letters as they are."""
    return json.dumps(value, ensure_ascii=False)


def _arguments(raw: Any) -> Json:
    """An object; nothing at all means none, and a string may hold the object as JSON."""
    if raw is None:
        return {}
    if isinstance(raw, str):
        raw = whole_json(raw) if raw.strip() else {}
    if not isinstance(raw, dict):
        raise BadJson(f"they must be an object, not {_kind(raw)}")
    return raw


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


# Calls written as a block of text: which tool a block calls, and as which argument.

_FENCED = re.compile(r"```\w*\n(.*?)\n?```", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Target:
    """A tool, and the argument that a block's text becomes; None when the block is a JSON object."""

    tool: str
    argument: str | None

    @classmethod
    def parse(cls, text: str) -> Target:
        """`tool.argument`, or `tool` alone when the block is to be a JSON object of all arguments."""
        tool, dot, argument = text.partition(".")
        if not tool or (dot and not argument):
            raise ConfigError(f"a target is written 'tool.argument' or 'tool', not {text!r}")
        return cls(tool, argument or None)

    @classmethod
    def of(cls, spec: ToolSpec) -> Target:
        """The tool's main argument: the only one, or the only one that must be given."""
        return cls(spec.name, main_argument(spec))

    def call(self, block: str, example: str) -> ToolCall:
        """The call that a block of text means."""
        if self.argument is not None:
            return ToolCall(self.tool, {self.argument: block})
        try:
            arguments = whole_json(block) if block.strip() else {}
        except BadJson as problem:
            return malformed(f"the arguments cannot be read: {problem}; write {example}", self.tool)
        if not isinstance(arguments, dict):
            return malformed(f"the arguments must be a JSON object; write {example}", self.tool)
        return ToolCall(self.tool, arguments)

    def block(self, call: ToolCall) -> str:
        """The text of a block that means `call`."""
        if self.argument is None:
            return write_json(call.arguments)
        value = call.arguments.get(self.argument, "")
        return value if isinstance(value, str) else write_json(value)


def targets(written: Mapping[str, str]) -> dict[str, Target]:
    """Targets by block name, as options give them: `{"python": "python.code"}`."""
    return {name: Target.parse(text) for name, text in written.items()}


def main_argument(spec: ToolSpec) -> str | None:
    """The one argument that a tool takes or insists on; None when there is no such one."""
    properties = list(spec.parameters.get("properties") or {})
    required = [name for name in spec.parameters.get("required") or [] if name in properties]
    if len(properties) == 1:
        return str(properties[0])
    return str(required[0]) if len(required) == 1 else None


def summaries(tools: Sequence[ToolSpec]) -> str:
    """One line for each tool: what it does and what it takes."""
    return "\n".join(
        f"- {tool.name}: {' '.join(tool.description.split())} "
        f"Arguments: {write_json(tool.parameters.get('properties') or {})}"
        for tool in tools
    )


def without_fence(code: str) -> str:
    """Code without the Markdown fence around all of it, which ReTool's models write inside their tag."""
    found = _FENCED.fullmatch(code.strip())
    return code if found is None else found[1]


def without_frame(block: str) -> str:
    """`block` without the one line break after its opening and the one before its end."""
    return block.removeprefix("\n").removesuffix("\n")
