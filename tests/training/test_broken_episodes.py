"""Every kind of broken episode, from the episodes themselves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from worker_parts import Steps, called, rl, task_set, tasks

import ludus
from ludus.algos import load_algorithm
from ludus.core import (
    EngineError,
    Fault,
    FinishReason,
    Group,
    Segment,
    SegmentKind,
    StopReason,
    Task,
    TokenSequence,
    ToolCall,
    ToolFault,
    Trajectory,
)
from ludus.observe import rollout_metrics
from ludus.training import BrokenConfig, RolloutBatch
from ludus.training.data.batch import Batch, advantage_inputs
from ludus.training.data.rollout_batch import (
    KINDS,
    Kind,
    broken_kinds,
    has_penalties,
    is_masked,
    penalty,
    shape_reward,
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
    played = await Steps([one], config, 0).play(0, {})
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
    played = await Steps([task_set(tasks(1), words)], config, 0).play(0, {})
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


@ludus.reward(name="success")
def plus_or_minus_one(answer: str) -> float:
    return 1.0 if answer == "right" else -1.0


@ludus.tool
async def ponder() -> str:
    """Take longer than an episode may."""
    await asyncio.sleep(60)
    return "at last"


SAID = ["right", "wrong", "x" * 99, called("ponder"), "right"]
"""The third is over length, the fourth over time."""


def advantages_of(group: Group) -> list[float]:
    """What GRPO makes of a group, one number for each attempt that is in it."""
    scored = group.trainable
    batch = Batch.of(scored)
    found = load_algorithm("grpo").estimate(advantage_inputs(batch, scored, [0] * len(scored)))
    places = [(batch.action_T & (batch.trajectory_T == n)).nonzero()[0] for n in range(len(scored))]
    return [float(found.advantages_T[place]) for place in places]


async def play_five(broken: dict[str, Any]) -> tuple[RolloutBatch, list[str]]:
    """A group of five attempts, and the sessions in which the model was asked."""
    asked: list[str] = []

    def words(task: str, attempt: int) -> str:
        asked.append(str(attempt))
        return SAID[attempt]

    one = task_set(
        tasks(1),
        words,
        tools=[ponder],
        rewards=[plus_or_minus_one],
        budgets={"max_turn_tokens": 60, "max_seconds": 1.0},
    )
    config = rl(tasks=1, attempts=5, broken=broken)
    return await Steps([one], config, 0).play(0, {}), asked


async def test_verltool_pays_nothing_and_masks_within_the_baseline() -> None:
    """Rewards 1, -1, 0, 0, 1: mean 0.2, deviation sqrt(2.8 / 4)."""
    played, asked = await play_five({"over_length": "verltool", "over_time": "verltool"})
    [group] = played.groups
    assert [t.reward for t in group.trajectories] == [1.0, -1.0, 0.0, 0.0, 1.0]
    assert group.trajectories[3].stop is StopReason.MAX_SECONDS
    assert asked.count("3") == 1, "it is not played again"
    assert played.masked == {(0, 2), (0, 3)}
    assert played.metrics["broken/over_time"] == played.metrics["broken/over_length"] == 1
    deviation = (2.8 / 4) ** 0.5
    by_hand = [0.8, -1.2, -0.2, -0.2, 0.8]
    assert advantages_of(group) == pytest.approx([one / deviation for one in by_hand], abs=1e-5)
    metrics = rollout_metrics(played.groups)
    assert metrics["failures"] == 0 and metrics["stop/max_seconds"] == pytest.approx(0.2)
    assert metrics["success"] == pytest.approx(0.4)


async def test_by_default_over_time_is_a_failure_and_a_mask_keeps_the_reward() -> None:
    """Rewards 1, -1, -1, none, 1: mean 0, deviation sqrt(4 / 3)."""
    played, asked = await play_five({"over_length": "mask"})
    [group] = played.groups
    assert [t.reward for t in group.trajectories] == [1.0, -1.0, -1.0, None, 1.0]
    assert asked.count("3") == 2 and played.masked == {(0, 2)}
    expected = [one / (4 / 3) ** 0.5 for one in (1, -1, -1, 1)]
    assert advantages_of(group) == pytest.approx(expected, abs=1e-5)


def test_verltool_comes_before_numbers() -> None:
    action = Segment(SegmentKind.ACTION, [1] * 30, [0.0] * 30, finish=FinishReason.STOP_TOKEN)
    sequence = TokenSequence([Segment(SegmentKind.PROMPT, [0]), action])
    one = Trajectory(
        Task.of("?"), [sequence], stop=StopReason.MAX_TURNS, reward=0.3, rewards={"f1": 0.3}
    )
    settings = rl(
        broken={"no_answer": "verltool", "void_turn": -0.7}, overlong={"longest": 20, "buffer": 10}
    )
    shape_reward(one, settings)
    assert one.reward == 0.0 and one.rewards["overlong"] == -1.0
    assert one.rewards["broken"] == pytest.approx(0.7) and one.rewards["success"] == 0.0
    assert is_masked(broken_kinds(one), settings.broken)
