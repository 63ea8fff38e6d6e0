"""Real server processes under pressure: full queues, deadlines, callers that leave, signals, tokens."""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from server_process import TOOLS, ServerProcess, context, lines_of, serving, until

from ludus.core import ConfigError, InfraError, ToolCall
from ludus.serve import ServerConfig, ToolServer
from ludus.tools.hosting import LocalHost, load_tools
from ludus.tools.remote import RemoteTools


async def call_alone(
    http: aiohttp.ClientSession,
    server: ServerProcess,
    name: str,
    deadline_ms: int | None = None,
    **arguments: Any,
) -> tuple[int, dict[str, Any], dict[str, str]]:
    body = {"key": secrets.token_hex(8), "name": name, "arguments": arguments}
    headers = {} if deadline_ms is None else {"Ludus-Deadline-Ms": str(deadline_ms)}
    async with http.post(f"{server.address}/v1/calls", json=body, headers=headers) as answer:
        return answer.status, await answer.json(), dict(answer.headers)


async def test_a_full_server_says_so_at_once_and_a_passed_deadline_is_never_run(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    file = tmp_path / "naps"
    options = ("--concurrency", "1", "--queue", "1", "--limit", "narrow=1")
    with serving("nap", "narrow", "echo", options=options) as server:
        first = asyncio.create_task(call_alone(http, server, "nap", seconds=0.9, file=str(file)))
        await until(lambda: lines_of(file) == ["start"])
        status, raw, _ = await call_alone(http, server, "nap", 100, seconds=0, file=str(file))
        assert (status, raw["error"]["kind"], raw["error"]["started"]) == (503, "expired", False)
        second = asyncio.create_task(call_alone(http, server, "nap", seconds=0))
        await asyncio.sleep(0.2)
        status, raw, headers = await call_alone(http, server, "nap", seconds=0)
        assert (status, raw["error"]["kind"], raw["error"]["started"]) == (503, "overloaded", False)
        assert int(headers["Retry-After"]) >= 1 and raw["error"]["retry_after"] > 0
        assert not first.done()
        assert (await first)[0] == (await second)[0] == 200
        assert lines_of(file) == ["start", "end"]
        # A client of ours waits and comes back, as often as it takes.
        async with RemoteTools(server.address) as tools:
            episode = context()
            naps = [tools.call(ToolCall("nap", {"seconds": 0.02}), episode) for _ in range(8)]
            assert [result.content for result in await asyncio.gather(*naps)] == ["rested"] * 8
            assert tools.counters.refused > 0
            await tools.close(episode)


async def test_a_slow_tool_holds_up_only_itself(
    server: ServerProcess, http: aiohttp.ClientSession
) -> None:
    slow = [asyncio.create_task(call_alone(http, server, "narrow", seconds=0.25)) for _ in range(3)]
    await asyncio.sleep(0.1)
    assert (await call_alone(http, server, "echo", text="quick"))[1]["content"] == "quick"
    assert not any(task.done() for task in slow)
    assert [status for status, _, _ in await asyncio.gather(*slow)] == [200] * 3


async def test_a_deadline_ends_a_running_call(
    server: ServerProcess, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    file = tmp_path / "nap"
    status, raw, _ = await call_alone(http, server, "nap", 300, seconds=60, file=str(file))
    assert (status, raw["error"]["kind"], raw["error"]["started"]) == (503, "expired", True)
    await until(lambda: lines_of(file) == ["start", "cancelled"])
    async with RemoteTools(server.address, deadline=0.5) as tools:
        episode = context()
        with pytest.raises(InfraError, match=r"within 0\.5 seconds|deadline"):
            await tools.call(ToolCall("nap", {"seconds": 60}), episode)
        await tools.close(episode)


async def test_cancelling_a_call_cancels_it_on_the_server(server: ServerProcess, tmp_path: Path) -> None:
    file = tmp_path / "nap"
    async with RemoteTools(server.address) as tools:
        episode = context()
        call = asyncio.create_task(
            tools.call(ToolCall("nap", {"seconds": 60, "file": str(file)}), episode)
        )
        await until(lambda: lines_of(file) == ["start"])
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until(lambda: lines_of(file) == ["start", "cancelled"])
        assert (await tools.call(ToolCall("echo", {"text": "still open"}), episode)).fault is None
        await tools.close(episode)


async def test_a_call_whose_caller_is_gone_is_cancelled_unless_somebody_asks_again(
    server: ServerProcess, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    file = tmp_path / "nap"
    body = {"key": "orphan", "name": "nap", "arguments": {"seconds": 60, "file": str(file)}}
    with pytest.raises(TimeoutError):
        timeout = aiohttp.ClientTimeout(total=0.3)
        async with http.post(f"{server.address}/v1/calls", json=body, timeout=timeout):
            pass
    await until(lambda: lines_of(file) == ["start", "cancelled"])
    body["key"], body["arguments"] = "joined", {"seconds": 0.5, "file": str(tmp_path / "second")}
    with pytest.raises(TimeoutError):
        timeout = aiohttp.ClientTimeout(total=0.3)
        async with http.post(f"{server.address}/v1/calls", json=body, timeout=timeout):
            pass
    async with http.post(f"{server.address}/v1/calls", json=body) as answer:
        assert (await answer.json())["content"] == "rested"
    assert lines_of(tmp_path / "second") == ["start", "end"]


async def test_closing_a_session_cancels_its_calls(server: ServerProcess, tmp_path: Path) -> None:
    file = tmp_path / "nap"
    async with RemoteTools(server.address) as tools:
        episode = context()
        call = asyncio.create_task(
            tools.call(ToolCall("nap", {"seconds": 60, "file": str(file)}), episode)
        )
        await until(lambda: lines_of(file) == ["start"])
        await tools.close(episode)
        with pytest.raises(InfraError):
            await call
        assert lines_of(file) == ["start", "cancelled"]


async def test_idle_sessions_end_and_state_is_never_replaced_silently(
    http: aiohttp.ClientSession,
) -> None:
    with serving("remember", "echo", options=("--idle-seconds", "0.4")) as server:
        async with RemoteTools(server.address) as tools:
            light, heavy = context("light"), context("heavy")
            await tools.call(ToolCall("echo", {"text": "a"}), light)
            await tools.call(ToolCall("remember", {"value": "a"}), heavy)

            async def sessions() -> int:
                async with http.get(f"{server.address}/healthz") as answer:
                    return int((await answer.json())["sessions"])

            async with asyncio.timeout(20):
                while await sessions():  # noqa: ASYNC110 - another process makes it so
                    await asyncio.sleep(0.05)
            async with http.get(f"{server.address}/metrics") as answer:
                assert 'ludus_tools_sessions_closed_total{why="idle"} 2.0' in await answer.text()
            assert (await tools.call(ToolCall("echo", {"text": "b"}), light)).content == "b"
            for _ in range(2):  # and it stays lost
                with pytest.raises(InfraError, match="is gone") as caught:
                    await tools.call(ToolCall("remember", {"value": "b"}), heavy)
            assert caught.value.replay and not caught.value.retriable
            assert (tools.counters.reopened, tools.counters.lost) == (1, 1)


async def test_told_to_stop_it_finishes_what_runs(http: aiohttp.ClientSession, tmp_path: Path) -> None:
    file = tmp_path / "nap"
    with serving("nap", "echo") as server:
        async with http.get(f"{server.address}/readyz") as answer:
            assert answer.status == 200
        running = asyncio.create_task(call_alone(http, server, "nap", seconds=0.7, file=str(file)))
        await until(lambda: lines_of(file) == ["start"])
        server.signal(signal.SIGTERM)
        await asyncio.sleep(0.2)
        status, raw, headers = await call_alone(http, server, "echo", text="too late")
        assert (status, raw["error"]["kind"], raw["error"]["started"]) == (503, "draining", False)
        assert "Retry-After" in headers
        async with http.get(f"{server.address}/readyz") as answer:
            assert answer.status == 503
        assert (await running)[1]["content"] == "rested"
        assert await asyncio.to_thread(server.process.wait, 20) == 0


async def test_told_twice_it_stops_at_once(http: aiohttp.ClientSession, tmp_path: Path) -> None:
    file = tmp_path / "nap"
    with serving("nap") as server:
        running = asyncio.create_task(call_alone(http, server, "nap", seconds=60, file=str(file)))
        await until(lambda: lines_of(file) == ["start"])
        server.signal(signal.SIGTERM)
        await asyncio.sleep(0.2)
        server.signal(signal.SIGTERM)
        assert await asyncio.to_thread(server.process.wait, 20) == 128 + signal.SIGTERM
        with pytest.raises(aiohttp.ClientError):
            await running


async def test_a_grace_that_ends_cancels(http: aiohttp.ClientSession, tmp_path: Path) -> None:
    file = tmp_path / "nap"
    with serving("nap", options=("--drain-seconds", "0.3")) as server:
        running = asyncio.create_task(call_alone(http, server, "nap", seconds=60, file=str(file)))
        await until(lambda: lines_of(file) == ["start"])
        server.signal(signal.SIGINT)
        status, raw, _ = await running
        assert (status, raw["error"]["kind"], raw["error"]["started"]) == (409, "cancelled", True)
        assert await asyncio.to_thread(server.process.wait, 20) == 0
        assert lines_of(file) == ["start", "cancelled"]


async def test_a_token_opens_the_door(http: aiohttp.ClientSession, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("correct-horse-battery\n")
    options = ("--token-file", str(file), "--host", "0.0.0.0", "--verbose")
    with serving("echo", options=options) as server:
        address = server.address
        assert "0.0.0.0" not in address  # it can be opened, from here as from elsewhere
        for path, status in (("/healthz", 200), ("/openapi.json", 200), ("/metrics", 401)):
            async with http.get(address + path) as answer:
                assert answer.status == status
        for token in (None, "wrong-horse-battery"):
            async with RemoteTools(address, token=token) as tools:
                with pytest.raises(ConfigError, match=r"rejected the token \(401\)"):
                    await tools.open(context())
        async with RemoteTools(address, token="correct-horse-battery") as tools:
            episode = context()
            assert (await tools.call(ToolCall("echo", {"text": "in"}), episode)).content == "in"
            await tools.close(episode)
        logged = [line for line in server.logs() if line["event"] == "call"]
        assert [(line["tool"], line["outcome"]) for line in logged] == [("echo", "ok")]
        assert {"request", "session", "seconds", "queue_seconds"} <= logged[0].keys()
        assert "correct-horse" not in str(logged)


def _mode(path: str) -> int:
    return Path(path).stat().st_mode & 0o777


def _show(path: str) -> None:
    Path(path).chmod(0o644)


async def test_other_users_of_the_machine_need_a_token_too(
    http: aiohttp.ClientSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("LUDUS_TOKEN", raising=False)
    with serving("echo", env={"LUDUS_TOKEN": None}) as server:
        kept = server.told["token_file"]
        assert kept == str(tmp_path / "ludus" / "token") and _mode(kept) == 0o600
        status, said, _ = await call_alone(http, server, "echo", text="let me in")
        assert (status, said["error"]["kind"]) == (401, "unauthorized")
        headers = {"Authorization": f"Bearer {lines_of(Path(kept))[0]}"}
        async with http.get(f"{server.address}/metrics", headers=headers) as answer:
            assert answer.status == 200
        async with RemoteTools(server.address) as tools:  # our own clients find it
            episode = context()
            assert (await tools.call(ToolCall("echo", {"text": "in"}), episode)).content == "in"
            await tools.close(episode)
    for options, env in (((), {"LUDUS_TOKEN": ""}), (("--no-token",), {"LUDUS_TOKEN": None})):
        with serving("echo", options=options, env=env) as server:
            assert "token_file" not in server.told
            assert (await call_alone(http, server, "echo", text="in"))[0] == 200
    _show(kept)
    with pytest.raises(RuntimeError, match="its owner alone"):
        serving("echo", env={"LUDUS_TOKEN": None}).__enter__()


def test_what_the_workers_cannot_host_is_said_by_the_server() -> None:
    with (
        pytest.raises(RuntimeError) as caught,
        serving("wants_env", options=("--backend", "processes")),
    ):
        pass
    assert "needs an environment" in " ".join(str(caught.value).split())


@pytest.mark.parametrize(
    ("reference", "config", "token", "complaint"),
    [
        ("wants_env", {}, None, "needs an environment"),
        ("nothing_like_it", {}, None, "has no 'nothing_like_it'"),
        ("echo", {"tool_concurrency": {"ecko": 1}}, None, "no tool here"),
        ("echo", {"tool_concurrency": {"echo": 0}}, None, "at least 1"),
        ("echo", {"host": "0.0.0.0"}, "short", "at least 16"),
        ("echo", {"host": "::"}, None, "set a token"),
        ("echo", {"host": "0.0.0.0"}, None, "set a token"),
        ("echo", {"host": "192.0.2.1"}, "long-enough-to-be-one", "cannot listen"),
    ],
)
async def test_what_cannot_be_served_is_a_config_error(
    reference: str, config: dict[str, Any], token: str | None, complaint: str
) -> None:
    host = LocalHost(lambda: load_tools([f"{TOOLS}:{reference}"]))
    with pytest.raises(ConfigError, match=complaint):
        await ToolServer(host, ServerConfig.parse(config), token=token).start()


async def test_calls_that_wait_for_the_sandbox_do_not_starve_live_sessions(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    config = tmp_path / "tools.toml"
    config.write_text('tools = ["python"]\nsandbox = { workers = 1, max_sessions = 1 }\n')
    with serving(options=("--config", str(config), "--concurrency", "3")) as server:
        async with RemoteTools(server.address) as tools:

            async def late() -> str:
                episode = context("late")
                result = await tools.call(ToolCall("python", {"code": "print(1)"}), episode)
                await tools.close(episode)
                return result.content

            async def alone() -> str:
                return str((await call_alone(http, server, "python", code="print(1)"))[1]["content"])

            live = context("live")
            assert (await tools.call(ToolCall("python", {"code": "x = 40"}), live)).fault is None
            waiting = [asyncio.create_task(one()) for one in (late, alone, late, alone, late)]
            await asyncio.sleep(0.5)
            async with asyncio.timeout(40):
                result = await tools.call(ToolCall("python", {"code": "x + 2"}), live)
                assert result.content == "42"
                assert not any(task.done() for task in waiting), "the only place is taken"
                await tools.close(live)
                assert await asyncio.gather(*waiting) == ["1"] * 5


async def test_calls_that_wait_for_their_turn_in_one_session_leave_the_slots_to_others(
    tmp_path: Path,
) -> None:
    config = tmp_path / "tools.toml"
    config.write_text('tools = ["python"]\nsandbox = { workers = 1 }\n')
    with serving(options=("--config", str(config), "--concurrency", "2")) as server:
        async with RemoteTools(server.address) as tools:
            busy, other = context("busy"), context("other")
            naps = [
                asyncio.create_task(
                    tools.call(ToolCall("python", {"code": "import time; time.sleep(2)"}), busy)
                )
                for _ in range(3)
            ]
            await asyncio.sleep(0.3)
            assert (await tools.call(ToolCall("python", {"code": "1 + 1"}), other)).content == "2"
            assert not naps[1].done(), "the slots were full of calls that wait for their turn"
            for episode in (busy, other):
                await tools.close(episode)
            for nap in naps:
                nap.cancel()


async def test_large_requests_are_read_as_there_is_room_and_small_ones_pass_them() -> None:
    # One character that ASCII has not makes four bytes of each in memory.
    text = "x" * 3_900_000 + "\U0001f600"
    arguments = json.dumps({"text": text, "seconds": 0.3}, ensure_ascii=False).encode()
    with serving("swallow", options=("--concurrency", "64")) as server:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            connector=connector, headers={"Content-Type": "application/json"}
        ) as http:

            async def send(key: int) -> str:
                body = b'{"key": "%d", "name": "swallow", "arguments": %s}' % (key, arguments)
                async with http.post(f"{server.address}/v1/calls", data=body) as answer:
                    return str((await answer.json())["content"])

            large = [asyncio.create_task(send(key)) for key in range(30)]
            await asyncio.sleep(0.5)
            small = await call_alone(http, server, "swallow", text="small", seconds=0)
            assert small[1]["content"] == "5" and not all(task.done() for task in large)
            assert await asyncio.gather(*large) == [str(len(text))] * 30
        status = await asyncio.to_thread(Path(f"/proc/{server.process.pid}/status").read_text)
        peak_mb = int(status.partition("VmHWM:")[2].split()[0]) / 1024
        assert peak_mb < 480, f"30 requests of 3.9 MB took {peak_mb:.0f} MB"


async def _trickle(server: ServerProcess, head: bytes) -> asyncio.StreamWriter:
    """A request of which little arrives, and no more for as long as it is held open."""
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    common = b"POST /v1/calls HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    writer.write(common + head)
    await writer.drain()
    return writer


@pytest.mark.parametrize(
    "head",
    [b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n", b"Content-Length: 7999999\r\n\r\n{"],
    ids=["chunked", "announced"],
)
async def test_who_sends_little_holds_little(http: aiohttp.ClientSession, head: bytes) -> None:
    """Bodies that announce all the room there is, and do not come, keep nobody from being read."""
    with serving("swallow") as server:
        slow = [await _trickle(server, head) for _ in range(8)]
        await asyncio.sleep(0.2)
        async with asyncio.timeout(15):  # a slow body may take 30 seconds
            said = await call_alone(http, server, "swallow", text="x" * 1_000_000, seconds=0)
            assert said[1]["content"] == "1000000"
        for writer in slow:
            writer.close()


async def test_bodies_that_fill_the_room_in_part_do_not_wait_for_each_other() -> None:
    text = "x" * 900_000
    with serving("swallow", options=("--held-bytes", "1000000")) as server:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            calls = [call_alone(http, server, "swallow", text=text, seconds=0.05) for _ in range(8)]
            async with asyncio.timeout(20):
                said = await asyncio.gather(*calls)
    assert [body["content"] for _, body, _ in said] == [str(len(text))] * 8
