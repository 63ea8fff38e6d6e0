"""The event loop of a sync caller. What runs in it calls nothing here, so it is no part of a step's way."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`; where a loop is running already, as in a notebook, on a loop in a thread of its own.

    The caller waits either way. An interrupt cancels the coroutine, and is raised when that has ended.
    """
    if not _is_in_a_loop():
        return asyncio.run(coroutine)
    outcome: Future[T] = Future()
    began: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = Future()

    async def main() -> T:
        task = asyncio.current_task()
        assert task is not None
        began.set_result((asyncio.get_running_loop(), task))
        return await coroutine

    def work() -> None:
        try:
            outcome.set_result(asyncio.run(main()))
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            outcome.set_exception(error)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(work,), name="ludus-run")
    thread.start()
    try:
        return outcome.result()
    except KeyboardInterrupt:
        loop, task = began.result()
        if not outcome.done():
            loop.call_soon_threadsafe(task.cancel)
        raise
    finally:
        thread.join()


def _is_in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
