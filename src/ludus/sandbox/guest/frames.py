"""The protocol between host and guest: frames of a JSON header and a body of bytes over a stream socket.

File descriptors travel alongside (SCM_RIGHTS). The host treats what it reads as hostile: sizes are bounded,
headers are JSON, nothing is ever unpickled.
"""

from __future__ import annotations

import array
import json
import os
import socket
from typing import Any

Header = dict[str, Any]

MOST_HEADER = 1 << 20
MOST_BODY = 64 << 20
MOST_REPORT = 1 << 20
"""The longest report of a program in a slot; our own code never writes a longer one."""
OUT_OF_MEMORY = 86
"""Exit status of a guest process without enough memory left to report its `MemoryError`."""
PREFIX = 8
_MOST_DESCRIPTORS = 4


class BadFrame(ValueError):
    """The peer sent something that is not a frame."""


def packed(header: Header, body: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(4, "little") + len(body).to_bytes(4, "little") + text + body


def sizes(prefix: bytes) -> tuple[int, int]:
    header, body = int.from_bytes(prefix[:4], "little"), int.from_bytes(prefix[4:8], "little")
    if header > MOST_HEADER or body > MOST_BODY:
        raise BadFrame(f"a frame of {header} + {body} bytes is too large")
    return header, body


def parsed(text: bytes | str) -> Header:
    """A header; only a JSON object is accepted."""
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadFrame(f"a frame's header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise BadFrame("a frame's header is not an object")
    return header


def send(link: socket.socket, header: Header, body: bytes = b"", fds: tuple[int, ...] = ()) -> None:
    """Send a frame on a blocking socket; descriptors travel with its first bytes."""
    data = packed(header, body)
    if fds:
        sent = socket.send_fds(link, [data], fds)
        data = data[sent:]
    if data:
        link.sendall(data)


def receive(link: socket.socket) -> tuple[Header, bytes, list[int]]:
    """The next frame of a blocking socket; `EOFError` at its end."""
    fds: list[int] = []
    prefix = _exactly(link, PREFIX, fds)
    header, body = sizes(prefix)
    return parsed(_exactly(link, header, fds)), _exactly(link, body, fds), fds


def _exactly(link: socket.socket, count: int, fds: list[int]) -> bytes:
    parts = bytearray()
    space = socket.CMSG_LEN(_MOST_DESCRIPTORS * array.array("i").itemsize)
    while len(parts) < count:
        data, ancillary, _, _ = link.recvmsg(
            min(count - len(parts), 1 << 20), space, socket.MSG_CMSG_CLOEXEC
        )
        fds += descriptors(ancillary)
        if not data:
            close_all(fds)
            raise EOFError
        parts += data
    return bytes(parts)


def descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """The file descriptors (SCM_RIGHTS) that `recvmsg` received."""
    found = array.array("i")
    for level, kind, raw in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(raw[: len(raw) - len(raw) % found.itemsize])
    return found.tolist()


def close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
