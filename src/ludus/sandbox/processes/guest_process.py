"""Guest processes on the host: the socket to one, its output, requests to it, and whose fault its end is.

Who waits for whom. At most one request to a guest process is in flight. Its answer is the next frame that the
guest sends; an unsolicited frame means that the code has taken over the process, which is killed for it. What
the guest says is untrusted data; that its process has ended is known from the kernel alone.
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ludus.sandbox.config import Limits, SandboxError
from ludus.sandbox.exchange import (
    OutputBuffer,
    ProcessExit,
    ended_at_once,
    looks_killed,
    unfinished,
)
from ludus.sandbox.guest import frames

if TYPE_CHECKING:
    from ludus.sandbox.processes.worker import SandboxWorker

_CHUNK = 1 << 16
_MOST_FDS = 8
_ROOM_FOR_FDS = socket.CMSG_SPACE(_MOST_FDS * array.array("i").itemsize)
_GRACE_SECONDS = 0.5
CONTROL_GROUP_FULL = (
    "all sessions together used up the memory of the sandbox's control group, and the kernel ended this one; "
    "allow fewer at a time (max_sessions) or less memory to each (limits.memory_mb)"
)

OnFrame = Callable[[frames.Header, bytes, list[int]], None]
OnClose = Callable[[str | None], None]
"""Called with what was wrong with the received data, or None when the peer closed."""
Answer = asyncio.Future[tuple[dict[str, Any], bytes]]
"""Done when the guest answers a request."""


class ControlChannel:
    """The host's end of a socket to the guest, on the event loop. Sending never blocks: the rest is queued."""

    def __init__(self, end: socket.socket, on_frame: OnFrame, on_close: OnClose) -> None:
        self._socket = end
        self._on_frame, self._on_close = on_frame, on_close
        self._incoming = bytearray()
        self._fds: list[int] = []
        self._outgoing: deque[tuple[bytes | memoryview, tuple[int, ...]]] = deque()
        self._loop = asyncio.get_running_loop()
        self._is_open = True
        self.most_body = 0
        """The largest body of a frame; the guest must not be able to fill the host's memory."""
        end.setblocking(False)
        self._loop.add_reader(end.fileno(), self._read)

    def send(self, header: frames.Header, body: bytes = b"", fds: tuple[int, ...] = ()) -> None:
        """Send a frame; `fds` are copied now, so the caller may close its own."""
        if not self._is_open:
            return
        self._outgoing.append((frames.packed(header, body), tuple(os.dup(fd) for fd in fds)))
        if len(self._outgoing) == 1:
            self._write()

    def drain(self) -> None:
        """Read what has arrived already; the peer is gone."""
        while self._is_open and self._read():
            pass

    def close(self) -> None:
        """Close; no callback is called any more."""
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()
            frames.close_all(self._fds)
            for _, fds in self._outgoing:
                frames.close_all(list(fds))
            self._outgoing.clear()

    def abandon(self) -> None:
        """Close the socket alone; the event loop is gone."""
        self._is_open = False
        self._socket.close()
        frames.close_all(self._fds)

    def _write(self) -> None:
        while self._outgoing:
            data, fds = self._outgoing[0]
            try:
                sent = socket.send_fds(self._socket, [data], fds) if fds else self._socket.send(data)
            except BlockingIOError:
                self._loop.add_writer(self._socket.fileno(), self._write)
                return
            except OSError:
                self._end(None)
                return
            frames.close_all(list(fds))
            if sent < len(data):
                self._outgoing[0] = (memoryview(data)[sent:], ())
            else:
                self._outgoing.popleft()
        self._loop.remove_writer(self._socket.fileno())

    def _read(self) -> bool:
        """Read once; returns whether there may be more."""
        try:
            data, ancillary, _, _ = self._socket.recvmsg(_CHUNK, _ROOM_FOR_FDS, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return False
        except OSError:
            data, ancillary = b"", []
        self._fds += frames.descriptors(ancillary)
        if not data:
            self._end(None)
            return False
        self._incoming += data
        try:
            if len(self._fds) > _MOST_FDS:
                raise frames.BadFrame("more descriptors than were requested")
            self._deliver()
        except frames.BadFrame as error:
            self._end(str(error))
        return self._is_open

    def _deliver(self) -> None:
        while self._is_open and len(self._incoming) >= frames.PREFIX:
            header, body = frames.sizes(bytes(self._incoming[: frames.PREFIX]))
            if body > self.most_body:
                raise frames.BadFrame(f"a body of {body} bytes where {self.most_body} were expected")
            end = frames.PREFIX + header + body
            if len(self._incoming) < end:
                return
            content = bytes(self._incoming[frames.PREFIX : end])
            del self._incoming[:end]
            fds, self._fds = self._fds, []
            self._on_frame(frames.parsed(content[:header]), content[header:], fds)
            frames.close_all(fds)

    def _end(self, problem: str | None) -> None:
        self.close()
        self._on_close(problem)


class OutputPipe(OutputBuffer):
    """Captures stdout or stderr by a pipe; far beyond the limit it stops reading."""

    def __init__(self, limit: int, overflow: Callable[[], None], *, at_once: bool = True) -> None:
        """`at_once`: read from the start."""
        super().__init__(limit)
        self._overflow = overflow
        self._loop = asyncio.get_running_loop()
        self._reader, self.writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._reader, False)
        self._is_listening = False
        if at_once:
            self.listen()

    def listen(self) -> None:
        """Read output as it comes. Until then the pipe itself buffers it, and `finish` reads it."""
        if self._reader >= 0 and not self._is_listening:
            self._is_listening = True
            self._loop.add_reader(self._reader, self._read)

    def close_writer(self) -> None:
        """Close our copy of the writing end, once the guest has its own."""
        os.close(self.writer)

    def finish(self) -> str:
        """The output so far, as text. Later output is lost."""
        while self._reader >= 0 and self._read():
            pass
        self._stop()
        return self.text()

    def _read(self) -> bool:
        try:
            data = os.read(self._reader, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self._stop()
            return False
        self.keep(data)
        if self.is_flooded:
            self._stop()
            self._overflow()
            return False
        return True

    def _stop(self) -> None:
        if self._reader >= 0:
            if self._is_listening:
                self._loop.remove_reader(self._reader)
            os.close(self._reader)
            self._reader = -1


class GuestProcess:
    """A process that code runs in, or that is kept as a template. Made by its worker."""

    def __init__(
        self,
        worker: SandboxWorker,
        number: int,
        link_end: socket.socket,
        limits: Limits,
        capacity: asyncio.Semaphore,
    ) -> None:
        """The caller has acquired `capacity`; the end of the process releases it."""
        loop = asyncio.get_running_loop()
        self.worker, self.number = worker, number
        self.limits, self.capacity = limits, capacity
        self.ended: asyncio.Future[ProcessExit] = loop.create_future()
        self.adopted: asyncio.Future[bool] = loop.create_future()
        """Of a fork: done when the fork server has taken it over, and it has its files."""
        self.refused: str | None = None
        """Why a fork could not be completed, where the code in it has made that impossible."""
        self.problem: str | None = None
        """Why it could not be started, or was lost."""
        self.was_killed = False
        """Whether the host killed it."""
        self.excess: str | None = None
        """The limit of the whole session for which the fork server kills it."""
        self.widened: asyncio.Future[None] | None = None
        """Done when the fork server has changed its process limit."""
        self._is_wide = False
        self._is_watched = False
        self._request: Answer | None = None
        self._ready: asyncio.Future[None] = loop.create_future()
        self._link = ControlChannel(link_end, self._on_frame, self._on_close)
        self.ended.add_done_callback(self._on_end)

    @property
    def alive(self) -> bool:
        return not self.ended.done()

    async def opened(self) -> None:
        """Wait until the guest is ready; one that cannot start is an infrastructure failure."""
        await first(self._ready, self.ended)
        if not self._ready.done():
            reason = self.problem or ended_at_once(self.ended.result())
            raise SandboxError(f"a session could not be started: {reason}")
        self._ready.result()

    def ask(
        self,
        header: dict[str, Any],
        body: bytes = b"",
        fds: tuple[int, ...] = (),
        *,
        most_body: int = 0,
    ) -> Answer:
        """Send a request. `fds` are copied."""
        self._request = asyncio.get_running_loop().create_future()
        self._link.most_body = most_body
        self._link.send(header, body, fds)
        return self._request

    async def exchange(
        self,
        header: dict[str, Any],
        body: bytes = b"",
        fds: tuple[int, ...] = (),
        *,
        most_body: int = 0,
    ) -> tuple[dict[str, Any], bytes] | None:
        """The answer to a request that takes no time; None if the process ended instead.

        After a timeout (`TimeoutError`) or a cancellation it is killed: its late answer would be taken for that
        of the next request, and a fork that it is making would have no owner.
        """
        request = self.ask(header, body, fds, most_body=most_body)
        try:
            async with asyncio.timeout(self.limits.wall_seconds):
                await first(request, self.ended)
        except BaseException:
            self.kill()
            raise
        finally:
            self.settled()
        return request.result() if request.done() else None

    def tell(self, header: dict[str, Any]) -> None:
        self._link.send(header)

    def settled(self) -> None:
        """The request is over; any further frame is unsolicited."""
        self._request = None

    def kill(self) -> None:
        """Kill it and all it started; `ended` is done when it is gone.

        Sent once: hostile code may give as many reasons to be killed as it can write frames.
        """
        if self.alive and not self.was_killed:
            self.was_killed = True
            self._order("kill")

    def signal(self, which: int) -> None:
        self._order("signal", signal=which)

    def watch(self) -> None:
        """Check all its processes together against its limits often, until `unwatch`."""
        self._is_watched = True
        self._order("watch")

    def unwatch(self) -> None:
        if self._is_watched:
            self._is_watched = False
            self._order("unwatch")

    async def widen(self, wide: bool) -> None:
        """Raise its process limit to leave room for forks; or lower it again, if it is not forked after all."""
        if self._is_wide != wide:
            self._is_wide = wide
            self.widened = asyncio.get_running_loop().create_future()
            self._order("widen", wide=wide)
            await first(self.widened, self.ended)

    async def end(self) -> None:
        """Kill the process and all it started, and wait until it is gone."""
        self._link.close()
        self.kill()
        await asyncio.shield(self.ended)

    def set_ended(self, ending: ProcessExit) -> None:
        if not self.adopted.done():
            self.adopted.set_result(False)
        if self.alive:
            self.ended.set_result(ending)

    def kernel_kills(self) -> int:
        """How many processes the kernel has killed so far for the memory of the whole sandbox."""
        return self.worker.group.kills()

    def is_group_full(self, kills: int) -> bool:
        """Whether the kernel has killed a process for the memory of all since `kernel_kills` was `kills`; False
        where this session alone may fill it."""
        is_smaller = self.limits.memory_mb << 20 < self.worker.group.memory_bytes
        return is_smaller and self.kernel_kills() > kills

    def infra_failure(self, kills: int) -> str | None:
        """Why its end is an infrastructure failure; None where the code is at fault, or it lives.

        The code is at fault, with two exceptions: the worker died; or the process was killed while the kernel
        killed processes for the memory of the whole sandbox. A session that exceeds a limit of its own is
        killed for that, with a result that says so.
        """
        if self.problem is not None:
            return self.problem
        if self.alive or self.was_killed or not self.is_group_full(kills):
            return None
        is_kill = looks_killed(unfinished(self.ended.result(), None, self.limits))
        return CONTROL_GROUP_FULL if is_kill else None

    def _order(self, operation: str, **values: Any) -> None:
        self.worker.tell({"op": operation, "id": self.number, **values})

    def _on_frame(self, header: dict[str, Any], body: bytes, fds: list[int]) -> None:
        if not self._ready.done():
            if header.get("state") == "ready":
                self._ready.set_result(None)
            else:
                reason = str(header.get("broken", header))[:500]
                self._ready.set_exception(SandboxError(f"a session could not be started: {reason}"))
            return
        request = self._request
        if request is None or request.done():
            self.kill()
            return
        request.set_result((header, body))

    def _on_close(self, problem: str | None) -> None:
        """The guest closed its end. Its process ends next, or is killed: it cannot be reached any more."""
        wait = 0.0 if problem else _GRACE_SECONDS
        asyncio.get_running_loop().call_later(wait, self.kill)

    def _on_end(self, _: object) -> None:
        self._link.drain()  # its last frame may have arrived together with its end
        self._link.close()
        self.capacity.release()
        if self._ready.done() and not self._ready.cancelled():
            self._ready.exception()  # retrieved, so that asyncio does not warn when no caller waits in `opened`


async def first(*futures: asyncio.Future[Any]) -> None:
    """Wait until one of them is done; cancelling the wait cancels none of them."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
