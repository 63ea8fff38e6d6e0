"""Ludus's tools and environments as an MCP server: what other agents use, over stdio or streamable HTTP.

A session of the protocol is an episode here: its sandbox, its files and its environments last as long as it
does. Over stdio the process has one session; over HTTP each client has its own, which is closed when the
client says so or when it has been idle. The stateless revision of the protocol (2026-07-28) has no sessions
over HTTP, so there a client is told to use an older one, which all of them know.

Environments bring a tool more, `begin_task`: it resets them for the task of that number, and says what it is.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import mcp_types as types
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.shared.exceptions import MCPError
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, MODERN_PROTOCOL_VERSIONS

from ludus.core.failures import ConfigError, Fault, InfraError
from ludus.core.messages import Json, ToolCall, ToolContext, ToolResult, ToolSpec
from ludus.core.strict_json import BadJson, check_json
from ludus.core.task import Task
from ludus.envs.env import observation_from_json
from ludus.tools.hosting import ToolHost
from ludus.tools.json_schema import argument_problems

_log = logging.getLogger(__name__)

BEGIN = "begin_task"
STDIO = "stdio"
Send = Callable[[Any], Awaitable[None]]
Application = Callable[[Any, Any, Any], Awaitable[None]]
_CHARSET = re.compile(r"charset\s*=\s*[\"']?([^\s;\"']*)", re.IGNORECASE)
_ABOUT = {
    "number": {"type": "integer", "minimum": 0, "description": "Which of the tasks; each has a number."}
}


@dataclass(slots=True)
class AgentSession:
    """What one client has here."""

    episode: str
    used: float
    context: ToolContext | None = None
    calls: int = 0
    """Running now."""
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)


class AgentSessions:
    """Sessions of agents on a host of tools and environments, by the protocol's session ids."""

    def __init__(
        self,
        host: ToolHost,
        tasks: Sequence[Task] = (),
        *,
        most: int = 256,
        idle_seconds: float = 1800.0,
    ) -> None:
        self._host, self._tasks, self._most, self._idle = host, list(tasks), most, idle_seconds
        self._sessions: dict[str, AgentSession] = {}
        self._count = 0

    @property
    def has_envs(self) -> bool:
        return bool(self._tasks)

    async def list(self, id: str) -> list[ToolSpec]:
        """What the session can call now."""
        async with self._used(id) as context:
            found = list(await self._host.list(context))
        if self.has_envs:
            schema = {"type": "object", "properties": _ABOUT, "required": ["number"]}
            about = f"Begin a task from its start: 0 to {len(self._tasks) - 1}. What was done before is gone."
            found.append(ToolSpec(BEGIN, about, schema))
        return found

    async def call(self, id: str, name: str, arguments: Json) -> ToolResult:
        """Run one call; a mistake of the caller's is a result with a fault."""
        if name == BEGIN and self.has_envs:
            return await self._begin(id, arguments)
        async with self._used(id) as context:
            return await self._host.call(ToolCall(name, arguments), context)

    async def close(self, id: str) -> None:
        session = self._sessions.pop(id, None)
        if session is not None and session.context is not None:
            await self._host.close(session.context)

    async def close_all(self) -> None:
        await asyncio.gather(*(self.close(id) for id in list(self._sessions)))

    async def sweep(self) -> None:
        """Close idle sessions from time to time, until cancelled."""
        while True:
            await asyncio.sleep(min(30.0, self._idle / 4))
            oldest = time.monotonic() - self._idle
            for id, one in list(self._sessions.items()):
                if one.used < oldest and not one.calls:
                    await self.close(id)

    @asynccontextmanager
    async def _used(self, id: str) -> AsyncIterator[ToolContext]:
        """The session's episode, opened if need be."""
        session = self._sessions.get(id)
        if session is None:
            if len(self._sessions) >= self._most:
                raise MCPError(
                    types.INTERNAL_ERROR, f"{self._most} sessions are open already; try again later"
                )
            self._count += 1
            session = self._sessions[id] = AgentSession(f"mcp {self._count}", time.monotonic())
        session.calls += 1
        try:
            async with session.opening:
                if session.context is None:
                    task = self._tasks[0] if self._tasks else Task("mcp")
                    context = ToolContext(session.episode, task)
                    await self._host.open(context)
                    session.context = context
            yield session.context
        finally:
            session.calls -= 1
            session.used = time.monotonic()

    async def _begin(self, id: str, arguments: Json) -> ToolResult:
        schema = {"properties": _ABOUT, "required": ["number"]}
        problems = argument_problems(schema, arguments)
        if not problems and not arguments["number"] < len(self._tasks):
            problems = [f"number: there are the tasks 0 to {len(self._tasks) - 1}"]
        if problems:
            return ToolResult("\n".join(problems), fault=Fault.BAD_ARGUMENTS)
        async with self._used(id):
            session = self._sessions[id]
            async with session.opening:
                assert session.context is not None
                await self._host.close(session.context)
                session.context = None
                task = self._tasks[int(arguments["number"])]
                context = ToolContext(session.episode, task)
                await self._host.open(context)
                session.context = context
                seen = await self._host.ask("opened", context, {})
        told = [message.content for message in task.messages]
        shown = [observation_from_json(one) for one in seen.values()]
        told += [one.text for one in shown]
        media = tuple(one for seen_now in shown for one in seen_now.media)
        return ToolResult("\n\n".join(text for text in told if text), media=media)


