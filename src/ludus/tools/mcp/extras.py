"""A server's resources and prompts as tools, where a recipe wants them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import mcp_types as types
from mcp.client.session import ClientSession

from ludus.core.messages import Json, ToolResult, ToolSpec
from ludus.tools.calling import OutputLimits, text_of
from ludus.tools.mcp.config import MCPServerConfig
from ludus.tools.mcp.results import result_of_prompt, result_of_resource

_Run = Callable[[ClientSession, Json, OutputLimits], Awaitable[ToolResult]]


@dataclass(frozen=True, slots=True)
class ExtraTool:
    """A tool that stands for another of MCP's methods."""

    spec: ToolSpec
    run: _Run
    repeatable: bool = True


def extra_tools(config: MCPServerConfig) -> Mapping[str, ExtraTool]:
    """The tools for resources and prompts that a recipe asks for, by name."""
    wanted: list[tuple[str, str, Json, _Run]] = []
    if config.resources:
        uri = {"uri": {"type": "string", "description": "As list_resources gives it."}}
        wanted.append(("list_resources", "List the resources that the server has.", {}, _list_resources))
        wanted.append(("read_resource", "Read a resource.", uri, _read_resource))
    if config.prompts:
        named: Json = {"name": {"type": "string"}}
        filled = {"type": "object", "additionalProperties": {"type": "string"}}
        wanted.append(("list_prompts", "List the prompts that the server has.", {}, _list_prompts))
        wanted.append(
            ("get_prompt", "Get a prompt, filled in.", {**named, "arguments": filled}, _get_prompt)
        )
    return {config.prefix + name: _made(config.prefix + name, about, properties, run)
            for name, about, properties, run in wanted if config.permits(name)}  # fmt: skip


def _made(name: str, description: str, properties: Json, run: _Run) -> ExtraTool:
    required = [one for one in properties if one != "arguments"]
    schema = {"type": "object", "properties": properties, "required": required}
    return ExtraTool(ToolSpec(name, description, schema), run)


async def _list_resources(session: ClientSession, arguments: Json, limits: OutputLimits) -> ToolResult:
    listed = await session.list_resources()
    templates = await session.list_resource_templates()
    rows = [
        {"uri": str(one.uri), "name": one.name, "description": one.description}
        for one in listed.resources
    ]
    rows += [
        {"uri": one.uri_template, "name": one.name, "description": one.description}
        for one in templates.resource_templates
    ]
    return ToolResult(limits.apply("\n".join(map(text_of, rows)) or "(none)"))


async def _read_resource(session: ClientSession, arguments: Json, limits: OutputLimits) -> ToolResult:
    found = await session.read_resource(str(arguments.get("uri", "")))
    return result_of_resource(found, limits)


async def _list_prompts(session: ClientSession, arguments: Json, limits: OutputLimits) -> ToolResult:
    listed = await session.list_prompts()
    rows = [
        {
            "name": one.name,
            "description": one.description,
            "arguments": [argument.name for argument in one.arguments or ()],
        }
        for one in listed.prompts
    ]
    return ToolResult(limits.apply("\n".join(map(text_of, rows)) or "(none)"))


async def _get_prompt(session: ClientSession, arguments: Json, limits: OutputLimits) -> ToolResult:
    given = arguments.get("arguments")
    filled = (
        {str(key): text_of(value) for key, value in given.items()} if isinstance(given, dict) else None
    )
    found: types.GetPromptResult = await session.get_prompt(str(arguments.get("name", "")), filled)
    return result_of_prompt(found, limits)
