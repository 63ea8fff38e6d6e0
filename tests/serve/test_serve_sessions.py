"""Sessions at awkward moments: half open, closing, failing to open, asked for by clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import aiohttp
import pytest

from ludus.core import Boundary, InfraError, Task, ToolCall, ToolContext, ToolResult, ToolSpec
from ludus.serve import ServerConfig, ToolServer
from ludus.tools.hosting import LocalHost
from ludus.tools.remote import RemoteTools


class Careful:
    """A tool set that takes its time, when told to, and knows what is open."""

    def __init__(self) -> None:
        self.is_open: set[str] = set()
        self.gate = asyncio.Event()
        self.gate.set()
        self.fails: Exception | None = None

    async def open(self, context: ToolContext) -> None:
        await self.gate.wait()
        if self.fails is not None:
            raise self.fails
        self.is_open.add(context.episode)

    async def list(self, context: ToolContext) -> Sequence[ToolSpec]:
        return [ToolSpec("tell", "Tell.", {"type": "object"})]

    async def call(self, call: ToolCall, context: ToolContext) -> ToolResult:
        assert context.episode in self.is_open
        return ToolResult("told")

    async def close(self, context: ToolContext) -> None:
        await self.gate.wait()
        self.is_open.discard(context.episode)


@pytest.fixture
async def tools() -> Careful:
    return Careful()


@pytest.fixture
async def server(tools: Careful) -> AsyncIterator[ToolServer]:
    async with ToolServer(LocalHost(lambda: tools), ServerConfig(max_sessions=2)) as server:
        yield server
        assert server.service is not None
        assert server.service.admission.running == server.service.admission.waiting == 0
    assert not tools.is_open


def opening(session: str) -> dict[str, str]:
    return {"session": session, "episode": session}


async def test_a_call_waits_for_the_session_that_is_being_opened(
    server: ToolServer, tools: Careful, http: aiohttp.ClientSession
) -> None:
    tools.gate.clear()
    url = f"{server.address}/v1/sessions"
    opened = [asyncio.create_task(http.post(url, json=opening("s1")).__aenter__()) for _ in range(2)]
    await asyncio.sleep(0.1)
    called = asyncio.create_task(
        http.post(f"{url}/s1/calls", json={"key": "k", "name": "tell"}).__aenter__()
    )
    await asyncio.sleep(0.1)
    assert not called.done()
    tools.gate.set()
    assert (await called).status == 200
    assert sorted([(await task).status for task in opened]) == [200, 201]


async def test_closing_what_is_being_opened(
    server: ToolServer, tools: Careful, http: aiohttp.ClientSession
) -> None:
    tools.gate.clear()
    url = f"{server.address}/v1/sessions"
    opened = asyncio.create_task(http.post(url, json=opening("s1")).__aenter__())
    await asyncio.sleep(0.1)
    closed = asyncio.create_task(http.delete(f"{url}/s1").__aenter__())
    answer = await opened
    assert (answer.status, (await answer.json())["error"]["kind"]) == (404, "session_unknown")
    tools.gate.set()
    assert (await (await closed).json()) == {"ended": True}


async def test_a_session_is_closed_though_its_client_has_left(
    server: ToolServer, tools: Careful, http: aiohttp.ClientSession
) -> None:
    url = f"{server.address}/v1/sessions"
    await http.post(url, json=opening("s1"))
    tools.gate.clear()
    with pytest.raises(TimeoutError):
        await http.delete(f"{url}/s1", timeout=aiohttp.ClientTimeout(total=0.1))
    async with http.get(f"{url}/s1") as answer:
        assert answer.status == 404
    tools.gate.set()
    assert server.service is not None
    async with asyncio.timeout(10):
        while len(server.service.sessions):  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)
    assert not tools.is_open


async def test_tools_that_cannot_be_opened(server: ToolServer, tools: Careful) -> None:
    async with RemoteTools(server.address) as remote:
        episode = ToolContext("e", Task.of("go"))
        tools.fails = InfraError(Boundary.POOL, "none left", retriable=True)
        with pytest.raises(InfraError, match="none left") as caught:
            await remote.open(episode)
        assert caught.value.boundary is Boundary.POOL and caught.value.retriable and caught.value.replay
        tools.fails = ZeroDivisionError("oops")
        with pytest.raises(InfraError, match="ZeroDivisionError: oops"):
            await remote.open(episode)
        tools.fails = None
        assert (await remote.call(ToolCall("tell"), episode)).content == "told"
        await remote.close(episode)


async def test_no_more_sessions_than_allowed(server: ToolServer, http: aiohttp.ClientSession) -> None:
    url = f"{server.address}/v1/sessions"
    answers = [await http.post(url, json=opening(f"s{i}")) for i in range(3)]
    assert [answer.status for answer in answers] == [201, 201, 503]
    assert (await answers[2].json())["error"]["kind"] == "overloaded"
    async with RemoteTools(server.address) as remote:
        waiting = asyncio.create_task(remote.call(ToolCall("tell"), ToolContext("e", Task.of("go"))))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await http.delete(f"{url}/s0")
        assert (await waiting).content == "told"