def make_mcp_server(sessions: AgentSessions, name: str = "ludus") -> Server[Any]:
    """The protocol's side of it."""

    async def list_tools(
        context: ServerRequestContext[Any], params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        with _failures():
            specs = await sessions.list(_session_id(context))
        return types.ListToolsResult(tools=[
            types.Tool(name=spec.name, description=spec.description, input_schema=spec.parameters)
            for spec in specs
        ])  # fmt: skip

    async def call_tool(
        context: ServerRequestContext[Any], params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        try:
            check_json(params.arguments or {}, depth=200)
        except BadJson as error:
            raise MCPError(types.INVALID_PARAMS, f"the arguments cannot be read: {error}") from None
        try:
            result = await sessions.call(_session_id(context), params.name, params.arguments or {})
        except (InfraError, ConfigError) as error:
            # the session's state may be gone: the next call of a closed session begins anew
            await sessions.close(_session_id(context))
            text = f"failed, and not by the call's fault; the session begins anew: {error}"
            return types.CallToolResult(content=[types.TextContent(text=text)], is_error=True)
        return _answer(result)

    return Server(name, on_list_tools=list_tools, on_call_tool=call_tool)


class _failures:  # noqa: N801 - reads as a block
    """Failures of ours, as the protocol says them."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, InfraError | ConfigError):
            raise MCPError(types.INTERNAL_ERROR, str(error)) from error


def _session_id(context: ServerRequestContext[Any]) -> str:
    headers = getattr(context.request, "headers", None)
    return STDIO if headers is None else str(headers.get("mcp-session-id", ""))


def _answer(result: ToolResult) -> types.CallToolResult:
    content: list[Any] = [types.TextContent(text=result.content)]
    for media in result.media:
        if media.data is not None and media.kind.startswith("image"):
            data = base64.b64encode(media.data).decode("ascii")
            kind = media.kind if "/" in media.kind else "image/png"
            content.append(types.ImageContent(data=data, mime_type=kind))
    notes: dict[str, Any] = {}
    if result.reward is not None:
        notes["ludus/reward"] = result.reward
    if result.terminated:
        notes["ludus/terminated"] = True
    return types.CallToolResult(content=content, is_error=result.fault is not None, _meta=notes or None)


async def serve_stdio(sessions: AgentSessions) -> None:
    """Serve one client on standard input and output, until it closes them."""
    server = make_mcp_server(sessions)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


def http_application(sessions: AgentSessions, host: str, token: str | None) -> Application:
    """The application behind /mcp: with a token, with sessions, and closing those that clients end."""
    app = make_mcp_server(sessions).streamable_http_app(host=host)

    async def guarded(scope: Any, receive: Any, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]
        }
        if token is not None and not _has_token(headers, token):
            await _refuse(
                send, 401, types.INVALID_REQUEST, "a token is needed: Authorization: Bearer ..."
            )
            return
        charset = _CHARSET.search(headers.get("content-type", ""))
        if charset is not None and charset[1].lower() not in ("utf-8", "utf8"):
            await _refuse(send, 415, types.INVALID_REQUEST, "send UTF-8: no other charset is read")
            return
        if headers.get("mcp-protocol-version") in MODERN_PROTOCOL_VERSIONS:
            known = {
                "supported": list(HANDSHAKE_PROTOCOL_VERSIONS),
                "requested": headers["mcp-protocol-version"],
            }
            text = "sandboxes and environments need a session: use a revision with a handshake"
            await _refuse(send, 400, types.UNSUPPORTED_PROTOCOL_VERSION, text, known)
            return
        await app(scope, receive, send)
        if scope["method"] == "DELETE" and "mcp-session-id" in headers:
            await sessions.close(headers["mcp-session-id"])

    return guarded


def _has_token(headers: Mapping[str, str], token: str) -> bool:
    given = headers.get("authorization", "").removeprefix("Bearer ").strip()
    return hmac.compare_digest(given.encode("utf-8", "replace"), token.encode())


async def _refuse(send: Send, status: int, code: int, text: str, data: Any = None) -> None:
    error = types.ErrorData(code=code, message=text, data=data)
    body = types.JSONRPCError(jsonrpc="2.0", id=None, error=error).model_dump_json(exclude_none=True)
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body.encode()})


async def serve_http(
    sessions: AgentSessions, host: str, port: int, token: str | None, ready: Callable[[str], None]
) -> None:
    """Serve until SIGTERM or SIGINT; `ready` is told the address."""
    import socket

    import uvicorn

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}") from None
    config = uvicorn.Config(
        http_application(sessions, host, token), log_config=None, timeout_graceful_shutdown=5
    )
    shown = f"[{host}]" if ":" in host else host
    sweeper = asyncio.create_task(sessions.sweep())
    ready(f"http://{shown}:{listening.getsockname()[1]}/mcp")
    try:
        await uvicorn.Server(config).serve([listening])
    finally:
        sweeper.cancel()
