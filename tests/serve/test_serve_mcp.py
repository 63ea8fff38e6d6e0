"""`ludus serve mcp`: tools and environments for other agents, used by the SDK's own client and by ours."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters

from ludus.core.failures import Fault, InfraError
from ludus.core.messages import ToolCall, ToolContext
from ludus.core.task import Task
from ludus.envs import WORLDS
from ludus.envs.served import load_served
from ludus.serve.mcp import AgentSessions
from ludus.tools.hosting import LocalHost
from ludus.tools.mcp import mcp_tools
from warm_python import WarmProcess

TOKEN = "a-token-of-many-characters"
SOURCES = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
"""Where children that begin with an environment of their own find this very ludus."""
SERVE = ["-c", "from ludus.cli.main import run; run()", "serve", "mcp"]

TOOLS = '''
import ludus

@ludus.tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b

class Counter(ludus.Env):
    """Counts for whoever holds it."""

    async def reset(self, task):
        self.value = int(task.target or 0)
        return f"at {self.value}"

    @ludus.tool
    async def count(self) -> ludus.ToolResult:
        """Count on."""
        self.value += 1
        return ludus.ToolResult(str(self.value), reward=0.5)
'''


@pytest.fixture
def code(tmp_path: Path) -> str:
    (tmp_path / "things.py").write_text(TOOLS)
    rows = [{"prompt": f"Count from {n}.", "target": n, "id": str(n)} for n in (10, 20)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "things.py")


@contextmanager
def serving(*words: str) -> Iterator[str]:
    """The address of a server over HTTP."""
    env = {"PATH": "/usr/bin:/bin", "LUDUS_TOKEN": TOKEN, **SOURCES}
    read, write = os.pipe()
    with open(read) as said, Path(os.devnull).open("w") as nothing:  # noqa: PTH123 - a pipe
        try:
            process = WarmProcess([*SERVE, *words, "--http"], env, stdout=write, stderr=nothing.fileno())
        finally:
            os.close(write)
        try:
            yield json.loads(said.readline())["address"]
        finally:
            process.terminate()
            process.wait(20)


def text(answer: Any) -> str:
    return str(answer.content[0].text)


@pytest.mark.parametrize("mode", ["legacy", pytest.param("auto", marks=pytest.mark.slow)])
async def test_the_sdk_client_over_stdio(code: str, mode: str) -> None:
    words = ["-m", "ludus", "serve", "mcp", f"{code}:add", f"env:{code}:Counter"]
    words += ["--tasks", str(Path(code).with_name("tasks.jsonl"))]
    async with Client(
        StdioServerParameters(command=sys.executable, args=words, env=SOURCES), mode=mode
    ) as client:
        listed = await client.list_tools()
        assert {tool.name for tool in listed.tools} == {"add", "count", "begin_task"}
        assert text(await client.call_tool("add", {"a": 2, "b": 3})) == "5"
        bad = await client.call_tool("add", {"a": "two", "b": 3})
        assert bad.is_error and "expected integer" in text(bad)
        assert text(await client.call_tool("count", {})) == "11"  # the session keeps its environment
        counted = await client.call_tool("count", {})
        assert text(counted) == "12"
        assert counted.meta is not None and counted.meta["ludus/reward"] == 0.5
        begun = await client.call_tool("begin_task", {"number": 1})
        assert "Count from 20." in text(begun) and "at 20" in text(begun)
        assert text(await client.call_tool("count", {})) == "21"
        assert (await client.call_tool("begin_task", {"number": 2})).is_error


async def test_a_task_begins_with_what_its_environment_shows() -> None:
    tasks = WORLDS["textcraft"].tasks("held_out")[:2]
    host = LocalHost(lambda: load_served([{"env": "textcraft"}]))
    await host.start()
    sessions = AgentSessions(host, tasks)
    try:
        begun = await sessions.call("one", "begin_task", {"number": 1})
    finally:
        await sessions.close_all()
        await host.stop()
    asked = "\n\n".join(message.content for message in tasks[1].messages)
    assert begun.content == asked, "textcraft says all in its task, and shows nothing at its start"


async def test_sessions_over_http(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_TOKEN", TOKEN)
    one, two = ToolContext("one", Task("a")), ToolContext("two", Task("b"))
    with serving(f"env:{code}:Counter") as address:
        tools = mcp_tools({"mcp": address, "headers": {"Authorization": "Bearer ${THE_TOKEN}"}})
        try:
            said = [(await tools.call(ToolCall("count"), where)).content for where in (one, two, one)]
            assert said == ["1", "1", "2"]  # each session has an environment of its own
            assert (await tools.call(ToolCall("nothing"), one)).fault is Fault.UNKNOWN_TOOL
            await tools.close(one)
            await tools.open(one)
            assert (await tools.call(ToolCall("count"), one)).content == "1"
        finally:
            await tools.aclose()
        stranger = mcp_tools({"mcp": address, "restarts": 0})
        with pytest.raises(InfraError, match=r"401|token"):
            await stranger.open(one)


HELLO = {
    "protocolVersion": "2025-06-18",
    "capabilities": {},
    "clientInfo": {"name": "x", "version": "1"},
}


async def test_bodies_that_are_wrong(code: str) -> None:
    headers = {
        "Authorization": f"Bearer {TOKEN}",
        "Accept": "application/json, text/event-stream",
        "Content-Type": "application/json",
    }
    with serving(f"{code}:add") as address:
        async with aiohttp.ClientSession(headers=headers) as http:

            async def post(data: str, **more: str) -> tuple[int, str]:
                async with http.post(address, data=data.encode(), headers=more) as answer:
                    return answer.status, await answer.text()

            hello = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": HELLO}
            async with http.post(address, json=hello) as answer:
                assert answer.status == 200
                session = {"mcp-session-id": answer.headers["mcp-session-id"]}
            assert len(session["mcp-session-id"]) >= 32  # made by the server, and not to be guessed

            def call(value: str) -> str:
                arguments = f'{{"a": {value}, "b": 1}}'
                params = f'{{"name": "add", "arguments": {arguments}}}'
                return f'{{"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {params}}}'

            for charset in ("punycode", "utf-16", "no-such-thing"):
                kind = f"application/json; charset={charset}"
                status, said = await post(call("1"), **session, **{"Content-Type": kind})
                assert status == 415 and "UTF-8" in said
            for value in ("NaN", "1e999", "-Infinity"):
                status, said = await post(call(value), **session)
                assert status < 500 and "arguments cannot be read" in said, said
            deep = '{"a":' * 900 + "1" + "}" * 900
            for value in (deep, '"\\ud800"'):
                status, said = await post(call(value), **session)
                assert status == 400 and "Parse error" in said, said
            status, said = await post(call("2"), **session)
            assert status == 200 and '"3"' in said


async def test_the_door_is_as_strict_as_the_others(code: str) -> None:
    key = {"Authorization": f"Bearer {TOKEN}"}
    accepts = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
    hello = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": HELLO}
    with serving(f"{code}:add") as address:
        async with aiohttp.ClientSession(headers=accepts) as http:
            for wrong in ({}, {"Authorization": TOKEN}, {"Authorization": "Bearer x"}):
                async with http.post(address, json=hello, headers=wrong) as answer:
                    assert answer.status == 401 and "token" in (await answer.json())["error"]["message"]
            async with http.post(address, data=b" " * 5_000_000, headers=key) as answer:
                assert answer.status == 413 and "bytes at most" in await answer.text()
            async with http.post(
                address, data=b"a=b", headers=key | {"Content-Type": "text/plain"}
            ) as no:
                assert no.status == 415
            packed = key | {"Content-Encoding": "gzip"}
            async with http.post(address, data=b"x", headers=packed) as answer:
                assert answer.status == 415
            async with http.get(address.replace("/mcp", "/other"), headers=key) as answer:
                assert answer.status == 404 and (await answer.json())["error"]
