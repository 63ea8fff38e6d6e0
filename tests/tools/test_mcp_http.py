"""MCP servers behind an address: the SDK's own server, real sockets."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import struct
import zlib
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
from ludus.tools.mcp import mcp_tools, toolset

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


def packed(app: App, packing: str, bomb: int = 0) -> App:
    """All JSON answers packed; those to calls are `bomb` megabytes of spaces before the answer."""

    def pack(body: bytes) -> bytes:
        spaces, whole, checksum = b" " * 1_000_000, zlib.compressobj(9, zlib.DEFLATED, -15), 0
        # each block stands alone after a full flush, so one is packed and repeated
        block = whole.compress(spaces) + whole.flush(zlib.Z_FULL_FLUSH)
        for _ in range(bomb):
            checksum = zlib.crc32(spaces, checksum)
        rest = zlib.compressobj(9, zlib.DEFLATED, -15)
        ending = struct.pack("<II", zlib.crc32(body, checksum), (bomb * len(spaces) + len(body)) % 2**32)
        header = bytes.fromhex("1f8b08000000000000ff")
        return b"".join([header, block * bomb, rest.compress(body), rest.flush(), ending])

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        start: list[Any] = []
        body = bytearray()

        async def hold(message: Any) -> None:
            if message["type"] == "http.response.start":
                start.append(message)
                return
            body.extend(message.get("body", b""))
            if message.get("more_body"):
                return
            if not body:
                await send(start[0])
                await send({"type": "http.response.body"})
                return
            is_call = b'"content"' in body
            sent = pack(bytes(body)) if bomb == 0 or is_call else bytes(body)
            headers = [(k, v) for k, v in start[0]["headers"] if k != b"content-length"]
            if bomb == 0 or is_call:
                headers.append((b"content-encoding", packing.encode()))
            await send({**start[0], "headers": headers})
            await send({"type": "http.response.body", "body": sent})

        await app(scope, receive, hold if scope["type"] == "http" else send)

    return answer


def peak() -> int:
    """Bytes of memory that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


async def test_answers_are_bounded_as_they_are_unpacked() -> None:
    app = packed(counting().streamable_http_app(json_response=True), "gzip", bomb=1500)
    async with serving(app) as port:
        tools = mcp_tools({"mcp": f"http://127.0.0.1:{port}/mcp", "max_message_bytes": 1_000_000})
        try:
            await tools.open(context("one"))
            before = peak()
            huge = await tools.call(ToolCall("big", {"size": 1}), context("one"))
            assert huge.fault is Fault.LIMIT and "larger than max_message_bytes" in huge.content
            assert peak() - before < 500_000_000  # of 1,500,000,000 that it unpacks to
        finally:
            await tools.aclose()


async def test_packed_answers_are_read() -> None:
    app = packed(counting().streamable_http_app(json_response=True), "gzip")
    async with serving(app) as port:
        tools = mcp_tools({"mcp": f"http://127.0.0.1:{port}/mcp"})
        try:
            assert (await tools.call(ToolCall("big", {"size": 5}), context("one"))).content == "xxxxx"
        finally:
            await tools.aclose()


async def test_a_packing_that_nobody_asked_for_is_refused() -> None:
    app = packed(counting().streamable_http_app(json_response=True), "br")
    async with serving(app) as port:
        tools = mcp_tools({"mcp": f"http://127.0.0.1:{port}/mcp", "restarts": 0})
        with pytest.raises(InfraError, match="packed as br"):
            await tools.open(context("one"))
        await tools.aclose()


async def test_results_with_very_many_blocks_are_cut_before_they_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    real = toolset._rendered

    def watched(blocks: Any) -> Any:
        seen.append(len(blocks))
        return real(blocks)

    monkeypatch.setattr(toolset, "_rendered", watched)
    server = MCPServer("many")

    @server.tool(structured_output=False)
    async def many(count: int) -> list[str]:
        return [f"line {n}" for n in range(count)]

    async with serving(server.streamable_http_app(json_response=True)) as port:
        tools = mcp_tools({"mcp": f"http://127.0.0.1:{port}/mcp", "max_chars": 200_000})
        try:
            few = await tools.call(ToolCall("many", {"count": 3}), context("one"))
            assert few.content == "line 0\nline 1\nline 2"
            found = await tools.call(ToolCall("many", {"count": 20_000}), context("one"))
            assert seen == [3, 1000]
            assert found.content.endswith("line 998\n... [19,001 more blocks left out] ...")
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


