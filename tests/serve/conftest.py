"""One server for the tests that disturb nobody, and clients that are closed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest
from server_process import ServerProcess, serving

from warm_python import warm


@pytest.fixture(scope="session", autouse=True)
def _warm() -> Iterator[None]:
    """Servers are processes that have imported themselves already."""
    with warm("ludus.cli.main", "ludus.cli.serve_commands", "ludus.serve.app", "ludus.serve.mcp"):
        yield


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    tools = ("echo", "add", "nap", "too_slow", "blocking", "pay", "look", "remember", "about", "big")
    more = ("finish", "broken", "raises", "who", "narrow")
    options = ("--max-body-bytes", "200000", "--client-seconds", "1", "--keepalive-seconds", "2")
    with serving(*tools, *more, options=(*options, "--orphan-seconds", "0.2")) as process:
        yield process


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session
