"""Workers that die, hang and cannot start, and what their supervisor makes of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from ludus.remote.supervisor import NoWorker, Restarts, Supervisor, WorkerDied

QUICK = Restarts(first_pause=0.0)


class Room:
    """All workers of a test, in the order in which they were made."""

    def __init__(self) -> None:
        self.made: list[Member] = []
        self.broken = 0
        """So many of the next starts fail."""

    def make(self, number: int) -> Member:
        self.made.append(Member(self, number))
        return self.made[-1]

    @property
    def alive(self) -> int:
        return sum(one.runs for one in self.made)


class Member:
    """A worker that dies when it is told to."""

    def __init__(self, room: Room, number: int) -> None:
        self.room, self.number = room, number
        self.death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.runs = False
        self.kills = 0

    async def start(self) -> str:
        self.runs = True
        if self.room.broken:
            self.room.broken -= 1
            raise OSError("no room for it")
        return f"fact of {self.number}"

    async def ended(self) -> str:
        return await asyncio.shield(self.death)

    async def kill(self) -> None:
        self.kills += 1
        self.runs = False

    async def work(self, seconds: float) -> int:
        await asyncio.sleep(seconds)
        return self.number


@asynccontextmanager
async def supervised(
    size: int, restarts: Restarts = QUICK
) -> AsyncIterator[tuple[Supervisor[Member], Room]]:
    room = Room()
    supervisor = Supervisor(room.make, size, restarts=restarts)
    await supervisor.start()
    try:
        yield supervisor, room
    finally:
        await supervisor.close()
        assert not room.alive


async def test_keys_stay_and_new_ones_go_where_least_is_done() -> None:
    async with supervised(3) as (supervisor, _):
        placed = [await supervisor.place(f"episode {one}", seconds=1.0) for one in range(6)]
        assert sorted(one.number for one in placed) == [0, 0, 1, 1, 2, 2]
        assert [await supervisor.place(f"episode {one}", seconds=1.0) for one in range(6)] == placed
        assert placed[0].started == f"fact of {placed[0].number}"
        supervisor.release("episode 4")
        supervisor.release("unknown")
        assert await supervisor.place("another", seconds=1.0) is placed[4]
        with placed[1].busy():
            assert placed[1].load == 3
            assert (await supervisor.place(seconds=1.0)) is not placed[1]
        assert placed[1].load == 2


async def test_a_dead_worker_is_replaced_and_its_holders_learn_why() -> None:
    async with supervised(2) as (supervisor, room):
        member = await supervisor.place("episode", seconds=1.0)
        call = asyncio.create_task(member.answer(member.worker.work(60.0)))
        await asyncio.sleep(0.01)
        member.worker.death.set_result("it fell over")
        with pytest.raises(WorkerDied, match="it fell over"):
            await call
        assert not member.is_up and member.reason == "it fell over"
        assert supervisor.where("episode") is None
        assert (await supervisor.place("episode", seconds=1.0)).is_up
        async with asyncio.timeout(5.0):
            while len(supervisor.members) < 2:  # noqa: ASYNC110 - no event tells it
                await asyncio.sleep(0.01)
        assert supervisor.replaced == 1 and len(room.made) == 3 and member.worker.kills >= 1


async def test_one_that_hangs_is_taken_out_by_its_user() -> None:
    async with supervised(1) as (supervisor, room):
        member = await supervisor.place(seconds=1.0)
        with pytest.raises(TimeoutError):
            await member.answer(member.worker.work(60.0), seconds=0.01)
        member.take_out("it took too long")
        other = await supervisor.place(seconds=5.0)
        assert other is not member and await other.answer(other.worker.work(0.0)) == 0
        assert room.made[0].kills == 1


async def test_starting_is_tried_again_and_given_up_in_the_end() -> None:
    async with supervised(1, Restarts(first_pause=0.0, most=3)) as (supervisor, room):
        room.broken = 2
        room.made[0].death.set_result("gone")
        await asyncio.sleep(0.01)
        assert (await supervisor.place(seconds=5.0)).is_up and len(room.made) == 4
        supervisor.members[0].is_proven = True
        room.broken = 100
        room.made[-1].death.set_result("gone again")
        await asyncio.sleep(0.01)
        with pytest.raises(
            NoWorker, match="no worker is left: worker 0: OSError: no room for it"
        ) as error:
            await supervisor.place(seconds=5.0)
        assert error.value.is_final and all(one.kills for one in room.made)


async def test_one_taken_out_for_good_is_not_replaced() -> None:
    async with supervised(2) as (supervisor, room):
        supervisor.members[0].take_out("it is wrong", for_good=True)
        await asyncio.sleep(0.05)
        assert [one.number for one in supervisor.members] == [1] and len(room.made) == 2
        supervisor.members[0].take_out("so is this", for_good=True)
        with pytest.raises(NoWorker, match="worker 0: it is wrong; worker 1: so is this"):
            await supervisor.place(seconds=5.0)


async def test_a_start_that_fails_ends_all() -> None:
    room = Room()
    room.broken = 1
    supervisor = Supervisor(room.make, 3)
    with pytest.raises(OSError, match="no room"):
        await supervisor.start()
    assert not room.alive and len(room.made) == 3
    with pytest.raises(NoWorker, match="stopped"):
        await supervisor.place(seconds=1.0)
    await supervisor.start()
    assert (await supervisor.place(seconds=1.0)).is_up and room.alive == 3
    await supervisor.close()
    assert not room.alive


async def test_waiting_for_a_worker_has_an_end() -> None:
    async with supervised(1, Restarts(first_pause=60.0, longest_pause=60.0)) as (supervisor, room):
        room.made[0].death.set_result("gone")
        await asyncio.sleep(0.01)
        with pytest.raises(NoWorker, match=r"came up within 0\.05 seconds: worker 0: gone"):
            await supervisor.place(seconds=0.05)
        waiting = asyncio.create_task(supervisor.place(seconds=60.0))
        await asyncio.sleep(0)
        await supervisor.close()
        with pytest.raises(NoWorker, match="stopped") as error:
            await waiting
        assert error.value.is_final


def test_pauses_grow_up_to_a_bound() -> None:
    rule = Restarts(first_pause=0.1, longest_pause=1.0)
    assert [rule.pause(count) for count in range(6)] == [0.0, 0.1, 0.2, 0.4, 0.8, 1.0]
    assert rule.pause(10**6) == 1.0
