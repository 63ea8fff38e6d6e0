"""Faults. The model's become observations; ours are typed, counted, and in neither loss nor baseline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rollout_parts import assert_exact, attempt_of, called, fake, play, play_one, rollout
from rollout_process_tools import die, die_once

from ludus.core import (
    Aborted,
    Boundary,
    EngineError,
    Fault,
    Group,
    InfraError,
    Sampling,
    SegmentKind,
    StopReason,
    Task,
    ToolCall,
    ToolContext,
    ToolFault,
    ToolResult,
    ToolSpec,
    Trajectory,
)
from ludus.envs import Env, EnvPool
from ludus.observe import rollout_metrics
from ludus.rewards import reward
from ludus.rollouts import Agent, Episode, Rollout
from ludus.tools import tool

HUGE = 100_000_000

# The model's faults: an observation, and the episode goes on ------------------------------------------


@tool(timeout=0.05)
async def hang() -> str:
    """Never return."""
    await asyncio.Event().wait()
    return "never"


@tool(timeout=0.05)
def hang_in_a_thread() -> str:
    """Take too long in a thread."""
    time.sleep(0.3)
    return "too late"


@tool
def boom() -> str:
    """Raise."""
    raise RuntimeError("boom")


@tool
def refuse() -> str:
    """Say what was wrong."""
    raise ToolFault("say please", Fault.LIMIT)


@tool
def leave() -> str:
    """Try to end the program."""
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("broken", "fault", "said"),
    [
        (hang, Fault.TOOL_TIMEOUT, "0.05 seconds"),
        (hang_in_a_thread, Fault.TOOL_TIMEOUT, "0.05 seconds"),
        (boom, Fault.TOOL_RAISED, "RuntimeError: boom"),
        (refuse, Fault.LIMIT, "say please"),
        (leave, Fault.TOOL_RAISED, "SystemExit"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
async def test_a_broken_tool_is_an_observation(broken: Any, fault: Fault, said: str) -> None:
    playing = rollout([called(broken.name), "done"], tools=[broken])
    trajectory = await play_one(playing)
    assert trajectory.stop is StopReason.ANSWERED and trajectory.is_trainable
    assert trajectory.actions[0].faults == (fault,) and trajectory.actions[1].faults == ()
    assert said in playing.renderer.tokenizer.decode(fake(playing).calls[1].consumed)
    assert_exact(trajectory, fake(playing))
    metrics = rollout_metrics([Group(trajectory.task, [trajectory])])
    assert metrics[f"fault/{fault}"] == 1 and metrics["failures"] == 0


@tool
def flood() -> str:
    """Return very much."""
    return "abcdefgh" * (HUGE // 8)


@tool(max_chars=10 * HUGE)
async def flood_on_the_loop() -> str:
    """Return very much, past the tool's own limit."""
    return "abcdefgh" * (HUGE // 8)


@pytest.mark.parametrize("broken", [flood, flood_on_the_loop], ids=lambda one: one.name)
async def test_a_huge_result_is_cut_to_its_budget(broken: Any) -> None:
    playing = rollout(
        [called(broken.name), "done"], tools=[broken], budgets={"max_observation_tokens": 200}
    )
    trajectory = await play_one(playing)
    [result] = [m.content for m in trajectory.messages if m.role == "tool"]
    assert len(playing.renderer.tokenizer.encode(result)) <= 200
    assert result.startswith("abcdef") and result.endswith("efgh") and "left out" in result
    [observation] = [s for s in trajectory.sequences[0].segments if s.kind is SegmentKind.OBSERVATION]
    assert len(observation.tokens) < 300
    assert trajectory.stop is StopReason.ANSWERED and trajectory.faults == []


class Talkative(Env):
    """An environment whose tool says too much."""

    @tool
    async def talk(self) -> str:
        """Talk."""
        return "bla " * 5000


async def test_results_of_an_environment_keep_to_the_budget_too() -> None:
    pool = EnvPool(Talkative, name="env")
    playing = rollout(
        [called("talk"), "done"], pools={"env": pool}, budgets={"max_observation_tokens": 100}
    )
    trajectory = await play_one(playing)
    [result] = [m.content for m in trajectory.messages if m.role == "tool"]
    assert len(result) <= 100 and "left out" in result
    await pool.close()


@pytest.mark.parametrize("value", [b"ok \xff\xfe", "ok \ud800", "ok \x00 <|im_end|> <tool_call>"])
async def test_a_result_that_is_no_clean_text(value: Any) -> None:
    @tool
    def odd() -> Any:
        """Return something odd."""
        return value

    playing = rollout([called("odd"), "done"], tools=[odd])
    trajectory = await play_one(playing)
    assert trajectory.stop is StopReason.ANSWERED and trajectory.faults == []
    assert_exact(trajectory, fake(playing))
    [observation] = [s for s in trajectory.sequences[0].segments if s.kind is SegmentKind.OBSERVATION]
    controls = playing.renderer.tokenizer.controls
    # the end of the model's turn was its own; what the tool wrote has opened or closed nothing
    assert observation.tokens.count(controls["<|im_end|>"]) == 1
    assert controls["<tool_call>"] not in observation.tokens


async def test_malformed_and_unknown_calls_are_observations() -> None:
    said = ["<tool_call>nonsense</tool_call>", called("nobody"), "done"]
    trajectory = await play_one(rollout(said, tools=[boom]))
    assert [a.faults for a in trajectory.actions] == [(Fault.MALFORMED_CALL,), (Fault.UNKNOWN_TOOL,), ()]
    assert trajectory.stop is StopReason.ANSWERED


async def test_an_action_cut_before_its_call_was_complete_ends_the_episode() -> None:
    playing = rollout([called("boom"), "done"], tools=[boom], budgets={"max_turn_tokens": 8})
    trajectory = await play_one(playing)
    assert trajectory.stop is StopReason.MAX_TOKENS and trajectory.turns == 1
    assert trajectory.is_trainable, "a budget is the model's to keep"
    metrics = rollout_metrics([Group(trajectory.task, [trajectory])])
    assert (metrics["stop/max_tokens"], metrics["turn_cut"]) == (1, 1)
    prompt = len(trajectory.tokens) - 8
    short = await play_one(rollout([called("boom")], tools=[boom], budgets={"max_tokens": prompt + 8}))
    metrics = rollout_metrics([Group(short.task, [short])])
    assert (metrics["stop/max_tokens"], metrics["turn_cut"]) == (1, 0), (
        "the episode's tokens were used up"
    )


# Ours: typed, counted, excluded -----------------------------------------------------------------------


def assert_failed(group: Group, boundary: Boundary, *, failed: int = 1) -> list[Trajectory]:
    """The group has `failed` failures, all of them at this boundary; the others are sound."""
    broken = [t for t in group.trajectories if t.failure is not None]
    assert [t.failure.boundary for t in broken if t.failure] == [boundary] * failed
    for trajectory in broken:
        assert trajectory.stop is StopReason.FAILED
        assert trajectory.reward is None and trajectory.rewards == {}
        assert not trajectory.is_trainable
    assert len(group.trainable) == len(group.trajectories) - failed
    metrics = rollout_metrics([group])
    assert metrics["failures"] == metrics[f"failure/{boundary}"] == failed
    assert metrics["episodes"] == len(group.trajectories)
    assert metrics["episodes_scored"] == len(group.trainable)
    return broken


def only_attempt(number: int, said: str, otherwise: str = "done") -> Callable[..., str]:
    """One attempt says something once; everybody else, and it itself later on, something other."""
    asked: set[str | None] = set()

    def script(tokens: list[int], sampling: Sampling, session: str | None) -> str:
        is_first = session not in asked
        asked.add(session)
        return said if is_first and attempt_of(session) == number else otherwise

    return script


async def test_a_tool_that_kills_its_process_fails_its_episode_alone() -> None:
    playing = rollout(only_attempt(1, called("die")), tools=[die], attempts=3)
    [group] = await play(playing)
    [broken] = assert_failed(group, Boundary.TOOL)
    assert broken.attempt == 1 and broken.failure is not None
    assert "die" in broken.failure.message and broken.failure.attempts == 2


async def test_a_tool_whose_process_died_once_leaves_no_trace(tmp_path: Path) -> None:
    said = called("die_once", marker=str(tmp_path / "marker"))
    trajectory = await play_one(rollout([said, "done"], tools=[die_once]))
    assert trajectory.failure is None and trajectory.faults == []
    assert [m.content for m in trajectory.messages if m.role == "tool"] == ["alive"]


async def test_one_call_that_fails_stops_its_siblings() -> None:
    stopped = asyncio.Event()

    @tool(timeout=None)
    async def wait() -> str:
        """Wait."""
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()
        return "never"

    @tool(retries=0)
    async def lose() -> str:
        """Lose the connection."""
        await asyncio.sleep(0)
        raise ConnectionError("gone")

    [group] = await play(rollout([called("wait") + called("lose")], tools=[wait, lose]))
    assert_failed(group, Boundary.TOOL)
    assert stopped.is_set()


class Moody(Env):
    """Cannot be reset while `left` is above zero."""

    left = 0

    def reset(self, task: Task) -> str:
        if type(self).left > 0:
            type(self).left -= 1
            raise OSError("no display")
        return "ready"


def moody(times: int) -> type[Moody]:
    return type("Moody", (Moody,), {"left": times})


async def test_an_environment_that_never_resets() -> None:
    pool = EnvPool(moody(10**6), name="env", reset_retries=1)
    [group] = await play(rollout(lambda *_: "done", pools={"env": pool}, attempts=2))
    broken = assert_failed(group, Boundary.ENV, failed=2)
    assert all(t.failure and "no display" in t.failure.message for t in broken)
    assert pool.stats.in_use == 0
    await pool.close()


async def test_an_environment_that_fails_to_reset_once() -> None:
    pool = EnvPool(moody(1), name="env")
    [group] = await play(rollout(lambda *_: "done", pools={"env": pool}, attempts=2))
    assert len(group.trainable) == 2 and rollout_metrics([group])["failures"] == 0
    assert pool.stats.failures == 1
    await pool.close()


async def test_an_exhausted_pool() -> None:
    go_on = asyncio.Event()

    @reward(timeout=None)
    async def waits(env: Any) -> float:
        await go_on.wait()
        return 1.0

    pool = EnvPool(moody(0), name="env", size=1, max_wait=0.05)
    playing = rollout(lambda *_: "done", rewards=[waits], pools={"env": pool}, retries=0)
    groups = playing.groups([Task.of("x", id="a"), Task.of("y", id="b")], 0)
    lost = await anext(groups)
    [broken] = assert_failed(lost, Boundary.POOL)
    assert broken.failure is not None and "raise the pool's size" in broken.failure.message
    go_on.set()
    rest = [group async for group in groups]
    assert [len(group.trainable) for group in rest] == [1]
    await pool.close()


async def test_an_engine_request_aborted_midway_is_nobodys_fault() -> None:
    is_asked = asyncio.Event()

    def script(tokens: list[int], sampling: Sampling, session: str | None) -> str:
        is_asked.set()
        return "a long answer"

    playing = rollout(script, attempts=2, engine={"seconds": 0.2})

    async def abort() -> None:
        await is_asked.wait()
        await fake(playing).abort("0/t/0/0")

    [group], _ = await asyncio.gather(play(playing), abort())
    aborted, sound = group.trajectories
    assert aborted.stop is StopReason.ABORTED and aborted.failure is None
    assert not aborted.is_trainable and sound.is_trainable
    assert_exact(aborted, fake(playing))
    metrics = rollout_metrics([group])
    assert metrics["aborted"] == 1 and metrics["failures"] == 0 and metrics["episodes_scored"] == 1


def looks_and_answers(**settings: Any) -> Rollout:
    """An episode of two turns: one look, one answer."""

    @tool
    def look() -> str:
        """Look."""
        return "a fox"

    def script(tokens: list[int], sampling: Sampling, session: str | None) -> str:
        has_looked = "a fox" in playing.renderer.tokenizer.decode(tokens)
        return "a fox" if has_looked else called("look")

    playing = rollout(script, tools=[look], **settings)
    return playing


@pytest.mark.parametrize("request_number", [0, 1])
async def test_a_passing_engine_error_leaves_a_clean_trajectory(request_number: int) -> None:
    playing = looks_and_answers(engine={"failures": {request_number: EngineError("overloaded")}})
    mended, undisturbed = await play_one(playing), await play_one(looks_and_answers())
    assert mended.is_trainable
    for view in ("tokens", "action_mask", "logprobs", "messages", "answer", "stop", "reward"):
        assert getattr(mended, view) == getattr(undisturbed, view)
    assert fake(playing).sessions == {}


async def test_a_lasting_engine_error() -> None:
    errors = {number: EngineError("out of memory") for number in range(10)}
    playing = rollout(lambda *_: "done", retries=2, engine={"failures": errors})
    [group] = await play(playing)
    [broken] = assert_failed(group, Boundary.ENGINE)
    assert broken.failure is not None and broken.failure.attempts == 3


async def test_an_engine_error_that_will_not_pass_is_not_retried() -> None:
    final = EngineError("the context is too long", retriable=False)
    playing = rollout(lambda *_: "done", retries=5, engine={"failures": {0: final}})
    [group] = await play(playing)
    [broken] = assert_failed(group, Boundary.ENGINE)
    assert broken.failure is not None and broken.failure.attempts == 1
    assert broken.failure.message == "the context is too long"


class Clumsy(Agent):
    """Raises in the attempts it is told to, after a turn."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def run(self, episode: Episode) -> None:
        await episode.generate()
        if episode.trajectory.attempt == 0:
            raise self.error
        episode.answer("done")


@pytest.mark.parametrize("error", [ValueError("a bug"), TimeoutError("not ours"), KeyError("k")])
async def test_an_agent_that_raises(error: Exception) -> None:
    playing = rollout(lambda *_: "done", agent=Clumsy(error), attempts=3, retries=3)
    [group] = await play(playing)
    [broken] = assert_failed(group, Boundary.AGENT)
    assert broken.failure is not None and broken.failure.kind == type(error).__name__
    assert broken.failure.attempts == 1, "a bug is not mended by trying again"
    assert fake(playing).sessions == {}


async def test_an_agent_that_aborts() -> None:
    playing = rollout(lambda *_: "done", agent=Clumsy(Aborted("too stale")), attempts=2)
    [group] = await play(playing)
    assert [t.stop for t in group.trajectories] == [StopReason.ABORTED, StopReason.ANSWERED]


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), "three", RuntimeError("x"), TimeoutError("x")]
)
async def test_a_reward_that_breaks(value: Any) -> None:
    @reward
    def broken(trajectory: Trajectory) -> Any:
        if trajectory.attempt != 2:
            return 1.0
        if isinstance(value, Exception):
            raise value
        return value

    playing = rollout(lambda *_: "done", rewards=[broken], attempts=4, retries=3)
    [group] = await play(playing)
    [lost] = assert_failed(group, Boundary.REWARD)
    assert lost.attempt == 2
    assert len(fake(playing).calls) == 4, "playing again would not mend a reward"


@pytest.mark.parametrize("alone", [True, False])
async def test_a_group_reward_that_breaks_fails_the_group(alone: bool) -> None:
    def ranking(group: Group) -> list[float]:
        raise RuntimeError("no judge")

    settings: dict[str, Any] = {"rewards": []} if alone else {}
    playing = rollout(lambda *_: "done", group_rewards=[ranking], attempts=3, **settings)
    [group] = await play(playing)
    assert_failed(group, Boundary.REWARD, failed=3)


async def test_an_episode_over_time_is_ours() -> None:
    playing = rollout(
        lambda *_: "done",
        attempts=2,
        budgets={"max_seconds": 0.1},
        engine={"seconds": lambda produced: 0.0},
        agent=Sleepy(),
    )
    [group] = await play(playing)
    [broken] = assert_failed(group, Boundary.DEADLINE)
    assert broken.failure is not None and "budgets.max_seconds = 0.1" in broken.failure.message
    assert broken.failure.attempts == 2 and broken.failure.kind == "TimeoutError"
    assert fake(playing).sessions == {}


class Stubborn:
    """A tool set of somebody's own: `note` works, `fail` breaks, and `wait` takes its time to be stopped."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    async def open(self, context: ToolContext) -> None:
        """Nothing to open."""

    async def list(self, context: ToolContext) -> list[ToolSpec]:
        return [
            ToolSpec(name, "Do it.", {"type": "object"}) for name in ("swallow", "fail", "wait", "nap")
        ]

    async def call(self, call: ToolCall, context: ToolContext) -> ToolResult:
        if call.name == "nap":
            await asyncio.sleep(0.02)
            return ToolResult("rested")
        if call.name == "fail":
            await asyncio.sleep(0.01)
            raise InfraError(Boundary.TOOL, "lost", retriable=False, replay=False)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if call.name == "swallow":
                return ToolResult("what cancellation?")
            await asyncio.sleep(0.05)
            self.notes.append("stopped")
            raise
        return ToolResult("never")

    async def close(self, context: ToolContext) -> None:
        self.notes.append("closed")


@pytest.mark.parametrize("calls", [1, 2])
async def test_a_tool_that_takes_cancellation_for_an_answer_does_not_outlive_the_episode(
    calls: int,
) -> None:
    said = called("swallow") * calls
    playing = rollout(lambda *_: said, tools=Stubborn(), budgets={"max_seconds": 0.2}, retries=0)
    trajectory = await asyncio.wait_for(play_one(playing), 20)
    assert trajectory.failure is not None and trajectory.failure.boundary is Boundary.DEADLINE
    assert trajectory.turns == 1


async def test_calls_beside_one_that_fails_are_over_before_the_tools_are_closed() -> None:
    tools = Stubborn()
    playing = rollout(lambda *_: called("fail") + called("wait"), tools=tools, retries=0)
    trajectory = await play_one(playing)
    assert trajectory.failure is not None and trajectory.failure.boundary is Boundary.TOOL
    assert tools.notes == ["stopped", "closed"]


async def test_the_time_of_calls_is_the_tools() -> None:
    playing = rollout(lambda tokens, *_: called("nap"), tools=Stubborn(), budgets={"max_turns": 3})
    trajectory = await play_one(playing)
    assert trajectory.turns == 3
    assert trajectory.seconds["tools"] >= 3 * 0.02 * 0.99  # sleeping is never shorter than asked for


class Sleepy(Agent):
    """Sleeps through its first attempt."""

    async def run(self, episode: Episode) -> None:
        if episode.trajectory.attempt == 0:
            await asyncio.Event().wait()
        await super().run(episode)


class Slow(Env):
    """Its tool goes on in a thread after its deadline."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1

    @tool(timeout=0.02)
    def work(self) -> str:
        """Work."""
        time.sleep(0.3)
        return "done"


async def test_an_environment_that_may_still_be_at_work_is_not_handed_out_again() -> None:
    Slow.made = 0
    pool = EnvPool(Slow, name="env", size=1)
    playing = rollout(only_attempt(0, called("work")), pools={"env": pool}, attempts=3, max_in_flight=1)
    [group] = await play(playing)
    assert len(group.trainable) == 3
    assert group.trajectories[0].faults == [Fault.TOOL_TIMEOUT]
    assert Slow.made == 2, "the first one was replaced, the second one was reused"
    await pool.close()


async def test_tools_that_an_environment_cannot_name_are_its_failure() -> None:
    class Mute(Env):
        async def tools(self) -> Any:
            raise OSError("no answer")

    pool = EnvPool(Mute, name="mute")
    [group] = await play(rollout(lambda *_: "done", pools={"mute": pool}))
    assert_failed(group, Boundary.ENV)
    await pool.close()


async def test_a_failure_inside_a_tool_keeps_its_own_boundary() -> None:
    @tool(retries=0)
    async def query() -> str:
        """Ask a server."""
        raise InfraError(Boundary.SERVER, "the search server is down")

    [group] = await play(rollout(lambda *_: called("query"), tools=[query]))
    assert_failed(group, Boundary.SERVER)


async def test_an_episode_whose_state_was_lost_is_played_again() -> None:
    """A lost session cannot be retried by the call, but a new episode gets a new session."""
    calls = 0

    @tool
    def remember(what: str) -> str:
        """Keep something in the session."""
        nonlocal calls
        calls += 1
        if calls == 1:
            raise InfraError(Boundary.SANDBOX, "the session is gone", retriable=False, replay=True)
        return "kept"

    playing = rollout(
        [called("remember", what="x"), called("remember", what="x"), "done"], tools=remember
    )
    [group] = [group async for group in playing.groups([Task.of("go", id="t")], seed=0)]
    [trajectory] = group.trajectories
    assert trajectory.is_trainable and trajectory.turns == 2 and calls == 2
