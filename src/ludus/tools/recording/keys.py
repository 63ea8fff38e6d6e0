"""Under which key a call is recorded: pure functions, the same on every machine.

A call's key is a digest of the tool's name, its version, the *history* it was made in, and its arguments as
canonical JSON. The history is a hash chain:

    root           = digest of the task (or of the episode)
    after one call = digest(key of that call, digest of its result)

so two calls have the same history when everything before them was the same, results included. A call of a
stateless tool has the history `NO_HISTORY`, and is added to no chain.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ludus.core.messages import Json, ToolContext, ToolResult
from ludus.core.task import Task
from ludus.tools.versions import canonical, digest

NO_HISTORY = ""
_SCHEME = "ludus-recording-1"
_MOST_ARGUMENT_CHARS = 2_000
_MOST_BITS = 10_000


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
