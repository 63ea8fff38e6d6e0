"""What passes between a run, a server and its workers, as plain JSON values. Nothing is ever pickled."""

from __future__ import annotations

import base64
import json
from typing import Any

from pydantic_core import to_jsonable_python

from ludus.core.failures import Boundary, ConfigError, Fault, InfraError
from ludus.core.messages import Json, Media, Message, ToolCall, ToolResult, ToolSpec
from ludus.core.task import Task
from ludus.tools.hosting.host import EpisodeLost, OutcomeUnknown, ToolFacts
from ludus.tools.results import text_of


def dump(value: Any) -> bytes:
    """JSON as UTF-8. Never fails on odd text: what UTF-8 cannot carry (lone surrogates) becomes '?'."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=text_of)
    return text.encode("utf-8", "replace")


def task_to_json(task: Task) -> Json:
    """A task without the bytes of its media. What JSON has no word for arrives as text."""
    return {
        "id": task.id,
        "messages": [_message_to_json(message) for message in task.messages],
        "target": _plain(task.target),
        "envs": _plain(dict(task.envs)),
        "metadata": _plain(dict(task.metadata)),
    }


def task_from_json(raw: Json) -> Task:
    messages = tuple(_message_from_json(message) for message in raw.get("messages", ()))
    metadata, envs = dict(raw.get("metadata") or {}), dict(raw.get("envs") or {})
    return Task(str(raw.get("id", "")), messages, raw.get("target"), envs, metadata)


def _message_to_json(message: Message) -> Json:
    calls = [{"name": c.name, "arguments": _plain(c.arguments), "id": c.id} for c in message.tool_calls]
    chat: Json = {"role": message.role, "content": message.content, "tool_calls": calls}
    return {**chat, "name": message.name, "tool_call_id": message.tool_call_id}


def _message_from_json(raw: Json) -> Message:
    calls = tuple(
        ToolCall(call["name"], call.get("arguments") or {}, call.get("id") or "")
        for call in raw.get("tool_calls") or ()
    )
    return Message(raw["role"], raw["content"], calls, raw.get("name"), raw.get("tool_call_id"))


def result_to_json(result: ToolResult, *, content: bool = True) -> Json:
    """A result; without its content where that travels on its own."""
    fields: Json = {"content": result.content} if content else {}
    fields["reward"] = result.reward
    fields["terminated"] = result.terminated
    fields["fault"] = None if result.fault is None else result.fault.value
    fields["media"] = [_media_to_json(media) for media in result.media]
    fields["seconds"] = result.seconds
    return fields


def result_from_json(raw: Json, content: str | None = None) -> ToolResult:
    fault = raw.get("fault")
    return ToolResult(
        content=str(raw["content"]) if content is None else content,
        reward=raw.get("reward"),
        terminated=bool(raw.get("terminated")),
        fault=None if fault is None else Fault(fault),
        media=tuple(_media_from_json(media) for media in raw.get("media") or ()),
        seconds=float(raw.get("seconds") or 0.0),
    )


def _media_to_json(media: Media) -> Json:
    data = None if media.data is None else base64.b64encode(media.data).decode("ascii")
    return {"kind": media.kind, "sha256": media.sha256, "data": data}


def _media_from_json(raw: Json) -> Media:
    data = raw.get("data")
    return Media(raw["kind"], raw["sha256"], None if data is None else base64.b64decode(data))


def facts_to_json(facts: ToolFacts) -> Json:
    return {
        **spec_to_json(facts.spec),
        "repeatable": facts.repeatable,
        "stateful": facts.stateful,
        "concurrency": facts.concurrency,
    }


def facts_from_json(raw: Json) -> ToolFacts:
    return ToolFacts(spec_from_json(raw), raw["repeatable"], raw["stateful"], raw.get("concurrency"))


def spec_to_json(spec: ToolSpec) -> Json:
    return {"name": spec.name, "description": spec.description, "parameters": spec.parameters}


def spec_from_json(raw: Json) -> ToolSpec:
    return ToolSpec(raw["name"], raw["description"], raw["parameters"])


def error_to_json(error: Exception) -> Json:
    """An error by its kind, so that it can be raised again on the other side."""
    if isinstance(error, EpisodeLost):
        kind = "session_lost"
    elif isinstance(error, OutcomeUnknown):
        kind = "unknown_outcome"
    elif isinstance(error, ConfigError):
        return {"kind": "config", "message": str(error)}
    elif isinstance(error, InfraError):
        kind = "infra"
    else:
        message = f"{type(error).__name__}: {error}"
        return error_to_json(InfraError(Boundary.TOOL, message, retriable=False))
    fields: Json = {"kind": kind, "boundary": error.boundary.value, "message": str(error)}
    fields |= {"attempts": error.attempts, "retriable": error.retriable, "replay": error.replay}
    return fields


def error_from_json(raw: Json) -> Exception:
    kind, message, attempts = raw["kind"], str(raw["message"]), int(raw.get("attempts") or 1)
    if kind == "config":
        return ConfigError(message)
    if kind == "session_lost":
        return EpisodeLost(message, attempts=attempts)
    if kind == "unknown_outcome":
        return OutcomeUnknown(message, attempts=attempts)
    boundary, retriable, replay = Boundary(raw["boundary"]), bool(raw["retriable"]), bool(raw["replay"])
    return InfraError(boundary, message, attempts=attempts, retriable=retriable, replay=replay)


def _plain(value: Any) -> Any:
    try:
        return to_jsonable_python(value, fallback=text_of)
    except Exception:  # noqa: BLE001 - user classes and cycles: what is left is its text
        return text_of(value)
