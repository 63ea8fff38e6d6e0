"""Anthropic's messages API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ludus.chat.api_fields import ApiError
from ludus.chat.api_requests import read_anthropic
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
_DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""For each kind of block: the type of its deltas, and their field."""


def parse(body: Json) -> ModelRequest:
    """A request; `ApiError` says what is wrong with it."""
    choice = body.get("tool_choice")
    asked = read_anthropic(body)
    return ModelRequest(
        model=text_field(body, "model"),
        messages=asked.messages,
        tools=asked.tools,
        left_out=asked.left_out,
        stream=flag_field(body, "stream"),
        max_tokens=number_field(body, "max_tokens"),
        stop=stops_field(body.get("stop_sequences"), "stop_sequences"),
        calls_allowed=not (isinstance(choice, dict) and choice.get("type") == "none"),
        asked=asked_of(body, ("temperature", "top_p", "top_k")),
        places=asked.places,
        raw=body,
    )


def body(request: ModelRequest, replies: Sequence[ModelReply]) -> Json:
    """The reply as one JSON object."""
    (reply,) = replies
    said = reply.reply
    content: list[Json] = []
    if said.thought:
        content.append({"type": "thinking", "thinking": said.thought, "signature": ""})
    if said.text:
        content.append({"type": "text", "text": said.text})
    for call in said.calls:
        content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments})
    return {**_head(request, reply.head), "content": content, **_ending(reply)}


def _head(request: ModelRequest, head: ReplyHead) -> Json:
    return {"id": f"msg_{head.id}", "type": "message", "role": "assistant", "model": request.model}


def _ending(reply: ModelReply) -> Json:
    reason, usage = "end_turn", (reply.prompt_tokens, reply.cached_tokens, reply.completion_tokens)
    if reply.reply.calls:
        reason = "tool_use"
    elif reply.is_cut:
        reason = "max_tokens"
    elif reply.stop is not None:
        reason = "stop_sequence"
    stop = reply.stop if reason == "stop_sequence" else None
    return {"stop_reason": reason, "stop_sequence": stop, "usage": _usage(*usage)}


def _usage(prompt: int, cached: int = 0, written: int = 0) -> Json:
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": written,
    }


class MessageWriter:
    """Blocks, one after the other: thinking, text, and one for each call."""

    def __init__(self, request: ModelRequest, heads: Sequence[ReplyHead]) -> None:
        self._request, self._heads = request, heads
        self._blocks = 0
        self._open: str | None = None

    def start(self) -> Iterator[Event]:
        (head,) = self._heads
        usage = _usage(head.prompt_tokens)  # what was cached is known at the end
        start: Json = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield _event("message_start", message={**_head(self._request, head), **start})

    def thought(self, index: int, piece: str) -> Iterator[Event]:
        yield from self._piece({"type": "thinking", "thinking": "", "signature": ""}, piece)

    def text(self, index: int, piece: str) -> Iterator[Event]:
        yield from self._piece({"type": "text", "text": ""}, piece)

    def _piece(self, block: Json, piece: str) -> Iterator[Event]:
        """A delta of a block, which is begun if it is not open."""
        kind = block["type"]
        if self._open != kind:
            yield from self._stop()
            yield _event("content_block_start", index=self._blocks, content_block=block)
            self._open = kind
        name, field = _DELTAS[kind]
        yield _event("content_block_delta", index=self._blocks, delta={"type": name, field: piece})

    def _stop(self) -> Iterator[Event]:
        if self._open is not None:
            yield _event("content_block_stop", index=self._blocks)
            self._blocks, self._open = self._blocks + 1, None

    def end(self, replies: Sequence[ModelReply]) -> Iterator[Event]:
        (reply,) = replies
        for call in reply.reply.calls:
            yield from self._stop()
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            yield from self._piece(block, arguments_text(call))
        yield from self._stop()
        ending = _ending(reply)
        yield _event("message_delta", usage=ending.pop("usage"), delta=ending)
        yield _event("message_stop")

    def error(self, problem: Json) -> Event:
        return "error", problem


def _event(kind: str, **fields: object) -> Event:
    return kind, {"type": kind, **fields}


def error(problem: ApiError) -> Json:
    """An error as Anthropic's clients read it."""
    kind = _ERRORS.get(problem.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(problem)}}


ANTHROPIC = Dialect("anthropic", parse, body, MessageWriter, error)
