"""What is kept for one episode while it is open, and the counters of a whole run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from ludus.core.messages import ToolCall, ToolResult, ToolSpec
from ludus.tools.recording.keys import Label, next_history


@dataclass(slots=True)
class Statistics:
    """Counters over all episodes of one `RecordedTools`."""

    hits: int = 0
    """Calls answered from the recording."""
    misses: int = 0
    """Calls that were looked for and not found."""
    recorded: int = 0
    """Results written."""
    caught_up: int = 0
    """Calls that were replayed first and had to be made on the real tool after all."""
    diverged: int = 0
    """Of these, the ones whose real result was not the recorded one."""
    unrecorded: int = 0
    """Calls made without writing them down, because the real tool's state was no longer known."""
    opened: int = 0
    """Episodes for which the real tools were opened."""


@dataclass(slots=True, eq=False)
class EpisodeSession:
    """One episode. Everything but `is_open` and `is_closed` is touched only under `turn`."""

    root: str
    history: str
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held for the length of a stateful call: an episode's history is one sequence."""
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_open: bool = False
    """Whether the real tools were opened."""
    is_closed: bool = False
    behind: list[tuple[ToolCall, ToolResult]] = field(default_factory=list)
    """Replayed calls that the real tools have not seen, in order."""
    is_detached: bool = False
    """The real tools are in a state that no history describes: straight through from here on."""
    broken: str = ""
    """Why the real tools could not be brought to where the model believes them to be."""
    tools: dict[str, str] = field(default_factory=dict)
    """The versions of the tools there are, by name."""

    def learn(self, specs: Sequence[tuple[ToolSpec, str]]) -> None:
        self.tools = {spec.name: version for spec, version in specs}

    def advance(self, label: Label, result: ToolResult) -> None:
        self.history = next_history(label.key, result)
