"""The HTTP client against a real server: what is sent again, what is not, and what a failure says."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from ludus.core.messages import Json
from ludus.remote.client import (
    LONGEST_RETRY_AFTER,
    BadResponse,
    HttpClient,
    NotConnected,
    RequestFailed,
    ResponseLost,
    RetryPolicy,
    backoff,
    retry_after,
)

FAST = RetryPolicy(seconds=20, retries=3, first_pause=0.001)


class _Server:
    """Answers in order; None breaks the connection off after the request has been read."""

    def __init__(self, answers: list[tuple[int, str] | None], headers: dict[str, str]) -> None:
        self.url = ""
        self.asked = 0
        self._answers: Iterator[tuple[int, str] | None] = iter(answers)
        self._headers = headers

    async def handle(self, request: web.Request) -> web.Response:
        await request.read()
        self.asked += 1
        answer = next(self._answers)
        if answer is None:
            assert request.transport is not None
            request.transport.abort()
            await asyncio.sleep(0.05)
            return web.Response()
        status, text = answer
        return web.Response(status=status, text=text, headers=self._headers)


@asynccontextmanager
async def serving(*answers: tuple[int, str] | None, **headers: str) -> AsyncIterator[_Server]:
    server = _Server(list(answers), {name.replace("_", "-"): value for name, value in headers.items()})
    app = web.Application()
    app.router.add_route("*", "/", server.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
    try:
        yield server
    finally:
        await runner.cleanup()


@asynccontextmanager
async def client(**options: Any) -> AsyncIterator[HttpClient]:
    made = HttpClient(purpose="a test", **options)
    try:
        yield made
    finally:
        await made.close()


def whole(body: Json) -> Json:
    return body


@pytest.mark.parametrize(
    ("method", "repeatable", "times"),
    [("GET", False, 2), ("POST", False, 1), ("POST", True, 2)],
)
@pytest.mark.parametrize("lost", [None, (500, "{}"), (200, "no JSON")])
async def test_what_may_have_run_is_sent_again_only_where_that_is_safe(
    method: str, repeatable: bool, times: int, lost: tuple[int, str] | None
) -> None:
    async with serving(lost, (200, '{"a": 1}')) as server, client() as http:
        asked = http.request(method, server.url, None, FAST, whole, repeatable=repeatable)
        if times == 1:
            with pytest.raises(RequestFailed, match="in 1 attempts"):
                await asked
        else:
            assert await asked == {"a": 1}
        assert server.asked == times


@pytest.mark.parametrize("status", [425, 429, 503])
async def test_what_was_refused_before_it_ran_is_always_sent_again(status: int) -> None:
    async with serving((status, "{}"), (200, '{"a": 1}')) as server, client() as http:
        assert await http.request("POST", server.url, {}, FAST, whole) == {"a": 1}


async def test_a_refusal_is_not_repeated_and_attempts_are_bounded() -> None:
    async with serving((400, '{"error": "no"}'), *[(503, "{}")] * 4) as server, client() as http:
        with pytest.raises(RequestFailed, match=r"refuses.*no") as refused:
            await http.request("GET", server.url, None, FAST, whole)
        assert refused.value.reply is not None and refused.value.reply.status == 400
        assert server.asked == 1
        with pytest.raises(RequestFailed, match="in 4 attempts"):
            await http.request("GET", server.url, None, FAST, whole)
        assert server.asked == 5


async def test_answers_that_are_no_use_have_a_bound_of_their_own() -> None:
    def useless(body: Json) -> Json:
        raise BadResponse("no vectors")

    policy = RetryPolicy(seconds=20, retries=9, first_pause=0.001, unusable=1)
    async with serving(*[(200, "{}")] * 9) as server, client() as http:
        with pytest.raises(RequestFailed, match="in 2 attempts: no vectors"):
            await http.request("GET", server.url, None, policy, useless)


async def test_a_server_is_waited_for_as_long_as_it_asks_within_the_deadline() -> None:
    async with serving((503, "{}"), (200, "{}"), Retry_After="0.2") as server, client() as http:
        started = time.monotonic()
        await http.request("GET", server.url, None, FAST, whole)
        assert time.monotonic() - started >= 0.2
    async with serving((503, "{}"), Retry_After="30") as server, client() as http:
        policy = RetryPolicy(seconds=0.2, retries=3)
        with pytest.raises(RequestFailed, match=r"within 0\.2 seconds"):
            await http.request("GET", server.url, None, policy, whole)


async def test_failures_say_whether_the_request_was_sent() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}/"
        async with client() as http:
            with pytest.raises(NotConnected):
                await http.send("GET", address)
    async with serving(None, (200, "x" * 200)) as server, client(most_bytes=100) as http:
        with pytest.raises(ResponseLost):
            await http.send("POST", server.url, {})
        with pytest.raises(ResponseLost, match="more than 100 bytes"):
            await http.send("POST", server.url, {})


def test_pauses_grow_to_a_bound_and_are_spread() -> None:
    for attempt in range(2000):
        pause = min(5.0, 0.1 * 2 ** min(attempt, 20))
        assert 1.0 + pause / 2 <= backoff(attempt, 0.1, 5.0, at_least=1.0) <= 1.0 + pause
    assert len({backoff(3, 0.1) for _ in range(50)}) > 10


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("2.5", 2.5),
        (7.0, 7),
        (None, 0),
        ("", 0),
        ("-1", 0),
        ("nan", 0),
        ("inf", LONGEST_RETRY_AFTER),
        ("Wed, 21 Oct 2026 07:28:00 GMT", 0),
    ],
)
def test_how_long_a_server_asks_to_wait(said: str | float | None, seconds: float) -> None:
    assert retry_after(said) == seconds
