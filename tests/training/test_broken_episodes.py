"""Every kind of broken episode, from the episodes themselves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from worker_parts import called, rl, task_set, tasks

import ludus
from ludus.core import (
    EngineError,
    Fault,
    FinishReason,
    Segment,
    SegmentKind,
    StopReason,
    Task,
    TokenSequence,
    ToolCall,
    ToolFault,
    Trajectory,
)
from ludus.training import BrokenConfig, RolloutWorker
from ludus.training.data.reward_shaping import (
    KINDS,
    Kind,
    broken_kinds,
    has_penalties,
    is_masked,
    penalty,
)


@ludus.tool
async def look(where: str = "here") -> str:
    """Look."""
    return f"nothing {where}"


@ludus.tool
async def drop() -> str:
    """Drop it."""
    raise ToolFault("you hold nothing")


@ludus.tool(timeout=0.01)
async def sleep() -> str:
    """Sleep."""
    await asyncio.sleep(30)
    return "awake"


async def kinds_when(
    said: list[str], agent: ludus.Agent | None = None, budgets: dict[str, Any] | None = None
) -> set[str]:
    """What is broken about an episode in which the model says these things."""
    replies = iter(said)
    one = task_set(
        tasks(1),
        lambda task, attempt: next(replies),
        tools=[look, drop, sleep],
        agent=agent or ludus.Agent(),
        budgets={"max_turns": len(said), **(budgets or {})},
    )
    config = rl(tasks=1, attempts=1, algorithm="reinforce")
    played = await RolloutWorker([one], config, 0).play(0, {})
    [trajectory] = played.groups[0].trajectories
    assert {k for k in KINDS if played.metrics[f"broken/{k}"]} == broken_kinds(trajectory)
    return set(broken_kinds(trajectory))


class Patient(ludus.Agent):
    """Waits for the word "done", and lets the model talk until then."""

    async def run(self, episode: ludus.Episode) -> None:
        while not episode.over:
            turn = await episode.generate()
            if turn.answer == "done":
                episode.answer("done")
            else:
                episode.observe("go on")


async def test_a_sound_episode() -> None:
    assert await kinds_when([called("look"), "right"]) == set()


async def test_no_answer() -> None:
    assert await kinds_when([called("look"), called("look")]) == {"no_answer"}


async def test_over_length() -> None:
    assert await kinds_when(["x" * 99], budgets={"max_turn_tokens": 9}) == {"over_length"}
    assert await kinds_when([called("look", where="x" * 99)], budgets={"max_turn_tokens": 60}) == {
        "over_length"
    }


@pytest.mark.parametrize(
    "said",
    [
        called("drop"),
        called("fly"),
        called("look", speed=3),
        "<tool_call>\n{nonsense\n</tool_call>",
    ],
)
async def test_tool_error(said: str) -> None:
    assert await kinds_when([said, "right"]) == {"tool_error"}


async def test_timed_out() -> None:
    assert await kinds_when([called("sleep"), "right"]) == {"timed_out"}
    two = called("look") + called("look")
    assert await kinds_when([two, "right"], budgets={"max_calls": 1}) == {"timed_out"}


async def test_void_turns() -> None:
    assert await kinds_when([""]) == {"void_turn"}
    assert await kinds_when([called("look"), "  "]) == {"void_turn"}
    assert await kinds_when(["hm", "done"], Patient()) == {"void_turn"}
    assert await kinds_when(["done"], Patient()) == set()
    assert await kinds_when(["hm", "hm"], Patient()) == {"void_turn", "no_answer"}


async def test_what_failed_through_our_fault_is_not_broken() -> None:
    def words(task: str, attempt: int) -> str:
        raise EngineError("gone", retriable=False)

    config = rl(tasks=1, attempts=2, broken={"no_answer": "mask", "void_turn": -1})
    played = await RolloutWorker([task_set(tasks(1), words)], config, 0).play(0, {})
    assert [t.reward for t in played.groups[0].trajectories] == [None, None]
    assert played.masked == frozenset() and not any(played.metrics.values())


def test_a_call_that_nobody_answered_is_an_error_too() -> None:
    def episode(finish: FinishReason) -> Trajectory:
        call = ToolCall("look", fault=Fault.MALFORMED_CALL)
        action = Segment(SegmentKind.ACTION, [1], [0.0], finish=finish, calls=(call,))
        sequence = TokenSequence([Segment(SegmentKind.PROMPT, [0]), action])
        return Trajectory(Task.of("?"), [sequence], stop=StopReason.TERMINATED, reward=0.0)

    assert broken_kinds(episode(FinishReason.STOP_TOKEN)) == {"tool_error"}
    assert broken_kinds(episode(FinishReason.LENGTH)) == set()


def test_treatments() -> None:
    config = BrokenConfig.parse({"no_answer": -1, "tool_error": -0.25, "over_length": "mask"})
    both: set[Kind] = {"no_answer", "tool_error", "void_turn"}
    assert penalty(both, config) == -1.25 and not is_masked(both, config)
    assert penalty({"over_length"}, config) == 0.0 and is_masked({"over_length"}, config)
    assert has_penalties(config) and not has_penalties(BrokenConfig(void_turn="mask"))
