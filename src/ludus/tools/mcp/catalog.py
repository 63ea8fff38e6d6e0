"""The tools of a server that an agent is offered: permissions, names that formats can write, valid schemas."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ludus.core.failures import ConfigError
from ludus.core.messages import Json, ToolSpec
from ludus.tools.mcp.config import MCPServerConfig
from ludus.tools.results import clean, cut

_log = logging.getLogger(__name__)

_MOST_DESCRIPTION = 2_000
_MOST_SCHEMA = 50_000
_NAME = re.compile(r"[^A-Za-z0-9_-]")
_MOST_NAME = 64


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool of a server, as it is offered to the model."""

    spec: ToolSpec
    name: str
    """The server's name of the tool."""
    is_read_only: bool = False
    """Whether the server declares that it changes nothing."""
    repeatable: bool = False
    """Whether a call may be sent again when its first outcome is unknown: read-only or idempotent, it says."""


@dataclass(frozen=True, slots=True)
class ToolCatalog:
    """The tools on offer, by the names that the model uses; and the names of those that are not permitted."""

    tools: Mapping[str, OfferedTool]
    denied: frozenset[str] = frozenset()
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Tools that cannot be offered, and why."""

    @property
    def read_only(self) -> frozenset[str]:
        return frozenset(name for name, one in self.tools.items() if one.is_read_only)

    @property
    def specs(self) -> list[ToolSpec]:
        return [one.spec for one in self.tools.values()]


def make_catalog(listed: Iterable[Any], config: MCPServerConfig) -> ToolCatalog:
    """The catalog of a server's list (`mcp_types.Tool`); `ConfigError` where nothing is left, or too much."""
    tools: dict[str, OfferedTool] = {}
    denied: set[str] = set()
    left_out: dict[str, str] = {}
    seen: set[str] = set()
    for one in listed:
        if one.name in seen:
            left_out[one.name] = "the server lists two tools of this name; the first is taken"
            continue
        seen.add(one.name)
        name = _free_name(config.prefix + one.name, tools)
        hints = one.annotations
        is_read_only = bool(hints is not None and hints.read_only_hint)
        if not config.permits(one.name) or (config.read_only and not is_read_only):
            denied.add(name)
        elif problem := schema_problem(one.input_schema):
            left_out[one.name] = problem
        else:
            is_idempotent = bool(hints is not None and hints.idempotent_hint)
            description = clean(cut(one.description or one.title or "", _MOST_DESCRIPTION))
            schema = plain_schema(one.input_schema)
            returns = one.output_schema if not schema_problem(one.output_schema or {}) else None
            spec = ToolSpec(name, description, schema, returns)
            tools[name] = OfferedTool(spec, one.name, is_read_only, is_read_only or is_idempotent)
    _check(tools, denied, left_out, config)
    return ToolCatalog(tools, frozenset(denied), left_out)


def _check(
    tools: Mapping[str, Any], denied: set[str], left_out: Mapping[str, str], config: MCPServerConfig
) -> None:
    if len(tools) > config.max_tools:
        some = ", ".join(list(tools)[:5])
        raise ConfigError(
            f"the MCP server {config.label!r} offers {len(tools):,} tools ({some}, ...), more than max_tools = "
            f"{config.max_tools}: pick those that the agent needs with allow = [...], or raise max_tools"
        )
    if not tools and denied and not (config.resources or config.prompts):
        raise ConfigError(
            f"the MCP server {config.label!r} has tools, and none is permitted (allow, deny, read_only): "
            f"{', '.join(sorted(denied)[:20])}"
        )
    if not tools and left_out and not (config.resources or config.prompts):
        name, why = next(iter(left_out.items()))
        raise ConfigError(
            f"the MCP server {config.label!r} has no tool that can be offered; {name}: {why}"
        )
    for name, why in left_out.items():
        _log.warning("the MCP server %r: the tool %.80r is left out: %s", config.label, name, why)


def _free_name(name: str, taken: Mapping[str, Any]) -> str:
    """A name that every format can write, and that no other tool has."""
    plain = (_NAME.sub("_", name) or "tool")[:_MOST_NAME]
    made, number = plain, 2
    while made in taken:
        made = f"{plain[: _MOST_NAME - 5]}_{number}"
        number += 1
    return made


def schema_problem(schema: Any) -> str:
    """The problem of a schema, as far as models and checks depend on it; empty if there is none."""
    try:
        size = len(json.dumps(schema))
    except (ValueError, TypeError, RecursionError):
        return "its schema is no JSON"
    if size > _MOST_SCHEMA:
        return f"its schema has {size:,} characters, and may have {_MOST_SCHEMA:,}"
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        return f"its schema is not of an object: {str(schema)[:100]}"
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not all(
        isinstance(one, dict | bool) for one in properties.values()
    ):
        return "the properties of its schema are no schemas"
    if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
        return "'required' of its schema is no list of names"
    return ""


def plain_schema(schema: Mapping[str, Any]) -> Json:
    """The schema in the form that local tools have: an object with properties, none a bare true or false."""
    properties = {
        str(name): one if isinstance(one, dict) else {}
        for name, one in schema.get("properties", {}).items()
    }
    made = {key: value for key, value in schema.items() if key != "$schema"}
    return {**made, "type": "object", "properties": properties}
