"""Search on the web and visits to pages, against real servers on this machine; recorded calls replay."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from ludus.core import ConfigError, InfraError, Task, ToolCall, ToolContext, ToolResult
from ludus.tools.library import build_toolset
from ludus.tools.library.web import Visit, WebSearch, is_public, page_text, web_results
from ludus.tools.recording import RecordingConfig

CONTEXT = ToolContext("episode", Task.of("?"))
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SERPER = {
    "searchParameters": {"q": "bees"},
    "answerBox": {"title": "Bee", "answer": "An insect"},
    "organic": [
        {
            "title": f"Page {n}",
            "link": f"https://example.org/{n}",
            "snippet": f"About\n bees {n}.",
            "position": n,
        }
        for n in range(1, 9)
    ],
}


@asynccontextmanager
async def serving(*routes: tuple[str, str, Handler]) -> AsyncIterator[str]:
    app = web.Application()
    for method, path, handler in routes:
        app.router.add_route(method, path, handler)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def answering(status: int, body: Any, seen: list[Any] | None = None, **headers: str) -> Handler:
    async def handler(request: web.Request) -> web.Response:
        if seen is not None:
            seen.append((dict(request.headers), await request.json()))
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(status=status, text=text, headers=headers)

    return handler


async def search(url: str, **options: Any) -> ToolResult:
    return await WebSearch(url=f"{url}/search", **options).call({"query": "bees"}, CONTEXT)


async def test_serpers_answer_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERPER_API_KEY", "secret")
    seen: list[Any] = []
    async with serving(("POST", "/search", answering(200, SERPER, seen))) as url:
        found = await search(url, k=2, parameters={"gl": "us"})
    assert found.content == (
        "Answer(Title: Bee) An insect\n"
        "Doc 1(Title: Page 1) About bees 1.\nURL: https://example.org/1\n"
        "Doc 2(Title: Page 2) About bees 2.\nURL: https://example.org/2"
    )
    ((headers, body),) = seen
    assert headers["X-API-KEY"] == "secret" and body == {"q": "bees", "num": 10, "gl": "us"}


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({}, "No page matches the query."),
        ({"organic": None, "answerBox": []}, "No page matches the query."),
        ({"organic": [1, {"title": None}]}, "Doc 1(Title: ) \nURL: "),
    ],
)
def test_odd_answers(answer: Any, text: str) -> None:
    assert web_results(answer, 3) == text


@pytest.mark.parametrize(
    ("status", "body", "message", "requests"),
    [
        (403, {"message": "Unauthorized."}, "is the key right", 1),
        (400, {"message": "Not enough credits"}, "Not enough credits", 1),
        (500, "oops", "answered 500: oops", 3),
        (429, "slow down", "answered 429", 3),
        (200, "<html>", "no JSON object", 3),
        (200, [], "no JSON object", 3),
        (302, "", "answered 302", 1),
    ],
)
async def test_an_api_that_fails_is_our_failure(
    status: int, body: Any, message: str, requests: int
) -> None:
    seen: list[Any] = []
    async with serving(("POST", "/search", answering(status, body, seen))) as url:
        with pytest.raises(InfraError, match=message):
            await search(url)
    assert len(seen) == requests


async def test_nobody_there_and_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InfraError, match="cannot be reached"):
        await search("http://127.0.0.1:9")
    monkeypatch.delenv("SERPER_API_KEY", raising=False)
    with pytest.raises(InfraError, match="SERPER_API_KEY is not set"):
        await WebSearch().call({"query": "bees"}, CONTEXT)
    for options in ({"k": 0}, {"url": "ftp://x"}, {"per_second": 0.0}):
        with pytest.raises(ConfigError, match="web_search"):
            WebSearch(**options)  # type: ignore[arg-type]


async def test_calls_keep_to_the_rate() -> None:
    times: list[float] = []

    async def handler(request: web.Request) -> web.Response:
        times.append(time.monotonic())
        return web.json_response(SERPER)

    async with serving(("POST", "/search", handler)) as url:
        tool = WebSearch(url=f"{url}/search", per_second=50)
        begun = time.monotonic()
        await asyncio.gather(*(tool.call({"query": str(n)}, CONTEXT) for n in range(6)))
    for calls, when in enumerate(sorted(times)):
        assert when - begun >= calls * 0.02 - 0.002, f"call {calls} came before {calls} gaps of 20 ms"
    assert len(times) == 6


async def test_a_query_is_paid_for_once_and_replayed_offline(tmp_path: Path) -> None:
    seen: list[Any] = []
    path = str(tmp_path / "web.sqlite")
    async with serving(("POST", "/search", answering(200, SERPER, seen))) as url:
        spec = {"tool": "web_search", "url": f"{url}/search"}
        for mode in ("replay_or_call", "replay_or_call", "replay"):
            record = RecordingConfig(path=path, mode=mode, stateless=("web_search",))
            tools = build_toolset([spec], record=record)
            await tools.open(CONTEXT)
            found = await tools.call(ToolCall("web_search", {"query": "bees"}), CONTEXT)
            assert "Doc 3(Title: Page 3)" in found.content
            await tools.close(CONTEXT)
    assert len(seen) == 1
    record = RecordingConfig(path=path, mode="replay", stateless=("web_search",))
    tools = build_toolset([spec], record=record)  # the server is gone
    await tools.open(CONTEXT)
    assert "Page 3" in (await tools.call(ToolCall("web_search", {"query": "bees"}), CONTEXT)).content
    with pytest.raises(InfraError):
        await tools.call(ToolCall("web_search", {"query": "wasps"}), CONTEXT)
    await tools.close(CONTEXT)


# Visits

PAGE = """<!DOCTYPE html><html><head><title>Bees &amp; hives</title><style>p {}</style></head>
<body><script>if (a < b) alert("<p>no</p>")</script><!-- hidden > -->
<h1>Bees</h1><p>They make <b>honey</b>,
and  3 &lt; 4.</p><ul><li>one</li><li>two</li></ul></body></html>"""


def page(
    body: str | bytes = PAGE, status: int = 200, content_type: str = "text/html", **headers: str
) -> Handler:
    async def handler(request: web.Request) -> web.Response:
        data = body.encode() if isinstance(body, str) else body
        return web.Response(status=status, body=data, content_type=content_type, headers=headers)

    return handler


async def visit(url: str, goal: str = "", **options: Any) -> ToolResult:
    return await Visit(**{"private": True, **options}).call({"url": url, "goal": goal}, CONTEXT)


async def test_a_page_is_read_as_text() -> None:
    async with serving(("GET", "/", page()), ("GET", "/old", page(status=301, Location="/"))) as url:
        read = await visit(url)
        assert (
            read.content
            == f"URL: {url}\nTitle: Bees & hives\nBees\nThey make honey, and 3 < 4.\none\ntwo"
        )
        assert (await visit(f"{url}/old")).content.startswith(f"URL: {url}/\nTitle: ")


async def test_what_cannot_be_read_is_told_to_the_model() -> None:
    async def slow(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(30)
        return web.Response()

    routes: tuple[tuple[str, str, Handler], ...] = (
        ("GET", "/gone", page(status=404)),
        ("GET", "/image", page(b"\x89PNG", content_type="image/png")),
        ("GET", "/loop", page(status=302, Location="/loop")),
        ("GET", "/out", page(status=302, Location="file:///etc/passwd")),
        ("GET", "/slow", slow),
    )
    async with serving(*routes) as url:
        for address, message in (
            (f"{url}/gone", "answered 404"),
            (f"{url}/image", "is no text but image/png"),
            (f"{url}/loop", "redirects more than 5 times"),
            (f"{url}/out", "is no address of a page"),
            ("ftp://example.org", "is no address of a page"),
            ("", "is no address of a page"),
            ("http://", "is no address of a page"),
            ("http://[::1", "is no address of a page"),
            ("http://a:99999/", "is no address of a page"),
            ("http://" + "a" * 1_000_000, "is no address of a page"),
            ("http://exa mple.org/\ud800", ""),
            ("http://127.0.0.1:9/", "cannot be reached"),
            ("http://no-such-host.invalid/", "cannot be reached"),
        ):
            result = await visit(address)
            assert result.fault is not None and message in result.content and len(result.content) < 700
        result = await visit(f"{url}/slow", seconds=0.2)
        assert result.fault is not None and "did not answer within 0.2 seconds" in result.content


async def test_a_long_page_is_cut_and_an_endless_one_ends() -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(b"bees " * 1000)
        return response

    async with serving(("GET", "/", endless)) as url:
        read = await visit(url, max_bytes=100_000, max_chars=1000)
    assert len(read.content) < 1000 and read.content.endswith(
        "[the page goes on: 99,999 characters in all]"
    )


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "127.1",
        "2130706433",
        "0x7f.1",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "0.0.0.0",
        "[::]",
    ],
)
async def test_private_addresses_are_refused(host: str) -> None:
    seen: list[int] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(1)
        return web.Response(text="secret")

    async with serving(("GET", "/", handler)) as url:
        port = url.rpartition(":")[2]
        result = await visit(f"http://{host}:{port}/", private=False)
    assert result.fault is not None and "secret" not in result.content and not seen


async def test_a_redirect_to_a_private_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first server counts as public; the address that it sends the visitor to is looked at again."""
    from ludus.tools.library import web as module

    seen: list[int] = []

    async def inner(request: web.Request) -> web.Response:
        seen.append(1)
        return web.Response(text="secret")

    async with serving(("GET", "/", inner)) as secret:
        port = int(secret.rpartition(":")[2])
        real = module.public_socket

        def socket_for(info: Any) -> Any:
            if info[4][1] == port:
                return real(info)
            made = socket.socket(*info[:3])
            made.setblocking(False)
            return made

        monkeypatch.setattr(module, "public_socket", socket_for)
        async with serving(("GET", "/", page(status=302, Location=secret))) as url:
            result = await visit(url, private=False)
    assert "is not a public address" in result.content and not seen


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1:248:1893:25c8:1946", True),
        ("10.0.0.1", False),
        ("172.16.5.4", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),  # a cloud's metadata
        ("100.64.0.1", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("fe80::1", False),
        ("fc00::1", False),
        ("fec0::1", False),
        ("ff02::1", False),
        ("::ffff:10.0.0.1", False),
        ("2002:0a00:0001::1", False),  # 6to4 of 10.0.0.1
        ("64:ff9b::a00:1", False),  # NAT64 of 10.0.0.1
        ("64:ff9b::5db8:d822", True),
        ("64:ff9b:1::a00:1", False),  # somebody's own NAT64
        ("::127.0.0.1", False),
        ("::1", False),
        ("::", False),
    ],
)
def test_public_addresses(address: str, public: bool) -> None:
    assert is_public(ip_address(address)) is public


