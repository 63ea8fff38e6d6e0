"""The seconds of an episode without those in queues, on a clock that jumps instead of waiting."""

from __future__ import annotations

import asyncio
import contextvars
import selectors
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.remote.limits import current_limit, queueing, recorded_wait, time_limit, under_limit


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock goes on to the next timer whenever nothing else is to be done."""

    def __init__(self) -> None:
        self.now = 0.0
        loop = self

        class Jumping(selectors.DefaultSelector):
            def select(self, timeout: float | None = None) -> list[Any]:
                ready = super().select(0)
                if not ready and timeout is not None:
                    loop.now += timeout
                return ready

        super().__init__(Jumping())

    def time(self) -> float:
        return self.now


def run(play: Callable[[], Awaitable[Any]], limit: float = 10.0) -> float | None:
    """When it ended; None when its time was up."""

    async def limited() -> float | None:
        try:
            async with time_limit(limit):
                await play()
        except TimeoutError:
            return None
        return asyncio.get_running_loop().time()

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(limited())


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=8))
def test_waits_are_left_out(steps: Sequence[tuple[bool, int]]) -> None:
    async def play() -> None:
        for is_wait, seconds in steps:
            if is_wait:
                with queueing():
                    await asyncio.sleep(seconds)
            else:
                await asyncio.sleep(seconds)

    own = sum(seconds for is_wait, seconds in steps if not is_wait)
    ended = run(play, 10.5)
    assert (ended is not None) == (own <= 10)
    if ended is not None:
        assert ended == pytest.approx(sum(seconds for _, seconds in steps), abs=0.01)


async def _wait(seconds: float) -> None:
    with queueing():
        await asyncio.sleep(seconds)


def test_waits_of_tasks_that_overlap_count_once() -> None:
    async def play() -> None:
        await asyncio.gather(_wait(20), _wait(30), _wait(5))
        await asyncio.sleep(9)
        limit = current_limit()
        assert limit is not None and limit.waited == pytest.approx(30, abs=0.01)

    assert run(play) == pytest.approx(39, abs=0.01)

    async def too_long() -> None:
        await play()
        await asyncio.sleep(2)

    assert run(too_long) is None


@pytest.mark.parametrize("is_seen", [True, False])
@pytest.mark.parametrize(("queued", "in_time"), [(4.0, True), (1.0, False)])
def test_what_a_reply_says_of_its_wait_settles_it(is_seen: bool, queued: float, in_time: bool) -> None:
    """8 seconds for a reply that was seen to wait for all of them, or for none, and 4 more."""

    async def play() -> None:
        with recorded_wait() as waited:
            await (_wait(8) if is_seen else asyncio.sleep(8))
            waited(queued)
        await asyncio.sleep(4)

    assert (run(play) is not None) == in_time


def test_a_wait_may_end_early() -> None:
    async def play() -> None:
        with queueing() as wait:
            await asyncio.sleep(50)
            wait.leave()
            wait.leave()
            await asyncio.sleep(11)

    assert run(play) is None


def test_another_task_may_wait_for_an_episode() -> None:
    async def serve(limit: Any) -> None:
        assert current_limit() is None
        with under_limit(limit):
            await _wait(57)

    async def both() -> None:
        outside = contextvars.copy_context()
        async with time_limit(10):
            served = asyncio.create_task(serve(current_limit()), context=outside)
            await asyncio.sleep(60)
            await served

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(both())


async def test_without_an_episode_nothing_is_limited() -> None:
    with queueing() as wait, recorded_wait() as waited:
        assert not wait.is_limited
        waited(5.0)


def test_a_call_that_outlives_its_episode_changes_nothing() -> None:
    left: list[asyncio.Task[None]] = []

    async def play() -> None:
        left.append(asyncio.create_task(_wait(100)))
        await asyncio.sleep(1)

    async def outlived() -> None:
        async with time_limit(10):
            await play()
        await left[0]

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(outlived())
