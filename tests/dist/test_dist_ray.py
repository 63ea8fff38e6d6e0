"""Tools in Ray actors, with a Ray of this machine: started by the test, without a dashboard.

Run it with `pytest -m slow tests/dist` where the package ray is installed; it takes about half a minute.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from pathlib import Path
from typing import Any

import pytest

from ludus.core import ConfigError, Fault, Task, ToolCall, ToolContext
from ludus.dist import RayHost
from ludus.serve import ToolServer
from ludus.tools.hosting import EpisodeLost, OutcomeUnknown
from ludus.tools.remote import RemoteTools

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
TOOLS = Path(__file__).parent.parent / "serve" / "served_tools.py"


def context() -> ToolContext:
    return ToolContext(f"episode-{secrets.token_hex(4)}", Task.of("go"))


async def until(condition: Any, seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - other processes make it so
            await asyncio.sleep(0.05)


async def test_actors_host_tools_as_processes_do(tmp_path: Path) -> None:
    names = ("who", "remember", "die", "die_once", "nap", "add")
    host = RayHost([f"{TOOLS}:{name}" for name in names], workers=2)
    async with ToolServer(host) as server, RemoteTools(server.address) as tools:
        episodes = [context() for _ in range(4)]
        pids = [int((await tools.call(ToolCall("who"), episode)).content) for episode in episodes]
        assert len(set(pids)) == 2 and os.getpid() not in pids
        assert (await tools.call(ToolCall("who"), episodes[0])).content == str(pids[0])
        assert (await tools.call(ToolCall("add", {"a": 1}), episodes[0])).fault is Fault.BAD_ARGUMENTS

        file = tmp_path / "nap"
        call = asyncio.create_task(
            tools.call(ToolCall("nap", {"seconds": 60, "file": str(file)}), episodes[0])
        )
        await until(file.exists)
        call.cancel()
        await until(lambda: file.read_text().splitlines() == ["start", "cancelled"])

        stateful = next(e for e, pid in zip(episodes, pids, strict=True) if pid == pids[0])
        other = next(e for e, pid in zip(episodes, pids, strict=True) if pid != pids[0])
        await tools.call(ToolCall("remember", {"value": "a"}), stateful)
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(EpisodeLost, match="is gone"):
            await tools.call(ToolCall("remember", {"value": "b"}), stateful)
        once = tmp_path / "once"
        assert (await tools.call(ToolCall("die_once", {"file": str(once)}), other)).content == "alive"
        assert once.read_text().splitlines() == ["tried", "tried"]
        with pytest.raises(OutcomeUnknown):
            await tools.call(ToolCall("die", {"file": str(tmp_path / "die")}), other)
        assert (tmp_path / "die").read_text() == "died\n"
        await until(lambda: host.health().alive == 2)
        assert host.health().restarted == 3
        assert (await tools.call(ToolCall("who"), context())).fault is None


async def test_tools_that_do_not_exist_are_said_so() -> None:
    host = RayHost([f"{TOOLS}:nothing_like_it"], workers=1)
    with pytest.raises(ConfigError, match="nothing_like_it"):
        await host.start()
    await host.stop()