async def test_a_second_model_summarises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LUDUS_API_KEY", "k")
    seen: list[Any] = []
    reply = {"choices": [{"message": {"role": "assistant", "content": " Bees make honey. "}}]}
    routes = (("GET", "/", page()), ("POST", "/v1/chat/completions", answering(200, reply, seen)))
    async with serving(*routes) as url:
        read = await visit(url, "what bees make", summarizer=f"{url}/v1#small")
        assert read.content == f"URL: {url}\nBees make honey."
        ((headers, body),) = seen
        assert headers["Authorization"] == "Bearer k" and body["model"] == "small"
        prompt = body["messages"][0]["content"]
        assert "They make honey, and 3 < 4." in prompt and "what bees make" in prompt
    async with serving(
        ("GET", "/", page()), ("POST", "/v1/chat/completions", answering(200, {}))
    ) as url:
        with pytest.raises(InfraError, match="no choices"):
            await visit(url, summarizer=f"{url}/v1#small")
    with pytest.raises(ConfigError, match="http://host/v1#MODEL"):
        Visit(summarizer="http://host/v1")


@pytest.mark.parametrize(
    ("data", "kind", "text"),
    [
        (b"<p>a<br>b", "text/html;", "a\nb"),
        ("é".encode("latin-1"), "text/plain;latin-1", "é"),
        ("<meta charset='latin-1'>é".encode("latin-1"), "text/html;", "é"),
        (b"a", "text/html;no-such-charset", "a"),
        (b"\xff\xfe<p>", "text/html;utf-8", "\ufffd\ufffd"),
        (b"1 < 2 and <b>3</b> <", "text/html;", "1 < 2 and 3 <"),
        (b"<script>never closed <p>x", "text/html;", ""),
        (b"x <!-- never closed", "text/html;", "x"),
        (b"<p", "text/html;", ""),
        (b"", "text/html;", ""),
        (b"<svg/>a<title>T</title>", "text/html;", "Title: T\naT"),
        (b'{"a": 1}', "application/json;", '{"a": 1}'),
    ],
)
def test_html_to_text(data: bytes, kind: str, text: str) -> None:
    assert page_text(data, kind) == text


@pytest.mark.parametrize(
    "piece",
    [b"<", b"<a", b"<!--", b"<script>", b"</", b"<a href='", b"&", b"<![CDATA[", b"<svg><p>", b"<title"],
)
def test_hostile_pages_take_linear_time(piece: bytes) -> None:
    """Two megabytes of each; a quadratic reader would need hours, so the suite's time limit judges."""
    page_text(piece * (2_000_000 // len(piece)), "text/html;")
