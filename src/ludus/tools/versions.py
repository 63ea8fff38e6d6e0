"""The version of a tool: a digest of its schema and, where it is a local tool, of its source and settings.

An edit of the function, even of a comment, is a new version, and so is another content of a file that a
setting names (a corpus, a database). What the function calls is not looked at. Digests are of canonical JSON,
which keeps what a tool can tell apart: 1, 1.0 and true differ, so do 0.0 and -0.0. The order of keys does not
count. NaN equals itself.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ludus.core.config import Config
from ludus.core.failures import ConfigError, LudusError
from ludus.core.messages import Json, ToolContext, ToolSet, ToolSpec
from ludus.core.task import Task
from ludus.tools.tool import FunctionTool, LocalTools, Tool, tool
from ludus.tools.toolset import CombinedTools, WrappedTools

_log = logging.getLogger(__name__)

_DIGEST_BYTES = 20
_NOT_IN_THE_RESULT = frozenset(
    {"name", "description", "timeout", "max_concurrency", "process", "retries", "stateful", "is_unbound"}
)
_MOST_HASHED = 64_000_000
"""Bytes of a file up to which its content counts; of a larger one, size and time."""
_MOST_PATH_CHARS = 1_000


class Unkeyable(ValueError):
    """Arguments that JSON cannot express: they cannot be compared reliably, so they have no key."""


async def tool_versions(tools: ToolSet) -> dict[str, str]:
    """The versions of a tool set by name; of tools elsewhere, what their schemas tell."""
    if isinstance(tools, LocalTools):
        return {one.name: spec_version(one.spec, source_version(one)) for one in tools.tools}
    if isinstance(tools, WrappedTools) and tools.inner is not None:
        return await tool_versions(tools.inner)
    if isinstance(tools, CombinedTools):
        return {n: v for one in tools.sets for n, v in (await tool_versions(one)).items()}
    try:
        specs = await tools.list(ToolContext("versions", Task()))
    except LudusError as error:
        _log.warning("the versions of the tools of %s are not known: %s", type(tools).__name__, error)
        return {}
    return {spec.name: spec_version(spec) for spec in specs}


def code_version(code: Callable[..., Any] | type, settings: Mapping[str, Any] | None = None) -> str:
    """A digest of the source of a class or function, or else its name, and of the settings that it is given."""
    text = source_of(code) or f"{code.__module__}:{getattr(code, '__qualname__', '')}"
    return settings_version(text, settings or {})


def spec_version(spec: ToolSpec, version: str = "") -> str:
    """The version of a tool: a digest of its spec and of the version that its owner adds."""
    try:
        parameters = canonical(spec.parameters)
    except Unkeyable as error:
        raise ConfigError(f"the schema of the tool {spec.name!r} is not JSON: {error}") from None
    return digest("version", spec.name, spec.description, parameters, version)


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
    """Digest of the file's content; empty where there is no such file."""
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


# Digests


def canonical(value: Any) -> str:
    """JSON in which equal values are equal texts, in ASCII. Tuples count as lists."""
    try:
        _check_keys(value)
        return json.dumps(value, sort_keys=True, separators=(",", ":"))
    except RecursionError:
        raise Unkeyable("nested too deeply") from None
    except (TypeError, ValueError) as error:  # foreign objects, cycles, numbers of thousands of digits
        raise Unkeyable(f"not JSON: {error}") from None


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


def digest(*parts: str) -> str:
    """A digest of texts in which no two lists of texts look the same: each goes in with its length."""
    state = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        state.update(len(data).to_bytes(8, "big"))
        state.update(data)
    return state.hexdigest()
