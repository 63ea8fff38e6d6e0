"""A socket to the inside, on the event loop: frames in, frames out, descriptors with them."""

from __future__ import annotations

import array
import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable

from ludus.sandbox.inside import frames

_CHUNK = 1 << 16
_ROOM_FOR_FDS = socket.CMSG_SPACE(8 * array.array("i").itemsize)

_MOST_FDS = 8

OnFrame = Callable[[frames.Header, bytes, list[int]], None]
OnClose = Callable[[str | None], None]
"""Told of what was wrong with what came, or of None when the other side closed."""


class Link:
    """One end of a socket pair. Sending never blocks; what the kernel does not take at once waits here."""

    def __init__(self, end: socket.socket, on_frame: OnFrame, on_close: OnClose) -> None:
        self._socket = end
        self._on_frame, self._on_close = on_frame, on_close
        self._incoming = bytearray()
        self._fds: list[int] = []
        self._outgoing: deque[tuple[bytes | memoryview, tuple[int, ...]]] = deque()
        self._loop = asyncio.get_running_loop()
        self._is_open = True
        self.most_body = 0
        """How large a frame's body may be; a stranger does not get to fill our memory."""
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
        """Take in what has arrived already; the other side is gone, and this is all there will be."""
        while self._is_open and self._read():
            pass

    def close(self) -> None:
        """Close; nothing is called any more."""
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
        """Read once; whether there may be more."""
        try:
            data, ancillary, _, _ = self._socket.recvmsg(_CHUNK, _ROOM_FOR_FDS, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return False
        except OSError:
            data, ancillary = b"", []
        for level, kind, raw in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(raw[: len(raw) - len(raw) % received.itemsize])
                self._fds.extend(received)
        if not data:
            self._end(None)
            return False
        self._incoming += data
        try:
            if len(self._fds) > _MOST_FDS:
                raise frames.BadFrame("more descriptors than anybody asked for")
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
