"""A logged request of a model API and its reply, as a conversation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ludus.chat.api_fields import as_chat_tools
from ludus.chat.api_requests import AskedConversation, read_anthropic, read_chat, read_responses
from ludus.core.messages import Json, Message, ToolSpec
from ludus.core.strict_json import BadJson, whole_json

_UNFINISHED = frozenset(
    {"length", "max_tokens", "incomplete", "content_filter", "error", "failed", "pause_turn"}
)
"""Why replies end that are not to be imitated."""
THOUGHTS = ("thinking", "redacted_thinking", "reasoning")
BLOCKS_OF_CALLS = ("tool_use", "tool_result")


class NotRead(ValueError):
    """A logged call is no conversation to learn from; the message says why."""


@dataclass(frozen=True, slots=True)
class LoggedConversation:
    """A request and its reply, which is the last message."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] | None
    """None where the log does not say."""
    has_thought: bool = False
    """A thought came with the reply. It is left out, as from the requests that follow."""
    trace: str = ""
    is_call: bool = True
    """A model was called; else an agent or a chain was, which calls models itself."""


def read_logged_call(entry: Json) -> Iterator[LoggedConversation]:
    """A request and its response, side by side or in one table."""
    request = object_of(entry.get("request")) or entry
    response = object_of(entry.get("response")) if "response" in entry else entry
    return read_exchange(object_of(request.get("body")) or request, response)


def read_exchange(request: Json, response: Json | None) -> Iterator[LoggedConversation]:
    response = response and (object_of(response.get("body")) or response)
    if not response:
        raise NotRead("it has no response that can be read (a stream is logged as its whole response)")
    if response.get("error"):
        raise NotRead(f"the request failed: {response['error']!s:.200}")
    content, finish = response.get("content"), response.get("stop_reason") or response.get("status")
    if isinstance(response.get("choices"), list):
        for choice in tables_of(response, "choices"):
            yield read_chat_reply(request, [table_of(choice, "message")], choice.get("finish_reason"))
    elif isinstance(response.get("output"), list):
        if request.get("previous_response_id") or request.get("conversation"):
            raise NotRead("its history is in another response: log the whole conversation as 'input'")
        given = request.get("input")
        items = (
            [{"role": "user", "content": given}] if isinstance(given, str) else list_of(request, "input")
        )
        whole = [*items, *response["output"]]
        yield _read(read_responses, {**request, "input": whole}, response["output"], finish)
    elif response.get("role") == "assistant" and isinstance(content, list):
        whole = [*list_of(request, "messages"), {"role": "assistant", "content": content}]
        yield _read(read_anthropic, {**request, "messages": whole}, content, finish)
    elif response.get("role") == "assistant":
        yield read_chat_reply(request, [response], finish)
    else:
        raise NotRead("its response has no 'choices', 'output' or 'content'")


def read_anthropic_messages(entry: Json) -> Iterator[LoggedConversation]:
    """Messages of Anthropic's API, the last reply among them."""
    yield _read(read_anthropic, entry, list_of(entry, "messages"), None)


def is_anthropic(entry: Mapping[str, Any]) -> bool:
    blocks = [
        block
        for message in list_of(entry, "messages")
        if isinstance(message, Mapping)
        for block in list_of(message, "content")
    ]
    return any(isinstance(one, Mapping) and one.get("type") in BLOCKS_OF_CALLS for one in blocks)


def read_chat_reply(request: Json, said: Sequence[Json], finish: Any) -> LoggedConversation:
    body: Json = {"messages": [*list_of(request, "messages"), *said]}
    offered = next(
        (request[one] for one in ("tools", "functions") if request.get(one) is not None), None
    )
    if offered is not None:
        body["tools"] = as_chat_tools(offered)
    return _read(read_chat, body, said, finish)


def _read(
    read: Callable[[Json], AskedConversation], body: Json, said: Sequence[Any], finish: Any
) -> LoggedConversation:
    if str(finish) in _UNFINISHED:
        raise NotRead(f"its reply was cut off, or kept back ({finish!r})")
    asked = read(body)
    reply = asked.messages[-1]
    if reply.role != "assistant" or not (reply.content.strip() or reply.tool_calls):
        raise NotRead("its reply says nothing")
    tools = asked.tools if body.get("tools") is not None else None
    return LoggedConversation(asked.messages, tools, any(map(thinks, said)))


def thinks(said: Any) -> bool:
    if not isinstance(said, Mapping):
        return False
    parts = [said, *list_of(said, "content"), *list_of(said, "parts")]
    kinds = [part.get("type") for part in parts if isinstance(part, Mapping)]
    return bool(
        said.get("reasoning_content") or said.get("reasoning") or any(kind in THOUGHTS for kind in kinds)
    )


def as_chat_call(call: Json, arguments: str) -> Json:
    if isinstance(call.get("function"), Mapping):
        return call
    function = {"name": call.get("name"), "arguments": call.get(arguments)}
    return {"id": call.get("id"), "type": "function", "function": function}


# Fields of unknown tables


def object_of(given: Any) -> Json | None:
    """A table, also one that is written as JSON; None for anything else."""
    if isinstance(given, str) and given.lstrip().startswith("{"):
        try:
            given = whole_json(given)
        except BadJson:
            return None
    return dict(given) if isinstance(given, Mapping) else None


def table_of(given: Mapping[str, Any], name: str) -> Json:
    if (found := object_of(given.get(name))) is None:
        raise NotRead(f"its {name!r} is not an object")
    return found


def list_of(given: Any, name: str) -> list[Any]:
    found = given.get(name) if isinstance(given, Mapping) else None
    return found if isinstance(found, list) else []


def tables_of(given: Any, name: str) -> list[Json]:
    found = list_of(given, name)
    if not all(isinstance(one, Mapping) for one in found):
        raise NotRead(f"its {name!r} are not objects")
    return found
