"""Episodes with the tools of MCP servers: lists that change in the midst, servers that die, the audit log."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from ludus.chat.formats import load_format
from ludus.chat.renderer import Renderer
from ludus.core.failures import Boundary, Fault
from ludus.core.messages import ToolCall
from ludus.core.task import Task
from ludus.core.tokenizer import ByteTokenizer
from ludus.core.trajectory import AuditRecord, Trajectory
from ludus.engine import FakeEngine
from ludus.observe import AuditLog, read_audit
from ludus.rewards import Scorer
from ludus.rollouts.agent import Demonstrator
from ludus.rollouts.recorder import Budgets
from ludus.rollouts.rollout import Rollout
from ludus.tools import shut
from ludus.tools.library import build_toolset

SERVER = Path(__file__).parents[1] / "tools" / "mcp_server.py"
COMMAND = shlex.join([sys.executable, "-I", str(SERVER)])


async def played(
    calls: list[ToolCall], audit: Any = None, format: str = "hermes", **settings: Any
) -> Trajectory:
    """An episode that makes these calls, one a turn."""

    def expert(task: Task) -> Any:
        for call in calls:  # noqa: UP028 - a list takes no observations
            yield call
        yield "done"

    tools = build_toolset([{"mcp": COMMAND, **settings}])
    rollout = Rollout(
        engine=FakeEngine([]),
        renderer=Renderer(ByteTokenizer(), load_format(format)),
        scorer=Scorer(()),
        tools=tools,
        agent=Demonstrator(expert),
        budgets=Budgets(max_tokens=200_000, max_observation_tokens=4000),
        audit=audit,
    )
    try:
        return await rollout.play(Task.of("go", id="t1"), 0, 0)
    finally:
        await shut(tools)


def results(trajectory: Trajectory) -> list[str]:
    return [message.content for message in trajectory.messages if message.role == "tool"]


async def test_the_model_is_told_of_new_tools_and_can_call_them() -> None:
    calls = [ToolCall("unlock"), ToolCall("secret", {"word": "x"}), ToolCall("refuse")]
    for format in ("hermes", "tags"):
        made = calls if format == "hermes" else calls[:1]
        seen: list[AuditRecord] = []
        episode = await played(made, seen.append, format)
        assert episode.failure is None
        told = results(episode)
        assert told[0].startswith("unlocked\n\nThe tools have changed:\n- gone: refuse\n- new: {")
        assert json.loads(told[0].rpartition("- new: ")[2])["name"] == "secret"
        if format == "hermes":
            assert told[1] == "the secret of x"  # and is told once
            assert "no tool called 'refuse'" in told[2]
            assert [record.legality for record in seen] == ["legal", "legal", "unknown_tool"]
            assert "secret" not in seen[0].offered and "secret" in seen[1].offered


async def test_a_server_that_dies_costs_a_replay_and_then_the_episode() -> None:
    episode = await played([ToolCall("add", {"a": 1, "b": 2}), ToolCall("die")])
    assert episode.failure is not None and episode.failure.boundary is Boundary.SERVER
    assert episode.failure.kind == "MCPServerDied" and episode.failure.attempts == 2
    assert episode.reward is None  # never a reward of zero


async def test_the_audit_log(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    long = "y" * 10_000
    calls = [
        ToolCall("add", {"a": 1, "b": 2}),
        ToolCall("add", {"a": "one"}),
        ToolCall("nothing"),
        ToolCall("refuse"),
        ToolCall("image"),
        ToolCall("echo", {"text": long}),
        ToolCall("die"),
    ]
    await played(calls, log, deny=["count"])
    log.close()
    with log.path.open("a") as file:
        file.write('{"kind": "ca')  # a run that was killed in the midst of a line
    rows = list(read_audit(tmp_path))
    assert [row["tool"] for row in rows] == [call.name for call in calls] * 2  # played again
    first = rows[: len(calls)]
    assert [row["legality"] for row in first] == [
        "legal",
        "bad_arguments",
        "unknown_tool",
        *["legal"] * 4,
    ]
    faults = [None, Fault.BAD_ARGUMENTS, Fault.UNKNOWN_TOOL, Fault.TOOL_RAISED, None, None, None]
    assert [row["fault"] for row in first] == faults
    assert [row["turn"] for row in first] == [1, 2, 3, 4, 5, 6, 7]
    assert first[0]["arguments"] == {"a": 1, "b": 2} and first[0]["chars"] == len('{"sum":3}')
    assert first[4]["media"] == 1 and first[5]["chars"] == 10_000 and len(first[5]["arguments"]) < 5_000
    assert "I cannot go on" in first[6]["failure"] and first[0]["failure"] is None
    assert all(
        row["seconds"] >= 0 and "add" in row["offered"] and "count" not in row["offered"] for row in rows
    )
    lines = [json.loads(line) for line in log.path.read_text().splitlines()[:-1]]
    assert sum(line["kind"] == "tools" for line in lines) == 1  # a list is written once
