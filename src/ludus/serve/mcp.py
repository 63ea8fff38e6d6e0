"""Ludus's tools and environments as an MCP server: what other agents use, over stdio or streamable HTTP.

A session of the protocol is an episode here: its sandbox, its files and its environments last as long as it
does. Over stdio the process has one session; over HTTP each client has its own, which is closed when the
client says so or when it has been idle. The stateless revision of the protocol (2026-07-28) has no sessions
over HTTP, so there the server offers an older one, which all of them know.

Environments bring a tool more, `begin_task`: it resets them for the task of that number, and says what it is.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import AsyncIterator, Iterable, MutableMapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import mcp_types as types
from aiohttp import web
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
from ludus.serve.admission import RequestError, Running
from ludus.serve.app import (
    AppServer,
    HttpApi,
    bearer_token,
    check_exposure,
    check_token,
    json_response,
    taken,
)
from ludus.serve.service import ServerConfig
from ludus.tools.hosting import ToolHost
from ludus.tools.json_schema import argument_problems
from ludus.tools.wire import JSON_TYPE

_log = logging.getLogger(__name__)

BEGIN = "begin_task"
STDIO = "stdio"
_MOST_BODY = 4 * 1024 * 1024
_ABOUT = {
    "number": {"type": "integer", "minimum": 0, "description": "Which of the tasks; each has a number."}
}


@dataclass(slots=True)
class AgentSession:
    """Session of one client."""

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

    async def list(self, id: str) -> list[ToolSpec]:
        """The session's current tools."""
        async with self._used(id) as context:
            found = list(await self._host.list(context))
        if self._tasks:
            schema = {"type": "object", "properties": _ABOUT, "required": ["number"]}
            about = f"Begin a task from its start: 0 to {len(self._tasks) - 1}. What was done before is gone."
            found.append(ToolSpec(BEGIN, about, schema))
        return found

    async def call(self, id: str, name: str, arguments: Json) -> ToolResult:
        """Run one call; a mistake of the caller's is a result with a fault."""
        if name == BEGIN and self._tasks:
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
        shown = [observation_from_json(one) for one in seen.values()]
        told = [*(message.content for message in task.messages), *(one.text for one in shown)]
        media = tuple(one for observation in shown for one in observation.media)
        return ToolResult("\n\n".join(text for text in told if text), media=media)


def make_mcp_server(sessions: AgentSessions) -> Server[Any]:
    """The protocol's side of it."""

    async def list_tools(
        context: ServerRequestContext[Any], params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        try:
            specs = await sessions.list(_session_id(context))
        except (InfraError, ConfigError) as error:
            raise MCPError(types.INTERNAL_ERROR, str(error)) from error
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

    return Server("ludus", on_list_tools=list_tools, on_call_tool=call_tool)


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


class McpApi(HttpApi):
    """The protocol over streamable HTTP at /mcp, by the SDK's application, which speaks ASGI."""

    def __init__(self, sessions: AgentSessions, config: ServerConfig, token: str | None) -> None:
        super().__init__(config)
        self._sessions, self._token = sessions, token
        self.running = Running()
        self._tasks: set[asyncio.Task[None]] = set()
        self.asgi = make_mcp_server(sessions).streamable_http_app(
            host=config.host, max_request_body_size=config.max_body_bytes
        )

    def routes(self) -> Iterable[web.RouteDef]:
        return [web.route("*", "/mcp", self._handle)]

    def admit(self, request: web.Request) -> None:
        check_token(request, bearer_token(request.headers), self._token)

    def problem(self, request: web.Request, error: Exception) -> web.Response | None:
        match error:
            case MCPError():
                status, told = 400, error.error
            case RequestError():
                status, told = error.kind.status, _invalid(str(error))
            case web.HTTPException():
                status, told = error.status, _invalid(error.reason)
            case _:
                return None
        body = types.JSONRPCError(jsonrpc="2.0", id=None, error=told)
        return json_response(body.model_dump(mode="json", exclude_none=True), status)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        version = request.headers.get("mcp-protocol-version")
        if version in MODERN_PROTOCOL_VERSIONS:
            known = {"supported": list(HANDSHAKE_PROTOCOL_VERSIONS), "requested": version}
            text = "sandboxes and environments need a session: use a revision with a handshake"
            raise MCPError(types.UNSUPPORTED_PROTOCOL_VERSION, text, known)
        if request.method == "POST":
            body = bytes(await self.bodies.read(request))
            with self.running:
                return await self._forwarded(request, body)
        answer = await self._forwarded(request)
        if request.method == "DELETE" and "mcp-session-id" in request.headers:
            await self._sessions.close(request.headers["mcp-session-id"])
        return answer

    async def _forwarded(self, request: web.Request, body: bytes = b"") -> web.StreamResponse:
        """Stream the SDK's response.

        A client that disconnects cancels this handler. The SDK is told instead: cancelled, it would end the
        whole session, and clients may hang up as soon as they have read their event.
        """
        answer, seconds = web.StreamResponse(), self._config.client_seconds
        gone = asyncio.Event()
        has_received = False

        async def receive() -> Json:
            nonlocal has_received
            if has_received:
                await gone.wait()
                return {"type": "http.disconnect"}
            has_received = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: MutableMapping[str, Any]) -> None:
            if gone.is_set():
                return
            try:
                if message["type"] == "http.response.start":
                    answer.set_status(message["status"])
                    for name, value in message["headers"]:
                        answer.headers.add(name.decode("latin-1"), value.decode("latin-1"))
                    await answer.prepare(request)
                    return
                if data := message.get("body"):
                    await taken(request, seconds, answer.write(data))
                if not message.get("more_body"):
                    await taken(request, seconds, answer.write_eof())
            except ConnectionError:
                gone.set()

        task = asyncio.create_task(self.asgi(_scope(request), receive, send))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            await asyncio.shield(task)
        finally:
            gone.set()
        return answer

    async def close(self) -> None:
        """End what the SDK still does for clients that are gone."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _invalid(message: str) -> types.ErrorData:
    return types.ErrorData(code=types.INVALID_REQUEST, message=message)


def _scope(request: web.Request) -> Json:
    """A request in ASGI's words. What a body is called has been checked: no parser may read it otherwise."""
    headers = [(name.lower(), value) for name, value in request.raw_headers]
    if request.method == "POST":
        headers = [(name, value) for name, value in headers if name != b"content-type"]
        headers.append((b"content-type", JSON_TYPE.encode()))
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": request.scheme,
        "path": request.path,
        "root_path": "",
        "query_string": request.query_string.encode(),
        "headers": headers,
    }


class McpServer(AppServer):
    """The protocol over HTTP in this event loop: `start`, then `drain_and_stop`, in one task."""

    def __init__(self, sessions: AgentSessions, host: str, port: int, token: str | None) -> None:
        super().__init__(
            ServerConfig(host=host, port=port, max_body_bytes=_MOST_BODY, drain_seconds=5.0)
        )
        check_exposure(host, token)
        self._sessions = sessions
        self._api = McpApi(sessions, self._config, token)
        self._open = AsyncExitStack()
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> str:
        asgi = self._api.asgi
        await self._open.enter_async_context(asgi.router.lifespan_context(asgi))
        try:
            address = await self._listen(self._api)
        except BaseException:
            await self._open.aclose()
            raise
        self._sweeper = asyncio.create_task(self._sessions.sweep())
        return f"{address}/mcp"

    async def drain_and_stop(self) -> None:
        """Let running calls finish within `drain_seconds`; close the connections."""
        await self._api.running.ended(self._config.drain_seconds)
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self._hang_up()
        await self._api.close()
        await self._open.aclose()
