"""Spans and events of OpenTelemetry's conventions for GenAI as conversations.

Read are `gen_ai.input.messages` (2025), the events for single messages that came before it, and attributes
with numbers in their names, as OpenLLMetry writes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ludus.chat.api_fields import as_chat_tools
from ludus.chat.logs.calls import (
    LoggedConversation,
    NotRead,
    as_chat_call,
    list_of,
    object_of,
    read_chat_reply,
    tables_of,
    thinks,
)
from ludus.core.messages import Json
from ludus.core.strict_json import BadJson, whole_json

_CAPTURE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
_MODEL_CALLS = ("chat", "generate_content", "text_completion")
_EXPORTS = {"resourceSpans": ("scopeSpans", "spans"), "resourceLogs": ("scopeLogs", "logRecords")}
"""The names of the levels of OTLP's JSON."""


def is_otlp(value: Any) -> bool:
    """Whether it is an export of spans or log records."""
    return isinstance(value, Mapping) and bool(_EXPORTS.keys() & value.keys())


def spans_of(export: Json) -> Iterator[tuple[str, Json]]:
    """The spans of an export, and its log records, those of one span together."""
    events: dict[tuple[str, str], Json] = {}
    for kind, (scopes, entries) in _EXPORTS.items():
        found = [
            one
            for r in tables_of(export, kind)
            for s in tables_of(r, scopes)
            for one in tables_of(s, entries)
        ]
        if kind == "resourceSpans":
            yield from ((f", span {number}", one) for number, one in enumerate(found, start=1))
            continue
        for one in found:
            ids = {name: str(one.get(name) or "") for name in ("traceId", "spanId")}
            span = events.setdefault(
                (ids["traceId"], ids["spanId"]), {**ids, "attributes": {}, "events": []}
            )
            span["events"].append(one)
    yield from ((f", log records of span {span!r:.40}", one) for (_, span), one in events.items())


def read_span(entry: Json) -> Iterator[LoggedConversation]:
    """A span of a model's call, or of an agent's; nothing for others."""
    attributes, asked, said = _with_events(entry)
    asked = _from_text(attributes, "gen_ai.input.messages", "gen_ai.prompt") or asked
    said = _from_text(attributes, "gen_ai.output.messages", "gen_ai.completion") or said
    operation = attributes.get("gen_ai.operation.name")
    if not asked or not said:
        if operation in _MODEL_CALLS:
            raise NotRead(f"it has no messages: they are captured where {_CAPTURE} says so")
        return
    system = _from_text(attributes, "gen_ai.system_instructions")
    request: Json = {"messages": [one for each in asked for one in _otel_messages(each)]}
    if system:
        request["messages"].insert(0, {"role": "system", "content": _text(system)})
    if tools := _from_text(attributes, "gen_ai.tool.definitions", "llm.request.functions"):
        request["tools"] = [_with_schema(tool) for tool in as_chat_tools(tools)]
    context = object_of(entry.get("context")) or entry
    trace = str(context.get("traceId") or context.get("trace_id") or "")
    for one in said:
        read = read_chat_reply(
            request, _otel_messages(one), one.get("finish_reason") if isinstance(one, Mapping) else None
        )
        yield replace(read, trace=trace, is_call=operation in (None, *_MODEL_CALLS))


def _with_events(entry: Json) -> tuple[Json, list[Json], list[Json]]:
    """A span's attributes with those of its events, and the messages that are events of their own."""
    attributes, asked, said = _attributes(entry.get("attributes")), list[Json](), list[Json]()
    for event in tables_of(entry, "events"):
        own = _attributes(event.get("attributes"))
        name = str(event.get("name") or event.get("eventName") or own.get("event.name") or "")
        told = own.get("gen_ai.event.content") or _any_value(event.get("body"))
        content = object_of(told) or own
        if name.startswith("gen_ai.") and name.endswith(".message"):
            role = name.removeprefix("gen_ai.").removesuffix(".message")
            asked.append({"role": role, "tool_call_id": content.get("id"), **content})
        elif name == "gen_ai.choice":
            finish = {"finish_reason": content.get("finish_reason")}
            said.append(
                {"role": "assistant", **(object_of(content.get("message")) or content), **finish}
            )
        else:
            attributes |= own
    return attributes, asked, said


