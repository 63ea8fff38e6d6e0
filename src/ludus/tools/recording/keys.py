"""Under which key a call is recorded: pure functions, the same on every machine.

A call's key is a digest of the tool's name, its version, the *history* it was made in, and its arguments as
canonical JSON. The history is a hash chain:

    root           = digest of the task (or of the episode)
    after one call = digest(key of that call, digest of its result)

so two calls have the same history when everything before them was the same, results included. A call of a
stateless tool has the history `NO_HISTORY`, and is added to no chain.

Canonical JSON keeps what a tool can tell apart: 1, 1.0 and true differ, so do 0.0 and -0.0, so do two spellings
of a letter in Unicode. The order of an object's keys does not count. NaN equals itself.

The version of a local tool is a digest of its source, of the plain settings it was made with, and of the files
that these name: a corpus, a database. An edit of the function, even of a comment, is a new version, so a stale
result is never replayed for new code. What the function calls is not looked at; name a version yourself where
that matters.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ludus.core.config import Config
from ludus.core.failures import ConfigError
from ludus.core.messages import Json, ToolContext, ToolResult, ToolSet, ToolSpec
from ludus.core.task import Task
from ludus.tools.tool import FunctionTool, Tool, tool
from ludus.tools.toolset import LocalTools

NO_HISTORY = ""
_SCHEME = "ludus-recording-1"
_DIGEST_BYTES = 20
_MOST_ARGUMENT_CHARS = 2_000
_MOST_BITS = 10_000


class Unkeyable(ValueError):
    """Arguments that JSON cannot say: they cannot be told apart reliably, so they have no key."""


@dataclass(frozen=True, slots=True)
class Label:
    """What identifies a call. `arguments` are for people to read, and cut where they are very long."""

    tool: str
    version: str
    history: str
    arguments_digest: str
    arguments: str

    @property
    def key(self) -> str:
        return _digest(_SCHEME, "call", self.tool, self.version, self.history, self.arguments_digest)


def label_of(tool: str, version: str, history: str, arguments: Any) -> Label:
    """The label of a call; `Unkeyable` when the arguments are not JSON."""
    text = canonical(arguments)
    return Label(tool, version, history, _digest(text), text[:_MOST_ARGUMENT_CHARS])


def canonical(value: Any) -> str:
    """JSON in which equal values are equal texts, in ASCII. Tuples count as lists."""
    try:
        _check_keys(value)
        return json.dumps(value, sort_keys=True, separators=(",", ":"))
    except RecursionError:
        raise Unkeyable("nested too deeply") from None
    except (TypeError, ValueError) as error:  # foreign objects, cycles, numbers of thousands of digits
        raise Unkeyable(f"not JSON: {error}") from None


def spec_version(spec: ToolSpec, version: str = "") -> str:
    """The version of a tool: what the model is told of it, and what its owner adds."""
    try:
        parameters = canonical(spec.parameters)
    except Unkeyable as error:
        raise ConfigError(f"the schema of the tool {spec.name!r} is not JSON: {error}") from None
    return _digest("version", spec.name, spec.description, parameters, version)


def root_history(context: ToolContext, *, per_episode: bool) -> str:
    """Where the chain of an episode begins: at its task, so that attempts at one task can share.

    The system prompt is left out, so that it may be reworded. What JSON cannot say of a target or of
    metadata counts by its type alone.
    """
    if per_episode:
        return _digest(_SCHEME, "episode", context.episode)
    task = context.task
    return _digest(_SCHEME, "task", json.dumps(_described(task), sort_keys=True, default=_type_name))


def next_history(call_key: str, result: ToolResult) -> str:
    """The history after a call. How long it took does not belong to it."""
    return _digest(call_key, result_digest(result))


def result_digest(result: ToolResult) -> str:
    """Everything of a result that a model or a reward can see."""
    media = [part for medium in result.media for part in (medium.kind, medium.sha256)]
    reward = "none" if result.reward is None else repr(float(result.reward))
    fault = "none" if result.fault is None else result.fault.value
    return _digest("result", result.content, reward, str(bool(result.terminated)), fault, *media)


def specs_key(name: str, history: str) -> str:
    """Where the list of tools is kept that a set called `name` had after this history."""
    return _digest(_SCHEME, "specs", name, history)


def list_key(payload: bytes) -> str:
    """Where a list of tools itself is kept, by its content: most histories share one."""
    return _digest(_SCHEME, "list", hashlib.sha256(payload).hexdigest())


def _digest(*parts: str) -> str:
    """A digest of texts in which no two lists of texts look the same: each goes in with its length."""
    state = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        state.update(len(data).to_bytes(8, "big"))
        state.update(data)
    return state.hexdigest()


def _check_keys(value: Any) -> None:
    """json.dumps would make text of other keys, and 1 and "1" the same."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is not text")
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return
    for item in value:
        _check_keys(item)


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


