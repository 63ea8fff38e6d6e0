"""Sessions at awkward moments: half open, closing, failing to open, asked for by clients that leave."""

from __future__ import annotations

import asyncio
import secrets
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


IDS = [secrets.token_hex(16) for _ in range(3)]


def opening(session: str = IDS[0]) -> dict[str, str]:
    return {"session": session, "episode": session}


async def test_a_call_waits_for_the_session_that_is_being_opened(
    server: ToolServer, tools: Careful, http: aiohttp.ClientSession
) -> None:
    tools.gate.clear()
    url = f"{server.address}/v1/sessions"
    opened = [asyncio.create_task(http.post(url, json=opening()).__aenter__()) for _ in range(2)]
    await asyncio.sleep(0.1)
    called = asyncio.create_task(
        http.post(f"{url}/{IDS[0]}/calls", json={"key": "k", "name": "tell"}).__aenter__()
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
    opened = asyncio.create_task(http.post(url, json=opening()).__aenter__())
    await asyncio.sleep(0.1)
    closed = asyncio.create_task(http.delete(f"{url}/{IDS[0]}").__aenter__())
    answer = await opened
    assert (answer.status, (await answer.json())["error"]["kind"]) == (404, "session_unknown")
    tools.gate.set()
    assert (await (await closed).json()) == {"ended": True}


async def test_a_session_is_closed_though_its_client_has_left(
    server: ToolServer, tools: Careful, http: aiohttp.ClientSession
) -> None:
    url = f"{server.address}/v1/sessions"
    await http.post(url, json=opening())
    tools.gate.clear()
    with pytest.raises(TimeoutError):
        await http.delete(f"{url}/{IDS[0]}", timeout=aiohttp.ClientTimeout(total=0.1))
    async with http.get(f"{url}/{IDS[0]}") as answer:
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
    answers = [await http.post(url, json=opening(id)) for id in IDS]
    assert [answer.status for answer in answers] == [201, 201, 503]
    assert (await answers[2].json())["error"]["kind"] == "overloaded"
    async with RemoteTools(server.address) as remote:
        waiting = asyncio.create_task(remote.call(ToolCall("tell"), ToolContext("e", Task.of("go"))))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await http.delete(f"{url}/{IDS[0]}")
        assert (await waiting).content == "told"


@pytest.mark.parametrize("name", ["alice", "s1", "a" * 40, "session-1", "0123456789abcde"])
async def test_a_session_that_others_could_guess_is_refused(
    server: ToolServer, http: aiohttp.ClientSession, name: str
) -> None:
    async with http.post(f"{server.address}/v1/sessions", json=opening(name)) as answer:
        said = (await answer.json())["error"]["message"]
        assert answer.status == 400 and "session: " in said and "leave it out" in said
    assert server.service is not None and len(server.service.sessions) == 0


async def test_a_session_is_named_by_the_server_where_its_client_names_none(
    server: ToolServer, http: aiohttp.ClientSession
) -> None:
    url = f"{server.address}/v1/sessions"
    found = []
    for _ in range(2):
        async with http.post(url, json={"episode": "e"}) as answer:
            assert answer.status == 201
            found.append((await answer.json())["session"])
    assert len(set(found)) == 2 and all(len(id) >= 32 for id in found)
    async with http.delete(f"{url}/{'0' * 32}") as answer:
        assert (await answer.json()) == {"ended": False}
    for id in found:
        async with http.post(f"{url}/{id}/calls", json={"key": "k", "name": "tell"}) as answer:
            assert (await answer.json())["content"] == "told"
        async with http.delete(f"{url}/{id}") as answer:
            assert (await answer.json()) == {"ended": True}
