"""OpenAI's responses API. Nothing is kept between requests: a conversation is sent whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

from ludus.core.messages import Json, Message, ToolSpec
from ludus.serve.model.chat import ASKED, MORE, error
from ludus.serve.model.requests import (
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
    text_field,
)

_SKIPPED = frozenset({"reasoning"})
"""Items that say nothing new: a reply's thinking is in its tokens."""


def parse(body: Json) -> ModelRequest:
    """A request; `ApiError` says what is wrong with it."""
    for name in ("previous_response_id", "conversation", "prompt"):
        if body.get(name) is not None:
            raise bad(f"'{name}' is not supported: send the whole conversation as 'input'", name)
    text = body.get("text")
    format = text.get("format") if isinstance(text, dict) else None
    if isinstance(format, dict) and format.get("type") not in (None, "text"):
        raise bad(
            f"text.format {format.get('type')!r} is not supported: replies are not constrained; ask for JSON "
            "in the prompt, or give a tool",
            "text",
        )
    messages = _messages(body)
    if not messages:
        raise bad("'input' must be a text or a list of items", "input")
    return ModelRequest(
        model=text_field(body, "model"),
        messages=messages,
        tools=check_tools(
            [_tool(one, f"tools[{i}]") for i, one in enumerate(list_field(body, "tools"))]
        ),
        stream=body.get("stream") is True,
        max_tokens=number_field(body, "max_output_tokens"),
        calls_allowed=body.get("tool_choice") != "none",
        asked=asked_of(body, (*ASKED, *MORE)),
        raw=body,
    )


def _messages(body: Json) -> tuple[Message, ...]:
    instructions = body.get("instructions")
    found: list[Message] = []
    if instructions is not None:
        found.append(Message("system", content_text(instructions, "instructions")))
    given = body.get("input")
    if isinstance(given, str):
        return (*found, Message("user", given))
    for number, item in enumerate(list_field(body, "input")):
        _add(found, item, f"input[{number}]")
    return tuple(found)


def _add(found: list[Message], item: Json, where: str) -> None:
    """Add an item. Text and calls of one turn are items of their own, and one message here."""
    kind = item.get("type") or "message"
    if kind in _SKIPPED:
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
        raise bad(f"{where} holds a picture, which is for messages of users and results", where)
    found.append(Message(role, text, media=media))  # type: ignore[arg-type]


def _tool(tool: Json, where: str) -> ToolSpec:
    if tool.get("type") != "function":
        raise bad(f"{where} is of type {tool.get('type')!r:.40}; only functions can be called", where)
    return read_tool(tool, "parameters", where)


def body(request: ModelRequest, replies: Sequence[ModelReply]) -> Json:
    """The reply as one JSON object."""
    (reply,) = replies
    return _response(request, reply, "incomplete" if reply.is_cut else "completed", _items(reply))


def _response(request: ModelRequest, reply: ModelReply, status: str, output: list[Json]) -> Json:
    raw, written = request.raw, reply.completion_tokens
    usage = {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": reply.cached_tokens},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.prompt_tokens + written,
    }
    return {
        "id": f"resp_{reply.reply.id}",
        "object": "response",
        "created_at": reply.created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": raw.get("instructions"),
        "max_output_tokens": request.max_tokens,
        "metadata": raw.get("metadata") or {},
        "model": request.model,
        "output": output,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": raw.get("temperature"),
        "text": {"format": {"type": "text"}},
        "tool_choice": raw.get("tool_choice") or "auto",
        "tools": raw.get("tools") or [],
        "top_p": raw.get("top_p"),
        "truncation": "disabled",
        "usage": None if status == "in_progress" else usage,
    }


def _items(reply: ModelReply) -> list[Json]:
    said = reply.reply
    items: list[Json] = []
    if said.thought:
        summary = [{"type": "summary_text", "text": said.thought}]
        items.append({"id": f"rs_{said.id}", "type": "reasoning", "summary": summary})
    if said.text or not said.calls:
        part = {"type": "output_text", "text": said.text, "annotations": [], "logprobs": []}
        items.append(
            {
                "id": f"msg_{said.id}",
                "type": "message",
                "role": "assistant",
                "status": "incomplete" if reply.is_cut else "completed",
                "content": [part],
            }
        )
    for call in said.calls:
        items.append(
            {
                "id": f"fc_{call.id.removeprefix('call_')}",
                "type": "function_call",
                "call_id": call.id,
                "name": call.name,
                "arguments": arguments_text(call),
                "status": "completed",
            }
        )
    return items


def events(
    request: ModelRequest, replies: Sequence[ModelReply]
) -> Iterator[tuple[str | None, Json | str]]:
    """The reply as events."""
    (reply,) = replies
    numbers = count()

    def event(kind: str, **fields: object) -> tuple[str, Json]:
        return kind, {"type": kind, "sequence_number": next(numbers), **fields}

    started = _response(request, reply, "in_progress", [])
    yield event("response.created", response=started)
    yield event("response.in_progress", response=started)
    for index, item in enumerate(_items(reply)):
        place = {"item_id": item["id"], "output_index": index}
        begun: Json = {"content": [], "arguments": "", "status": "in_progress"}
        shown = {name: begun.get(name, value) for name, value in item.items()}
        yield event("response.output_item.added", output_index=index, item=shown)
        if item["type"] == "message":
            (part,) = item["content"]
            where = {**place, "content_index": 0}
            yield event("response.content_part.added", **where, part={**part, "text": ""})
            for piece in pieces_of(part["text"]):
                yield event("response.output_text.delta", **where, delta=piece, logprobs=[])
            yield event("response.output_text.done", **where, text=part["text"], logprobs=[])
            yield event("response.content_part.done", **where, part=part)
        if item["type"] == "function_call":
            for piece in pieces_of(item["arguments"]):
                yield event("response.function_call_arguments.delta", **place, delta=piece)
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield event("response.function_call_arguments.done", **place, **done)
        yield event("response.output_item.done", output_index=index, item=item)
    whole = body(request, replies)
    yield event(f"response.{whole['status']}", response=whole)


RESPONSES = Dialect("responses", parse, body, events, error)
