"""The client of tool servers, against a server in this process and against servers that misbehave."""

from __future__ import annotations

import asyncio
import gc
import json
import warnings
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import ClientSession, web
from hypothesis import given
from hypothesis import strategies as st

from ludus.core import (
    Boundary,
    ConfigError,
    InfraError,
    Media,
    Message,
    Task,
    ToolCall,
    ToolContext,
    ToolResult,
    ToolSpec,
)
from ludus.remote.client import PerLoop
from ludus.serve import ServerConfig, ToolServer
from ludus.tools import as_toolset, tool
from ludus.tools.hosting import EpisodeLost, LocalHost, OutcomeUnknown
from ludus.tools.remote import RemoteTools
from ludus.tools.remote_http import failure_of, in_order, normalized, unsendable
from ludus.tools.wire import (
    ErrorBody,
    error_from_json,
    error_to_json,
    result_from_json,
    result_to_json,
    task_from_json,
    task_to_json,
)

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def misbehaving(answer: Answer) -> AsyncIterator[str]:
    """A server that opens sessions as it should, and answers calls with `answer`."""

    async def opened(request: web.Request) -> web.Response:
        tools = [
            {
                "name": name,
                "description": "",
                "parameters": {},
                "repeatable": name == "look",
                "stateful": False,
            }
            for name in ("look", "pay")
        ]
        return web.json_response({"tools": tools}, status=201, headers={"Ludus-Instance": "one"})

    async def ended(request: web.Request) -> web.Response:
        return web.json_response({"ended": True})

    app = web.Application()
    app.router.add_post("/v1/sessions", opened)
    app.router.add_delete("/v1/{rest:.*}", ended)
    app.router.add_post("/v1/sessions/{id}/calls", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def context(name: str = "e") -> ToolContext:
    return ToolContext(name, Task.of("go"))


async def test_a_broken_answer_is_asked_for_again_with_the_same_key() -> None:
    seen: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        seen.append(await request.json())
        if len(seen) == 1:
            assert request.transport is not None
            request.transport.abort()
        if len(seen) == 2:
            return web.Response(text="<html>502</html>", status=502, content_type="text/html")
        return web.json_response(result_to_json(ToolResult("there")))

    async with misbehaving(answer) as address, RemoteTools(address) as tools:
        assert (await tools.call(ToolCall("pay"), context())).content == "there"
        assert tools.counters.retries == 2
    assert len({body["key"] for body in seen}) == 1
    assert "retry" not in seen[0] and seen[1]["retry"]["instance"] == "one"
    assert 0 <= seen[1]["retry"]["age_ms"] <= seen[2]["retry"]["age_ms"]


async def test_giving_up_tells_what_may_have_run_from_what_cannot_have() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async with misbehaving(answer) as address, RemoteTools(address, unreachable_seconds=0.2) as tools:
        with pytest.raises(OutcomeUnknown, match="whether it took effect"):
            await tools.call(ToolCall("pay"), context())
        with pytest.raises(InfraError, match="no result from the tool server") as caught:
            await tools.call(ToolCall("look"), context())
        assert caught.value.boundary is Boundary.SERVER and caught.value.attempts > 1


@pytest.mark.parametrize(
    "body", [{}, {"content": 3, "fault": "no such fault"}, {"content": "x", "media": [1]}], ids=str
)
async def test_an_answer_that_makes_no_sense_is_a_failure_of_ours(body: dict[str, Any]) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response(body)

    async with misbehaving(answer) as address, RemoteTools(address) as tools:
        with pytest.raises(InfraError, match="unexpected reply") as caught:
            await tools.call(ToolCall("look"), context())
        assert not caught.value.retriable


async def test_a_stream_that_ends_early_is_not_a_result() -> None:
    calls = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal calls
        calls += 1
        lines = [{"result": {"fault": None}}, {"text": "half"}, {"text": " whole"}, {"end": 10}]
        text = "".join(json.dumps(line) + "\n" for line in lines[: 2 if calls == 1 else 4])
        return web.Response(text=text, content_type="application/x-ndjson")

    async with misbehaving(answer) as address, RemoteTools(address) as tools:
        assert (await tools.call(ToolCall("look"), context())).content == "half whole"
    assert calls == 2


async def test_a_server_says_when_to_come_back() -> None:
    times: list[float] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        times.append(asyncio.get_running_loop().time())
        if len(times) == 1:
            error = {"kind": "overloaded", "message": "full", "started": False, "retry_after": 0.4}
            return web.json_response({"error": error}, status=503)
        return web.json_response(result_to_json(ToolResult("there")))

    async with misbehaving(answer) as address, RemoteTools(address) as tools:
        await tools.call(ToolCall("look"), context())
        assert tools.counters.refused == 1
    assert times[1] - times[0] >= 0.4


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            {"kind": "failed", "message": "no disk", "started": True, "boundary": "env", "news": 1},
            "no disk",
        ),
        ({"kind": "failed", "message": "no disk", "started": "perhaps"}, "unexpected reply.*started"),
        ({"kind": "no such kind", "message": "", "started": False}, "unexpected reply.*kind"),
        ("no table", "unexpected reply"),
    ],
)
async def test_errors_of_other_versions_are_read_or_named(error: Any, message: str) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": error}, status=424)

    async with misbehaving(answer) as address, RemoteTools(address) as tools:
        with pytest.raises(InfraError, match=message) as caught:
            await tools.call(ToolCall("look"), context())
        assert caught.value.boundary is (Boundary.ENV if "news" in error else Boundary.SERVER)
        assert not caught.value.retriable


