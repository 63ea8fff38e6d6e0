"""Ctrl-C and SIGTERM: a command that is stopped says what is kept, and how to go on."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from rich.console import Console
from rich.text import Text

T = TypeVar("T")


async def until_told(work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; SIGTERM stops it as Ctrl-C does, so that `kill` and schedulers lose nothing."""
    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


@contextmanager
def stopped_says(console: Console, kept: str) -> Iterator[None]:
    """Around what can be gone on with: `kept` is said if it is stopped."""
    try:
        yield
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print(Text(f"stopped; {kept}"), soft_wrap=True)  # commands are there to be copied
        raise KeyboardInterrupt from None
