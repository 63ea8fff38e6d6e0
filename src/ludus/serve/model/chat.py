"""OpenAI's chat completions API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ludus.chat.api_fields import ApiError, bad
from ludus.chat.api_requests import read_chat
from ludus.core.messages import Json
from ludus.serve.model.requests import (
    Dialect,
    Event,
    ModelReply,
    ModelRequest,
    ReplyHead,
    arguments_text,
    asked_of,
    flag_field,
    number_field,
    stops_field,
    stream_options,
    text_field,
)

ASKED = ("temperature", "top_p", "seed", "presence_penalty", "frequency_penalty", "logit_bias")
"""Fields about sampling. Servers of open models also take those of `MORE`."""
MORE = ("top_k", "min_p", "repetition_penalty")
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
    asked = read_chat(body)
    return ModelRequest(
        model=text_field(body, "model"),
        messages=asked.messages,
        tools=asked.tools,
        left_out=asked.left_out,
        stream=flag_field(body, "stream"),
        max_tokens=number_field(body, "max_completion_tokens", "max_tokens"),
        stop=stops_field(body.get("stop"), "stop"),
        count=number_field(body, "n") or 1,
        calls_allowed=body.get("tool_choice") != "none",
        asked=asked_of(body, (*ASKED, *MORE)),
        usage_in_stream=stream_options(body, "include_usage")["include_usage"],
        places=asked.places,
        raw=body,
    )


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
