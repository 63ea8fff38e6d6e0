"""Renderings that come again: many episodes read the same short results and the same prompt."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

from ludus.core.tooling import ToolSpec
from ludus.rollouts.renderers.pieces import Entry

MOST_ENTRIES = 4096
MOST_CHARACTERS = 2000
"""Longer conversations are not kept: they hardly come twice, and they would fill the memory."""


class RenderCache:
    """The least recently used rendering goes first. Safe with threads: a race costs a second rendering."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, tuple[int, ...]] = OrderedDict()

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
        named = tuple((tool.name, tool.description, json.dumps(tool.parameters)) for tool in tools)
        key = (kind, tuple(entries), named)
        kept = self._kept.pop(key, None)
        if kept is None:
            kept = tuple(render())
        self._kept[key] = kept
        if len(self._kept) > MOST_ENTRIES:
            self._kept.popitem(last=False)
        return list(kept)