def _otel_messages(raw: Any) -> list[Json]:
    """A message of parts as OpenAI's: each result is a message of its own."""
    if not isinstance(raw, Mapping):
        raise NotRead(f"a message is an object, not {raw!r:.80}")
    if not isinstance(raw.get("parts"), list):
        calls = [as_chat_call(one, "arguments") for one in tables_of(raw, "tool_calls")]
        return [{**raw, "tool_calls": calls}]
    parts = [one for one in tables_of(raw, "parts") if one.get("type") != "reasoning"]
    results = [one for one in parts if one.get("type") == "tool_call_response"]
    calls = [as_chat_call(one, "arguments") for one in parts if one.get("type") == "tool_call"]
    made: list[Json] = [
        {"role": "tool", "tool_call_id": one.get("id"), "content": _result(one)} for one in results
    ]
    rest = [one for one in parts if one.get("type") not in ("tool_call", "tool_call_response")]
    if rest or calls or not results:
        made.append({"role": raw.get("role"), "content": _text(rest), "tool_calls": calls})
        made[-1]["reasoning"] = thinks(raw)
    return made


def _result(part: Json) -> str:
    found = part.get("response", part.get("result"))
    return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)


def _text(parts: Any) -> str:
    found = [one.get("content") if isinstance(one, Mapping) else one for one in parts]
    texts = [one for one in found if isinstance(one, str)]
    if len(texts) < len(found):
        kinds = {str(one.get("type")) for one in parts if isinstance(one, Mapping)} - {"text"}
        raise NotRead(
            f"a message holds parts that are not text: {', '.join(sorted(kinds)) or 'of no type'}"
        )
    return "".join(texts)


def _with_schema(tool: Any) -> Any:
    """A tool whose schema may be written as JSON."""
    function = tool.get("function")
    if isinstance(function, Mapping) and isinstance(function.get("parameters"), str):
        return {**tool, "function": {**function, "parameters": object_of(function["parameters"])}}
    return tool


def _from_text(attributes: Json, *names: str) -> list[Any]:
    """A list in an attribute: as it is, as JSON, or one attribute for each number (`gen_ai.prompt.0.role`)."""
    for name in names:
        found = attributes.get(name)
        if isinstance(found, str):
            try:
                found = whole_json(found)
            except BadJson as error:
                raise NotRead(f"{name} cannot be read: {error}") from None
        found = found if found is not None else _numbered(attributes, f"{name}.")
        if found:
            return found if isinstance(found, list) else [found]
    return []


def _numbered(attributes: Json, prefix: str) -> Any:
    tree: Json = {}
    for name in (one for one in attributes if one.startswith(prefix)):
        node = tree
        *path, last = name.removeprefix(prefix).split(".")
        for part in path:
            inner = node.setdefault(part, {})
            node = inner if isinstance(inner, dict) else {}
        node[last] = attributes[name]
    return _listed(tree)


def _listed(tree: Any) -> Any:
    """Tables whose keys are numbers as lists."""
    if not isinstance(tree, dict):
        return tree
    if tree and all(key.isdecimal() for key in tree):
        return [_listed(tree[key]) for key in sorted(tree, key=int)]
    return {key: _listed(value) for key, value in tree.items()}


def _attributes(given: Any) -> Json:
    if isinstance(given, Mapping):
        return {str(name): value for name, value in given.items()}
    pairs = [one for one in given if isinstance(one, Mapping)] if isinstance(given, list) else []
    return {str(one.get("key")): _any_value(one.get("value")) for one in pairs}


def _any_value(given: Any) -> Any:
    """A value of OTLP's JSON: {"stringValue": "..."} and the like."""
    if not isinstance(given, Mapping) or len(given) != 1:
        return given
    ((kind, value),) = given.items()
    if kind == "arrayValue":
        return [_any_value(one) for one in list_of(value, "values")]
    if kind == "kvlistValue":
        return _attributes(list_of(value, "values"))
    return value if kind.endswith("Value") else given
