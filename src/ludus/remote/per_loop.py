"""One resource per event loop: connections and locks belong to the loop that made them."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable
from typing import Any, Generic, Protocol, TypeVar


class AsyncClosable(Protocol):
    """A resource that has to be closed in the event loop that made it."""

    def close(self) -> Any:
        """Release it; an awaitable."""


R = TypeVar("R", bound=AsyncClosable)
_Opened = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[R, AsyncGenerator[R, None]]]


class PerLoop(Generic[R]):
    """One resource per event loop, made when first needed.

    It is closed by `close`, with the event loop, or when this object is garbage. An async generator
    holds it, and event loops close their async generators when they shut down.
    """

    def __init__(self, make: Callable[[], R]) -> None:
        self._make = make
        self._opened: _Opened[R] = weakref.WeakKeyDictionary()
        weakref.finalize(self, _close_soon, self._opened)

    async def get(self) -> R:
        """This event loop's resource."""
        loop = asyncio.get_running_loop()
        if loop not in self._opened:
            owner = _owner(self._make(), self._opened)
            # nothing is awaited in between: two callers get the same one
            self._opened[loop] = await anext(owner), owner
        return self._opened[loop][0]

    async def close(self) -> None:
        """Close this event loop's resource."""
        opened = self._opened.get(asyncio.get_running_loop())
        if opened is not None:
            await opened[1].aclose()


async def _owner(resource: R, opened: _Opened[R]) -> AsyncGenerator[R, None]:
    """Holds a resource, and not the object that it is for, which may be collected before."""
    loop = asyncio.get_running_loop()
    try:
        yield resource
    finally:
        # Kept, it would keep its event loop alive, which is what lets go of it.
        opened.pop(loop, None)
        await resource.close()


def _close_soon(opened: _Opened[Any]) -> None:
    """Close all that is open, each on its event loop; a loop that has ended has closed its own."""
    for loop, (_, owner) in list(opened.items()):
        if not loop.is_closed():
            loop.call_soon_threadsafe(_close, loop, owner)


def _close(loop: asyncio.AbstractEventLoop, owner: AsyncGenerator[Any, None]) -> None:
    closing = loop.create_task(_closed(owner))
    _closing.add(closing)
    closing.add_done_callback(_closing.discard)


async def _closed(owner: AsyncGenerator[Any, None]) -> None:
    await owner.aclose()


_closing: set[asyncio.Task[None]] = set()
"""Event loops hold their tasks weakly."""
