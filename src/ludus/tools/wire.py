"""What crosses process boundaries as JSON: tasks, messages, calls, results, and the tool server's HTTP API."""

from __future__ import annotations

import json
import secrets
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter
from pydantic_core import to_jsonable_python

from ludus.core.failures import Boundary, ConfigError, InfraError
from ludus.core.messages import Json, Media, Message, ToolResult, ToolSpec
from ludus.core.strict_json import check_json, decode
from ludus.core.task import Task
from ludus.remote.lost_episodes import EpisodeLost, OutcomeUnknown
from ludus.tools.calling import text_of

# The HTTP API: headers, kinds of errors, and bodies. The server validates what it reads by these models and
# derives its OpenAPI document from them.

INSTANCE_HEADER = "Ludus-Instance"
"""In every answer: which server process gave it. A restart makes another one."""
DEADLINE_HEADER = "Ludus-Deadline-Ms"
"""In a request: how many milliseconds its sender will still wait."""
JSON_TYPE = "application/json"
STREAM_TYPE = "application/x-ndjson"

Key = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.:-]+$")]


class ErrorKind(StrEnum):
    """Why there is no result, and the HTTP status that says so. `ErrorBody` says what it means for a retry."""

    status: int

    def __new__(cls, name: str, status: int = 500) -> ErrorKind:
        kind = str.__new__(cls, name)
        kind._value_, kind.status = name, status
        return kind

    BAD_REQUEST = "bad_request", 400
    UNAUTHORIZED = "unauthorized", 401
    FORBIDDEN = "forbidden", 403
    NOT_FOUND = "not_found", 404
    METHOD_NOT_ALLOWED = "method_not_allowed", 405
    SLOW_CLIENT = "slow_client", 408
    SESSION_UNKNOWN = "session_unknown", 404
    UNKNOWN_OUTCOME = "unknown_outcome", 409
    CANCELLED = "cancelled", 409
    SESSION_LOST = "session_lost", 410
    TOO_LARGE = "too_large", 413
    BAD_TASK = "bad_task", 422
    UNSUPPORTED_TYPE = "unsupported_type", 415
    KEY_REUSED = "key_reused", 409
    FAILED = "failed", 424
    OVERLOADED = "overloaded", 503
    DRAINING = "draining", 503
    EXPIRED = "expired", 503


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class _Request(_Body):
    """What clients send is taken as it is, or not at all: nothing is converted."""

    model_config = ConfigDict(strict=True)


def _secret(session: str) -> str:
    if len(session) < 16 or len(set(session)) < 4:
        raise ValueError(
            "others could guess it, and use or close the session: send at least 16 random characters, or "
            "leave it out and take the one in the answer"
        )
    return session


class OpenBody(_Request):
    """Open a session for an episode. Repeating it with the same `session` gives the same session."""

    session: Annotated[Key, AfterValidator(_secret)] = Field(
        default_factory=lambda: secrets.token_hex(16)
    )
    """Secret for using and closing the session: at least 16 random characters, or left out and made here."""
    episode: str = Field(max_length=1024)
    """The episode's identity for the tools."""
    task: Task = Task()
    """What the episode is about, for tools that want to know."""
    tools: list[str] | None = None
    """The tools wanted; all of them when left out."""


class ToolBody(_Body):
    """A tool's spec for the model, and whether a client may repeat a call."""

    name: str
    description: str
    parameters: dict[str, Any]
    """A JSON Schema."""
    returns: dict[str, Any] | None = None
    """A JSON Schema of its results, where that is known."""
    repeatable: bool
    """Whether a call may run again when the outcome of its first run is unknown."""
    stateful: bool
    """Whether a call may leave something behind in the session that later calls need."""


class ObservationBody(_Body):
    """What an environment shows."""

    text: str
    media: list[Media] = []


