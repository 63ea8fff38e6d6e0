"""Coroutines from plain code (with a loop, without, interrupted), and the frozen garbage collector."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import signal
import threading
import weakref
from collections.abc import Iterator

import pytest

from ludus.remote.threads import frozen_gc, run_coroutine, run_to_the_end

word: contextvars.ContextVar[str] = contextvars.ContextVar("word")


async def work(value: int) -> tuple[int, str, str]:
    await asyncio.sleep(0)
    return value, word.get("none"), threading.current_thread().name


def test_without_a_loop_it_runs_here() -> None:
    assert run_coroutine(work(3)) == (3, "none", threading.current_thread().name)


def test_errors_have_no_other_error_behind_them() -> None:
    async def fail() -> None:
        raise ValueError("so it is")

    with pytest.raises(ValueError, match="so it is") as found:
        run_coroutine(fail())
    assert found.value.__context__ is None


async def test_inside_a_loop_it_runs_in_a_thread_that_sees_the_same_context() -> None:
    word.set("given")
    value, seen, thread = run_coroutine(work(3))
    assert (value, seen) == (3, "given")
    assert thread == "ludus-run"
    assert not any(one.name == "ludus-run" for one in threading.enumerate())


async def test_what_it_raises_is_raised() -> None:
    async def fail() -> None:
        raise ValueError("so it is")

    with pytest.raises(ValueError, match="so it is"):
        run_coroutine(fail())


def test_an_interrupt_cancels_it_and_waits_for_its_end() -> None:
    notes: list[str] = []

    async def long() -> None:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.02)
            notes.append("cleaned up")

    async def outer() -> None:
        run_coroutine(long())

    loop = asyncio.new_event_loop()  # `asyncio.run` would take the interrupt for itself
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a process in the background has none
    try:
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(outer())
    finally:
        signal.signal(signal.SIGINT, before)
        loop.close()
    assert notes == ["cleaned up"]


@pytest.fixture
def thawed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The tests themselves run on a frozen heap (conftest.py)."""
    monkeypatch.setattr("ludus.remote.threads._gc_frozen_by", 0)
    gc.unfreeze()
    yield
    gc.freeze()


class Knot:
    """Part of a cycle, which only the collector can free."""

    def __init__(self) -> None:
        self.itself = self


def watched() -> weakref.ref[Knot]:
    return weakref.ref(Knot())


@pytest.mark.usefixtures("thawed")
def test_new_garbage_is_collected_and_old_garbage_after_the_end() -> None:
    old = Knot()
    seen = weakref.ref(old)
    with frozen_gc():
        assert gc.get_freeze_count() > 0
        new = watched()
        gc.collect()
        assert new() is None
        del old
        gc.collect()
        assert seen() is not None, "the collector does not look at it here"
    gc.collect()
    assert seen() is None


@pytest.mark.usefixtures("thawed")
def test_what_was_garbage_before_is_not_kept() -> None:
    seen = watched()
    with frozen_gc():
        assert seen() is None


@pytest.mark.usefixtures("thawed")
def test_only_the_outermost_ends_it() -> None:
    with frozen_gc():
        with pytest.raises(ValueError, match="inside"), frozen_gc():
            raise ValueError("inside")
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("thawed")
def test_what_somebody_else_has_frozen_stays_so() -> None:
    # a count would change whenever another thread lets go of something frozen
    theirs: list[object] = []
    gc.freeze()
    with frozen_gc(), frozen_gc():
        pass
    assert gc.get_freeze_count() > 0
    assert not any(found is theirs for found in gc.get_objects()), "frozen objects are in no generation"


@pytest.mark.usefixtures("thawed")
def test_an_interrupt_at_the_start_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gc, "collect", interrupted)
        with pytest.raises(KeyboardInterrupt), frozen_gc():
            pass
    with frozen_gc():
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


async def test_what_must_not_be_cut_off_ends_before_its_caller_is_cancelled() -> None:
    order: list[str] = []

    async def work() -> int:
        await asyncio.sleep(0.03)
        order.append("done")
        return 7

    async def caller() -> None:
        assert await run_to_the_end(work()) == 7
        order.append("bookkeeping")
        await asyncio.sleep(0)
        order.append("never")

    task = asyncio.create_task(caller())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert order == ["done", "bookkeeping"] and task.cancelling() == 1


async def test_its_error_is_raised_and_the_cancellation_too() -> None:
    async def work() -> None:
        await asyncio.sleep(0.01)
        raise ValueError("broken")

    async def caller() -> None:
        with pytest.raises(ValueError, match="broken"):
            await run_to_the_end(work())
        await asyncio.sleep(0)

    task = asyncio.create_task(caller())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
