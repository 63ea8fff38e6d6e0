"""How an environment reaches the agent: available actions, order of calls, deadlines, own threads."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, ClassVar

import pytest

from ludus.chat import Renderer, load_format
from ludus.core import Boundary, ByteTokenizer, ConfigError, Fault, Task, ToolCall
from ludus.engine import FakeEngine
from ludus.envs import Env, EnvPool, Step
from ludus.observe import rollout_metrics, set_metrics
from ludus.observe.metrics import undefined
from ludus.rewards import Scorer, reward
from ludus.rollouts import Budgets, Rollout
from ludus.tools import as_toolset, tool

TASK = Task.of("Go.", id="t")


def playing(pool: EnvPool, *turns: str | list[ToolCall], **settings: Any) -> Rollout:
    """A rollout in which the model says these turns, in every episode."""
    format = load_format("hermes")
    said = [turn if isinstance(turn, str) else format.render_action("", turn) for turn in turns]

    counts: dict[str | None, int] = {}

    def next_turn(tokens: list[int], sampling: object, session: str | None) -> str:
        turn = counts[session] = counts.get(session, -1) + 1
        return said[min(turn, len(said) - 1)] + "<|im_end|>"

    return Rollout(
        engine=FakeEngine(next_turn, ByteTokenizer()),
        renderer=Renderer(ByteTokenizer(), format),
        scorer=Scorer(settings.pop("rewards", [])),
        tools=as_toolset(settings.pop("tools", [])),
        pools={pool.name: pool},
        budgets=Budgets(max_turns=len(turns)),
        **settings,
    )


class Door(Env):
    """Opens after a key was taken."""

    def reset(self, task: Task) -> str:
        self.has_key = False
        return "A door."

    def step(self, action: str) -> Step:
        self.has_key = self.has_key or action == "take key"
        return Step("You act.", terminated=action == "open door" and self.has_key)

    def available_actions(self) -> list[str]:
        return ["open door"] if self.has_key else ["take key", "wait"]


class Telling(Door):
    show_actions = "observation"


def observed(trajectory: Any) -> list[str]:
    return [message.content for message in trajectory.messages if message.role != "assistant"]


@pytest.mark.parametrize("said_by", ["class", "recipe"])
async def test_available_actions_are_part_of_each_observation_but_the_last(said_by: str) -> None:
    pool = (
        EnvPool(Telling, name="door", size=1)
        if said_by == "class"
        else EnvPool(Door, name="door", size=1, show_actions="observation")
    )
    turns = [[ToolCall("step", {"action": a})] for a in ("dance", "take key", "open door")]
    trajectory = await playing(pool, *turns).play(TASK, attempt=0, seed=0)
    await pool.close()
    seen = observed(trajectory)
    assert 'A door.\n\nAvailable actions: ["take key", "wait"]' in seen[0]
    assert 'You act.\n\nAvailable actions: ["take key", "wait"]' in seen[1]
    assert 'Available actions: ["open door"]' in seen[2]
    assert "Available" not in seen[3], "it is over"


async def test_available_actions_are_a_tool_or_nothing() -> None:
    turns = [[ToolCall("available_actions")], "done"]
    pool = EnvPool(Telling, name="door", size=1, show_actions="tool")
    trajectory = await playing(pool, *turns).play(TASK, attempt=0, seed=0)
    assert 'Available actions: ["take key", "wait"]' in observed(trajectory)[1]
    assert "Available actions" not in observed(trajectory)[0]
    await pool.close()
    pool = EnvPool(Telling, name="door", size=1, show_actions="no")
    trajectory = await playing(pool, *turns).play(TASK, attempt=0, seed=0)
    assert trajectory.faults == [Fault.UNKNOWN_TOOL]
    assert "Available actions:" not in "".join(observed(trajectory))
    await pool.close()


async def test_an_environment_that_does_not_know_its_actions_says_so_and_long_lists_are_cut() -> None:
    class Mute(Door):
        show_actions = "observation"

        def available_actions(self) -> list[str] | None:
            return None

    class Rich(Door):
        def available_actions(self) -> list[str]:
            return [f"go {n}" for n in range(3000)]

    ask = [ToolCall("available_actions")], "done"
    pool = EnvPool(Mute, name="door", size=1)
    trajectory = await playing(pool, [ToolCall("step", {"action": "wait"})]).play(TASK, 0, 0)
    assert "Available" not in "".join(observed(trajectory))
    await pool.close()
    pool = EnvPool(Mute, name="door", size=1, show_actions="tool")
    assert "not known" in observed(await playing(pool, *ask).play(TASK, 0, 0))[1]
    await pool.close()
    pool = EnvPool(Rich, name="door", size=1, show_actions="tool")
    seen = observed(await playing(pool, *ask).play(TASK, 0, 0))[1]
    assert '"go 99"] and 2900 more' in seen and '"go 100"' not in seen
    await pool.close()
    with pytest.raises(ConfigError, match="show_actions is one of no, tool, observation, not 'loud'"):
        EnvPool(Door).show_actions_of(type("Loud", (Door,), {"show_actions": "loud"})())


class Slow(Env):
    """Notes when calls begin and end."""

    log: ClassVar[list[str]] = []

    def reset(self, task: Task) -> None:
        Slow.log = []

    @tool
    async def wait(self, n: int, seconds: float) -> str:
        """Wait."""
        Slow.log.append(f"begin {n}")
        await asyncio.sleep(seconds)
        Slow.log.append(f"end {n}")
        return str(n)


@tool
async def peek(env: Slow, n: int) -> str:
    """Look at the environment from outside."""
    Slow.log.append(f"peek {n}")
    return ""


async def test_calls_of_one_environment_run_one_after_another_in_the_order_of_the_model() -> None:
    calls = [
        ToolCall("wait", {"n": 1, "seconds": 0.02}),
        ToolCall("peek", {"n": 2}),
        ToolCall("wait", {"n": 3, "seconds": 0.0}),
    ]
    pool = EnvPool(Slow, name="slow", size=1)
    await playing(pool, calls, tools=[peek]).play(TASK, attempt=0, seed=0)
    await pool.close()
    assert Slow.log == ["begin 1", "end 1", "peek 2", "begin 3", "end 3"]


class Stuck(Env):
    """The first instance hangs in its first call, however it is called."""

    made = 0
    let_go: ClassVar[threading.Event]
    closed: ClassVar[list[int]]

    def __init__(self) -> None:
        self.number = Stuck.made
        Stuck.made += 1

    def step(self, action: str) -> str:
        if self.number == 0:
            Stuck.let_go.wait(30)
        return f"instance {self.number}"

    @tool
    async def nap(self) -> str:
        """Sleep."""
        await asyncio.sleep(30 if self.number == 0 else 0)
        return f"instance {self.number}"

    def available_actions(self) -> list[str]:
        if self.number == 0:
            Stuck.let_go.wait(30)
        return ["look"]

    def close(self) -> None:
        Stuck.closed.append(self.number)


@pytest.fixture(autouse=True)
def fresh() -> Any:
    Stuck.made, Stuck.let_go, Stuck.closed = 0, threading.Event(), []
    yield
    Stuck.let_go.set()


@pytest.mark.parametrize(
    ("call", "show"),
    [
        (ToolCall("step", {"action": "x"}), "no"),
        (ToolCall("nap"), "no"),
        (ToolCall("available_actions"), "tool"),
        (ToolCall("step", {"action": "x"}), "observation"),
    ],
)
async def test_a_call_that_hangs_costs_the_instance_and_the_episode_is_played_again(
    call: ToolCall, show: Any
) -> None:
    pool = EnvPool(Stuck, name="stuck", size=2, step_timeout=0.5, show_actions=show)
    trajectory = await playing(pool, [call], "done").play(TASK, attempt=0, seed=0)
    assert trajectory.failure is None and Stuck.made == 2
    assert "instance 1" in observed(trajectory)[1] or "look" in observed(trajectory)[1]
    trajectory = await playing(pool, [call], "done").play(TASK, attempt=0, seed=0)
    assert trajectory.failure is None and Stuck.made == 2, "the second instance is used again"
    await pool.close()
    assert sorted(Stuck.closed) == [0, 1]


async def test_a_hung_step_without_retries_is_a_typed_failure_of_ours() -> None:
    pool = EnvPool(Stuck, name="stuck", size=1, step_timeout=0.05)
    calls = [ToolCall("step", {"action": "x"})]
    trajectory = await playing(pool, calls, retries=0).play(TASK, attempt=0, seed=0)
    await pool.close()
    failure = trajectory.failure
    assert failure is not None and (failure.boundary, failure.kind) == (Boundary.ENV, "TimeoutError")
    assert (
        "'stuck' did not answer within 0.05 seconds (agent.pools.stuck.step_timeout)" in failure.message
    )
    assert trajectory.reward is None and trajectory.faults == []


class Touchy(Env):
    """Not thread-safe: it notes which thread it was used in."""

    isolation = "thread"
    threads: ClassVar[dict[int, set[str]]] = {}

    def __init__(self) -> None:
        self.note()

    def note(self) -> None:
        Touchy.threads.setdefault(id(self), set()).add(
            f"{threading.current_thread().name} {threading.get_ident()}"
        )

    def reset(self, task: Task) -> None:
        self.note()

    def step(self, action: str) -> str:
        self.note()
        return "ok"

    @tool
    def act(self) -> str:
        """Act."""
        self.note()
        return "ok"

    def is_healthy(self) -> bool:
        self.note()
        return True

    def close(self) -> None:
        self.note()


@tool
def touch(env: Touchy) -> str:
    """Touch it from outside."""
    env.note()
    return "ok"


@reward
def success(env: Touchy) -> float:
    env.note()
    return 1.0


@reward
def other(envs: Any) -> float:
    envs["touchy"].note()
    return 1.0


async def test_an_environment_that_is_not_thread_safe_has_a_thread_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ludus.remote.threads._IDLE_SECONDS", 0.001)  # others' threads end soon
    Touchy.threads = {}
    pool = EnvPool(Touchy, name="touchy", size=3)
    calls = [ToolCall("act"), ToolCall("touch"), ToolCall("step", {"action": "x"})]
    run = playing(pool, calls, calls, tools=[touch], rewards=[success, other], attempts=6)
    [group] = [group async for group in run.groups([TASK], seed=0)]
    assert [t.failure for t in group.trajectories] == [None] * 6
    await asyncio.sleep(0.05)
    await pool.close()
    assert len(Touchy.threads) == 3, "instances"
    assert all(len(threads) == 1 for threads in Touchy.threads.values())
    assert len({next(iter(threads)) for threads in Touchy.threads.values()}) == 3


async def test_calls_and_errors_are_counted_by_the_name_of_the_tool() -> None:
    turns = [
        [ToolCall("step", {"action": "wait"}), ToolCall("step"), ToolCall("fly")],
        [ToolCall("available_actions"), ToolCall("step", {"action": "wait"})],
    ]
    pool = EnvPool(Door, name="door", size=1, show_actions="tool")
    run = playing(pool, *turns, rewards=[reward(lambda: 1.0, name="one")], attempts=2)
    groups = [group async for group in run.groups([TASK], seed=0)]
    await pool.close()
    metrics = rollout_metrics(groups)
    assert {name: value for name, value in metrics.items() if name.startswith("tool/")} == {
        "tool/available_actions/calls": 1.0,
        "tool/available_actions/errors": 0.0,
        "tool/step/calls": 3.0,
        "tool/step/errors": 1.0,
    }
    assert metrics["fault/unknown_tool"] == 1.0 and not undefined(metrics)
    told = set_metrics("doors", metrics, ["success"])
    assert told["sets/doors/tool/step/calls"] == 3.0 and told["sets/doors/reward/one"] == 1.0
    assert "sets/doors/turns" not in told and not undefined(told)
