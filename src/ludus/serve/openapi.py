"""The table of endpoints, from which routes, the OpenAPI document and the documentation page are made."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape

from pydantic import BaseModel, TypeAdapter

from ludus.core.messages import Json, ToolResult
from ludus.tools.wire import (
    DEADLINE_HEADER,
    INSTANCE_HEADER,
    JSON_TYPE,
    STREAM_TYPE,
    ActionsBody,
    BatchAnswer,
    BatchBody,
    CallBody,
    ClosedBody,
    EnvsBody,
    ErrorAnswer,
    ErrorKind,
    HealthBody,
    Key,
    ObservationBody,
    OpenBody,
    ResetBody,
    SessionBody,
    StateBody,
    StepBody,
)

MOST_MILLISECONDS = 10**9
"""The longest deadline: eleven days."""
_KEY_SCHEMA = TypeAdapter(Key).json_schema()


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method of one path. `name` is the handler's."""

    name: str
    method: str
    path: str
    summary: str
    answer: type | str
    """The type of a success, or the media type of one that is not JSON."""
    body: type[BaseModel] | None = None
    status: int = 200
    errors: tuple[ErrorKind, ...] = ()
    streams: bool = False
    """Whether it can answer in NDJSON."""
    is_open: bool = False
    """Whether it needs no token."""
    has_deadline: bool = False
    also: dict[int, type[BaseModel]] = field(default_factory=dict)
    """Other statuses that carry something else than an error."""


_GATE = (ErrorKind.OVERLOADED, ErrorKind.DRAINING, ErrorKind.EXPIRED)
_RUN = (
    ErrorKind.BAD_REQUEST,
    ErrorKind.KEY_REUSED,
    ErrorKind.UNKNOWN_OUTCOME,
    ErrorKind.CANCELLED,
    ErrorKind.FAILED,
    *_GATE,
)
_SESSION = (ErrorKind.SESSION_UNKNOWN, ErrorKind.SESSION_LOST)
_ASK = (ErrorKind.BAD_REQUEST, ErrorKind.BAD_TASK, ErrorKind.FAILED, *_SESSION, *_GATE)

