"""One resource per event loop: connections and locks belong to the loop that made them."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable
from typing import Any, Generic, Protocol, TypeVar


class AsyncClosable(Protocol):
    """What has to be closed in the event loop that made it."""

    def close(self) -> Any:
        """Release it; an awaitable."""


R = TypeVar("R", bound=AsyncClosable)


class PerLoop(Generic[R]):
    """One resource per event loop, made when first needed.

    It is closed by `close`, or with the event loop: an async generator holds it, and event loops close their
    async generators when they shut down.
    """

    def __init__(self, make: Callable[[], R]) -> None:
        self._make = make
        self._opened: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, tuple[R, AsyncGenerator[R, None]]
        ] = weakref.WeakKeyDictionary()

    async def get(self) -> R:
        """This event loop's resource."""
        loop = asyncio.get_running_loop()
        if loop not in self._opened:
            owner = self._owner()
            # nothing is awaited in between: two callers get the same one
            self._opened[loop] = await anext(owner), owner
        return self._opened[loop][0]

    async def close(self) -> None:
        """Close this event loop's resource."""
        opened = self._opened.get(asyncio.get_running_loop())
        if opened is not None:
            await opened[1].aclose()

    async def _owner(self) -> AsyncGenerator[R, None]:
        resource, loop = self._make(), asyncio.get_running_loop()
        try:
            yield resource
        finally:
            # Kept, it would keep its event loop alive, which is what lets go of it.
            self._opened.pop(loop, None)
            await resource.close()
