"""What a chat template can do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a chat template was seen to do when it was tried."""

    system: bool = True
    """It has a place for a system prompt."""
    tool_role: bool = True
    """It renders results of tools as such."""
    alternates: bool = False
    """It insists that users and assistants take turns."""
    native_tools: bool = False
    """It describes tools itself, and writes calls the way the action format reads them."""
    opens_thinking: str = ""
    """The `<think>` that it puts at the end of its generation prompt."""
    lead: str = ""
    """White space that it writes before what the assistant says, and that a model says itself."""
    rewrites: tuple[str, ...] = ()
    """In which conversations it rewrites what was said earlier; empty when it preserves prefixes."""
