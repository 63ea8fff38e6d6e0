"""The settings of a recording, as a recipe writes them."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from ludus.core.config import Config, Place
from ludus.tools.recording.modes import Mode, OnDivergence, Scope
from ludus.tools.recording.recorded import RecordedTools
from ludus.tools.recording.wrapping import recorded


class RecordingConfig(Config):
    """A memory for the results of tools."""

    path: Place = Field(min_length=1)
    """A SQLite file, or the address of a Redis server: redis://host:port/db."""
    mode: Mode = Mode.REPLAY_OR_CALL
    """record, replay, or replay_or_call."""
    stateless: tuple[str, ...] = ()
    """Tools whose result depends on their arguments alone; ['*'] for all of them."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Versions of tools by name, in place of a digest of their source."""
    scope: Scope = Scope.TASK
    """Who shares the records of stateful tools: all attempts at a task, or each episode its own."""
    name: str = Field(default="tools", min_length=1)
    """What this set of tools is called there: two sets in one store have different names."""
    on_divergence: OnDivergence = OnDivergence.FAIL
    """What to do when a real tool, catching up, answers otherwise than recorded: fail or continue."""

    def wrap(self, tools: Any) -> RecordedTools:
        """`tools` with this memory."""
        return recorded(
            tools,
            self.path,
            self.mode,
            stateless=self.stateless,
            versions=self.versions,
            scope=self.scope,
            on_divergence=self.on_divergence,
            name=self.name,
        )
