"""The pool: one instance to an episode, none left behind."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import textwrap
import threading
import time
from typing import Any

import pytest

from ludus.core import Boundary, ConfigError, InfraError, Task
from ludus.envs import Env, EnvPool, Observation, own_tools
from ludus.tools import tool

TASK = Task.of("go", id="t1")


class Counter(Env):
    """Counts, and remembers its own life."""

    all: list[Counter] = []  # noqa: RUF012 - the record of the whole test
    lock = threading.Lock()

    def __init__(self) -> None:
        self.value = 0
        self.resets = 0
        self.closes = 0
        with Counter.lock:
            Counter.all.append(self)

    def reset(self, task: Task) -> str:
        self.value = 0
        self.resets += 1
        return f"task {task.id}"

    @tool
    def add(self, n: int) -> str:
        """Add."""
        self.value += n
        return str(self.value)

    def close(self) -> None:
        self.closes += 1


@pytest.fixture(autouse=True)
def fresh_record():
    Counter.all = []


async def until(condition, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        await asyncio.sleep(0.005)


async def test_an_episode_gets_one_instance_and_keeps_it():
    pool = EnvPool(Counter, size=4)
    first = await pool.acquire("a", TASK)
    again, other = await asyncio.gather(pool.acquire("a", TASK), pool.acquire("b", TASK))
    assert again.env is first.env and other.env is not first.env
    assert first.observation == Observation("task t1")
    assert first.env.resets == 1
    await pool.close()


async def test_two_calls_at_once_for_one_episode_share_the_instance():
    pool = EnvPool(Counter, size=4)
    leases = await asyncio.gather(*(pool.acquire("a", TASK) for _ in range(5)))
    assert len({id(lease.env) for lease in leases}) == 1
    assert pool.stats.created == 1
    await pool.close()


async def test_an_instance_is_reset_and_used_again():
    pool = EnvPool(Counter, size=1)
    for turn in range(3):
        async with pool.lease(f"e{turn}", TASK) as env:
            assert env.value == 0
            env.add(5)
    assert [(env.resets, env.closes) for env in Counter.all] == [(3, 0)]
    await pool.close()
    assert Counter.all[0].closes == 1


async def test_waiting_is_first_in_first_out():
    pool = EnvPool(Counter, size=1)
    await pool.acquire("holder", TASK)
    order: list[int] = []

    async def episode(n: int) -> None:
        async with pool.lease(f"e{n}", TASK):
            order.append(n)

    episodes = []
    for n in range(6):
        episodes.append(asyncio.create_task(episode(n)))
        await asyncio.sleep(0)
    assert pool.stats.waiting == 6
    await pool.release("holder")
    await asyncio.gather(*episodes)
    assert order == list(range(6))
    await pool.close()


async def test_an_exhausted_pool_says_how_big_it_is_and_what_to_do():
    pool = EnvPool(Counter, name="shop", size=2, max_wait=0.05)
    await pool.acquire("a", TASK)
    await pool.acquire("b", TASK)
    with pytest.raises(InfraError, match=r"'shop'.*2 of 2.*raise the pool's size") as caught:
        await pool.acquire("c", TASK)
    assert caught.value.boundary is Boundary.POOL
    assert pool.stats.waiting == 0
    await pool.release("a")
    assert (await pool.acquire("c", TASK)).env
    await pool.close()


async def test_cancelled_waiters_leak_nothing():
    pool = EnvPool(Counter, size=1)
    await pool.acquire("holder", TASK)
    waiters = [asyncio.create_task(pool.acquire(f"w{n}", TASK)) for n in range(3)]
    await asyncio.sleep(0.01)
    waiters[0].cancel()
    await asyncio.sleep(0)
    await pool.release("holder")  # handed to the second waiter ...
    waiters[1].cancel()  # ... which is cancelled before it runs
    lease = await waiters[2]
    assert lease.env is Counter.all[0]
    assert pool.stats.in_use == 1 and pool.stats.waiting == 0
    await pool.close()


@pytest.mark.parametrize("is_async", [False, True])
async def test_an_acquisition_cancelled_at_any_moment_loses_no_instance(is_async: bool):
    async def made() -> Counter:
        return Counter()

    threads, ticks, is_over = threading.active_count(), 0, False
    while not is_over:
        pool = EnvPool(made if is_async else Counter, size=1)
        acquiring = asyncio.ensure_future(pool.acquire("a", TASK))
        for _ in range(ticks):
            await asyncio.sleep(0)
            time.sleep(0.002)  # noqa: ASYNC251 - a thread gets ahead of the event loop
        is_over, ticks = acquiring.done(), ticks + 1
        acquiring.cancel()
        await asyncio.gather(acquiring, return_exceptions=True)
        await pool.close()
        assert pool.stats.created == pool.stats.closed
    assert ticks > 3
    await until(lambda: all(one.closes == 1 for one in Counter.all))  # one in a thread may come late
    await until(lambda: threading.active_count() <= threads + 1)  # the shared one


async def test_releasing_is_idempotent_and_works_while_being_cancelled():
    pool = EnvPool(Counter, size=1)
    inside = asyncio.Event()

    async def episode() -> None:
        async with pool.lease("a", TASK):
            inside.set()
            await asyncio.sleep(3600)

    running = asyncio.create_task(episode())
    await inside.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await pool.release("a")
    await pool.release("never seen")
    assert (pool.stats.in_use, pool.stats.idle) == (0, 1)
    await pool.close()


class Stubborn(Counter):
    """Its first resets fail."""

    failing = 0

    async def reset(self, task: Task) -> str:
        with Counter.lock:
            Stubborn.failing -= 1
            if Stubborn.failing >= 0:
                raise OSError("the server is not up")
        return "up"


async def test_a_failed_reset_costs_the_instance_and_is_tried_again():
    Stubborn.failing = 2
    pool = EnvPool(Stubborn, size=1)
    lease = await pool.acquire("a", TASK)
    assert lease.observation.text == "up"
    assert [env.closes for env in Counter.all] == [1, 1, 0]
    assert pool.stats.failures == 2
    await pool.close()


async def test_resets_that_fail_again_and_again_are_told_a_few_times(caplog):
    Stubborn.failing = 100
    pool = EnvPool(Stubborn, name="shop", size=1, reset_retries=100)
    await pool.acquire("a", TASK)
    await pool.close()
    told = [r.message for r in caplog.records if "resetting the environment 'shop'" in r.message]
    assert len(told) == 3, "the first, the tenth and the hundredth"
    assert "100 times so far" in told[-1] and "the server is not up" in told[-1]


async def test_a_reset_that_keeps_failing_is_an_infra_error_and_the_pool_lives_on():
    Stubborn.failing = 3
    pool = EnvPool(Stubborn, name="shop", size=1, reset_retries=2)
    with pytest.raises(InfraError, match=r"'shop'.*not up") as caught:
        await pool.acquire("a", TASK)
    assert (caught.value.boundary, caught.value.attempts) == (Boundary.ENV, 3)
    assert (await pool.acquire("a", TASK)).observation.text == "up"
    await pool.close()
    assert all(env.closes == 1 for env in Counter.all)


async def test_a_reset_that_hangs_is_a_failed_reset():
    let_go = threading.Event()

    class Hangs(Counter):
        def reset(self, task: Task) -> None:
            let_go.wait()

    pool = EnvPool(Hangs, size=1, reset_timeout=0.05, reset_retries=0)
    with pytest.raises(InfraError) as caught:
        await pool.acquire("a", TASK)
    assert isinstance(caught.value.__cause__, TimeoutError)
    let_go.set()
    await pool.close()
    assert Counter.all[0].closes == 1


async def test_a_factory_that_fails_fails_one_episode_at_a_time():
    tries = 0

    def factory() -> Counter:
        nonlocal tries
        tries += 1
        if tries <= 2:
            raise RuntimeError("no display")
        return Counter()

    pool = EnvPool(factory, size=1, reset_retries=1)
    results = await asyncio.gather(
        pool.acquire("a", TASK), pool.acquire("b", TASK), return_exceptions=True
    )
    assert isinstance(results[0], InfraError) and "no display" in str(results[0])
    assert results[0].boundary is Boundary.ENV
    assert results[1].env is Counter.all[0]
    await pool.close()


async def test_an_instance_made_after_its_deadline_is_closed():
    let_go = threading.Event()

    def slow() -> Counter:
        let_go.wait()
        return Counter()

    pool = EnvPool(slow, size=1, reset_timeout=0.05, reset_retries=0)
    with pytest.raises(InfraError):
        await pool.acquire("a", TASK)
    let_go.set()
    await until(lambda: Counter.all and Counter.all[0].closes == 1)
    await pool.close()


async def test_a_task_whose_arguments_do_not_fit_is_a_config_error():
    class Picky(Counter):
        def reset(self, task: Task, *, level: int) -> str:
            return f"level {level}"

    pool = EnvPool(Picky, name="game", size=1)
    good = Task.of("go", id="g", envs={"game": {"level": 3}})
    assert (await pool.acquire("a", good)).observation.text == "level 3"
    await pool.release("a")
    with pytest.raises(ConfigError, match="'levle'"):
        await pool.acquire("b", Task.of("go", id="b", envs={"game": {"levle": 3}}))
    await pool.close()


async def test_worn_out_and_broken_instances_are_replaced():
    pool = EnvPool(Counter, size=1, max_uses=2)
    for n in range(4):
        async with pool.lease(str(n), TASK):
            pass
    assert [env.resets for env in Counter.all] == [2, 2]
    await pool.acquire("x", TASK)
    await pool.release("x", is_broken=True)
    await pool.acquire("y", TASK)
    await until(lambda: Counter.all[2].closes == 1)
    assert len(Counter.all) == 4
    await pool.close()


async def test_old_instances_are_retired_even_when_idle():
    pool = EnvPool(Counter, size=2, time_to_live=0.1)
    async with pool.lease("a", TASK):
        pass
    assert pool.stats.idle == 1
    await until(lambda: Counter.all[0].closes == 1)
    assert pool.stats.idle == 0
    async with pool.lease("b", TASK) as env:
        assert env is not Counter.all[0]
    await pool.close()


async def test_an_unhealthy_instance_is_not_handed_out_again():
    class Sick(Counter):
        def is_healthy(self) -> bool:
            if self is Counter.all[0]:
                raise ConnectionError("gone")
            return True

    pool = EnvPool(Sick, size=1)
    for n in range(3):
        async with pool.lease(str(n), TASK):
            pass
    assert [env.resets for env in Counter.all] == [1, 2]
    assert Counter.all[0].closes == 1 and pool.stats.failures == 1
    await pool.close()


async def test_closing_wakes_those_who_wait_and_closes_everything():
    pool = EnvPool(Counter, size=2)
    await pool.acquire("a", TASK)
    await pool.acquire("b", TASK)
    await pool.release("b")
    await pool.acquire("c", TASK)
    waiting = asyncio.create_task(pool.acquire("d", TASK))
    await asyncio.sleep(0)
    await pool.close()
    with pytest.raises(InfraError, match="closed"):
        await waiting
    with pytest.raises(InfraError, match="closed"):
        await pool.acquire("e", TASK)
    assert [env.closes for env in Counter.all] == [1, 1]
    await pool.release("a")
    await pool.close()
    assert [env.closes for env in Counter.all] == [1, 1]


async def test_an_environment_that_cannot_be_closed_does_not_stop_the_pool():
    class Clingy(Counter):
        async def close(self) -> None:
            self.closes += 1
            if self is Counter.all[0]:
                raise RuntimeError("will not")
            await asyncio.sleep(3600)

    pool = EnvPool(Clingy, size=2, close_timeout=0.05)
    await pool.acquire("a", TASK)
    await pool.acquire("b", TASK)
    await pool.close()
    assert [env.closes for env in Counter.all] == [1, 1]
    assert pool.stats.failures == 2


async def test_many_episodes_with_random_fates_leave_nothing_behind():
    rng = random.Random(7)

    class Moody(Counter):
        async def reset(self, task: Task) -> str:
            await asyncio.sleep(rng.random() * 0.002)
            if rng.random() < 0.1:
                raise OSError("bad day")
            return await asyncio.to_thread(super().reset, task)

    pool = EnvPool(Moody, size=5, max_uses=7, reset_retries=1)
    holders: dict[int, str] = {}

    async def episode(name: str) -> None:
        async with pool.lease(name, TASK) as env:
            assert holders.setdefault(id(env), name) == name, "two episodes hold one instance"
            try:
                await asyncio.sleep(rng.random() * 0.005)
                if rng.random() < 0.1:
                    raise ValueError("episode broke")
            finally:
                del holders[id(env)]
        assert pool.stats.in_use <= 5

    episodes = [asyncio.create_task(episode(f"e{n}")) for n in range(150)]
    await asyncio.sleep(0.02)
    for one in rng.sample(episodes, 40):
        one.cancel()
    done = await asyncio.gather(*episodes, return_exceptions=True)
    assert not [error for error in done if isinstance(error, AssertionError)]
    assert sum(result is None for result in done) > 60
    assert pool.stats.in_use == 0 and pool.stats.waiting == 0
    await pool.close()
    assert pool.stats.idle == 0 and pool.stats.created == pool.stats.closed
    assert all(env.closes == 1 for env in Counter.all)


@pytest.mark.parametrize("ending", ["pass", "raise SystemExit(3)", "raise RuntimeError('crash')"])
def test_a_pool_that_nobody_closed_is_closed_at_exit(ending: str):
    code = f"""
    import asyncio
    from ludus.core.task import Task
    from ludus.envs import Env, EnvPool

    class Plain(Env):
        def close(self):
            print("closed plain", flush=True)

    class Later(Env):
        async def close(self):
            await asyncio.sleep(0)
            print("closed later", flush=True)

    pools = [EnvPool(Plain), EnvPool(Later)]

    async def main():
        for pool in pools:
            await pool.acquire("a", Task.of("x"))
        {ending}

    asyncio.run(main())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=40
    )
    assert sorted(done.stdout.split("\n")) == ["", "closed later", "closed plain"]


