"""What has to be closed is closed: at the end of an `async with`, and when nobody waits for it any more."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

from ludus.core.failures import LudusError


class ClosedAtExit(ABC):
    """An asynchronous context manager whose exit is `close`, whatever happened."""

    @abstractmethod
    async def close(self) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


Made = TypeVar("Made", bound=ClosedAtExit)
_finishing: set[asyncio.Task[Any]] = set()


async def undisturbed(making: Coroutine[Any, Any, Made]) -> Made:
    """What `making` makes. A caller that is cancelled does not break it off; what it made is closed."""
    task = asyncio.get_running_loop().create_task(making)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        closing = asyncio.get_running_loop().create_task(_closed_when_made(task))
        _finishing.add(closing)
        closing.add_done_callback(_finishing.discard)
        raise


async def _closed_when_made(task: asyncio.Task[Made]) -> None:
    with contextlib.suppress(LudusError):
        await (await task).close()
