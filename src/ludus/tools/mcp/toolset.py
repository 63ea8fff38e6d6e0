"""The tools of an MCP server as a tool set: what an episode opens, lists, calls and closes.

Who waits for whom. A shared server is started by the first episode that needs it, under a lock. With a server
per episode, `servers` of them run at once, and further episodes wait in `open`. Calls wait for one of
`concurrency` slots. A server that has died is started again by the next call that needs it, after a pause that
doubles with each failure in a row; once `restarts` of them have failed, every caller gets the error until the
pause is over.

Refusals of the server, and a call that is too slow on a server that lives, are faults that the model reads. A
server that died or hangs is an infrastructure failure: a call that may be repeated (it declares itself
read-only or idempotent, and the episode has no state there) is sent once more; any other ends the episode,
which is played again.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import mcp_types as types
from mcp.client.session import ClientSession
from mcp_types import INVALID_PARAMS

from ludus.core.failures import ConfigError, Fault, InfraError
from ludus.core.messages import Json, Media, ToolCall, ToolContext, ToolResult, ToolSpec
from ludus.remote.lost_episodes import EpisodeState
from ludus.remote.supervisor import Restarts
from ludus.tools.calling import OutputLimits, clean, text_of
from ludus.tools.json_schema import argument_problems
from ludus.tools.mcp import MCPServerConfig
from ludus.tools.mcp.connection import (
    NONSENSE,
    MCPConnection,
    OfferedTool,
    ServerGone,
    ServerRefusal,
    SlowCall,
    ToolCatalog,
)
from ludus.tools.mcp.servers import LARGER, TOO_LARGE
from ludus.tools.remote_http import unsendable
from ludus.tools.tool import Limiter, malformed, unknown_tool

_log = logging.getLogger(__name__)

_RESTARTS = Restarts(first_pause=0.1, longest_pause=30.0)


@dataclass(slots=True)
class _EpisodeState:
    """State of an episode."""

    connection: MCPConnection | None = None
    """Its own, where each episode has one."""
    seen: ToolCatalog | None = None
    """The catalog that the episode got last."""
    kept: EpisodeState = field(default_factory=EpisodeState)
    """State of the episode on its own server."""
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)


class MCPTools:
    """The tools of one MCP server."""

    deterministic = False

    def __init__(self, config: MCPServerConfig) -> None:
        self.config = config
        self._limits = OutputLimits(config.max_chars)
        self._episodes: dict[str, _EpisodeState] = {}
        self._shared: MCPConnection | None = None
        self._starting = asyncio.Lock()
        self._failed_starts = 0
        self._has_started = False
        self._not_before = 0.0
        self._last_failure: InfraError | None = None
        self._calls = Limiter(config.concurrency)
        self._places = asyncio.Semaphore(config.servers)
        self._extras = extra_tools(config)
        self._read_only: frozenset[str] = frozenset()
        self._effects: frozenset[str] = frozenset()
        self.restarted = 0
        """How often a server that had died was started again."""

    # Episodes

    async def open(self, context: ToolContext) -> None:
        if context.episode in self._episodes:
            await self.close(context)
        state = self._episodes[context.episode] = _EpisodeState()
        try:
            await self._connection(state)
        except BaseException:
            await self.close(context)
            raise

    async def list(self, context: ToolContext) -> Sequence[ToolSpec]:
        state = self._state(context)
        connection = await self._connection(state)
        state.seen = await connection.list()
        self._read_only = state.seen.read_only
        self._effects = frozenset(state.seen.tools) - self._read_only
        return [*state.seen.specs, *(one.spec for one in self._extras.values())]

    async def changed(self, context: ToolContext) -> bool:
        """Whether the list may differ from the one that the episode last got."""
        state = self._episodes.get(context.episode)
        if state is None or state.seen is None:
            return False
        connection = state.connection if self.config.has_own_sessions else self._shared
        return connection is not None and (connection.is_stale or connection.catalog is not state.seen)

    def read_only(self) -> frozenset[str]:
        """The tools that say of themselves that they change nothing, as last listed."""
        return self._read_only

    def effects(self) -> frozenset[str]:
        """The other tools of the server, which may change something that outlives the run."""
        return self._effects

    async def close(self, context: ToolContext) -> None:
        state = self._episodes.pop(context.episode, None)
        if state is not None and state.connection is not None:
            connection, state.connection = state.connection, None
            try:
                await connection.close()
            finally:
                self._places.release()

    async def aclose(self) -> None:
        """Stop every server."""
        mine = [state.connection for state in self._episodes.values() if state.connection is not None]
        self._episodes.clear()
        shared, self._shared = self._shared, None
        running = [*mine, *([shared] if shared is not None else [])]
        await asyncio.gather(*(one.close() for one in running))
        for _ in mine:
            self._places.release()

    def _state(self, context: ToolContext) -> _EpisodeState:
        return self._episodes.setdefault(context.episode, _EpisodeState())

    # Servers

    async def _connection(self, state: _EpisodeState) -> MCPConnection:
        """The episode's server, running."""
        state.kept.check()
        if not self.config.has_own_sessions:
            async with self._starting:
                if self._shared is None or not self._shared.is_alive:
                    self.restarted += self._shared is not None
                    self._shared = None
                    self._shared = await self._started()
                return self._shared
        async with state.opening:
            if state.connection is None:
                await self._places.acquire()
                try:
                    state.connection = await self._started()
                except BaseException:
                    self._places.release()
                    raise
            elif not state.connection.is_alive:
                state.kept.gone(f"its MCP server {self.config.label!r} died")
                state.connection = await self._started()
                self.restarted += 1
            return state.connection

    async def _started(self) -> MCPConnection:
        """A server that has just been started, after as many attempts as it takes and is allowed."""
        while True:
            pause = self._not_before - time.monotonic()
            if pause > 0 and self._last_failure is not None:
                if self._failed_starts > self.config.restarts:
                    raise self._given_up(self._last_failure)
                await asyncio.sleep(pause)
            connection = MCPConnection(self.config)
            try:
                await connection.start()
            except ServerGone as failure:
                self._failed_starts += 1
                self._last_failure = failure
                self._not_before = time.monotonic() + _RESTARTS.pause(self._failed_starts)
                is_final = failure.kind == NONSENSE  # it would say the same again
                if is_final or self._failed_starts > self.config.restarts:
                    raise self._given_up(failure) from failure
                _log.warning("%s; it is tried again", failure)
                continue
            self._failed_starts, self._last_failure, self._has_started = 0, None, True
            return connection

    def _given_up(self, failure: InfraError) -> InfraError | ConfigError:
        """A server that has never run is a mistake in the recipe; one that has is a failure."""
        many = f" ({self._failed_starts} attempts)" if self._failed_starts > 1 else ""
        text = f"{failure}{many}"
        if self._has_started or self.config.is_http:
            return ServerGone(text, "NotStarted")
        hint = "" if failure.kind == NONSENSE else ". Does the command run in a terminal?"
        return ConfigError(text + hint)

    # Calls

    async def call(self, call: ToolCall, context: ToolContext) -> ToolResult:
        if call.fault is not None:
            return malformed(call)
        state = self._state(context)
        if call.name in self._extras:
            return await self._performed(call, state, self._extras[call.name])
        connection = await self._connection(state)
        catalog = await connection.list()
        found = catalog.tools.get(call.name)
        if found is None:
            return _not_offered(call.name, catalog)
        problem = unsendable(call.arguments)
        problems = [problem] if problem else argument_problems(found.spec.parameters, call.arguments)
        if problems:
            shown = "\n".join(f"- {one}" for one in problems)
            text = f"The arguments of {call.name} do not fit:\n{shown}"
            return ToolResult(self._limits.apply(text), fault=Fault.BAD_ARGUMENTS)
        run = partial(_call_tool, found)
        return await self._performed(call, state, CallableTool(found.spec, run, found.repeatable))

    async def _performed(self, call: ToolCall, state: _EpisodeState, found: CallableTool) -> ToolResult:
        """One call, sent once more where that is safe and the first server has died of it."""
        async with self._calls.slot():
            started = time.monotonic()
            may_repeat = found.repeatable and not state.kept.has_state
            while True:
                connection = await self._connection(state)
                try:
                    result = await self._sent(call, connection, found)
                    break
                except ServerGone as gone:
                    if not may_repeat or gone.kind == NONSENSE:  # it would say the same again
                        raise
                    _log.warning("%s; %r changes nothing, so it is sent again", gone, call.name)
                    may_repeat = False
            state.kept.has_state = self.config.has_own_sessions
        return replace(result, seconds=time.monotonic() - started)

    async def _sent(self, call: ToolCall, connection: MCPConnection, found: CallableTool) -> ToolResult:
        try:
            return await connection.request(
                f"a call of {call.name!r}",
                lambda session: found.run(session, call.arguments, self._limits),
            )
        except SlowCall as slow:
            return ToolResult(f"{call.name} was stopped: {slow}.", fault=Fault.TOOL_TIMEOUT)
        except ServerRefusal as refusal:  # the server's own error, which the model reads
            text = f"{call.name}: {str(refusal) or 'refused'}"
            if refusal.code == TOO_LARGE or LARGER in text or "byte limit" in text:
                return ToolResult(self._limits.apply(f"{text}. Ask for less"), fault=Fault.LIMIT)
            is_bad = refusal.code == INVALID_PARAMS
            fault = Fault.BAD_ARGUMENTS if is_bad else Fault.TOOL_RAISED
            return ToolResult(self._limits.apply(text), fault=fault)