@pytest.mark.parametrize(
    "error",
    [
        EpisodeLost("the worker died", attempts=2),
        OutcomeUnknown("it may have run", attempts=3),
        InfraError(Boundary.ENV, "no disk", attempts=4, retriable=False, replay=True),
        ConfigError("no such tool"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_failure_means_the_same_in_another_process_and_behind_a_server(error: Exception) -> None:
    told = json.loads(json.dumps(error_to_json(error)))
    found = [error_from_json(told)]
    if not isinstance(error, ConfigError):
        found.append(failure_of(ErrorBody(started=True, **told), told["attempts"], "http://host:1"))
    for one in found:
        assert type(one) is type(error) and str(one) == str(error) and vars(one) == vars(error)


async def test_the_list_is_asked_for_again_after_a_call() -> None:
    class Growing:
        """A tool set whose list grows with every call."""

        calls = 0

        async def open(self, context: ToolContext) -> None: ...

        async def list(self, context: ToolContext) -> list[ToolSpec]:
            return [ToolSpec(f"tool{i}", "", {"type": "object"}) for i in range(self.calls + 1)]

        async def call(self, call: ToolCall, context: ToolContext) -> ToolResult:
            self.calls += 1
            return ToolResult("", media=(Media("image", "ab" * 32, b"\x00\xff"),))

        async def close(self, context: ToolContext) -> None: ...

    async with ToolServer(LocalHost(Growing)) as server, RemoteTools(server.address) as tools:
        await tools.open(context())
        assert len(await tools.list(context())) == 1
        result = await tools.call(ToolCall("tool0"), context())
        assert result.media[0].data == b"\x00\xff"
        assert len(await tools.list(context())) == 2
        await tools.close(context())
        assert server.service is not None and len(server.service.sessions) == 0


def test_connections_end_with_the_event_loop() -> None:
    """Nobody calls `aclose`, over two event loops: no warning about what was left open."""

    @tool
    async def hello() -> str:
        """Say hello."""
        return "hello"

    tools: list[RemoteTools] = []

    async def main() -> None:
        async with ToolServer(LocalHost(lambda: as_toolset(hello)), ServerConfig(port=0)) as server:
            tools.append(RemoteTools(server.address))
            assert (await tools[-1].call(ToolCall("hello"), context())).content == "hello"
            await tools[-1].close(context())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(main())
        asyncio.run(main())
        tools.clear()
        gc.collect()


async def test_connections_of_a_forgotten_client_are_closed(caplog: pytest.LogCaptureFixture) -> None:
    class Client:
        def __init__(self) -> None:
            self.sessions = PerLoop(self.make)  # a cycle, so that it waits for the collector

        def make(self) -> ClientSession:
            return ClientSession()

    made = weakref.ref(await Client().sessions.get())
    gc.collect()
    for _ in range(10):  # closing is left to the event loop
        await asyncio.sleep(0)
    gc.collect()
    assert made() is None
    assert "Unclosed" not in caplog.text


@pytest.mark.parametrize(
    "address",
    ["", "http://", "ftp://x", "http://x:99999", "http://u@x:1", "http://x:1/?a=b", "http://x:y"],
)
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(ConfigError, match="address"):
        RemoteTools(address)
    with pytest.raises(ConfigError, match="at least one"):
        RemoteTools([])


def test_addresses_are_normalized() -> None:
    assert normalized("127.0.0.1:80") == normalized("http://127.0.0.1:80/") == "http://127.0.0.1:80"


@given(st.lists(st.text(), min_size=40, max_size=40, unique=True), st.integers(1, 4))
def test_affinity_is_stable_and_moves_only_what_it_must(episodes: list[str], lost: int) -> None:
    addresses = [f"http://h{i}" for i in range(5)]
    homes = {episode: in_order(addresses, episode)[0] for episode in episodes}
    fewer = [address for address in addresses if address != f"http://h{lost}"]
    for episode, home in homes.items():
        assert in_order(reversed_copy(addresses), episode)[0] == home
        if home in fewer:
            assert in_order(fewer, episode)[0] == home


def reversed_copy(addresses: list[str]) -> list[str]:
    return list(reversed(addresses))


def test_affinity_spreads_episodes() -> None:
    addresses = [f"http://h{i}" for i in range(4)]
    homes = Counter(in_order(addresses, f"episode {i}")[0] for i in range(4000))
    assert all(800 < count < 1200 for count in homes.values())


@given(JSON, st.text(), st.dictionaries(st.text(), JSON, max_size=3))
def test_tasks_and_results_survive_the_way(target: Any, text: str, metadata: dict[str, Any]) -> None:
    messages = (Message("system", text), Message("assistant", "", (ToolCall("f", {"a": target}, "1"),)))
    task = Task(text, messages, target, {"env": {"a": 1}}, metadata)
    assert task_from_json(json.loads(json.dumps(task_to_json(task)))) == task
    result = ToolResult(text, 0.5, True, media=(Media("image", "00", text.encode()),), seconds=1.5)
    assert result_from_json(json.loads(json.dumps(result_to_json(result)))) == result


@pytest.mark.parametrize(
    ("raw", "place"),
    [
        ({"content": 3}, "content: "),
        ({"content": "x", "fault": "tired"}, "fault: "),
        ({"content": "x", "media": [{"kind": "image", "sha256": "00", "data": "%%"}]}, "media.0.data"),
    ],
)
def test_a_result_that_is_none_is_named_by_its_field(raw: dict[str, Any], place: str) -> None:
    with pytest.raises(ValueError, match=f"^{place}"):
        result_from_json(raw)


@given(st.dictionaries(st.text(), JSON, max_size=3))
def test_plain_arguments_can_be_sent(arguments: dict[str, Any]) -> None:
    assert unsendable(arguments) == ""
    assert unsendable({"a": {1: arguments}}) and unsendable([arguments])
    assert "not finite" in unsendable({"a": [arguments, float("inf")]})
