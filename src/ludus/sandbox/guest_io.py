"""Transport between host and guest: the control socket, output pipes, standard input, source code."""

from __future__ import annotations

import array
import asyncio
import fcntl
import importlib.util
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from ludus.sandbox.guest import frames

_CHUNK = 1 << 16
_MOST_FDS = 8
_ROOM_FOR_FDS = socket.CMSG_SPACE(_MOST_FDS * array.array("i").itemsize)
_DISCARDED = 16 << 20
"""Output beyond its limit that is read and thrown away before the program is stopped."""
_MOST_SOURCE = 4 << 20
_ADD_SEALS, _ALL_SEALS = 1033, 0x000F

OnFrame = Callable[[frames.Header, bytes, list[int]], None]
OnClose = Callable[[str | None], None]
"""Called with what was wrong with the received data, or None when the peer closed."""


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


class OutputBuffer:
    """Keeps the head and the tail of an output."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._head = bytearray()
        self._tail = bytearray()
        self._total = 0

    @property
    def truncated(self) -> bool:
        return self._total > self._limit

    @property
    def is_flooded(self) -> bool:
        """Whether it is far beyond its limit, so that the program is to be stopped."""
        return self._total > self._limit + _DISCARDED

    def keep(self, data: bytes) -> None:
        """Take what was read."""
        self._total += len(data)
        room = self._limit - len(self._head) if not self._tail else 0
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * self._limit:
            del self._tail[: -self._limit]

    def text(self) -> str:
        """The kept output, with a note in the middle of how much was left out."""
        if not self.truncated:
            return _decoded(self._head + self._tail)
        half = self._limit // 2
        whole = self._head + self._tail
        left_out = self._total - 2 * half
        note = f"\n... [{left_out:,} bytes left out] ...\n"
        return _decoded(whole[:half]) + note + _decoded(whole[-half:])


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


def _decoded(data: bytes | bytearray) -> str:
    return bytes(data).decode("utf-8", errors="backslashreplace")


def encode_source(code: str) -> bytes:
    """Python source as bytes; `ValueError` for more than 4 MB."""
    if not isinstance(code, str):
        raise TypeError(f"code is a text, not {type(code).__name__}")
    data = encode_text(code)
    if len(data) > _MOST_SOURCE:
        raise ValueError(f"the code has {len(data):,} bytes; {_MOST_SOURCE:,} are accepted")
    return data


def encode_text(given: str) -> bytes:
    """UTF-8, with lone surrogates kept."""
    return given.encode("utf-8", "surrogatepass")


def encode_argument(word: str) -> bytes:
    """A word of a command line, with NUL and lone surrogates escaped."""
    return word.replace("\0", "\\0").encode("utf-8", "backslashreplace")


def stdin_file(given: str) -> int | None:
    """Standard input as a sealed memory file; None for none."""
    if not given:
        return None
    data = encode_text(given)
    fd = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, _ADD_SEALS, _ALL_SEALS)
    return fd


# A bundle defines each module under its full name before the next one runs, so modules that import each other
# work unchanged in a sandbox, which cannot see this package.
_DEFINE = """\
def _define(name, source):
    import sys, types
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
"""


@cache
def bundle(*modules: str, then: str = "") -> str:
    """Source code that defines the named modules in this order and runs `then`."""
    definitions = [f"_define({name!r}, {_source(name)!r})" for name in modules]
    return "\n".join([_DEFINE, *definitions, then, ""])


def _source(name: str) -> str:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"there is no module {name!r} to bundle", name=name)
    return Path(spec.origin).read_text(encoding="utf-8")


def call(module: str, function: str, arguments: Sequence[str] = ()) -> str:
    """Source that calls a function of a bundled module with text arguments."""
    given = ", ".join(repr(one) for one in arguments)
    return f"__import__('sys').modules[{module!r}].{function}({given})"
