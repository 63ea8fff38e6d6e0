"""MCP servers behind an address: the SDK's own server, real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from ludus.core.failures import Fault, InfraError
from ludus.core.messages import ToolCall, ToolContext
from ludus.core.task import Task
from ludus.tools.mcp import mcp_tools

App = Callable[[Any, Any, Any], Awaitable[None]]


def context(name: str) -> ToolContext:
    return ToolContext(name, Task("t"))


def counting() -> MCPServer:
    """A server that keeps a count for each session."""
    server = MCPServer("counting")
    counts: dict[str, int] = {}

    @server.tool()
    async def count(ctx: Context[Any]) -> str:
        key = (ctx.headers or {})["mcp-session-id"]
        counts[key] = counts.get(key, 0) + 1
        return str(counts[key])

    @server.tool()
    async def big(size: int) -> str:
        return "x" * size

    @server.tool()
    async def fail() -> str:
        raise ToolError("it does not work")

    return server


@asynccontextmanager
async def serving(app: App, port: int = 0) -> AsyncIterator[int]:
    listening = socket.create_server(("127.0.0.1", port))
    config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve([listening]))
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        await running


def guarded(app: App, token: str) -> App:
    async def check(scope: Any, receive: Any, send: Any) -> None:
        given = dict(scope.get("headers") or ()).get(b"authorization")
        if scope["type"] == "http" and given != f"Bearer {token}".encode():
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"who are you?"})
            return
        await app(scope, receive, send)

    return check


async def test_sessions_tokens_and_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "s3cret")
    headers = {"Authorization": "Bearer ${MY_TOKEN}"}
    async with serving(guarded(counting().streamable_http_app(), "s3cret")) as port:
        address = f"http://127.0.0.1:{port}/mcp"
        tools = mcp_tools({"mcp": address, "headers": headers, "max_message_bytes": 50_000})
        one, two = context("one"), context("two")
        try:
            await asyncio.gather(tools.open(one), tools.open(two))
            assert {spec.name for spec in await tools.list(one)} == {"count", "big", "fail"}
            made = [(await tools.call(ToolCall("count"), where)).content for where in (one, two, one)]
            assert made == ["1", "1", "2"]  # each episode has a session of its own
            failed = await tools.call(ToolCall("fail"), one)
            assert failed.fault is Fault.TOOL_RAISED and "it does not work" in failed.content
            huge = await tools.call(ToolCall("big", {"size": 1_000_000}), one)
            assert huge.fault is Fault.LIMIT and len(huge.content) < 500
            assert (await tools.call(ToolCall("count"), one)).content == "3"  # the session lives on
        finally:
            await tools.aclose()
        stranger = mcp_tools({"mcp": address, "restarts": 0})
        with pytest.raises(InfraError, match="HTTP status 401"):
            await stranger.open(one)


async def test_json_answers_are_bounded_too() -> None:
    app = counting().streamable_http_app(json_response=True)
    async with serving(app) as port:
        tools = mcp_tools({"mcp": f"http://127.0.0.1:{port}/mcp", "max_message_bytes": 50_000})
        try:
            huge = await tools.call(ToolCall("big", {"size": 1_000_000}), context("one"))
            assert huge.fault is Fault.LIMIT and len(huge.content) < 500
        finally:
            await tools.aclose()


async def test_a_server_that_goes_away_and_comes_back() -> None:
    one = context("one")
    async with serving(counting().streamable_http_app()) as port:
        tools = mcp_tools({"mcp": f"http://127.0.0.1:{port}/mcp", "restarts": 0})
        await tools.open(one)
        assert (await tools.call(ToolCall("count"), one)).content == "1"
    try:
        with pytest.raises(InfraError) as caught:
            await tools.call(ToolCall("count"), one)
        assert caught.value.replay  # its session is lost, so it is played again
        with pytest.raises(InfraError, match="ConnectError"):
            await tools.open(context("two"))
        async with serving(counting().streamable_http_app(), port):
            await asyncio.sleep(0.3)  # the pause after a failed start
            await tools.open(one)
            assert (await tools.call(ToolCall("count"), one)).content == "1"
            await tools.aclose()
    finally:
        await tools.aclose()
