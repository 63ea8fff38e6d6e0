"""Renderings that come again: many episodes have the same tools and prompt, and read the same short results."""

from __future__ import annotations

import hashlib
import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from ludus.core.messages import ToolSpec
from ludus.rollouts.renderers.pieces import Entry

Kept = TypeVar("Kept")

MOST_BYTES = 1 << 24
MOST_CHARACTERS = 2000
"""Longer conversations are not kept: they hardly come twice."""
_OVERHEAD = 512


class Recent(Generic[Kept]):
    """What was made last; the least recently used goes first. Safe with threads, which may make a thing twice.

    `most` is a number of things, or what `size` says of all of them together.
    """

    def __init__(self, most: int, size: Callable[[Kept], int] = lambda _: 1) -> None:
        self._most, self._size = most, size
        self._total = 0
        self._kept: OrderedDict[Hashable, Kept] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Kept]) -> Kept:
        """What is kept by this key, or else what `make` gives."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        made = make()
        with self._lock:
            self._drop(key)  # another thread was as quick
            self._kept[key] = made
            self._total += self._size(made)
            while self._total > self._most:
                self._drop(next(iter(self._kept)))
        return made

    def _drop(self, key: Hashable) -> None:
        if key in self._kept:
            self._total -= self._size(self._kept.pop(key))


class RenderCache:
    """Tokens of short conversations, in a few bytes each: a prompt with many tools has thousands."""

    def __init__(self) -> None:
        self._kept: Recent[array[int]] = Recent(MOST_BYTES, _bytes)

    def tokens(
        self,
        kind: str,
        entries: Sequence[Entry],
        tools: Sequence[ToolSpec],
        render: Callable[[], list[int]],
    ) -> list[int]:
        """What `render` gives for these entries and tools."""
        if sum(len(piece.text) for entry in entries for piece in entry.all_pieces()) > MOST_CHARACTERS:
            return render()
        key = (kind, tuple(entries), tools_key(tools))
        return list(self._kept.get(key, lambda: array("i", render())))


def _bytes(tokens: array[int]) -> int:
    """What a rendering takes, with a key of the longest kind."""
    return tokens.itemsize * len(tokens) + MOST_CHARACTERS + _OVERHEAD


def tools_key(tools: Sequence[ToolSpec]) -> str:
    """The same for tools of which a model would be told the same; short, whatever they say."""
    told = [(tool.name, tool.description, tool.parameters) for tool in tools]
    return hashlib.sha256(json.dumps(told, default=repr).encode()).hexdigest()
