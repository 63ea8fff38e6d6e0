"""What a recording holds: options and counters, the key of a call, and records as bytes.

A call's key is a digest of the tool's name, its version, the *history* it was made in, and its arguments as
canonical JSON. A history is a hash chain, so that two calls have the same one when everything before them was
the same, results included:

    root           = digest of the task (or of the episode)
    after one call = digest(key of that call, digest of its result)

A call of a stateless tool has the history `NO_HISTORY`, and is added to no chain. A record is JSON, media as
base64, compressed where it is long, and never pickle: a recording may come from a stranger.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from enum import StrEnum
from typing import Any

from pydantic import Field, TypeAdapter

from ludus.core.config import Config, Place
from ludus.core.messages import Json, ToolContext, ToolResult, ToolSpec
from ludus.core.strict_json import decode
from ludus.core.task import Task
from ludus.tools.versions import canonical, digest
from ludus.tools.wire import result_from_json, result_to_json

Specs = Sequence[tuple[ToolSpec, str]]
"""Tools, each with its version."""
NO_HISTORY = ""
_SCHEME = "ludus-recording-1"
_ROWS = TypeAdapter(list[tuple[str, str, Json, str]])
_COMPRESS_FROM = 4_096
_PLAIN, _COMPRESSED = b"j", b"z"
_SHOWN_CHARS = 300
_COMPARED_CHARS = 400
_MOST_ARGUMENT_CHARS = 2_000
_MOST_BITS = 10_000


class Mode(StrEnum):
    """How a call is answered."""

    RECORD = "record"
    """Call, and write; a record that is there already is replaced."""
    REPLAY = "replay"
    """Never call; what is not recorded is an infrastructure failure."""
    REPLAY_OR_CALL = "replay_or_call"
    """Replay what is recorded; call and write the rest."""


class OnDivergence(StrEnum):
    """The reaction to a real tool that, catching up, answers differently from the recording."""

    FAIL = "fail"
    """The episode fails and leaves the loss and the baseline: the model has read a wrong result."""
    CONTINUE = "continue"
    """Warn, go on with the real tool as it is, and write nothing more in this episode."""


class Scope(StrEnum):
    """The episodes that share the records of stateful tools."""

    TASK = "task"
    """All attempts at a task, as long as their histories agree."""
    EPISODE = "episode"
    """None are shared: each attempt has its own, as tools with random results need."""


class RecordingConfig(Config):
    """A memory for the results of tools."""

    path: Place = Field(min_length=1)
    """A SQLite file, or the address of a Redis server: redis://host:port/db."""
    mode: Mode = Mode.REPLAY_OR_CALL
    """record, replay, or replay_or_call."""
    stateless: tuple[str, ...] = ()
    """Tools whose result depends on their arguments alone; ['*'] for all of them."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Versions of tools by name, in place of a digest of their source."""
    scope: Scope = Scope.TASK
    """Which episodes share the records of stateful tools: all attempts at a task, or none."""
    name: str = Field(default="tools", min_length=1)
    """Name of this set of tools in the store: two sets in one store have different names."""
    on_divergence: OnDivergence = OnDivergence.FAIL
    """Reaction to a real tool that, catching up, answers otherwise than recorded: fail or continue."""

    @property
    def options(self) -> dict[str, Any]:
        """All but the path, as `recorded` takes them."""
        return {key: getattr(self, key) for key in type(self).model_fields if key != "path"}


@dataclass(slots=True)
class RecordingStats:
    """Counters over all episodes of one `RecordedTools`."""

    hits: int = 0
    """Calls answered from the recording."""
    misses: int = 0
    """Calls that were looked for and not found."""
    recorded: int = 0
    """Results written."""
    caught_up: int = 0
    """Calls that were replayed first and had to be made on the real tool after all."""
    diverged: int = 0
    """Caught-up calls whose real result was not the recorded one."""
    unrecorded: int = 0
    """Calls made without writing them down, because the real tool's state was no longer known."""
    opened: int = 0
    """Episodes for which the real tools were opened."""


@dataclass(frozen=True, slots=True)
class Label:
    """The identity of a call. `arguments` are for people to read, and cut where they are very long."""

    tool: str
    version: str
    history: str
    arguments_digest: str
    arguments: str

    @property
    def key(self) -> str:
        return digest(_SCHEME, "call", self.tool, self.version, self.history, self.arguments_digest)


def label_of(tool: str, version: str, history: str, arguments: Any) -> Label:
    """The label of a call; `Unkeyable` when the arguments are not JSON."""
    text = canonical(arguments)
    return Label(tool, version, history, digest(text), text[:_MOST_ARGUMENT_CHARS])


def root_history(context: ToolContext, *, per_episode: bool) -> str:
    """Where the chain of an episode begins: at its task, so that attempts at one task can share.

    The system prompt is left out, so that it may be reworded. What JSON cannot say of a target or of
    metadata counts by its type alone.
    """
    if per_episode:
        return digest(_SCHEME, "episode", context.episode)
    task = context.task
    return digest(_SCHEME, "task", json.dumps(_described(task), sort_keys=True, default=_type_name))


def next_history(call_key: str, result: ToolResult) -> str:
    """The history after a call. How long it took does not belong to it."""
    return digest(call_key, result_digest(result))


