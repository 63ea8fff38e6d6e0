"""A server's standard output as lines, in memory that does not grow with what it writes."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ID_FIRST = re.compile(
    rb'^\s*\{\s*"jsonrpc"\s*:\s*"2\.0"\s*,\s*"id"\s*:\s*(\d{1,15})\s*,\s*"(?:result|error)"'
)
_ID_LAST = re.compile(rb'\}\s*,\s*"jsonrpc"\s*:\s*"2\.0"\s*,\s*"id"\s*:\s*(\d{1,15})\s*\}\s*$')
_KEPT = 256


@dataclass(frozen=True, slots=True)
class LongLine:
    """A line that was too long to be kept."""

    size: int
    request: int | None
    """The request that it answers, where its beginning or its end says so."""


class LineSplitter:
    """Cuts a stream of bytes into lines; of a line over `limit` only its size and its request are kept."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._parts: list[bytes] = []
        self._size = 0
        self._head = self._tail = b""

    def feed(self, data: bytes) -> list[bytes | LongLine]:
        """The lines that `data` completes."""
        *ended, rest = data.split(b"\n")
        lines: list[bytes | LongLine] = []
        for piece in ended:
            self._add(piece)
            lines.append(self._take())
        self._add(rest)
        return lines

    def _add(self, piece: bytes) -> None:
        self._size += len(piece)
        if self._size <= self._limit:
            self._parts.append(piece)
            return
        if self._parts:
            whole = b"".join(self._parts)
            self._head, self._tail, self._parts = whole[:_KEPT], whole[-_KEPT:], []
        self._head = (self._head + piece)[:_KEPT] if len(self._head) < _KEPT else self._head
        self._tail = (self._tail + piece[-_KEPT:])[-_KEPT:]

    def _take(self) -> bytes | LongLine:
        size, head, tail = self._size, self._head, self._tail
        line = b"".join(self._parts)
        self._parts, self._size, self._head, self._tail = [], 0, b"", b""
        if size <= self._limit:
            return line
        found = _ID_FIRST.search(head) or _ID_LAST.search(tail)
        return LongLine(size, int(found[1]) if found else None)
