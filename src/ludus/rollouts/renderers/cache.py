"""Renderings that come again: many episodes have the same tools and prompt, and read the same short results."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from ludus.core.tooling import ToolSpec
from ludus.rollouts.renderers.pieces import Entry

Kept = TypeVar("Kept")

MOST_RENDERINGS = 4096
MOST_CHARACTERS = 2000
"""Longer conversations are not kept: they hardly come twice, and they would fill the memory."""


class Recent(Generic[Kept]):
    """What was made last; the least recently used goes first. Safe with threads: a race makes it twice."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[Hashable, Kept] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Kept]) -> Kept:
        """What `make` gives, made once for each key."""
        try:
            made = self._kept.pop(key)
        except KeyError:
            made = make()
        self._kept[key] = made
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return made


class RenderCache:
    """Tokens of short conversations."""

    def __init__(self) -> None:
        self._kept: Recent[tuple[int, ...]] = Recent(MOST_RENDERINGS)

    def tokens(
        self,
        kind: str,
        entries: Sequence[Entry],
        tools: Sequence[ToolSpec],
        render: Callable[[], list[int]],
    ) -> list[int]:
        """What `render` gives for these entries and tools, computed once."""
        if sum(len(piece.text) for entry in entries for piece in entry.pieces) > MOST_CHARACTERS:
            return render()
        key = (kind, tuple(entries), tools_key(tools))
        return list(self._kept.get(key, lambda: tuple(render())))


def tools_key(tools: Sequence[ToolSpec]) -> Hashable:
    """The same for tools that a model would be told the same about."""
    return tuple((tool.name, tool.description, json.dumps(tool.parameters)) for tool in tools)