async def _call_tool(
    tool: OfferedTool, session: ClientSession, arguments: Json, limits: OutputLimits
) -> ToolResult:
    """By the plain request: the session's own method also runs the output schema, whatever it costs."""
    sendable = json.loads(clean(json.dumps(arguments, ensure_ascii=False)))  # without lone surrogates
    params = types.CallToolRequestParams(name=tool.name, arguments=sendable)
    answer = await session.send_request(types.CallToolRequest(params=params), types.CallToolResult)
    text, media = _rendered(answer.content)
    structured = answer.structured_content
    if structured is not None and not text:
        text = text_of(structured)
    if not answer.is_error and tool.spec.returns is not None:
        _check_returns(tool.spec.name, structured, tool.spec.returns)
    fault = Fault.TOOL_RAISED if answer.is_error else None
    content = text or ("the tool failed, and says no more" if answer.is_error else "done")
    return ToolResult(limits.apply(content), fault=fault, media=media)


def _not_offered(name: str, catalog: ToolCatalog) -> ToolResult:
    if name in catalog.denied:
        known = ", ".join(sorted(catalog.tools)) or "none"
        text = f"The tool {name!r} is not permitted here. Available tools: {known}."
        return ToolResult(text[:2_000], fault=Fault.UNKNOWN_TOOL)
    return unknown_tool(name, catalog.tools)


# Answers, as the model reads them


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
class CallableTool:
    """A tool of the server, or one that stands for another of MCP's methods."""

    spec: ToolSpec
    run: _Run
    repeatable: bool = True


def extra_tools(config: MCPServerConfig) -> Mapping[str, CallableTool]:
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
    made: dict[str, CallableTool] = {}
    for name, about, properties, run in wanted:
        if config.permits(name):
            required = [one for one in properties if one != "arguments"]
            schema = {"type": "object", "properties": properties, "required": required}
            made[config.prefix + name] = CallableTool(ToolSpec(config.prefix + name, about, schema), run)
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