_NOT_IN_THE_RESULT = frozenset(
    {"name", "description", "timeout", "max_concurrency", "process", "retries", "is_unbound"}
)


_MOST_HASHED = 64_000_000
"""Bytes of a file up to which its content counts; of a larger one, size and time."""
_MOST_PATH_CHARS = 1_000


def source_versions(things: Iterable[Any]) -> dict[str, str]:
    """Versions by name of the functions and tools among `things`; tools elsewhere are left to their specs."""
    inside = [item for one in things for item in (one.tools if isinstance(one, LocalTools) else [one])]
    local = [one for one in inside if isinstance(one, Tool) or not isinstance(one, ToolSet)]
    made = [one if isinstance(one, Tool) else tool(one) for one in local]
    for one in made:
        if one.signature.env is not None:
            raise ConfigError(
                f"tool {one.name!r} acts on the episode's environment, which a replay would leave as it is; "
                "leave the tool out of the recording"
            )
    return {one.name: source_version(one) for one in made}


def source_version(one: Tool) -> str:
    """A digest of source and settings; of the settings alone where the source is not to be had."""
    code: Callable[..., Any] | type = one.function if isinstance(one, FunctionTool) else type(one)
    settings = {
        name: value
        for name, value in vars(one).items()
        if not name.startswith("_") and name not in _NOT_IN_THE_RESULT
    }
    return settings_version(source_of(code), settings)


def settings_version(source: str, settings: Mapping[str, Any]) -> str:
    """A digest of a source and of those of its settings that are plain, with the files that they name."""
    text = canonical([source, _plain_settings(settings)])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _plain_settings(settings: Mapping[str, Any]) -> Json:
    """Numbers, texts and paths, also those within a dataclass or a config; a file goes in with its content."""
    found: Json = {}
    for name, value in settings.items():
        if isinstance(value, Config) or (is_dataclass(value) and not isinstance(value, type)):
            found[name] = _plain_settings(
                dict(value)
                if isinstance(value, Config)
                else {one.name: getattr(value, one.name) for one in fields(value)}
            )
        elif value is None or isinstance(value, (str, int, float, Path)):
            found[name] = str(value) if isinstance(value, Path) else value
            if isinstance(value, (str, Path)) and (digest := _file_digest(str(value))):
                found[name] = [str(value), digest]
    return found


def _file_digest(name: str) -> str:
    """What is in the file of this name; nothing where there is none."""
    if len(name) > _MOST_PATH_CHARS or ("/" not in name and not Path(name).suffix):
        return ""
    try:
        path = Path(name).expanduser()
        status = path.stat()
        return _content_digest(path, status.st_size, status.st_mtime_ns) if path.is_file() else ""
    except (OSError, ValueError, RuntimeError):  # no path, or one that may not be read
        return ""


@lru_cache(maxsize=100)
def _content_digest(path: Path, size: int, time: int) -> str:
    if size > _MOST_HASHED:
        return f"{size}-{time}"
    return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()


def source_of(code: Callable[..., Any] | type) -> str:
    """The text of a function or class; nothing where it is not to be had."""
    try:
        return textwrap.dedent(inspect.getsource(code))
    except (OSError, TypeError):  # typed at a prompt, or written in C
        return ""
