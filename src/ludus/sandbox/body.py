"""One living process of a session, and the link to it.

Who waits for whom. At most one request is under way. Its answer is the next frame that the inside sends; a
frame that nobody asked for means that the code has taken over the process, which is ended for it. Whatever
the inside says is taken as data from a stranger; that the process has ended is known from the kernel alone.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from typing import Any

from ludus.sandbox.endings import ended_at_once
from ludus.sandbox.errors import SandboxError
from ludus.sandbox.link import Link
from ludus.sandbox.worker import Process

_GRACE_SECONDS = 0.5


@dataclass(slots=True)
class Request:
    """Something asked of the inside."""

    answered: asyncio.Future[tuple[dict[str, Any], bytes]]


class Body:
    """A process that code runs in, or that is kept to be forked from."""

    def __init__(self, process: Process, link_end: socket.socket, places: asyncio.Semaphore) -> None:
        """`places` are those among the living; the caller has taken one, and our end gives it back."""
        self.process = process
        self._places = places
        self._link = Link(link_end, self._on_frame, self._on_close)
        self._request: Request | None = None
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        process.ended.add_done_callback(self._on_end)

    @property
    def alive(self) -> bool:
        return not self.process.ended.done()

    async def opened(self) -> None:
        """Wait until the inside is ready; one that cannot start is our failure."""
        await first(self._ready, self.process.ended)
        if not self._ready.done():
            reason = self.process.problem or ended_at_once(self.process.ended.result())
            raise SandboxError(f"a session could not be started: {reason}")
        self._ready.result()

    def ask(
        self,
        header: dict[str, Any],
        body: bytes = b"",
        fds: tuple[int, ...] = (),
        *,
        most_body: int = 0,
    ) -> Request:
        """Send a request; its `answered` is done when the inside says something. `fds` are copied."""
        self._request = Request(asyncio.get_running_loop().create_future())
        self._link.most_body = most_body
        self._link.send(header, body, fds)
        return self._request

    def tell(self, header: dict[str, Any]) -> None:
        """Say something that is not answered."""
        self._link.send(header)

    def settled(self) -> None:
        """The request is over; whoever speaks now was not asked."""
        self._request = None

    async def end(self) -> None:
        """End the process and all it started, and wait until it is gone."""
        self._link.close()
        self.process.kill()
        await asyncio.shield(self.process.ended)

    def _on_frame(self, header: dict[str, Any], body: bytes, fds: list[int]) -> None:
        if not self._ready.done():
            if header.get("state") == "ready":
                self._ready.set_result(None)
            else:
                reason = str(header.get("broken", header))[:500]
                self._ready.set_exception(SandboxError(f"a session could not be started: {reason}"))
            return
        request = self._request
        if request is None or request.answered.done():
            self.process.kill()
            return
        request.answered.set_result((header, body))

    def _on_close(self, problem: str | None) -> None:
        """The inside closed its end. Its process ends next, or is ended: without it there is no way in."""
        wait = 0.0 if problem else _GRACE_SECONDS
        asyncio.get_running_loop().call_later(wait, self.process.kill)

    def _on_end(self, _: object) -> None:
        self._link.drain()  # its last word may have arrived together with its end
        self._link.close()
        self._places.release()
        if self._ready.done() and not self._ready.cancelled():
            self._ready.exception()  # seen: a start that failed is told by `opened`, if anybody waits for it


async def first(*futures: asyncio.Future[Any]) -> None:
    """Wait until one of them is done; cancelling the wait cancels none of them."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
