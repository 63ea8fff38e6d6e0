"""Server and worker processes that are killed: nothing is lost, or runs twice, without saying so."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from pathlib import Path

import pytest
from server_process import TOOLS, ServerProcess, context, lines_of, serving, until

from ludus.core import Boundary, InfraError, ToolCall
from ludus.serve import ToolServer
from ludus.tools import remote_http
from ludus.tools.hosting import EpisodeLost, OutcomeUnknown, ProcessHost
from ludus.tools.remote import RemoteTools


def references(*names: str) -> list[str]:
    return [f"{TOOLS}:{name}" for name in names]


async def test_a_killed_server_and_its_successor(tmp_path: Path) -> None:
    """Three calls are running when the server is killed: one may be repeated, one not, one has state."""
    names = ("look", "pay", "remember", "echo", "nap")
    paid, looked = tmp_path / "paid", tmp_path / "looked"
    first = ServerProcess(*names)
    try:
        async with RemoteTools(first.address) as tools:
            episodes = [context(name) for name in ("may", "must-not", "state", "idle")]
            for episode in episodes:
                await tools.open(episode)
            assert (await tools.call(ToolCall("remember", {"value": "a"}), episodes[2])).content == "a"
            may = asyncio.create_task(
                tools.call(ToolCall("look", {"file": str(looked), "seconds": 1}), episodes[0])
            )
            must_not = asyncio.create_task(
                tools.call(ToolCall("pay", {"file": str(paid), "seconds": 1}), episodes[1])
            )
            await until(lambda: lines_of(paid) and lines_of(looked))
            first.kill()
            with serving(*names, options=("--port", str(first.port))):
                assert (await may).content == "seen"
                with pytest.raises(OutcomeUnknown, match="whether it took effect is unknown") as caught:
                    await must_not
                assert caught.value.boundary is Boundary.SERVER and caught.value.attempts > 1
                with pytest.raises(EpisodeLost, match="is gone"):
                    await tools.call(ToolCall("remember", {"value": "b"}), episodes[2])
                assert (await tools.call(ToolCall("echo", {"text": "x"}), episodes[3])).content == "x"
                assert len(lines_of(paid)) == 1, "what must not be repeated was not"
                assert len(lines_of(looked)) == 2 and tools.counters.repeated == 1, (
                    "and what was is counted"
                )
                for episode in episodes:
                    await tools.close(episode)
    finally:
        first.close()


async def test_a_server_that_is_gone_is_a_typed_failure() -> None:
    server = ServerProcess("echo")
    server.kill()
    server.close()
    async with RemoteTools(server.address, unreachable_seconds=0.3) as tools:
        with pytest.raises(InfraError, match="attempts") as caught:
            await tools.open(context())
        assert caught.value.boundary is Boundary.SERVER and caught.value.attempts >= 2


async def test_an_outage_is_told_while_it_lasts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remote_http, "_SAY_AFTER_SECONDS", 0.2)
    first = ServerProcess("echo")
    try:
        async with RemoteTools(first.address, unreachable_seconds=40) as tools:
            episodes = [context(str(number)) for number in range(3)]
            for one in episodes:
                await tools.open(one)
            first.kill()
            calls = [
                asyncio.create_task(tools.call(ToolCall("echo", {"text": "x"}), one)) for one in episodes
            ]
            await until(lambda: "has not answered" in caplog.text)
            assert "answers again" not in caplog.text
            with serving("echo", options=("--port", str(first.port))):
                assert [(await one).content for one in calls] == ["x"] * 3
                for one in episodes:
                    await tools.close(one)
    finally:
        first.close()
    told = [one.getMessage() for one in caplog.records if one.name == remote_http.__name__]
    assert len(told) == 2, "once for all episodes, and when it is over"
    assert told[0].startswith(f"the server at {first.address} has not answered for ")
    assert "waits for 40 seconds" in told[0]
    assert told[1] == f"the server at {first.address} answers again"


async def test_with_several_servers_episodes_are_spread_and_move_when_one_dies() -> None:
    with serving("who", "remember") as left, serving("who", "remember") as right:
        async with RemoteTools([left.address, right.address]) as tools:
            episodes = [context(str(i)) for i in range(12)]
            homes = {}
            for episode in episodes:
                await tools.open(episode)
                answers = [(await tools.call(ToolCall("who"), episode)).content for _ in range(2)]
                assert answers[0] == answers[1], "an episode keeps to its server"
                homes[episode.episode] = answers[0]
            assert set(homes.values()) == {str(left.process.pid), str(right.process.pid)}
            left.kill()
            left_episodes = [e for e in episodes if homes[e.episode] == str(left.process.pid)]
            fresh = await tools.call(ToolCall("who"), context("new"))
            assert fresh.content == str(right.process.pid)
            # An episode without state moves to the server that is left; it is not lost with the other.
            assert (await tools.call(ToolCall("who"), left_episodes[0])).content == str(
                right.process.pid
            )


async def test_worker_processes_that_die_are_replaced(tmp_path: Path) -> None:
    host = ProcessHost(references("who", "remember", "die", "die_once", "nap"), workers=2)
    facts = {one.spec.name: one for one in await host.start()}
    try:
        assert facts["remember"].stateful and not facts["who"].stateful
        assert facts["die_once"].repeatable and not facts["die"].repeatable
        episodes = [context(str(i)) for i in range(4)]
        for episode in episodes:
            await host.open(episode)
        pids = [(await host.call(ToolCall("who"), episode)).content for episode in episodes]
        assert Counter(pids).most_common() == [(pids[0], 2), (pids[1], 2)], "spread evenly"
        stateful, light = episodes[0], episodes[2]
        assert pids[0] == pids[2] and str(os.getpid()) not in pids
        await host.call(ToolCall("remember", {"value": "a"}), stateful)
        with pytest.raises(OutcomeUnknown, match="killed by SIGKILL"):
            await host.call(ToolCall("die", {"file": str(tmp_path / "die")}), light)
        assert lines_of(tmp_path / "die") == ["died"]
        with pytest.raises(EpisodeLost, match="is gone"):
            await host.call(ToolCall("remember", {"value": "b"}), stateful)
        assert (await host.call(ToolCall("who"), light)).content not in pids[:1]
        again = await host.call(ToolCall("die_once", {"file": str(tmp_path / "once")}), episodes[1])
        assert again.content == "alive" and lines_of(tmp_path / "once") == ["tried", "tried"]
        await until(lambda: host.health().alive == 2 and host.health().restarted == 2)
        await host.close(stateful)
        await host.open(stateful)
        assert (await host.call(ToolCall("remember", {"value": "c"}), stateful)).content == "c"
    finally:
        await host.stop()
    await until(lambda: not any(_is_alive(int(pid)) for pid in pids))


async def test_a_cancelled_call_is_cancelled_in_its_worker(tmp_path: Path) -> None:
    host = ProcessHost(references("nap", "big"), workers=1)
    await host.start()
    try:
        episode, file = context(), tmp_path / "nap"
        await host.open(episode)
        call = asyncio.create_task(
            host.call(ToolCall("nap", {"seconds": 60, "file": str(file)}), episode)
        )
        await until(lambda: lines_of(file) == ["start"])
        call.cancel()
        await until(lambda: lines_of(file) == ["start", "cancelled"])
        assert (
            len((await host.call(ToolCall("big", {"chars": 3_000_000}), episode)).content) == 3_000_000
        )
        assert host.health().running == 0
    finally:
        await host.stop()


async def test_a_worker_that_blocks_its_event_loop_is_replaced(tmp_path: Path) -> None:
    module = tmp_path / "blocker.py"
    module.write_text(
        "import time\n"
        "async def block() -> str:\n    'Blocks.'\n    time.sleep(600)\n"
        "async def quick() -> str:\n    'Quick.'\n    return 'quick'\n"
    )
    host = ProcessHost([f"{module}:block", f"{module}:quick"], workers=1, hang_seconds=0.5)
    await host.start()
    try:
        episode, other = context(), context()
        await host.open(episode)
        await host.open(other)
        blocked = asyncio.create_task(host.call(ToolCall("block"), episode))
        await asyncio.sleep(0.2)
        quick = asyncio.create_task(host.call(ToolCall("quick"), other))
        await until(lambda: host.health().restarted >= 1)
        blocked.cancel()
        assert (await quick).content == "quick"
        await asyncio.wait((blocked,))
    finally:
        await host.stop()


async def test_a_server_with_workers_survives_them(tmp_path: Path) -> None:
    names = ("who", "look", "remember")
    with serving(*names, options=("--backend", "processes", "--workers", "2")) as server:
        async with RemoteTools(server.address) as tools:
            episode, other = context(), context()
            victim = int((await tools.call(ToolCall("who"), episode)).content)
            await tools.call(ToolCall("remember", {"value": "a"}), other)
            file = tmp_path / "looked"
            running = asyncio.create_task(
                tools.call(ToolCall("look", {"file": str(file), "seconds": 0.5}), episode)
            )
            await until(lambda: lines_of(file))
            os.kill(victim, signal.SIGKILL)
            assert (await running).content == "seen" and len(lines_of(file)) == 2
            logged = [line["event"] for line in server.logs()]
            assert any("was killed by SIGKILL" in line and "repeated" in line for line in logged)
    await until(lambda: not _is_alive(victim))


async def test_workers_end_with_a_server_that_is_killed() -> None:
    with serving("who", options=("--backend", "processes", "--workers", "1")) as server:
        async with RemoteTools(server.address) as tools:
            episode = context()
            worker = int((await tools.call(ToolCall("who"), episode)).content)
            assert worker != server.process.pid and _is_alive(worker)
            server.kill()
            await until(lambda: not _is_alive(worker))


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_random_kills_under_load(tmp_path: Path) -> None:
    """Servers are killed at random under 48 callers: every call ends as a result or a typed failure,
    what may not be repeated never runs twice, and every repetition is counted."""
    names = ("look", "pay", "echo")
    server = ServerProcess(*names)
    port, rounds, outcomes = server.port, 12, Counter[str]()
    stop, played = asyncio.Event(), list[tuple[int, int]]()

    async def killer() -> None:
        nonlocal server
        for _ in range(rounds):
            await asyncio.sleep(random.uniform(0.3, 1.0))
            server.kill()
            server.close()
            server = await asyncio.to_thread(ServerProcess, *names, options=("--port", str(port)))
        stop.set()

    async def caller(tools: RemoteTools, number: int) -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            played.append((number, turn))
            name = "pay" if (turn + number) % 2 else "look"
            file = tmp_path / f"{name}-{number}-{turn}"
            episode = context(f"{number}-{turn}")
            try:
                await tools.call(ToolCall(name, {"file": str(file), "seconds": 0.02}), episode)
                outcomes[f"{name} ok"] += 1
                assert lines_of(file), "a result without a run"
            except OutcomeUnknown:
                assert name == "pay"
                outcomes["pay unknown"] += 1
            finally:
                await tools.close(episode)
            if name == "pay":
                assert len(lines_of(file)) <= 1, "ran twice"

    async with RemoteTools(f"127.0.0.1:{port}") as tools:
        await asyncio.gather(killer(), *(caller(tools, number) for number in range(48)))
        looked = [tmp_path / f"look-{number}-{turn}" for number, turn in played]
        twice = sum(len(lines_of(file)) - 1 for file in looked if lines_of(file))
        assert twice <= tools.counters.repeated
    server.kill()
    server.close()
    assert outcomes["pay ok"] > 50 and outcomes["look ok"] > 50


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_workers_killed_at_random_under_load(tmp_path: Path) -> None:
    """The same for the worker processes of one server: other calls go on, and all workers come back."""
    host = ProcessHost(references("look", "pay", "remember", "who"), workers=3)
    outcomes, stop = Counter[str](), asyncio.Event()

    async def killer() -> None:
        for _ in range(25):
            await asyncio.sleep(random.uniform(0.05, 0.5))
            episode = context()
            await host.open(episode)
            os.kill(int((await host.call(ToolCall("who"), episode)).content), signal.SIGKILL)
            await host.close(episode)
        stop.set()

    async def caller(tools: RemoteTools, number: int) -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            episode, paid = context(f"{number}-{turn}"), tmp_path / f"pay-{number}-{turn}"
            looked = str(tmp_path / f"look-{number}-{turn}")
            try:
                for values in ("a", "a,a"):
                    told = await tools.call(ToolCall("remember", {"value": "a"}), episode)
                    assert told.content == values, "state is whole, or lost and said so"
                await tools.call(ToolCall("look", {"file": looked, "seconds": 0.02}), episode)
                await tools.call(ToolCall("pay", {"file": str(paid), "seconds": 0.02}), episode)
                outcomes["ok"] += 1
            except EpisodeLost:
                outcomes["lost"] += 1
            await tools.close(episode)
            assert len(lines_of(paid)) <= 1, "ran twice"

    async with ToolServer(host) as server, RemoteTools(server.address) as tools:
        await asyncio.gather(killer(), *(caller(tools, number) for number in range(24)))
        await until(lambda: host.health().alive == 3)
        assert host.health().restarted >= 20 and host.health().running == 0
        assert server.service is not None and len(server.service.sessions) == 0
        assert server.service.admission.running == server.service.admission.waiting == 0
    assert outcomes["ok"] > 100 and outcomes["lost"] > 5


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
