"""Reading what an execution writes, without letting it fill our memory or take our time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

_CHUNK = 1 << 16
_DISCARDED = 16 << 20


class Capture:
    """One pipe. Keeps the head and the tail of what comes; far beyond the limit it stops listening."""

    def __init__(self, limit: int, overflow: Callable[[], None], *, at_once: bool = True) -> None:
        """`at_once`: listen from the start."""
        self._limit = limit
        self._overflow = overflow
        self._head = bytearray()
        self._tail = bytearray()
        self._total = 0
        self._loop = asyncio.get_running_loop()
        self._reader, self.writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._reader, False)
        self._is_listening = False
        if at_once:
            self.listen()

    @property
    def truncated(self) -> bool:
        return self._total > self._limit

    def listen(self) -> None:
        """Read what comes as it comes. Until then as much is kept as a pipe holds, and `finish` reads it."""
        if self._reader >= 0 and not self._is_listening:
            self._is_listening = True
            self._loop.add_reader(self._reader, self._read)

    def close_writer(self) -> None:
        """The other side has its copy of the writing end; ours must not keep the pipe open."""
        os.close(self.writer)

    def finish(self) -> str:
        """What was written so far, as text. Those who still hold the other end write to nobody."""
        while self._reader >= 0 and self._read():
            pass
        self._stop()
        return self._text()

    def _read(self) -> bool:
        try:
            data = os.read(self._reader, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self._stop()
            return False
        self._total += len(data)
        self._keep(data)
        if self._total > self._limit + _DISCARDED:
            self._stop()
            self._overflow()
            return False
        return True

    def _keep(self, data: bytes) -> None:
        room = self._limit - len(self._head) if not self._tail else 0
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * self._limit:
            del self._tail[: -self._limit]

    def _stop(self) -> None:
        if self._reader >= 0:
            if self._is_listening:
                self._loop.remove_reader(self._reader)
            os.close(self._reader)
            self._reader = -1

    def _text(self) -> str:
        if not self.truncated:
            return _decoded(self._head + self._tail)
        half = self._limit // 2
        whole = self._head + self._tail
        left_out = self._total - 2 * half
        note = f"\n... [{left_out:,} bytes left out] ...\n"
        return _decoded(whole[:half]) + note + _decoded(whole[-half:])


def _decoded(data: bytes | bytearray) -> str:
    return bytes(data).decode("utf-8", errors="backslashreplace")
