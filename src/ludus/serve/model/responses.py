"""OpenAI's responses API. Nothing is kept between requests: a conversation is sent whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

from ludus.chat.api_fields import bad
from ludus.chat.api_requests import read_responses
from ludus.core.messages import Json
from ludus.serve.model.chat import ASKED, MORE, error
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
    stream_options,
    text_field,
)


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
    stream_options(body, "include_obfuscation")
    asked = read_responses(body)
    return ModelRequest(
        model=text_field(body, "model"),
        messages=asked.messages,
        tools=asked.tools,
        left_out=asked.left_out,
        stream=flag_field(body, "stream"),
        max_tokens=number_field(body, "max_output_tokens"),
        calls_allowed=body.get("tool_choice") != "none",
        asked=asked_of(body, (*ASKED, *MORE)),
        places=asked.places,
        messages_field="input",
        raw=body,
    )


def body(request: ModelRequest, replies: Sequence[ModelReply]) -> Json:
    """The reply as one JSON object."""
    (reply,) = replies
    status, written = "incomplete" if reply.is_cut else "completed", reply.completion_tokens
    usage = {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": reply.cached_tokens},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.prompt_tokens + written,
    }
    return {**_response(request, reply.head, status), "output": _items(reply), "usage": usage}


def _response(request: ModelRequest, head: ReplyHead, status: str) -> Json:
    """A response that says nothing yet."""
    raw = request.raw
    return {
        "id": f"resp_{head.id}",
        "object": "response",
        "created_at": head.created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": raw.get("instructions"),
        "max_output_tokens": request.max_tokens,
        "metadata": raw.get("metadata") or {},
        "model": request.model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": raw.get("temperature"),
        "text": {"format": {"type": "text"}},
        "tool_choice": raw.get("tool_choice") or "auto",
        "tools": [tool for tool in raw.get("tools") or [] if tool.get("type") == "function"],
        "top_p": raw.get("top_p"),
        "truncation": "disabled",
        "usage": None,
    }


def _items(reply: ModelReply) -> list[Json]:
    said = reply.reply
    items: list[Json] = []
    if said.thought:
        items.append(_reasoning(said.id, said.thought))
    if said.text or not said.calls:
        items.append(_message(said.id, said.text, "incomplete" if reply.is_cut else "completed"))
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


def _reasoning(id: str, thought: str) -> Json:
    return {
        "id": f"rs_{id}",
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": thought}],
    }


def _message(id: str, text: str, status: str) -> Json:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    about = {"id": f"msg_{id}", "type": "message", "role": "assistant", "status": status}
    return {**about, "content": [part]}


_DELTAS = {
    "reasoning": ("reasoning_summary_text", "reasoning_summary_part", "summary", "summary_index"),
    "message": ("output_text", "content_part", "content", "content_index"),
}
"""For each kind of item: the names of its events, the field with its parts, and the one with their numbers."""


class ResponseWriter:
    """Items, one after the other: reasoning, a message, and one for each call."""

    def __init__(self, request: ModelRequest, heads: Sequence[ReplyHead]) -> None:
        self._request, self._heads = request, heads
        self._numbers = count()
        self._items = 0
        self._open: Json | None = None
        self._said = ""

    def _event(self, kind: str, **fields: object) -> Event:
        name = f"response.{kind}"
        return name, {"type": name, "sequence_number": next(self._numbers), **fields}

    def start(self) -> Iterator[Event]:
        started = _response(self._request, self._heads[0], "in_progress")
        yield self._event("created", response=started)
        yield self._event("in_progress", response=started)

    def thought(self, index: int, piece: str) -> Iterator[Event]:
        yield from self._piece(_reasoning(self._heads[0].id, ""), piece)

    def text(self, index: int, piece: str) -> Iterator[Event]:
        yield from self._piece(_message(self._heads[0].id, "", "in_progress"), piece)

    def _piece(self, item: Json, piece: str) -> Iterator[Event]:
        """A delta of an item, which is begun if it is not open."""
        text, part, parts, _ = _DELTAS[item["type"]]
        if self._open is None or self._open["id"] != item["id"]:
            yield from self._stop()
            self._open, self._said = item, ""
            yield self._event("output_item.added", output_index=self._items, item={**item, parts: []})
            yield self._event(f"{part}.added", **self._place(), part=item[parts][0])
        if piece:
            more: Json = {"logprobs": []} if text == "output_text" else {}
            self._said += piece
            yield self._event(f"{text}.delta", **self._place(), delta=piece, **more)

    def _place(self) -> Json:
        assert self._open is not None
        number = _DELTAS[self._open["type"]][3]
        return {"item_id": self._open["id"], "output_index": self._items, number: 0}

    def _stop(self, status: str = "completed") -> Iterator[Event]:
        """End the item that is open."""
        if self._open is None:
            return
        item = self._open
        text, part, parts, _ = _DELTAS[item["type"]]
        whole = {**item[parts][0], "text": self._said}
        more: Json = {"logprobs": []} if text == "output_text" else {}
        yield self._event(f"{text}.done", **self._place(), text=self._said, **more)
        yield self._event(f"{part}.done", **self._place(), part=whole)
        done = {**item, parts: [whole], **({"status": status} if "status" in item else {})}
        yield self._event("output_item.done", output_index=self._items, item=done)
        self._items, self._open = self._items + 1, None

    def end(self, replies: Sequence[ModelReply]) -> Iterator[Event]:
        (reply,) = replies
        if not reply.reply.calls:
            yield from self.text(0, "")  # there is a message, if an empty one
        yield from self._stop("incomplete" if reply.is_cut else "completed")
        for item in _items(reply):
            if item["type"] != "function_call":
                continue
            place = {"item_id": item["id"], "output_index": self._items}
            begun = {**item, "arguments": "", "status": "in_progress"}
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield self._event("output_item.added", output_index=self._items, item=begun)
            yield self._event("function_call_arguments.delta", **place, delta=item["arguments"])
            yield self._event("function_call_arguments.done", **place, **done)
            yield self._event("output_item.done", output_index=self._items, item=item)
            self._items += 1
        whole = {**body(self._request, replies), "created_at": self._heads[0].created}
        yield self._event(whole["status"], response=whole)

    def error(self, problem: Json) -> Event:
        fields = {name: problem["error"][name] for name in ("code", "message", "param")}
        return "error", {
            "type": "error",
            "sequence_number": next(self._numbers),
            **fields,
            **problem,  # openai's client raises what has an "error"
        }


RESPONSES = Dialect("responses", parse, body, ResponseWriter, error)