class ServedEnvBody(_Body):
    """An environment as a client must know it before it opens a session."""

    name: str
    size: int
    """The most instances at once, in each replica."""
    tools: list[dict[str, Any]]
    """Its tools: name, description and parameters (a JSON Schema)."""
    step_rewards: str
    """How rewards of calls make up the episode's: sum, max, last."""
    show_actions: str
    """How the agent learns of possible actions: no, tool, observation."""
    takes_text: bool
    """Whether it has the tool `step`, which takes an action in words."""


class EnvsBody(_Body):
    """The environments that are served."""

    envs: list[ServedEnvBody]


class ResetBody(_Request):
    """Begin another episode in the environments that the session holds."""

    task: Task = Task()


class StepBody(_Request):
    """An action in words: a call of the tool `step`."""

    action: str
    key: Key | None = None
    """As in a call; a random one when left out, so that repeating the request is another step."""


class ActionsBody(_Body):
    """What makes sense now."""

    actions: list[str] | None
    """None where the environment does not say."""


class StateBody(_Body):
    """An environment's public attributes, for rewards."""

    state: dict[str, Any]


class SessionBody(_Body):
    """An open session."""

    session: str
    episode: str
    instance: str
    """The server process that holds it."""
    tools: list[ToolBody]
    """The tools that can be called now."""
    envs: dict[str, ObservationBody] = {}
    """The environments that it holds, and what each showed last."""


class RetryBody(_Request):
    """What a client knows of an earlier attempt whose answer never came."""

    instance: str = Field(max_length=128)
    """The server process that the earlier attempt was sent to; empty when unknown."""
    age_ms: float = Field(ge=0, le=1e12)
    """How long ago it was sent."""


def _sendable(arguments: Json) -> Json:
    check_json(arguments, depth=200)
    return arguments


class CallBody(_Request):
    """One call. The same `key` again joins the call or gets its answer: nothing runs twice."""

    key: Key
    name: str = Field(max_length=1024)
    arguments: Annotated[dict[str, Any], AfterValidator(_sendable)] = {}
    id: str = Field(default="", max_length=1024)
    retry: RetryBody | None = None


class BatchCallBody(CallBody):
    """A call of a batch; without a session it stands alone."""

    session: Key | None = None


class BatchBody(_Request):
    """Many calls, run side by side; each has its own outcome."""

    calls: list[BatchCallBody] = Field(max_length=1024)


class ErrorBody(_Body):
    """Why there is no result."""

    kind: ErrorKind
    message: str
    started: bool
    """Whether the tool may have run. When it is false, sending the same again is always safe."""
    retry_after: float | None = None
    """Seconds after which to try again, where that makes sense."""
    boundary: Boundary | None = None
    """Where a failure of kind `failed` happened."""
    attempts: int = 1
    """How often the server tried."""
    retriable: bool = False
    """Whether a failure of kind `failed` may pass: the same can be tried again."""
    replay: bool = False
    """Whether the episode as a whole can be played again."""


class ErrorAnswer(_Body):
    """The body of every answer that is not a success."""

    error: ErrorBody


class OutcomeBody(_Body):
    """The outcome of one call of a batch: a result, or an error."""

    key: str
    result: ToolResult | None = None
    error: ErrorBody | None = None


class BatchAnswer(_Body):
    """The outcomes, in the order of the calls."""

    outcomes: list[OutcomeBody]


class ClosedBody(_Body):
    """What became of something that was to be ended."""

    ended: bool
    """False when there was nothing to end, which is no error."""


class HealthBody(_Body):
    """How the server is doing."""

    status: Literal["ok", "draining", "starting"]
    instance: str
    version: str
    uptime: float
    sessions: int
    running: int
    waiting: int
    workers: int
    alive: int
    restarted: int


# The codec between our types and plain JSON values, for servers, worker processes and recordings. Nothing is
# ever pickled.

_TASK = TypeAdapter(Task)
_RESULT = TypeAdapter(ToolResult)
_MEDIA = TypeAdapter(tuple[Media, ...])


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=text_of).encode


