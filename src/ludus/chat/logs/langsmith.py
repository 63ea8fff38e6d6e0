"""Runs of LangSmith's, and messages of LangChain's, as conversations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ludus.chat.logs.calls import (
    BLOCKS_OF_CALLS,
    THOUGHTS,
    LoggedConversation,
    NotRead,
    as_chat_call,
    list_of,
    object_of,
    read_chat_reply,
    read_exchange,
    table_of,
    tables_of,
    thinks,
)
from ludus.core.messages import Json

_LANGCHAIN = {"human": "user", "ai": "assistant", "function": "tool"}
"""LangChain's names of roles that differ from OpenAI's."""


def read_run(run: Json) -> Iterator[LoggedConversation]:
    """A run of LangSmith's, of a model or of what calls models; nothing for runs of tools and the like."""
    inputs, outputs = table_of(run, "inputs"), object_of(run.get("outputs")) or {}
    given = list_of(inputs, "messages")
    given = given[0] if given and isinstance(given[0], list) else given
    if run.get("run_type") not in (None, "llm", "chain") or not given:
        return
    if run.get("error"):
        raise NotRead(f"the run failed: {run['error']!s:.200}")
    parameters = object_of((object_of(run.get("extra")) or {}).get("invocation_params")) or {}
    request = {**parameters, **inputs, "messages": [_langchain(one) for one in given]}
    if request.get("tools") is None:
        request["tools"] = parameters.get("tools")
    for read in _run_replies(request, outputs):
        yield replace(read, trace=str(run.get("trace_id") or ""), is_call=run.get("run_type") != "chain")


def _run_replies(request: Json, outputs: Json) -> Iterator[LoggedConversation]:
    made = list_of(outputs, "generations")
    for one in made[0] if made and isinstance(made[0], list) else made:
        about = object_of(one.get("generation_info")) if isinstance(one, Mapping) else None
        said = _langchain(one.get("message") if isinstance(one, Mapping) else None)
        yield read_chat_reply(
            request, [said], (about or {}).get("finish_reason") or said.get("finish_reason")
        )
    if made:
        return
    if not isinstance(outputs.get("messages"), list):
        message = outputs.get("message") or outputs.get("output")
        reply = _langchain(message) if isinstance(message, Mapping) else outputs
        yield from read_exchange(request, reply)
        return
    whole, asked = [_langchain(one) for one in outputs["messages"]], request["messages"]
    more = whole[len(asked) :] if whole[: len(asked)] == asked else whole
    yield read_chat_reply(request, more, None)


def _langchain(raw: Any) -> Json:
    """A message of LangChain's, in any of its three forms, as one of OpenAI's."""
    if not isinstance(raw, Mapping):
        raise NotRead(f"a message is an object, not {raw!r:.80}")
    fields = object_of(raw.get("kwargs")) or object_of(raw.get("data")) or dict(raw)
    names = list_of(raw, "id")
    kind = str(fields.get("type") or (names[-1] if names else raw.get("type")))
    if "role" in fields and kind in ("None", "message", "chat"):
        return fields
    kind = kind.removesuffix("Chunk").removesuffix("Message").lower()
    if fields.get("invalid_tool_calls"):
        raise NotRead("its reply holds a call that could not be parsed")
    more = object_of(fields.get("additional_kwargs")) or {}
    about = object_of(fields.get("response_metadata")) or {}
    calls = [as_chat_call(one, "args") for one in tables_of(fields, "tool_calls")]
    content = fields.get("content")
    if isinstance(content, list):  # calls stand in their own field as well
        dropped = (*BLOCKS_OF_CALLS, *THOUGHTS, "function_call")
        content = [
            one for one in content if not (isinstance(one, Mapping) and one.get("type") in dropped)
        ]
        content = [{"type": "text", "text": one} if isinstance(one, str) else one for one in content]
    made = {
        "role": _LANGCHAIN.get(kind, kind),
        "content": content,
        "tool_calls": calls or more.get("tool_calls"),
        "function_call": more.get("function_call"),
        "tool_call_id": fields.get("tool_call_id"),
        "finish_reason": about.get("finish_reason") or about.get("stop_reason"),
        "reasoning": thinks(fields) or more.get("reasoning_content"),
    }
    return {name: value for name, value in made.items() if value}