def test_own_tools_are_bound_and_in_order():
    class More(Counter):
        @tool
        def subtract(self, n: int) -> str:
            """Subtract."""
            return self.add(-n)

    env: Any = More()
    assert [one.name for one in own_tools(env)] == ["add", "subtract"]
    assert env.tools()[1](2) == "-2" and env.value == -2


def test_a_pool_needs_room():
    with pytest.raises(ConfigError, match="size"):
        EnvPool(Counter, size=0)


async def test_spares_are_made_ahead_and_never_more_than_the_size():
    pool = EnvPool(Counter, size=4, spares=2)
    await pool.acquire("a", TASK)
    await until(lambda: pool.stats.idle == 2)
    await pool.acquire("b", TASK)
    await until(lambda: pool.stats.idle == 2)
    await pool.acquire("c", TASK)
    await pool.acquire("d", TASK)
    assert pool.stats.created == 4 and pool.stats.idle == 0
    await pool.release("d", is_broken=True)
    await until(lambda: pool.stats.idle == 1)
    await pool.close()
    assert all(env.closes == 1 for env in Counter.all)


async def test_a_spare_that_cannot_be_made_is_not_tried_for_ever():
    def factory() -> Counter:
        if Counter.all:
            raise RuntimeError("out of memory")
        return Counter()

    pool = EnvPool(factory, size=4, spares=2, reset_retries=0)
    await pool.acquire("a", TASK)
    await asyncio.sleep(0.05)
    assert 1 <= pool.stats.failures <= 2 and pool.stats.in_use == 1
    await pool.release("a")
    assert (await pool.acquire("b", TASK)).env is Counter.all[0]
    await pool.close()


async def test_a_spare_that_died_while_it_was_idle_is_not_handed_out():
    class Mortal(Counter):
        dead = False

        def is_healthy(self) -> bool:
            return not self.dead

    pool = EnvPool(Mortal, size=3, spares=1)
    await pool.acquire("a", TASK)
    await until(lambda: pool.stats.idle == 1)
    Counter.all[1].dead = True
    lease = await pool.acquire("b", TASK)
    assert lease.env is not Counter.all[1] and lease.env.resets == 1
    await until(lambda: Counter.all[1].closes == 1)
    await pool.close()
