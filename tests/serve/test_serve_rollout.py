"""Episodes with remote tools: the same record as with local ones, and none lost when a server is killed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from server_process import TOOLS, ServerProcess, lines_of, serving, until

from ludus.chat import Renderer, load_format
from ludus.core import Boundary, ByteTokenizer, Group, Task, ToolCall, ToolSet
from ludus.engine import FakeEngine
from ludus.rewards import Scorer, reward
from ludus.rollouts import Budgets, Rollout
from ludus.tools.hosting import load_tools
from ludus.tools.remote import RemoteTools

NAMES = ("remember", "add", "raises", "nap")


@reward
def one() -> float:
    """Every episode is worth 1."""
    return 1.0


def rollout(tools: ToolSet, turns: list[list[ToolCall]], attempts: int) -> Rollout:
    """Every episode makes the same calls, turn by turn, and then answers."""
    renderer = Renderer(ByteTokenizer(), load_format("hermes"))
    said: dict[str, int] = {}

    def script(tokens: list[int], sampling: Any, session: str | None) -> str:
        assert session is not None
        turn = said[session] = said.get(session, -1) + 1
        return renderer.format.render_action("", turns[turn]) if turn < len(turns) else "finished"

    return Rollout(
        engine=FakeEngine(script, renderer.tokenizer),
        renderer=renderer,
        scorer=Scorer([one], []),
        tools=tools,
        budgets=Budgets(max_turns=8),
        attempts=attempts,
    )


async def played(playing: Rollout) -> Group:
    [group] = [group async for group in playing.groups([Task.of("Go.", id="t")], 0)]
    return group


async def test_the_record_is_the_same_token_by_token() -> None:
    turns = [
        [ToolCall("remember", {"value": "é\n<|im_end|>"}), ToolCall("add", {"a": 2, "b": 3})],
        [ToolCall("raises", {"message": "no"}), ToolCall("nowhere"), ToolCall("add", {"a": "x"})],
        [ToolCall("remember", {"value": "b"})],
    ]
    references = [f"{TOOLS}:{name}" for name in NAMES]
    here = await played(rollout(load_tools(references), turns, 4))
    with serving(*NAMES) as server:
        async with RemoteTools(server.address) as tools:
            there = await played(rollout(tools, turns, 4))
    for local, remote in zip(here.trajectories, there.trajectories, strict=True):
        assert local.failure is None and remote.failure is None
        assert [s.tokens for s in local.sequences] == [s.tokens for s in remote.sequences]
        assert local.messages == remote.messages and "é" in str(remote.messages)


async def test_episodes_that_lose_their_server_are_played_again(tmp_path: Path) -> None:
    file = tmp_path / "naps"
    turns = [
        [ToolCall("remember", {"value": "a"})],
        [ToolCall("nap", {"seconds": 0.5, "file": str(file)})],
        [ToolCall("remember", {"value": "b"})],
    ]
    first = ServerProcess(*NAMES)
    try:
        async with RemoteTools(first.address) as tools:
            playing = asyncio.create_task(played(rollout(tools, turns, 6)))
            await until(lambda: lines_of(file).count("start") == 6)
            first.kill()
            with serving(*NAMES, options=("--port", str(first.port))):
                group = await playing
            assert tools.counters.lost == 6
    finally:
        first.close()
    for trajectory in group.trajectories:
        assert trajectory.failure is None
        assert [m.content for m in trajectory.messages if "a,b" in m.content], "its state is whole"


async def test_the_servers_queue_is_not_an_episodes_time() -> None:
    """One call runs at a time, so the last of 16 episodes waits for longer than an episode may take."""
    with serving("nap", options=("--concurrency", "1")) as server:
        async with RemoteTools(server.address) as tools:
            playing = rollout(tools, [[ToolCall("nap", {"seconds": 0.15})]], 16)
            playing.budgets, playing.retries = Budgets(max_seconds=1.5), 0
            group = await played(playing)
            slow = rollout(tools, [[ToolCall("nap", {"seconds": 2.5})]], 1)
            slow.budgets, slow.retries = Budgets(max_seconds=1.5), 0
            [late] = (await played(slow)).trajectories
    assert [one.failure for one in group.trajectories] == [None] * 16
    assert max(s.seconds for one in group.trajectories for s in one.spans if s.kind == "queue") > 1.5
    assert late.failure is not None and late.failure.boundary is Boundary.DEADLINE
