"""The door in front of the queue."""

from __future__ import annotations

import asyncio

from ludus.engine import AdmissionQueue


async def _settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_first_come_first_served() -> None:
    door = AdmissionQueue(2)
    order: list[int] = []

    async def visit(number: int) -> None:
        assert await door.enter()
        order.append(number)

    visits = [asyncio.create_task(visit(i)) for i in range(5)]
    await _settled()
    assert order == [0, 1]
    for count in (3, 4, 5):
        await asyncio.to_thread(door.leave)
        await _settled()
        assert order == list(range(count))
    await asyncio.gather(*visits)
    door.leave()
    door.leave()
    assert door.free == 2


async def test_cancelled_and_expelled_waiters_leave_no_gap() -> None:
    door = AdmissionQueue(1)
    assert await door.enter()
    cancelled, expelled, third = (asyncio.create_task(door.enter(tag)) for tag in ("a", "b", "c"))
    await _settled()
    cancelled.cancel()
    door.cancel("b")
    await _settled()
    assert await expelled is False
    door.leave()
    assert await third is True
    door.leave()
    assert door.free == 1


async def test_one_who_is_let_in_and_turned_away_at_once_gives_the_place_back() -> None:
    for last_word in ("cancel", "expel"):
        door = AdmissionQueue(1)
        assert await door.enter()
        waiter = asyncio.create_task(door.enter("s"))
        await _settled()
        door.leave()  # the waiter has the place and does not know it yet
        if last_word == "cancel":
            waiter.cancel()
        else:
            door.cancel("s")
        result = (await asyncio.gather(waiter, return_exceptions=True))[0]
        assert result is False or isinstance(result, asyncio.CancelledError)
        await _settled()
        assert door.free == 1


def test_those_whose_loop_has_ended_are_passed_over() -> None:
    door = AdmissionQueue(1)

    async def stay_in_queue() -> None:
        assert await door.enter()
        asyncio.create_task(door.enter())  # noqa: RUF006
        await _settled()

    asyncio.run(stay_in_queue())
    door.leave()
    assert door.free == 1
