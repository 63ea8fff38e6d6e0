"""Environments in processes of their own: what works behind the stand-in, and what a fault costs."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from ludus.chat import Renderer, load_format
from ludus.core import Boundary, ByteTokenizer, ConfigError, Fault, InfraError, Task, ToolCall
from ludus.engine import FakeEngine
from ludus.envs import Env, EnvPool, load_env, reset_env, step_env
from ludus.envs.isolated import IsolatedEnv
from ludus.rewards import Scorer, reward
from ludus.rollouts import Budgets, Rollout
from ludus.tools import as_toolset, tool
from odd_env import Dying, Odd, Sleepy, Stillborn, Unwell

TASK = Task.of("Go.", id="t", envs={"odd": {"level": 3}})


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def until(condition: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        await asyncio.sleep(0.01)


async def test_it_is_used_like_the_environment_itself() -> None:
    pool = EnvPool(Odd, name="odd", size=1)
    lease = await pool.acquire("e", TASK)
    env = lease.env
    assert lease.observation.text == "level 3"
    assert isinstance(env, Odd) and type(env) is not Odd
    assert (env.count, env.twice(4), await env.later(5), env.step_rewards) == (3, 8, 15, "max")
    step = await step_env(env, "go")
    assert (step.observation.text, step.reward, step.terminated) == ("4 go", 0.5, False)
    assert env.available_actions() == ["end"] and "Odd" in env.render()
    saved = env.snapshot()
    await step_env(env, "go")
    env.restore(saved)
    assert env.count == 4
    specs = [one.spec for one in env.tools()]
    assert [spec.name for spec in specs] == ["add", "slowly", "step"]
    assert specs[0].parameters["properties"]["n"]["description"] == "How much."
    assert specs[2].description == "Do something."
    await pool.release("e")
    async with pool.lease("f", Task.of("again")) as again:
        assert again is env and again.count == 0, "reset, and used again"
    await pool.close()
    assert not alive(env.process_id)


async def test_what_cannot_cross_is_refused_with_its_name() -> None:
    pool = EnvPool(Odd, name="odd", size=1)
    env = (await pool.acquire("e", TASK)).env
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        _ = env.missing
    assert getattr(env, "missing", None) is None
    with pytest.raises(ConfigError, match="'hidden' is a function"):
        _ = env.hidden
    with pytest.raises(
        ConfigError, match=r"'odd' lives in another process, and 'children' cannot travel"
    ):
        env.spawn()
        _ = env.children
    with pytest.raises(AttributeError, match="'count' cannot be assigned from here"):
        env.count = 7
    with pytest.raises(ConfigError, match="another process"):
        env.twice(lambda: 0)
    with pytest.raises(Exception, match=r"'step': KeyError: 'raise' \(.*odd_env.py:\d+ in step\)"):
        await step_env(env, "raise")
    with pytest.raises(Exception, match="SystemExit"):
        await step_env(env, "exit")
    assert env.count == 3, "it lives"
    with pytest.raises(ConfigError, match="'levle'"):
        await reset_env(env, Task.of("x", envs={"odd": {"levle": 1}}), "odd")
    await pool.close()

    class Local(Env):
        isolation = "process"

    pool = EnvPool(Local, name="local", size=1)
    with pytest.raises(ConfigError, match=r'\'local\' has isolation = "process".*Local'):
        await pool.acquire("e", TASK)
    await pool.close()
    with pytest.raises(ConfigError, match="memory_mb"):
        EnvPool(Local, name="local", isolation="none", memory_mb=100)


@reward(env=Odd)
async def success(env: Odd) -> float:
    return float(env.count)


@reward
def doubled(env: Odd) -> float:
    return float(env.twice(env.count))


@tool
def outside(env: Odd, n: int) -> str:
    """Works on the environment from outside of its process."""
    return str(env.twice(n))


def rollout(pool: EnvPool, turns: list[Any], **settings: Any) -> Rollout:
    format = load_format("hermes")
    said = [turn if isinstance(turn, str) else format.render_action("", turn) for turn in turns]
    counts: dict[str | None, int] = {}

    def script(tokens: object, sampling: object, session: str | None) -> str:
        counts[session] = counts.get(session, -1) + 1
        return said[min(counts[session], len(said) - 1)] + "<|im_end|>"

    return Rollout(
        engine=FakeEngine(script, ByteTokenizer()),
        renderer=Renderer(ByteTokenizer(), format),
        scorer=Scorer([success, doubled]),
        tools=as_toolset([outside]),
        pools={pool.name: pool},
        budgets=Budgets(max_turns=len(turns)),
        **settings,
    )


async def test_tools_functions_and_rewards_reach_it_in_an_episode() -> None:
    turns = [
        [
            ToolCall("add", {"n": 2}),
            ToolCall("add", {"n": -1}),
            ToolCall("add", {"n": "x"}),
            ToolCall("outside", {"n": 21}),
            ToolCall("available_actions"),
        ],
        [ToolCall("step", {"action": "raise"}), ToolCall("slowly"), ToolCall("step", {"action": "end"})],
    ]
    pool = EnvPool(Odd, name="odd", size=1)
    trajectory = await rollout(pool, turns).play(TASK, attempt=0, seed=0)
    await pool.close()
    assert trajectory.failure is None
    seen = [message.content for message in trajectory.messages if message.role == "tool"]
    text = "\n".join(seen)
    for part in (
        "5",
        "only up",
        "42",
        'Available actions: ["end"]',
        "KeyError: 'raise'",
        "waited",
        "6 end",
    ):
        assert part in text
    assert trajectory.faults == [Fault.TOOL_RAISED, Fault.BAD_ARGUMENTS, Fault.TOOL_RAISED]
    assert trajectory.rewards == {"success": 6.0, "doubled": 12.0, "tools": 0.5}


@pytest.mark.parametrize("fault", ["crash", "hang"])
async def test_a_crash_and_a_hang_cost_the_instance_and_are_failures_of_ours(fault: str) -> None:
    pool = EnvPool(Odd, name="odd", size=2, step_timeout=0.5)
    turns = [[ToolCall("step", {"action": fault})]]
    trajectory = await rollout(pool, turns, retries=0).play(TASK, attempt=0, seed=0)
    assert trajectory.failure is not None and trajectory.failure.boundary is Boundary.ENV
    assert ("SIGKILL" if fault == "crash" else "0.5 seconds") in trajectory.failure.message
    assert trajectory.reward is None
    good = await rollout(pool, [[ToolCall("step", {"action": "end"})]]).play(TASK, attempt=0, seed=0)
    assert good.failure is None and good.rewards["success"] == 4.0
    await pool.close()
    assert pool.stats.created == 2 and pool.stats.closed == 2


async def test_an_instance_whose_process_was_killed_while_idle_is_replaced() -> None:
    pool = EnvPool(Odd, name="odd", size=1)
    async with pool.lease("a", TASK) as env:
        pid = env.process_id
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not alive(pid))
    async with pool.lease("b", TASK) as env:
        assert env.process_id != pid and env.count == 3
    await pool.close()


async def test_one_that_was_stopped_while_idle_ends_with_its_pool() -> None:
    pool = EnvPool(Odd, name="odd", size=1, close_timeout=0.5)
    async with pool.lease("a", TASK) as env:
        pid = env.process_id
    os.kill(pid, signal.SIGSTOP)
    await pool.close()
    await until(lambda: not alive(pid))


async def test_everything_it_started_ends_with_it() -> None:
    pool = EnvPool(Odd, name="odd", size=1)
    async with pool.lease("a", TASK) as env:
        child = env.spawn()
        assert alive(child)
    await pool.close()
    await until(lambda: not alive(child))


async def test_one_that_leaks_is_replaced_between_episodes() -> None:
    pool = EnvPool(Odd, name="odd", size=1, memory_mb=120)
    async with pool.lease("a", TASK) as env:
        first, before = env.process_id, env.memory_mb()
        assert 10 < before < 110
    async with pool.lease("b", TASK) as env:
        assert env.process_id == first
        await step_env(env, "leak")
        assert env.memory_mb() > before + 90
    async with pool.lease("c", TASK) as env:
        assert env.process_id != first
    await pool.close()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Unwell, r"no display \(.*odd_env.py"),
        (Stillborn, "no licence"),
        pytest.param(Dying, "SIGKILL", marks=pytest.mark.slow),
        pytest.param(Sleepy, "no result within 1 seconds", marks=pytest.mark.slow),
    ],
)
async def test_one_that_cannot_begin_is_a_typed_failure(kind: type[Env], text: str) -> None:
    pool = EnvPool(kind, name="odd", size=1, reset_retries=0, reset_timeout=1.0)
    if kind is not Sleepy:
        pool = EnvPool(kind, name="odd", size=1, reset_retries=0)
    with pytest.raises(InfraError, match=text) as caught:
        await pool.acquire("e", TASK)
    assert caught.value.boundary is Boundary.ENV
    await pool.close()
    assert pool.stats.created == pool.stats.closed


def test_a_prebuilt_environment_works_unchanged_in_a_process() -> None:
    from ludus.worlds.safe import expert, held_out_tasks

    async def play() -> bool:
        pool = EnvPool(load_env("safe"), name="safe", size=1, isolation="process")
        task = held_out_tasks()[0]
        async with pool.lease("e", task) as env:
            tools = {one.name: one for one in env.tools()}
            script, said = expert(task), None
            try:
                while True:
                    call = script.send(said) if said is not None else next(script)
                    said = env.call_tool(call, "e", task).content
            except StopIteration:
                assert set(tools) == {"turn", "open"}
                opened = bool(env.opened)
        await pool.close()
        return opened

    assert asyncio.run(play())


@pytest.mark.parametrize(
    "ending", [pytest.param("pass", marks=pytest.mark.slow), "os.kill(os.getpid(), signal.SIGKILL)"]
)
def test_its_process_ends_with_ours(ending: str, tmp_path: Path) -> None:
    (tmp_path / "thing.py").write_text("from ludus.envs import Env\nclass Thing(Env):\n    pass\n")
    code = f"""
    import asyncio, os, signal, sys
    sys.path.insert(0, {str(tmp_path)!r})
    from ludus.core import Task
    from ludus.envs import EnvPool
    from thing import Thing

    async def main():
        env = (await EnvPool(Thing, isolation="process").acquire("e", Task.of("x"))).env
        print(env.process_id, flush=True)

    asyncio.run(main())
    {ending}
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60
    )
    pid = int(done.stdout)
    asyncio.run(until(lambda: not alive(pid)))
    assert "Traceback" not in done.stderr


def test_the_stand_in_can_be_used_without_a_pool() -> None:
    env = IsolatedEnv(Odd, "odd")
    try:
        assert env.reset(TASK).text == "level 3"
        assert repr(env).startswith("<Odd in process ")
    finally:
        env.close()
        env.close()
    with pytest.raises(InfraError, match="was lost"):
        env.reset(TASK)