def answer(number: int, **more: Any) -> str:
    return json.dumps({"jsonrpc": "2.0", "id": number, **more})


HOSTILE: dict[str, Callable[[int], str]] = {
    "null result": lambda n: answer(n, result=None),
    "no result": answer,
    "null content": lambda n: answer(n, result={"content": None}),
    "null tools": lambda n: answer(n, result={"tools": None}),
    "empty result": lambda n: answer(n, result={}),
    "a list": lambda n: answer(n, result=[]),
    "null error": lambda n: answer(n, error=None),
    "null": lambda n: "null",
    "nothing": lambda n: "",
    "a page": lambda n: "<html>it works!</html>",
    "deep": lambda n: "[" * 100_000,
}


def hostile(where: str, make: Callable[[int], str], kind: str) -> App:
    """A server that answers requests of one method with what is no MCP."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body, more = b"", scope["method"] == "POST"
        while more:
            received = await receive()
            body, more = body + received.get("body", b""), received.get("more_body", False)
        asked = json.loads(body) if body else {}
        number, status, sent = asked.get("id"), 200 if body else 405, "application/json"
        tools = [{"name": name, "inputSchema": {"type": "object"}} for name in ("add", "other")]
        about = {"name": "hostile", "version": "1"}
        results: dict[str, Any] = {
            "initialize": {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": about},
            "tools/list": {"tools": tools},
            "tools/call": {"content": [{"type": "text", "text": "fine"}]},
        }
        text = answer(number, result=results.get(asked.get("method"), {})) if number is not None else ""
        is_other = asked.get("params", {}).get("name") == "other"
        if asked.get("method") == where and not is_other:
            text, sent = make(number), kind
            text = f"event: message\ndata: {text}\n\n" if "event" in kind else text
        elif number is None:
            status = 202 if body else 405
        headers = [(b"content-type", sent.encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": text.encode()})

    return app


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream", "text/html"])
@pytest.mark.parametrize("name", HOSTILE)
async def test_an_answer_that_is_no_mcp_is_the_servers_failure(name: str, kind: str) -> None:
    """At once, and never an observation: the model has done nothing wrong."""
    one = context("one")
    async with serving(hostile("tools/call", HOSTILE[name], kind)) as port:
        tools = mcp_tools({"mcp": f"http://127.0.0.1:{port}/mcp", "timeout": 30, "restarts": 0})
        try:
            async with asyncio.timeout(20):
                await tools.open(one)
                with pytest.raises(InfraError) as caught:
                    await tools.call(ToolCall("add"), one)
            if name == "nothing" and "event" in kind:  # a stream that ends is one that broke off
                assert caught.value.kind == "MCPServerDied"
                return
            assert caught.value.kind == "MCPServerNonsense" and len(str(caught.value)) < 600
            assert "a call of 'add' with what is no MCP" in str(caught.value)
            assert (await tools.call(ToolCall("other"), one)).content == "fine"  # the session lives on
        finally:
            await tools.aclose()


@pytest.mark.parametrize("name", ["null result", "null tools", "nothing", "a page"])
async def test_a_list_that_is_no_mcp_is_told_when_it_is_opened(name: str) -> None:
    async with serving(hostile("tools/list", HOSTILE[name], "application/json")) as port:
        tools = mcp_tools({"mcp": f"http://127.0.0.1:{port}/mcp", "restarts": 0})
        async with asyncio.timeout(20):
            with pytest.raises(InfraError, match="answered tools/list with what is no MCP"):
                await tools.open(context("one"))
        await tools.aclose()
