"""Logged calls of language models as conversations: bodies of APIs, LangSmith's runs, OpenTelemetry's spans.

Each form is turned into the request of an API whose last message is the reply, and is read as the model server
reads a request: so a logged prompt renders to the tokens of a live one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ludus.chat.logs.calls import (
    LoggedConversation,
    NotRead,
    is_anthropic,
    list_of,
    object_of,
    read_anthropic_messages,
    read_logged_call,
)
from ludus.chat.logs.langsmith import read_run
from ludus.chat.logs.spans import is_otlp, read_span, spans_of
from ludus.core.messages import Json

__all__ = ["LoggedConversation", "NotRead", "form_of", "is_log", "log_entries"]


def log_entries(value: Any) -> Iterator[tuple[str, Any]]:
    """The calls, runs and spans in a value of a log, each with its place there."""
    if is_otlp(value):
        yield from spans_of(value)
        return
    pending = [("", value)]
    while pending:
        place, one = pending.pop()
        yield place, one
        children = list(enumerate(list_of(one, "child_runs"), start=1))
        pending += [(f"{place}, child run {n}", each) for n, each in reversed(children)]


def form_of(entry: Any) -> Callable[[Json], Iterator[LoggedConversation]] | None:
    """How a call is read; None for what is in none of these forms."""
    if not isinstance(entry, Mapping):
        return None
    if "attributes" in entry and {"context", "spanId", "span_id", "traceId", "trace_id"} & entry.keys():
        return read_span
    if isinstance(entry.get("inputs"), Mapping) and {"outputs", "run_type"} & entry.keys():
        return read_run
    has_reply = {"choices", "response"} & entry.keys()
    if ("messages" in entry and has_reply) or ("response" in entry and object_of(entry.get("request"))):
        return read_logged_call
    if "input" in entry and isinstance(entry.get("output"), list):
        return read_logged_call
    return read_anthropic_messages if is_anthropic(entry) else None


def is_log(value: Any) -> bool:
    """Whether a row of a file is a logged call, rather than a row of data."""
    return is_otlp(value) or form_of(value) is not None