def result_digest(result: ToolResult) -> str:
    """Everything of a result that a model or a reward can see."""
    media = [part for medium in result.media for part in (medium.kind, medium.sha256)]
    reward = "none" if result.reward is None else repr(float(result.reward))
    fault = "none" if result.fault is None else result.fault.value
    return digest("result", result.content, reward, str(bool(result.terminated)), fault, *media)


def specs_key(name: str, history: str) -> str:
    """Where the list of tools is kept that a set called `name` had after this history."""
    return digest(_SCHEME, "specs", name, history)


def list_key(payload: bytes) -> str:
    """Where a list of tools itself is kept, by its content: most histories share one."""
    return digest(_SCHEME, "list", hashlib.sha256(payload).hexdigest())


def _described(task: Task) -> Json:
    said = [
        [one.role, one.content, [[call.name, _plain(call.arguments)] for call in one.tool_calls]]
        for one in task.messages
        if one.role != "system"
    ]
    parts = {"target": task.target, "envs": task.envs, "metadata": task.metadata}
    return {"id": task.id, "messages": said, **{name: _plain(part) for name, part in parts.items()}}


def _plain(value: Any) -> Any:
    """`value` with text for keys; what is neither JSON nor a mapping counts by its type."""
    if isinstance(value, Mapping):
        return {f"{type(key).__name__}:{key}": _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return hex(value)  # Python refuses to write longer numbers in decimal
    return value if value is None or isinstance(value, (str, int, float)) else _type_name(value)


def _type_name(value: Any) -> str:
    return f"<{type(value).__name__}>"


# Records as bytes


class BadRecord(ValueError):
    """Bytes that are no record."""


def encode_result(result: ToolResult) -> bytes:
    """A result as bytes; `TypeError` or `ValueError` when a foreign tool set gave something odd."""
    if not isinstance(result.content, str):
        raise TypeError(f"its content is {type(result.content).__name__}, not text")
    return _packed(result_to_json(result))


def decode_result(data: bytes) -> ToolResult:
    """The result that `encode_result` was given, equal in every field."""
    raw = _unpacked(data)
    try:
        return result_from_json(raw)
    except ValueError as error:
        raise BadRecord(f"it is no result of a call ({error})") from None


def encode_specs(specs: list[tuple[ToolSpec, str]]) -> bytes:
    """Tools with their versions, as bytes; equal lists give equal bytes."""
    rows = [[spec.name, spec.description, spec.parameters, version] for spec, version in specs]
    return _packed({"tools": rows})


def decode_specs(data: bytes) -> list[tuple[ToolSpec, str]]:
    """Tools with their versions."""
    raw = _unpacked(data)
    try:
        rows = decode(_ROWS, raw.get("tools"))
    except ValueError as error:
        raise BadRecord(f"it is no list of tools ({error})") from None
    return [(ToolSpec(name, about, schema), version) for name, about, schema, version in rows]


def _packed(value: Json) -> bytes:
    # ASCII escapes carry lone surrogates, which UTF-8 cannot; keys stay in order, since a schema's order is
    # part of the prompt
    data = json.dumps(value, separators=(",", ":")).encode("ascii")
    return _PLAIN + data if len(data) < _COMPRESS_FROM else _COMPRESSED + zlib.compress(data, 1)


def _unpacked(data: bytes) -> Json:
    try:
        if data[:1] not in (_PLAIN, _COMPRESSED):
            raise ValueError("unknown form")
        value = json.loads(zlib.decompress(data[1:]) if data[:1] == _COMPRESSED else data[1:])
    except (ValueError, zlib.error, RecursionError) as error:
        raise BadRecord(f"it cannot be read ({error})") from None
    if not isinstance(value, dict):
        raise BadRecord("it is not an object")
    return value


# Why a call was not found


def explain_miss(wanted: Label, recorded: Sequence[Label]) -> str:
    """One message with tool, arguments and the nearest recorded call."""
    asked = f"no recorded result for {wanted.tool}({_shown(wanted.arguments)})"
    return f"{asked}; {_nearest(wanted, recorded)}. Record it, or use the mode replay_or_call"


def _nearest(wanted: Label, recorded: Sequence[Label]) -> str:
    if not recorded:
        return "nothing is recorded for this tool"
    same_arguments = [one for one in recorded if one.arguments_digest == wanted.arguments_digest]
    if any(one.history == wanted.history for one in same_arguments):
        return "this very call is recorded for another version of the tool: it was changed since"
    if any(one.history == NO_HISTORY for one in same_arguments):
        return "these arguments are recorded, but when the tool was declared stateless"
    if same_arguments and wanted.history == NO_HISTORY:
        return "these arguments are recorded, but when the tool was not declared stateless"
    if same_arguments:
        return "these arguments are recorded, but for another task or after other calls"
    here = [one for one in recorded if one.history == wanted.history]
    near = max(here or recorded, key=lambda one: _similarity(wanted.arguments, one.arguments))
    where = "" if wanted.history == NO_HISTORY else " at this point" if here else " elsewhere"
    return f"the nearest recorded call{where} is {near.tool}({_shown(near.arguments)})"


def _similarity(one: str, other: str) -> float:
    first, second = one[:_COMPARED_CHARS], other[:_COMPARED_CHARS]
    return SequenceMatcher(None, first, second, autojunk=False).quick_ratio()


def _shown(arguments: str) -> str:
    return arguments if len(arguments) <= _SHOWN_CHARS else arguments[:_SHOWN_CHARS] + "..."
