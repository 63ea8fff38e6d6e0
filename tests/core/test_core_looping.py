"""Coroutines from plain code: with no loop, inside one, and interrupted."""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import threading

import pytest

from ludus.core.concurrency import run_coroutine

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
