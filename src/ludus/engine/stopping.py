"""Noticing a stop string while tokens arrive, at a cost that does not grow with the output."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]


class StopWatcher:
    """Decodes a short tail of the generated tokens and looks for stop strings in it.

    The tail always covers more characters than the longest stop string has, so that cutting it inside a
    character or a word, which can garble its first letters, hides nothing.
    """

    def __init__(self, stops: Sequence[str], decode: Decode) -> None:
        self._stops = tuple(stops)
        self._decode = decode
        self._tail: list[int] = []
        self._reach = max(len(stop) for stop in stops) + 8
        # Tokens may decode to nothing; the tail is cut at this size all the same.
        self._most_tokens = 8 * self._reach

    def push(self, token: int) -> str | None:
        """The stop string that this token completes, if any."""
        self._tail.append(token)
        text = self._decode(self._tail)
        ends = [(text.find(stop) + len(stop), stop) for stop in self._stops if stop in text]
        if ends:
            return min(ends)[1]
        if len(text) > 3 * self._reach or len(self._tail) > self._most_tokens:
            self._shorten()
        return None

    def _shorten(self) -> None:
        """Keep the fewest tokens that still cover what a stop string can reach."""
        keep = min(len(self._tail), self._reach) // 2 + 1
        while keep < len(self._tail) and len(self._decode(self._tail[-keep:])) < self._reach:
            keep *= 2
        if keep > self._most_tokens // 2:
            keep = self._most_tokens // 2
        self._tail = self._tail[-keep:]
