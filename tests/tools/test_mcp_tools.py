"""MCP servers as tools: real processes, of which most misbehave."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.core.failures import Boundary, ConfigError, Fault, InfraError
from ludus.core.messages import ToolCall, ToolContext, ToolResult
from ludus.core.task import Task
from ludus.tools.library import build_toolset
from ludus.tools.mcp import MCPServerConfig, is_mcp, mcp_tools
from ludus.tools.mcp.servers import LineSplitter, LongLine
from ludus.tools.mcp.toolset import MCPTools

SERVER = Path(__file__).parent / "mcp_server.py"
CONTEXT = ToolContext("episode", Task("t"))


def command(*options: str) -> str:
    return shlex.join([sys.executable, "-I", str(SERVER), *options])


@asynccontextmanager
async def server(*options: str, **settings: Any) -> AsyncIterator[MCPTools]:
    tools = mcp_tools({"mcp": command(*options), "timeout": 10.0, **settings})
    try:
        yield tools
    finally:
        await tools.aclose()


async def call(tools: Any, name: str, context: ToolContext = CONTEXT, /, **arguments: Any) -> ToolResult:
    return await tools.call(ToolCall(name, arguments), context)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def gone(*pids: int) -> bool:
    """Whether these processes end; waits for them."""
    for _ in range(500):
        if not any(map(is_running, pids)):
            return True
        await asyncio.sleep(0.01)
    return False


# What an agent gets


async def test_lists_calls_and_shows() -> None:
    async with server() as tools:
        await tools.open(CONTEXT)
        specs = {spec.name: spec for spec in await tools.list(CONTEXT)}
        assert specs["add"].description == "Add two numbers."
        assert specs["add"].parameters["required"] == ["a", "b"]
        assert specs["add"].returns is not None and specs["add"].returns["required"] == ["sum"]
        assert "needs_a_name" in specs
        assert (await call(tools, "needs_a_name")).content == "needs.a/name was called"
        result = await call(tools, "add", a=2, b=3)
        assert (result.content, result.fault) == ('{"sum":5}', None) and result.seconds > 0
        assert (
            await call(tools, "echo", text="a lone \ud800")
        ).content == "a lone \N{REPLACEMENT CHARACTER}"
        image = await call(tools, "image")
        assert image.content == (
            "look\n[image/png]\n[resource notes: file:///notes.txt (text/plain)]\n[image/png that is no base64]"
        )
        assert [media.kind for media in image.media] == ["image/png"]
        assert image.media[0].data is not None and image.media[0].data[:4] == b"\x89PNG"


async def test_refusals_are_observations() -> None:
    async with server() as tools:
        refused = await call(tools, "refuse")
        assert (refused.content, refused.fault) == ("not today", Fault.TOOL_RAISED)
        missing = await call(tools, "add", a=1)
        assert missing.fault is Fault.BAD_ARGUMENTS and "b: missing" in missing.content
        wrong = await call(tools, "add", a=1, b="two")
        assert wrong.fault is Fault.BAD_ARGUMENTS and 'b: expected integer; got "two"' in wrong.content
        bad = await call(tools, "rpc_error", code=-32602)
        assert bad.fault is Fault.BAD_ARGUMENTS and "no such thing" in bad.content
        other = await call(tools, "rpc_error", code=-32000 + 7)
        assert other.fault is Fault.TOOL_RAISED
        unknown = await call(tools, "ad", a=1, b=2)
        assert unknown.fault is Fault.UNKNOWN_TOOL and "Did you mean 'add'?" in unknown.content
        deep: Any = []
        for _ in range(300):
            deep = [deep]
        assert (await call(tools, "echo", text=deep)).fault is Fault.BAD_ARGUMENTS
        malformed = ToolCall("", fault=Fault.MALFORMED_CALL, problem="no JSON")
        assert (await tools.call(malformed, CONTEXT)).fault is Fault.MALFORMED_CALL


async def test_permissions() -> None:
    async with server(allow=["add", "d*"], deny=["die"], prefix="m_") as tools:
        assert {spec.name for spec in await tools.list(CONTEXT)} == {"m_add", "m_die_once"}
        assert (await call(tools, "m_add", a=1, b=1)).content == '{"sum":2}'
        denied = await call(tools, "m_die")
        assert denied.fault is Fault.UNKNOWN_TOOL and "not permitted" in denied.content
    async with server(read_only=True) as tools:
        assert {spec.name for spec in await tools.list(CONTEXT)} == {"add", "die_once"}
    async with server(allow=["nothing"]) as tools:
        with pytest.raises(ConfigError, match="none is permitted"):
            await tools.open(CONTEXT)


async def test_two_servers_need_a_prefix() -> None:
    both = build_toolset([f"mcp:{command()}", {"mcp": command(), "prefix": "second_"}])
    clash = build_toolset([f"mcp:{command()}", {"tool": f"mcp:{command()}"}])
    try:
        await both.open(CONTEXT)
        assert (await call(both, "second_add", a=1, b=2)).content == '{"sum":3}'
        with pytest.raises(ConfigError, match="prefix"):
            await clash.open(CONTEXT)
    finally:
        for one in (both, clash):
            await one.aclose()  # type: ignore[attr-defined]


async def test_episodes_of_their_own() -> None:
    first, second = ToolContext("one", Task("a")), ToolContext("two", Task("b"))
    async with server() as shared:
        assert [(await call(shared, "count", c)).content for c in (first, second)] == ["1", "2"]
    async with server(per_episode=True, servers=2) as own:
        await asyncio.gather(own.open(first), own.open(second))
        assert [(await call(own, "count", c)).content for c in (first, second, first)] == ["1", "1", "2"]
        third = asyncio.create_task(own.open(ToolContext("three", Task("c"))))
        done, _ = await asyncio.wait((third,), timeout=0.05)
        assert not done  # two servers at most
        await own.close(first)
        await third


async def test_fresh_files_for_every_episode(tmp_path: Path) -> None:
    (tmp_path / "seed.txt").write_text("seed")
    first, second = ToolContext("one", Task("a")), ToolContext("two", Task("b"))
    async with server(files=str(tmp_path)) as tools:
        await asyncio.gather(tools.open(first), tools.open(second))
        assert (await call(tools, "files", first, name="mine")).content == "mine seed.txt"
        assert (await call(tools, "files", second, name="other")).content == "other seed.txt"
    assert os.listdir(tmp_path) == ["seed.txt"]  # noqa: PTH208


# Servers that misbehave


async def test_a_dead_server_is_a_failure_and_is_started_again() -> None:
    async with server() as tools:
        await tools.open(CONTEXT)
        with pytest.raises(InfraError, match="I cannot go on") as caught:
            await call(tools, "die")
        assert caught.value.boundary is Boundary.SERVER and caught.value.replay
        assert caught.value.kind == "MCPServerDied" and "status 3" in str(caught.value)
        assert (await call(tools, "add", a=1, b=1)).fault is None  # the next call has a new one
        assert tools.restarted == 1


async def test_what_changes_nothing_is_sent_again(tmp_path: Path) -> None:
    async with server() as tools:
        result = await call(tools, "die_once", marker=str(tmp_path / "died"))
        assert result.content == "alive" and tools.restarted == 1


async def test_an_episode_never_goes_on_with_lost_state() -> None:
    async with server(per_episode=True) as tools:
        await tools.open(CONTEXT)
        assert (await call(tools, "count")).content == "1"
        with pytest.raises(InfraError):
            await call(tools, "die")
        with pytest.raises(InfraError, match="is gone") as caught:
            await call(tools, "count")
        assert caught.value.replay
        await tools.close(CONTEXT)
        await tools.open(CONTEXT)  # played again
        assert (await call(tools, "count")).content == "1"


async def test_an_answer_that_is_no_json_rpc_is_a_failure_of_the_server_at_once() -> None:
    async with server(timeout=30) as tools:
        await tools.open(CONTEXT)
        async with asyncio.timeout(20):
            with pytest.raises(
                InfraError, match=r"a call of 'null' with what is no MCP.*null"
            ) as caught:
                await call(tools, "null")
        assert caught.value.boundary is Boundary.SERVER and caught.value.kind == "MCPServerNonsense"
        assert (await call(tools, "add", a=1, b=1)).fault is None
        assert tools.restarted == 0


async def test_slow_is_not_hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ludus.tools.mcp.servers._GRACE_SECONDS", 0.2)
    monkeypatch.setattr("ludus.tools.mcp.connection._PROBE_SECONDS", 0.2)
    async with server(timeout=0.2) as tools:
        await tools.open(CONTEXT)
        slow = await call(tools, "slow")
        assert slow.fault is Fault.TOOL_TIMEOUT and "0.2 seconds" in slow.content
        assert tools.restarted == 0
        with pytest.raises(InfraError, match="hangs") as caught:
            await call(tools, "hang")
        assert caught.value.kind == "MCPServerHangs" and caught.value.replay
        assert (await call(tools, "add", a=1, b=1)).fault is None and tools.restarted == 1


async def test_huge_and_garbled_output(caplog: pytest.LogCaptureFixture) -> None:
    async with server("banner", max_message_bytes=20_000, max_chars=1_000) as tools:
        for id_last in (False, True):
            huge = await call(tools, "huge", size=10_000_000, id_last=id_last)
            assert huge.fault is Fault.LIMIT and "may have 20,000" in huge.content
        large = await call(tools, "huge", size=10_000, id_last=False)
        assert large.fault is None and len(large.content) <= 1_000 and "left out" in large.content
        assert (await call(tools, "stray")).content == "answered"
        assert (await call(tools, "lie")).content == "a lie"
        with pytest.raises(InfraError, match="no MCP"):
            await call(tools, "nonsense")
        assert (await call(tools, "add", a=1, b=1)).fault is None and tools.restarted == 0
    told = [record.message for record in caplog.records]
    assert sum("Welcome to the server!" in line for line in told) == 1  # once, not for every line
    assert any("does not keep to its output schema" in line for line in told)


@pytest.mark.parametrize(
    ("options", "settings", "message"),
    [
        (["exits"], {"restarts": 1}, r"the settings are wrong.* \(2 attempts\)"),
        (
            ["silent"],
            {"restarts": 0, "start_timeout": 0.3},
            "not ready within 0.3 seconds .start_timeout",
        ),
        (["many=200"], {}, "offers 200 tools .* allow"),
        (["endless"], {}, "without end"),
        (["schemas=wrong"], {}, r"no MCP: tools.1.inputSchema.type: Input should be 'object'"),
    ],
)
async def test_servers_that_cannot_be_used(
    options: list[str], settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ludus.tools.mcp.servers._GRACE_SECONDS", 0.2)
    async with server(*options, **settings) as tools:
        with pytest.raises(ConfigError, match=message):
            await tools.open(CONTEXT)


async def test_a_server_that_needs_several_attempts(tmp_path: Path) -> None:
    async with server(f"starts={tmp_path / 'starts'}", "from=3") as tools:
        await tools.open(CONTEXT)
        assert (tmp_path / "starts").read_text() == "xxx"


async def test_schemas_that_are_none_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    async with server("schemas") as tools:
        assert [spec.name for spec in await tools.list(CONTEXT)] == ["good"]
    told = "\n".join(record.message for record in caplog.records)
    assert told.count("is left out") == 2 and "60,0" in told and "two tools of this name" in told


async def test_a_command_that_does_not_exist() -> None:
    tools = mcp_tools("mcp:no-such-program-anywhere --flag")
    with pytest.raises(ConfigError, match=r"cannot run 'no-such-program-anywhere'.*Install it"):
        await tools.open(CONTEXT)


async def test_the_list_changes_in_the_midst() -> None:
    async with server() as tools:
        await tools.open(CONTEXT)
        await tools.list(CONTEXT)
        assert not await tools.changed(CONTEXT)
        await call(tools, "unlock")
        assert await tools.changed(CONTEXT)
        names = {spec.name for spec in await tools.list(CONTEXT)}
        assert "secret" in names and "refuse" not in names and not await tools.changed(CONTEXT)
        assert (await call(tools, "secret", word="x")).content == "the secret of x"
        assert (await call(tools, "refuse")).fault is Fault.UNKNOWN_TOOL


# Processes


async def test_servers_end_with_their_tools_and_take_everything_along(tmp_path: Path) -> None:
    async with server(f"pid={tmp_path / 'pids'}") as tools:
        await tools.open(CONTEXT)
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert all(map(is_running, pids)) and len(pids) == 2
    assert await gone(*pids)


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_servers_die_with_us_however_we_end(tmp_path: Path, how: signal.Signals) -> None:
    started = command(f"pid={tmp_path / 'pids'}")
    code = f"""
