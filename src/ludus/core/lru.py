"""A cache that forgets what was used longest ago."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Kept = TypeVar("Kept")


class LruCache(Generic[Kept]):
    """A thread-safe LRU cache; two threads may make the same value twice.

    `most` is a number of values, or their size together as `size` counts it.
    """

    def __init__(self, most: int, size: Callable[[Kept], int] = lambda _: 1) -> None:
        self._most, self._size = most, size
        self._total = 0
        self._kept: OrderedDict[Hashable, Kept] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Kept]) -> Kept:
        """The value of this key, made by `make` if it is not kept."""
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

    def find(self, key: Hashable) -> Kept | None:
        """The value of this key if it is kept."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._kept.clear()
            self._total = 0

    def _drop(self, key: Hashable) -> None:
        if key in self._kept:
            self._total -= self._size(self._kept.pop(key))
