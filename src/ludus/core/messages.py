"""The conversation as people, tools and rewards read it. What the model read is tokens: `trajectory`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ludus.core.failures import Fault

Role = Literal["system", "user", "assistant", "tool"]
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Media:
    """Something that is not text, by reference: the content's hash, and its bytes while at hand."""

    kind: str
    sha256: str
    data: bytes | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call as parsed from an action. `fault` and `problem` are set when it could not be parsed."""

    name: str
    arguments: Json = field(default_factory=dict)
    id: str = ""
    fault: Fault | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of the conversation."""

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None
    tool_call_id: str | None = None
    media: tuple[Media, ...] = ()

    def as_chat(self) -> Json:
        """The OpenAI-style dictionary that chat templates take."""
        chat: Json = {"role": self.role, "content": self.content}
        if self.tool_calls:
            chat["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        if self.name is not None:
            chat["name"] = self.name
        if self.tool_call_id is not None:
            chat["tool_call_id"] = self.tool_call_id
        return chat

    @classmethod
    def parse(cls, raw: Message | Mapping[str, Any]) -> Message:
        """A message from a dictionary such as a task file holds; unknown roles are refused."""
        if isinstance(raw, Message):
            return raw
        role, content = raw.get("role"), _text(raw.get("content"), bool(raw.get("tool_calls")))
        if role not in ("system", "user", "assistant", "tool"):
            raise ValueError(f"a message's role must be system, user, assistant or tool, not {role!r}")
        if not isinstance(content, str):
            raise ValueError(f"a message's content must be a string, not {type(content).__name__}")
        unknown = set(raw) - {"role", "content", "name", "tool_calls", "tool_call_id"}
        if unknown:
            raise ValueError(f"a message has no field {sorted(unknown)[0]!r}")
        calls = tuple(
            ToolCall(
                name=call["function"]["name"],
                arguments=_arguments(call["function"]["arguments"]),
                id=call.get("id", ""),
            )
            for call in raw.get("tool_calls") or ()
        )
        return cls(role, content, calls, raw.get("name"), raw.get("tool_call_id"))


def _text(content: Any, has_calls: bool) -> Any:
    """A message's text; a call may come without any, and a text may come in parts."""
    if content is None and has_calls:
        return ""
    parts = content if isinstance(content, list) else []
    if parts and all(isinstance(part, Mapping) and part.get("type") == "text" for part in parts):
        return "".join(str(part.get("text", "")) for part in parts)
    return content


def _arguments(given: Any) -> dict[str, Any]:
    """A call's arguments: a table, or one written as JSON, as servers of chats send it."""
    table = json.loads(given) if isinstance(given, str) else given
    if not isinstance(table, Mapping):
        raise ValueError(f"the arguments of a tool call are a table, not {given!r:.80}")
    return dict(table)
