"""Anthropic's messages API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ludus.core.messages import Json, Message, ToolSpec
from ludus.serve.model.requests import (
    ApiError,
    Dialect,
    ModelReply,
    ModelRequest,
    arguments_text,
    asked_of,
    bad,
    check_tools,
    content_text,
    list_field,
    number_field,
    pieces_of,
    read_call,
    read_content,
    read_tool,
    stops_field,
    text_field,
)

_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_STREAMED: dict[str, tuple[str, Any, str, str]] = {
    "thinking": ("thinking", "", "thinking_delta", "thinking"),
    "text": ("text", "", "text_delta", "text"),
    "tool_use": ("input", {}, "input_json_delta", "partial_json"),
}
"""For each kind of block: the field that is streamed, its beginning, and the delta's type and field."""
_THOUGHTS = frozenset({"thinking", "redacted_thinking"})


def parse(body: Json) -> ModelRequest:
    """A request; `ApiError` says what is wrong with it."""
    choice = body.get("tool_choice")
    tools = [_tool(tool, f"tools.{i}") for i, tool in enumerate(list_field(body, "tools"))]
    found: list[Message] = []
    if body.get("system"):
        found.append(Message("system", content_text(body["system"], "system")))
    messages = list_field(body, "messages")
    if not messages:
        raise bad("messages: at least one message is required", "messages")
    for number, message in enumerate(messages):
        found += _messages(message, f"messages.{number}")
    return ModelRequest(
        model=text_field(body, "model"),
        messages=tuple(found),
        tools=check_tools(tools),
        stream=body.get("stream") is True,
        max_tokens=number_field(body, "max_tokens"),
        stop=stops_field(body.get("stop_sequences"), "stop_sequences"),
        calls_allowed=not (isinstance(choice, dict) and choice.get("type") == "none"),
        asked=asked_of(body, ("temperature", "top_p", "top_k")),
        raw=body,
    )


def _tool(tool: Json, where: str) -> ToolSpec:
    if tool.get("type") not in (None, "custom"):
        raise bad(f"{where}: a tool of type {tool['type']!r:.40} cannot be called here", where)
    return read_tool(tool, "input_schema", where)


def _messages(raw: Json, where: str) -> list[Message]:
    """One message of theirs: results stand in a user's message, before its text."""
    role, content = raw.get("role"), raw.get("content")
    if role not in ("user", "assistant", "system"):
        raise bad(f"{where}: a role is user or assistant, not {role!r:.40}", where)
    if isinstance(content, str):
        return [Message(role, content)]
    blocks = list_field(raw, "content")
    if role == "assistant":
        calls = [
            read_call(block.get("name"), block.get("input"), block.get("id"), where)
            for block in blocks
            if block.get("type") == "tool_use"
        ]
        texts = [b for b in blocks if b.get("type") != "tool_use" and b.get("type") not in _THOUGHTS]
        return [Message("assistant", content_text(texts, where), tuple(calls))]
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
    return found


def body(request: ModelRequest, replies: Sequence[ModelReply]) -> Json:
    """The reply as one JSON object."""
    (reply,) = replies
    return {**_head(request, reply), "content": _blocks(reply), **_ending(reply), "usage": _usage(reply)}


def _head(request: ModelRequest, reply: ModelReply) -> Json:
    id = f"msg_{reply.reply.id}"
    return {"id": id, "type": "message", "role": "assistant", "model": request.model}


def _blocks(reply: ModelReply) -> list[Json]:
    said = reply.reply
    found: list[Json] = []
    if said.thought:
        found.append({"type": "thinking", "thinking": said.thought, "signature": ""})
    if said.text:
        found.append({"type": "text", "text": said.text})
    for call in said.calls:
        found.append({"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments})
    return found


def _ending(reply: ModelReply) -> Json:
    reason = "end_turn"
    if reply.reply.calls:
        reason = "tool_use"
    elif reply.is_cut:
        reason = "max_tokens"
    elif reply.stop is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": reply.stop if reason == "stop_sequence" else None}


def _usage(reply: ModelReply) -> Json:
    return {
        "input_tokens": reply.prompt_tokens - reply.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": reply.cached_tokens,
        "output_tokens": reply.completion_tokens,
    }


def events(
    request: ModelRequest, replies: Sequence[ModelReply]
) -> Iterator[tuple[str | None, Json | str]]:
    """The reply as events."""
    (reply,) = replies

    def event(kind: str, **fields: object) -> tuple[str, Json]:
        return kind, {"type": kind, **fields}

    usage = {**_usage(reply), "output_tokens": 0}
    start: Json = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield event("message_start", message={**_head(request, reply), **start})
    inputs = iter(arguments_text(call) for call in reply.reply.calls)
    for index, block in enumerate(_blocks(reply)):
        kind = block["type"]
        field, empty, name, part = _STREAMED[kind]
        yield event("content_block_start", index=index, content_block={**block, field: empty})
        for piece in pieces_of(next(inputs) if kind == "tool_use" else block[kind]):
            yield event("content_block_delta", index=index, delta={"type": name, part: piece})
        yield event("content_block_stop", index=index)
    yield event("message_delta", delta=_ending(reply), usage={"output_tokens": reply.completion_tokens})
    yield event("message_stop")


def error(problem: ApiError) -> Json:
    """An error as Anthropic's clients read it."""
    kind = _ERRORS.get(problem.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(problem)}}


ANTHROPIC = Dialect("anthropic", parse, body, events, error)