ENDPOINTS = (
    Endpoint(
        "open_session", "POST", "/v1/sessions", "Open a session for an episode.", SessionBody,
        body=OpenBody, status=201, has_deadline=True,
        errors=(
            ErrorKind.BAD_REQUEST, ErrorKind.BAD_TASK, ErrorKind.KEY_REUSED, ErrorKind.FAILED,
            *_SESSION, *_GATE,
        ),
    ),
    Endpoint(
        "get_session", "GET", "/v1/sessions/{session}", "The session and its tools as they are now.",
        SessionBody, errors=(*_SESSION, ErrorKind.FAILED),
    ),
    Endpoint(
        "close_session", "DELETE", "/v1/sessions/{session}",
        "Close a session; its running calls are cancelled.", ClosedBody,
    ),
    Endpoint(
        "call_in_session", "POST", "/v1/sessions/{session}/calls", "Call a tool in a session.",
        ToolResult, body=CallBody, streams=True, has_deadline=True, errors=(*_SESSION, *_RUN),
    ),
    Endpoint(
        "step", "POST", "/v1/sessions/{session}/step",
        "Act in words in the session's environment: a call of its tool `step`.",
        ToolResult, body=StepBody, streams=True, has_deadline=True, errors=(*_SESSION, *_RUN),
    ),
    Endpoint(
        "reset", "POST", "/v1/sessions/{session}/reset",
        "Reset the session's environments for another task.", SessionBody,
        body=ResetBody, has_deadline=True, errors=_ASK,
    ),
    Endpoint(
        "observation", "GET", "/v1/sessions/{session}/observation",
        "What the session's environment showed last; `?env=NAME` where it has several.",
        ObservationBody, has_deadline=True, errors=_ASK,
    ),
    Endpoint(
        "actions", "GET", "/v1/sessions/{session}/actions",
        "The actions that the session's environment offers now; `?env=NAME` where it has several.",
        ActionsBody, has_deadline=True, errors=_ASK,
    ),
    Endpoint(
        "state", "GET", "/v1/sessions/{session}/state",
        "Public attributes of the session's environment, for rewards; `?env=NAME` where it has several.",
        StateBody, has_deadline=True, errors=_ASK,
    ),
    Endpoint(
        "envs", "GET", "/v1/envs", "The environments that are served.", EnvsBody,
        has_deadline=True, errors=(ErrorKind.BAD_REQUEST, ErrorKind.FAILED, *_GATE),
    ),
    Endpoint(
        "cancel_call", "DELETE", "/v1/sessions/{session}/calls/{key}", "Cancel a running call.",
        ClosedBody,
    ),
    Endpoint(
        "call_alone", "POST", "/v1/calls", "Call a tool outside any session.", ToolResult,
        body=CallBody, streams=True, has_deadline=True, errors=(*_RUN, ErrorKind.SESSION_LOST),
    ),
    Endpoint(
        "call_batch", "POST", "/v1/batch", "Many calls side by side, each with its own outcome.",
        BatchAnswer, body=BatchBody, streams=True, has_deadline=True, errors=(ErrorKind.BAD_REQUEST,),
    ),
    Endpoint("healthz", "GET", "/healthz", "Whether the process lives.", HealthBody, is_open=True),
    Endpoint(
        "readyz", "GET", "/readyz", "Whether it takes calls; 503 when not.", HealthBody, is_open=True,
        also={503: HealthBody},
    ),
    Endpoint("metrics", "GET", "/metrics", "Numbers for Prometheus.", "text/plain"),
    Endpoint("openapi", "GET", "/openapi.json", "This document.", JSON_TYPE, is_open=True),
    Endpoint("docs", "GET", "/docs", "The same for people.", "text/html", is_open=True),
)  # fmt: skip

_WITH_BODY = (ErrorKind.SLOW_CLIENT, ErrorKind.TOO_LARGE, ErrorKind.UNSUPPORTED_TYPE)


def openapi_document(version: str) -> Json:
    """The OpenAPI 3.1 description of all endpoints."""
    types = {one for endpoint in ENDPOINTS for one in (endpoint.body, endpoint.answer, ErrorAnswer)}
    _, schemas = TypeAdapter.json_schemas(
        [(one.__name__, "validation", TypeAdapter(one)) for one in types if isinstance(one, type)],
        ref_template="#/components/schemas/{model}",
    )
    paths: dict[str, Json] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Ludus tool server",
            "version": version,
            "description": "Tools and environments for agents, a session for each episode, with admission "
            "control and exactly-once calls.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(endpoint: Endpoint) -> Json:
    parameters: list[Json] = [
        {"name": name, "in": "path", "required": True, "schema": _KEY_SCHEMA}
        for name in re.findall(r"{(\w+)}", endpoint.path)
    ]
    if endpoint.has_deadline:
        schema = {"type": "integer", "minimum": 0, "maximum": MOST_MILLISECONDS}
        parameters.append({"name": DEADLINE_HEADER, "in": "header", "required": False, "schema": schema})
    operation: Json = {
        "operationId": endpoint.name,
        "summary": endpoint.summary,
        "parameters": parameters,
        "responses": _responses(endpoint),
        "security": [] if endpoint.is_open else [{"token": []}, {}],
    }
    if endpoint.body is not None:
        operation["requestBody"] = {"required": True, "content": _json_content(endpoint.body)}
    return operation


