"""A server's answers as results for the model: text, structured content, images, links to resources; and the
tools that stand for its resources and prompts.

Results with very many blocks are cut before the SDK reads them, because it checks each block on the event loop.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import mcp_types as types
from anyio.abc import ObjectReceiveStream
from mcp.client.session import ClientSession
from mcp.shared.message import SessionMessage

from ludus.core.failures import Fault
from ludus.core.messages import Json, Media, ToolResult, ToolSpec
from ludus.tools.json_schema import argument_problems
from ludus.tools.mcp.config import MCPServerConfig
from ludus.tools.results import OutputLimits, text_of

_log = logging.getLogger(__name__)

MOST_BLOCKS = 1_000
_LISTS = ("content", "contents", "messages")


# Before the SDK reads them


@asynccontextmanager
async def with_short_results(transport: AbstractAsyncContextManager[Any]) -> AsyncIterator[Any]:
    """The streams of a transport; what is read has at most `MOST_BLOCKS` blocks in a result."""
    async with transport as (read, write):
        yield _ShortResults(read), write


class _ShortResults(ObjectReceiveStream[Any]):
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    @property
    def last_context(self) -> Any:
        """Context of the message that was read last, which the SDK asks for. Streams of stdio have none."""
        return getattr(self._inner, "last_context", None)

    async def receive(self) -> Any:
        message = await self._inner.receive()
        if isinstance(message, SessionMessage) and isinstance(message.message, types.JSONRPCResponse):
            _shorten(message.message.result)
        return message

    async def aclose(self) -> None:
        await self._inner.aclose()


def _shorten(result: dict[str, Any]) -> None:
    for name in _LISTS:
        blocks = result.get(name)
        if isinstance(blocks, list) and len(blocks) > MOST_BLOCKS:
            left_out = len(blocks) - MOST_BLOCKS + 1
            del blocks[MOST_BLOCKS - 1 if name == "content" else MOST_BLOCKS :]
            if name == "content":
                note = f"... [{left_out:,} more blocks left out] ..."
                blocks.append({"type": "text", "text": note})


# As the model reads them


def result_of_call(
    answer: types.CallToolResult, tool: str, limits: OutputLimits, returns: Json | None
) -> ToolResult:
    """The result of a tool call. What the server calls an error is the model's: it reads it."""
    text, media = _rendered(answer.content)
    structured = answer.structured_content
    if structured is not None and not text:
        text = text_of(structured)
    if not answer.is_error and returns is not None:
        _check_returns(tool, structured, returns)
    fault = Fault.TOOL_RAISED if answer.is_error else None
    content = text or ("the tool failed, and says no more" if answer.is_error else "done")
    return ToolResult(limits.apply(content), fault=fault, media=media)


def _rendered(blocks: Iterable[Any]) -> tuple[str, tuple[Media, ...]]:
    found = [_block(block) for block in blocks]
    text = "\n".join(text for text, _ in found if text)
    return text, tuple(media for _, media in found if media is not None)


def _block(block: Any) -> tuple[str, Media | None]:
    match block:
        case types.TextContent() | types.TextResourceContents():
            return block.text, None
        case types.ImageContent() | types.AudioContent():
            return _media(block.mime_type, block.data)
        case types.ResourceLink():
            about = ", ".join(one for one in (block.mime_type, block.description) if one)
            return f"[resource {block.name}: {block.uri}{f' ({about})' if about else ''}]", None
        case types.EmbeddedResource():
            return _block(block.resource)
        case types.BlobResourceContents():
            text, media = _media(block.mime_type or "application/octet-stream", block.blob)
            return f"{text} {block.uri}", media
    return f"[{block.type} that cannot be shown]", None


def _media(kind: str, data: str) -> tuple[str, Media | None]:
    """Something that is not text, as the project carries it: by its hash, with its bytes."""
    try:
        raw = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        return f"[{kind[:80]} that is no base64]", None
    return f"[{kind[:80]}]", Media(kind[:80], hashlib.sha256(raw).hexdigest(), raw)


_LIARS: set[str] = set()


def _check_returns(tool: str, structured: Any, returns: Json) -> None:
    """Say once for each tool that what it gives is not what its output schema says; the result counts."""
    if structured is None:
        problems = ["it has an output schema, and gave no structured content"]
    else:
        problems = argument_problems(returns, structured)
    if problems and tool not in _LIARS:
        _LIARS.add(tool)
        _log.warning("the MCP tool %r does not keep to its output schema: %s", tool, problems[0])


# Resources and prompts as tools

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
        filled = {"type": "object", "additionalProperties": {"type": "string"}}
        named = {"name": {"type": "string"}, "arguments": filled}
        wanted.append(("list_prompts", "List the prompts that the server has.", {}, _list_prompts))
        wanted.append(("get_prompt", "Get a prompt, filled in.", named, _get_prompt))
    made: dict[str, ExtraTool] = {}
    for name, about, properties, run in wanted:
        if config.permits(name):
            required = [one for one in properties if one != "arguments"]
            schema = {"type": "object", "properties": properties, "required": required}
            made[config.prefix + name] = ExtraTool(ToolSpec(config.prefix + name, about, schema), run)
    return made


async def _list_resources(session: ClientSession, arguments: Json, limits: OutputLimits) -> ToolResult:
    listed = await session.list_resources()
    templates = await session.list_resource_templates()
    found = [(str(one.uri), one.name, one.description) for one in listed.resources]
    found += [(one.uri_template, one.name, one.description) for one in templates.resource_templates]
    return _listing(
        [{"uri": uri, "name": name, "description": about} for uri, name, about in found], limits
    )


async def _read_resource(session: ClientSession, arguments: Json, limits: OutputLimits) -> ToolResult:
    found = await session.read_resource(str(arguments.get("uri", "")))
    text, media = _rendered(found.contents)
    return ToolResult(limits.apply(text or "(empty)"), media=media)


async def _list_prompts(session: ClientSession, arguments: Json, limits: OutputLimits) -> ToolResult:
    rows = [
        {
            "name": one.name,
            "description": one.description,
            "arguments": [argument.name for argument in one.arguments or ()],
        }
        for one in (await session.list_prompts()).prompts
    ]
    return _listing(rows, limits)


async def _get_prompt(session: ClientSession, arguments: Json, limits: OutputLimits) -> ToolResult:
    given = arguments.get("arguments")
    filled = (
        {str(key): text_of(value) for key, value in given.items()} if isinstance(given, dict) else None
    )
    found: types.GetPromptResult = await session.get_prompt(str(arguments.get("name", "")), filled)
    said = [(message.role, *_rendered([message.content])) for message in found.messages]
    text = "\n\n".join(f"{role}: {text}" for role, text, _ in said)
    media = tuple(one for _, _, several in said for one in several)
    return ToolResult(limits.apply(text or "(empty)"), media=media)


def _listing(rows: list[Json], limits: OutputLimits) -> ToolResult:
    return ToolResult(limits.apply("\n".join(map(text_of, rows)) or "(none)"))
