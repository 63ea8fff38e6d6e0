"""Admission and the idempotency cache by themselves: what they promise holds for any order of events."""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.core import ToolResult
from ludus.serve.admission import Admission, RequestError, Ticket, WorkBudget
from ludus.serve.service import CallOutcome, CallRecord, IdempotencyCache
from ludus.tools.wire import CallBody, ErrorKind

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["enter", "leave", "abandon"]), st.sampled_from("abc"), st.integers(0, 20)
    ),
    max_size=60,
)


@given(EVENTS, st.integers(1, 3), st.integers(0, 4), st.integers(1, 2))
def test_limits_hold_and_nobody_waits_who_could_run(
    events: list[tuple[str, str, int]], concurrency: int, queue: int, narrow: int
) -> None:
    """Against a model that keeps plain lists: `a` has a limit of its own, `b` has none, `c` is unknown."""

    async def play() -> None:
        admission = Admission(concurrency, queue, {"a": narrow, "b": None})
        running: list[tuple[str, Ticket]] = []
        waiting: list[tuple[str, Ticket]] = []

        def may_run(tool: str) -> bool:
            free = len(running) < concurrency
            return free and (tool != "a" or sum(name == "a" for name, _ in running) < narrow)

        def settle() -> None:
            while ready := [one for one in waiting if may_run(one[0])]:
                waiting.remove(ready[0])
                running.append(ready[0])

        for event, tool, index in events:
            if event == "enter":
                lane = [one for one in waiting if (one[0] == tool)]
                try:
                    ticket = admission.enter(tool)
                except RequestError as problem:
                    assert problem.kind is ErrorKind.OVERLOADED and not problem.started
                    assert problem.retry_after and problem.retry_after > 0
                    assert len(waiting) >= queue and (not may_run(tool) or lane)
                    continue
                (running if may_run(tool) and not lane else waiting).append((tool, ticket))
            else:
                pool = running if event == "leave" else waiting
                if pool:
                    _, ticket = pool.pop(index % len(pool))
                    ticket.leave()
                    ticket.leave()  # more than once is harmless
                    settle()
            assert [ticket.started is not None for _, ticket in running] == [True] * len(running)
            assert [ticket.started is None for _, ticket in waiting] == [True] * len(waiting)
            assert (admission.running, admission.waiting) == (len(running), len(waiting))

    asyncio.run(play())


async def test_a_ticket_that_is_cancelled_as_its_turn_comes_passes_the_slot_on() -> None:
    admission = Admission(1, 10, {})
    first, second, third = (admission.enter("x") for _ in range(3))
    waiter = asyncio.create_task(second.granted())
    await asyncio.sleep(0)
    first.leave()
    waiter.cancel()
    await asyncio.wait((waiter,))
    second.leave()
    await asyncio.wait_for(third.granted(), 5)
    third.leave()
    assert (admission.running, admission.waiting) == (0, 0)


async def test_a_deadline_in_the_queue() -> None:
    admission = Admission(1, 10, {})
    loop = asyncio.get_running_loop()
    running = admission.enter("x")
    with pytest.raises(RequestError, match="deadline"):
        admission.enter("x", loop.time() - 1)
    late = admission.enter("x", loop.time() + 0.01)
    with pytest.raises(RequestError, match="not run") as caught:
        await late.granted()
    assert caught.value.kind is ErrorKind.EXPIRED and not caught.value.started
    late.leave()
    running.leave()
    assert (admission.running, admission.waiting) == (0, 0)


def call(key: str, name: str = "f") -> CallBody:
    return CallBody(key=key, name=name)


async def finished(cache: IdempotencyCache, key: str, chars: int = 1) -> CallRecord:
    async def work() -> tuple[CallOutcome, bool]:
        return ToolResult("x" * chars), True

    entry = cache.start("s", call(key), work())
    assert entry.done is not None
    await entry.done.wait()
    return entry


async def test_what_is_forgotten_is_known_to_be_forgotten() -> None:
    cache = IdempotencyCache(600.0, keep_calls=2, keep_bytes=10**6)
    assert not cache.may_have_forgotten(10_000)
    first, _, _ = [await finished(cache, key) for key in "abc"]
    assert cache.find("s", call("a")) is None and cache.find("s", call("c")) is not None
    assert cache.find("other session", call("c")) is None
    age = asyncio.get_running_loop().time() - first.arrived
    assert cache.may_have_forgotten(age + 0.001), "its first attempt may be the one that was forgotten"
    with pytest.raises(RequestError, match="different call"):
        cache.find("s", call("c", "g"))


async def test_the_journal_is_bounded_in_size_and_age() -> None:
    cache = IdempotencyCache(600.0, keep_calls=100, keep_bytes=5_000)
    for key in "abcdef":
        await finished(cache, key, chars=1_000)
    assert 0 < len(cache) < 5
    short = IdempotencyCache(0.01, keep_calls=100, keep_bytes=10**6)
    await finished(short, "a")
    await asyncio.sleep(0.05)
    assert short.find("s", call("a")) is None and len(short) == 0


async def test_a_call_cancelled_before_it_began_is_finished_all_the_same() -> None:
    cache = IdempotencyCache(600.0, 10, 10**6)

    async def work() -> tuple[CallOutcome, bool]:
        raise AssertionError("it never runs")

    entry = cache.start("s", call("a"), work())
    assert entry.task is not None and entry.done is not None
    entry.task.cancel()
    await asyncio.wait_for(entry.done.wait(), 5)
    assert isinstance(entry.outcome, RequestError) and not entry.outcome.started
    assert cache.find("s", call("a")) is None, "nothing ran, so it may be asked for again"


async def test_work_is_bounded_by_its_size_in_its_order() -> None:
    budget, doors = WorkBudget(10), {name: threading.Event() for name in "abcd"}
    begun: list[str] = []

    def work(name: str) -> str:
        begun.append(name)
        doors[name].wait(20)
        return name

    sizes = {"a": 6, "b": 6, "c": 2, "d": 99}  # c would fit beside a, and comes after b
    tasks = {name: asyncio.create_task(budget.run(size, work, name)) for name, size in sizes.items()}

    async def until(*names: str) -> None:
        async with asyncio.timeout(20):
            while begun != list(names):  # noqa: ASYNC110 - of threads
                await asyncio.sleep(0.001)

    await until("a")
    doors["a"].set()
    assert await tasks["a"] == "a"
    async with asyncio.timeout(20):
        while len(begun) < 3:  # noqa: ASYNC110 - of threads
            await asyncio.sleep(0.001)
    assert sorted(begun) == ["a", "b", "c"] and budget.held == 8
    for name in "bcd":
        doors[name].set()
    assert [await tasks[name] for name in "bcd"] == ["b", "c", "d"]
    await asyncio.sleep(0)
    assert budget.held == 0


async def test_a_caller_that_leaves_frees_its_place_and_its_work_holds_its_share() -> None:
    budget, door, begun = WorkBudget(10), threading.Event(), list[int]()

    def work(number: int) -> None:
        begun.append(number)
        door.wait(20)
        raise ValueError("told to no one")

    tasks = [asyncio.create_task(budget.run(10, work, number)) for number in range(3)]
    async with asyncio.timeout(20):
        while not begun:  # noqa: ASYNC110 - of threads
            await asyncio.sleep(0.001)
    for task in tasks[:2]:
        task.cancel()
    await asyncio.wait(tasks[:2])
    assert begun == [0] and budget.held == 10  # its thread goes on
    door.set()
    with pytest.raises(ValueError, match="no one"):
        await tasks[2]
    await asyncio.sleep(0)
    assert begun == [0, 2] and budget.held == 0