def _responses(endpoint: Endpoint) -> Json:
    headers: Json = {INSTANCE_HEADER: {"schema": {"type": "string"}, "required": True}}
    if isinstance(endpoint.answer, str):
        content = {
            endpoint.answer: {"schema": {} if endpoint.answer == JSON_TYPE else {"type": "string"}}
        }
    else:
        content = _json_content(endpoint.answer)
    if endpoint.streams:
        content[STREAM_TYPE] = {"schema": {"type": "string"}}
    success = {"headers": headers, "content": content}
    responses: Json = {str(endpoint.status): {"description": "Success", **success}}
    if endpoint.status == 201:
        responses["200"] = {"description": "It was there already", **success}
    for status, kinds in _by_status(endpoint).items():
        later = {"Retry-After": {"schema": {"type": "integer"}}} if status == 503 else {}
        responses[str(status)] = {
            "description": ", ".join(kind.value for kind in kinds),
            "headers": {**headers, **later},
            "content": _json_content(ErrorAnswer),
        }
    for status, model in endpoint.also.items():
        responses[str(status)] = {"description": "Not now", "content": _json_content(model)}
    return responses


def _by_status(endpoint: Endpoint) -> dict[int, list[ErrorKind]]:
    kinds = [*endpoint.errors, ErrorKind.FORBIDDEN]
    if not endpoint.is_open:
        kinds.append(ErrorKind.UNAUTHORIZED)
    if "{" in endpoint.path:
        kinds += [ErrorKind.BAD_REQUEST, ErrorKind.NOT_FOUND]
    if endpoint.body is not None:
        kinds += _WITH_BODY
    by_status: dict[int, list[ErrorKind]] = {}
    for kind in dict.fromkeys(kinds):
        by_status.setdefault(kind.status, []).append(kind)
    return by_status


def _json_content(type_: type) -> Json:
    return {JSON_TYPE: {"schema": {"$ref": f"#/components/schemas/{type_.__name__}"}}}


# The documentation page: plain HTML, no scripts, nothing external.
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "code,pre{font:13px/1.4 ui-monospace,monospace;background:#f5f5f2;border-radius:4px}"
    "code{padding:.1rem .3rem}pre{padding:.8rem;overflow:auto}details{margin:.3rem 0}"
    "h2{margin-top:2rem;border-bottom:1px solid #ddd}td{padding:.1rem .8rem .1rem 0;vertical-align:top}"
)


def docs_page(document: Json) -> str:
    """HTML for people."""
    info = document["info"]
    parts = [
        "<!doctype html><html lang=en><head><meta charset=utf-8>",
        f"<title>{escape(info['title'])}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1><p>{escape(info['description'])}</p>",
        "<p>The machine-readable form is <a href=/openapi.json>openapi.json</a>.</p>",
    ]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            title = f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
            parts += [
                f"{title}<p>{escape(operation['summary'])}</p><table>",
                *_rows(operation),
                "</table>",
            ]
    parts.append("<h2>Schemas</h2>")
    for name, schema in sorted(document["components"]["schemas"].items()):
        text = escape(json.dumps(schema, indent=2))
        summary = f"<summary><code>{name}</code></summary>"
        parts.append(f"<details id=schema-{name}>{summary}<pre>{text}</pre></details>")
    return "\n".join([*parts, "</body></html>"])


def _rows(operation: Json) -> Iterator[str]:
    for parameter in operation["parameters"]:
        kind = f"{parameter['in']}, {parameter['schema']['type']}"
        yield f"<tr><td><code>{escape(parameter['name'])}</code><td>{escape(kind)}"
    if "requestBody" in operation:
        yield f"<tr><td>body<td>{_schema_link(operation['requestBody']['content'][JSON_TYPE]['schema'])}"
    for status, answer in sorted(operation["responses"].items()):
        kinds = ", ".join(
            f"{escape(kind)} {_schema_link(content['schema'])}"
            for kind, content in answer["content"].items()
        )
        yield f"<tr><td><code>{status}</code><td>{escape(answer['description'])}<td>{kinds}"


def _schema_link(schema: Json) -> str:
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    return f"<a href=#schema-{name}><code>{name}</code></a>" if name else ""