def dump(value: Any) -> bytes:
    """JSON as UTF-8. Never fails on odd text: what UTF-8 cannot carry (lone surrogates) becomes '?'."""
    return _encode(value).encode("utf-8", "replace")


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
    """The task; a `ValueError` says what does not fit."""
    return decode(_TASK, raw)


def _message_to_json(message: Message) -> Json:
    calls = [{"name": c.name, "arguments": _plain(c.arguments), "id": c.id} for c in message.tool_calls]
    chat: Json = {"role": message.role, "content": message.content, "tool_calls": calls}
    return {**chat, "name": message.name, "tool_call_id": message.tool_call_id}


def result_to_json(result: ToolResult, *, content: bool = True) -> Json:
    """A result; without its content where that travels on its own."""
    fields: Json = {"content": result.content} if content else {}
    fields["reward"] = None if result.reward is None else float(result.reward)
    fields["terminated"] = bool(result.terminated)
    fields["fault"] = None if result.fault is None else result.fault.value
    fields["media"] = _MEDIA.dump_python(result.media, mode="json") if result.media else []
    fields["seconds"] = float(result.seconds)
    return fields


def result_from_json(raw: Json, content: str | None = None) -> ToolResult:
    """The result, with the content that travelled on its own; a `ValueError` says what does not fit."""
    return decode(_RESULT, raw if content is None else {**raw, "content": content})


def spec_to_json(spec: ToolSpec) -> Json:
    known = {"returns": spec.returns} if spec.returns is not None else {}
    return {
        "name": spec.name,
        "description": spec.description,
        "parameters": spec.parameters,
        **known,
    }


def spec_from_json(raw: Json) -> ToolSpec:
    return ToolSpec(raw["name"], raw["description"], raw["parameters"], raw.get("returns"))


def _plain(value: Any) -> Any:
    try:
        return to_jsonable_python(value, fallback=text_of)
    except Exception:  # noqa: BLE001 - user classes and cycles: what is left is its text
        return text_of(value)


# Failures


def error_kind(error: InfraError) -> ErrorKind:
    """Kind of a failure, as it is sent to another process."""
    if isinstance(error, EpisodeLost):
        return ErrorKind.SESSION_LOST
    return ErrorKind.UNKNOWN_OUTCOME if isinstance(error, OutcomeUnknown) else ErrorKind.FAILED


def failure_fields(error: InfraError) -> Json:
    """Further fields of a failure that are sent, see `ErrorBody`."""
    fields: Json = {"boundary": error.boundary.value, "attempts": error.attempts}
    return {**fields, "retriable": error.retriable, "replay": error.replay}


def failure_from(
    kind: str, message: str, boundary: str, attempts: int, retriable: bool, replay: bool
) -> InfraError:
    """The failure that another process sent by its kind (`error_kind`) and fields (`failure_fields`)."""
    if kind == ErrorKind.SESSION_LOST:
        return EpisodeLost(message, attempts=attempts)
    if kind == ErrorKind.UNKNOWN_OUTCOME:
        return OutcomeUnknown(message, attempts=attempts)
    at = Boundary(boundary)
    return InfraError(at, message, attempts=attempts, retriable=retriable, replay=replay)


def error_to_json(error: Exception) -> Json:
    """An error of a worker by its kind, so that its host can raise it again."""
    if isinstance(error, ConfigError):
        return {"kind": "config", "message": str(error)}
    if not isinstance(error, InfraError):
        error = InfraError(Boundary.TOOL, f"{type(error).__name__}: {error}", retriable=False)
    return {"kind": error_kind(error).value, "message": str(error), **failure_fields(error)}


def error_from_json(raw: Json) -> Exception:
    """The error that `error_to_json` wrote."""
    return ConfigError(raw["message"]) if raw["kind"] == "config" else failure_from(**raw)
