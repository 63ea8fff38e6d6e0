"""Requests of OpenAI's and Anthropic's APIs, read as messages and tools: by the model server, and from logs.

A request is read the same way wherever it comes from, so that a logged one renders to the tokens of a live one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ludus.chat.api_fields import (
    ReadOnce,
    bad,
    content_text,
    list_field,
    read_call,
    read_content,
    read_tools,
)
from ludus.core.messages import Json, Message, Role, ToolSpec

_THOUGHTS = ("thinking", "redacted_thinking")
_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


@dataclass(frozen=True, slots=True)
class AskedConversation:
    """What a request asks a reply to."""

    messages: tuple[Message, ...]
    places: tuple[str, ...]
    """Where in the body each message stands, for errors."""
    tools: tuple[ToolSpec, ...]
    left_out: tuple[str, ...]
    """The tools that the model cannot call: hosted ones, and the like."""


def read_chat(body: Json) -> AskedConversation:
    """The conversation of a request of OpenAI's chat completions."""
    tools, left_out = read_tools(body, ("function",), "tools[{}]", inner="function")
    messages = read_messages(list_field(body, "messages"))
    places = tuple(f"messages[{i}]" for i in range(len(messages)))
    return AskedConversation(messages, places, tools, left_out)


def read_messages(raw: Sequence[Json]) -> tuple[Message, ...]:
    """The messages of a conversation."""
    if not raw:
        raise bad("'messages' must hold at least one message", "messages")
    found: list[Message] = []
    for i, message in enumerate(raw):
        known = ReadOnce("chat", message)
        found += known.messages or known.keep((_message(message, f"messages[{i}]"),))
    return tuple(found)


def _message(raw: Json, where: str) -> Message:
    role = _ROLES.get(str(raw.get("role")))
    if role is None:
        known = ", ".join(_ROLES)
        raise bad(f"{where} has the role {raw.get('role')!r:.40}; a role is one of {known}", where)
    content, media = read_content(raw.get("content"), where)
    if media and role in ("assistant", "system"):
        raise bad(f"{where} holds an image, which is for messages of users and results", where)
    if role == "assistant":
        calls = []
        before_tools = raw.get("function_call")  # the form that clients of 2023 write
        for call in list_field(raw, "tool_calls") or (
            [{"function": before_tools}] if before_tools else []
        ):
            function = call.get("function")
            if not isinstance(function, dict):
                raise bad(f"{where}: a call of type {call.get('type')!r:.40} cannot be read", where)
            calls.append(
                read_call(function.get("name"), function.get("arguments"), call.get("id"), where)
            )
        refusal = raw.get("refusal")
        return Message(role, content or (refusal if isinstance(refusal, str) else ""), tuple(calls))
    if role == "tool":
        id, name = raw.get("tool_call_id"), raw.get("name")
        return Message(
            role,
            content,
            name=name if isinstance(name, str) else None,
            tool_call_id=id if isinstance(id, str) else None,
            media=media,
        )
    return Message(role, content, media=media)


def read_anthropic(body: Json) -> AskedConversation:
    """The conversation of a request of Anthropic's messages API."""
    tools, left_out = read_tools(body, (None, "custom"), "tools.{}", schema="input_schema")
    found: list[Message] = []
    places: list[str] = []
    if body.get("system"):
        found.append(Message("system", content_text(body["system"], "system")))
        places.append("system")
    messages = list_field(body, "messages")
    if not messages:
        raise bad("messages: at least one message is required", "messages")
    for number, message in enumerate(messages):
        where = f"messages.{number}"
        known = ReadOnce("anthropic", message)
        found += known.messages or known.keep(_anthropic_messages(message, where))
        places += [where] * (len(found) - len(places))  # results are messages of their own
    return AskedConversation(tuple(found), tuple(places), tools, left_out)


def _anthropic_messages(raw: Json, where: str) -> tuple[Message, ...]:
    """One message of theirs: results stand in a user's message, before its text."""
    role, content = raw.get("role"), raw.get("content")
    if role not in ("user", "assistant", "system"):
        raise bad(f"{where}: a role is user or assistant, not {role!r:.40}", where)
    if isinstance(content, str):
        return (Message(role, content),)
    blocks = list_field(raw, "content")
    if role == "assistant":
        calls = [
            read_call(block.get("name"), block.get("input"), block.get("id"), where)
            for block in blocks
            if block.get("type") == "tool_use"
        ]
        texts = [b for b in blocks if b.get("type") != "tool_use" and b.get("type") not in _THOUGHTS]
        return (Message("assistant", content_text(texts, where), tuple(calls)),)
    found: list[Message] = []
    texts = []
    for block in blocks:
        if block.get("type") != "tool_result":
            texts.append(block)
            continue
        id = block.get("tool_use_id")
        result, media = read_content(block.get("content"), where)
        id = id if isinstance(id, str) else None
        found.append(Message("tool", result, tool_call_id=id, media=media))
    if texts or not found:
        text, media = read_content(texts, where)
        found.append(Message(role, text, media=media))
    return tuple(found)


def read_responses(body: Json) -> AskedConversation:
    """The conversation of a request of OpenAI's responses API, which is sent whole."""
    messages, places = _items(body)
    tools, left_out = read_tools(body, ("function",), "tools[{}]")
    if not messages:
        raise bad("'input' must be a text or a list of items", "input")
    return AskedConversation(messages, places, tools, left_out)


def _items(body: Json) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    """The messages, and where each stands."""
    instructions = body.get("instructions")
    found: list[Message] = []
    places: list[str] = []
    if instructions is not None:
        found.append(Message("system", content_text(instructions, "instructions")))
        places.append("instructions")
    given = body.get("input")
    if isinstance(given, str):
        return (*found, Message("user", given)), (*places, "input")
    for number, item in enumerate(list_field(body, "input")):
        where = f"input[{number}]"
        _add_item(found, item, where)
        places += [where] * (len(found) - len(places))  # an item may go on with the message before it
    return tuple(found), tuple(places)


def _add_item(found: list[Message], item: Json, where: str) -> None:
    """Add an item. Text and calls of one turn are items of their own, and one message here."""
    kind = item.get("type") or "message"
    if kind == "reasoning":  # it says nothing new: a reply's thinking is in its tokens
        return
    if kind == "function_call_output":
        id, (output, media) = item.get("call_id"), read_content(item.get("output"), where)
        id = id if isinstance(id, str) else None
        found.append(Message("tool", output, tool_call_id=id, media=media))
        return
    if kind == "function_call":
        call = read_call(item.get("name"), item.get("arguments"), item.get("call_id"), where)
        if found and found[-1].role == "assistant":
            last = found.pop()
            found.append(Message("assistant", last.content, (*last.tool_calls, call)))
        else:
            found.append(Message("assistant", "", (call,)))
        return
    roles = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
    role = roles.get(str(item.get("role")))
    if kind != "message" or role is None:
        raise bad(f"{where} is of type {kind!r:.40} and role {item.get('role')!r:.40}: not known", where)
    text, media = read_content(item.get("content"), where)
    if media and role != "user":
        raise bad(f"{where} holds an image, which is for messages of users and results", where)
    found.append(Message(role, text, media=media))  # type: ignore[arg-type]
