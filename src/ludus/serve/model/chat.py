"""OpenAI's chat completions API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ludus.core.messages import Json, Message, Role
from ludus.serve.model.requests import (
    ApiError,
    Dialect,
    Event,
    ModelReply,
    ModelRequest,
    ReadOnce,
    ReplyHead,
    arguments_text,
    asked_of,
    bad,
    flag_field,
    list_field,
    number_field,
    read_call,
    read_content,
    read_tools,
    stops_field,
    stream_options,
    text_field,
)

ASKED = ("temperature", "top_p", "seed", "presence_penalty", "frequency_penalty", "logit_bias")
"""Fields about sampling. Servers of open models also take those of `MORE`."""
MORE = ("top_k", "min_p", "repetition_penalty")
_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
}


def parse(body: Json) -> ModelRequest:
    """A request; `ApiError` says what is wrong with it."""
    format = body.get("response_format")
    if isinstance(format, dict) and format.get("type") not in (None, "text"):
        raise bad(
            f"response_format {format.get('type')!r} is not supported: replies are not constrained; ask for "
            "JSON in the prompt, or give a tool",
            "response_format",
        )
    if flag_field(body, "logprobs") or body.get("top_logprobs"):
        raise bad("'logprobs' is not supported: replies carry none", "logprobs")
    tools, left_out = read_tools(body, frozenset({"function"}), "tools[{}]", inner="function")
    messages = read_messages(list_field(body, "messages"))
    return ModelRequest(
        model=text_field(body, "model"),
        messages=messages,
        tools=tools,
        left_out=left_out,
        stream=flag_field(body, "stream"),
        max_tokens=number_field(body, "max_completion_tokens", "max_tokens"),
        stop=stops_field(body.get("stop"), "stop"),
        count=number_field(body, "n") or 1,
        calls_allowed=body.get("tool_choice") != "none",
        asked=asked_of(body, (*ASKED, *MORE)),
        usage_in_stream=stream_options(body, "include_usage")["include_usage"],
        places=tuple(f"messages[{i}]" for i in range(len(messages))),
        raw=body,
    )


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
        for call in list_field(raw, "tool_calls"):
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


def body(request: ModelRequest, replies: Sequence[ModelReply]) -> Json:
    """The reply as one JSON object."""
    choices = [
        {"index": i, "message": _reply_message(r), "logprobs": None, "finish_reason": _finish(r)}
        for i, r in enumerate(replies)
    ]
    return {**_head(request, replies[0].head, ""), "choices": choices, "usage": _usage(replies)}


def _head(request: ModelRequest, head: ReplyHead, kind: str) -> Json:
    return {
        "id": f"chatcmpl-{head.id}",
        "object": f"chat.completion{kind}",
        "created": head.created,
        "model": request.model,
    }


def _reply_message(reply: ModelReply) -> Json:
    said, calls = reply.reply, _calls(reply)
    message: Json = {
        "role": "assistant",
        "content": said.text or (None if calls else ""),
        "refusal": None,
    }
    if said.thought:
        message["reasoning_content"] = said.thought
    if calls:
        message["tool_calls"] = calls
    return message


def _calls(reply: ModelReply) -> list[Json]:
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": arguments_text(call)},
        }
        for call in reply.reply.calls
    ]


def _finish(reply: ModelReply) -> str:
    if reply.reply.calls:
        return "tool_calls"
    return "length" if reply.is_cut else "stop"


def _usage(replies: Sequence[ModelReply]) -> Json:
    prompt, written = replies[0].prompt_tokens, sum(reply.completion_tokens for reply in replies)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": replies[0].cached_tokens},
    }


class ChatWriter:
    """Chunks."""

    def __init__(self, request: ModelRequest, heads: Sequence[ReplyHead]) -> None:
        self._request, self._count = request, len(heads)
        self._head = _head(request, heads[0], ".chunk") if heads else {}

    def _chunk(self, index: int, delta: Json, finish: str | None = None) -> Event:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        return None, {**self._head, "choices": [choice]}

    def start(self) -> Iterator[Event]:
        for index in range(self._count):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def thought(self, index: int, piece: str) -> Iterator[Event]:
        yield self._chunk(index, {"reasoning_content": piece})

    def text(self, index: int, piece: str) -> Iterator[Event]:
        yield self._chunk(index, {"content": piece})

    def end(self, replies: Sequence[ModelReply]) -> Iterator[Event]:
        for index, reply in enumerate(replies):
            for number, call in enumerate(_calls(reply)):
                function = {**call["function"], "arguments": ""}
                yield self._chunk(
                    index, {"tool_calls": [{**call, "index": number, "function": function}]}
                )
                more = {"index": number, "function": {"arguments": call["function"]["arguments"]}}
                yield self._chunk(index, {"tool_calls": [more]})
            yield self._chunk(index, {}, _finish(reply))
        if self._request.usage_in_stream:
            yield None, {**self._head, "choices": [], "usage": _usage(replies)}
        yield None, "[DONE]"

    def error(self, problem: Json) -> Event:
        return None, problem


def error(problem: ApiError) -> Json:
    """An error as OpenAI's clients read it."""
    kind = _ERRORS.get(problem.status, "server_error")
    shown = {"message": str(problem), "type": kind, "param": problem.param, "code": problem.code}
    return {"error": shown}


CHAT = Dialect("chat", parse, body, ChatWriter, error)