import asyncio
from ludus.core.messages import ToolContext
from ludus.core.task import Task
from ludus.tools.mcp import mcp_tools
async def main():
    tools = mcp_tools({{"mcp": {started!r}}})
    await tools.open(ToolContext("e", Task("t")))
    print("up", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    ours = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert ours.stdout is not None and ours.stdout.readline() == "up\n"
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert all(map(is_running, pids))
    os.kill(ours.pid, how)
    ours.wait()
    ours.stdout.close()
    assert asyncio.run(gone(*pids))


# Settings


def test_settings_that_cannot_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert (
        is_mcp("mcp:x") and is_mcp({"mcp": "x"}) and is_mcp({"tool": "mcp:x"}) and not is_mcp("python")
    )
    for spec, message in {
        "mcp:": "it is empty",
        'mcp:say "hello': "cannot be read",
        "mcp:https://": "is no address",
    }.items():
        with pytest.raises(ConfigError, match=message):
            MCPServerConfig.of(spec)
    tables: list[tuple[dict[str, Any], str]] = [
        ({"mcp": "https://host/mcp", "env": {"A": "b"}}, "takes no env"),
        ({"mcp": "server", "headers": {"A": "b"}}, "takes no headers"),
        ({"mcp": "server {files}"}, "say which folder"),
        ({"mcp": "server", "files": str(tmp_path / "none")}, "there is no folder"),
        ({"mcp": "server", "alow": ["x"]}, "allow"),
        ({"mcp": "server", "prefix": "a b"}, "prefix"),
    ]
    for table, message in tables:
        with pytest.raises(ConfigError, match=message):
            MCPServerConfig.of(table)
    monkeypatch.setenv("SECRET", "s3cret")
    config = MCPServerConfig.of(
        {"mcp": "https://host:1/mcp?key=1", "headers": {"Authorization": "Bearer ${SECRET}"}}
    )
    assert (
        config.http_headers() == {"Authorization": "Bearer s3cret"}
        and config.label == "https://host:1/mcp"
    )
    with pytest.raises(ConfigError, match="no environment variable NOT_SET"):
        MCPServerConfig.of({"mcp": "x", "env": {"A": "${NOT_SET}"}}).variables("")


# Pure parts


@given(st.lists(st.binary(max_size=40).map(lambda b: b.replace(b"\n", b"")), max_size=8), st.data())
def test_lines_do_not_depend_on_chunks(lines: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(line + b"\n" for line in lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    splitter = LineSplitter(20)
    chunks = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    found = [line for chunk in chunks for line in splitter.feed(chunk)]
    assert found == [line if len(line) <= 20 else LongLine(len(line), None) for line in lines]


@given(st.integers(0, 10**9), st.booleans())
def test_the_request_of_a_long_line_is_found(number: int, id_last: bool) -> None:
    filler = b'"' + b"x" * 5000 + b', \\"id\\": 7}"'
    head = b'{"jsonrpc":"2.0","id":%d,"result":{"a":%s}}\n' % (number, filler)
    tail = b'{"result":{"a":%s},"jsonrpc":"2.0","id":%d}\n' % (filler, number)
    splitter, stream = LineSplitter(1000), tail if id_last else head
    found = [
        line
        for place in range(0, len(stream), 700)
        for line in splitter.feed(stream[place : place + 700])
    ]
    assert found == [LongLine(len(stream) - 1, number)]
