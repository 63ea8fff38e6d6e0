"""`recorded`: tools with a memory, in one line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ludus.core.messages import ToolSet
from ludus.tools.recording.modes import Mode, OnDivergence, Scope, chosen
from ludus.tools.recording.recorded import RecordedTools
from ludus.tools.recording.store import open_store
from ludus.tools.recording.versions import source_versions
from ludus.tools.tool import Tool
from ludus.tools.toolset import as_toolset


def recorded(
    tools: Any,
    address: str | Path,
    mode: Mode | str = Mode.REPLAY_OR_CALL,
    *,
    stateless: Iterable[str] = (),
    versions: Mapping[str, str] | None = None,
    scope: Scope | str = Scope.TASK,
    on_divergence: OnDivergence | str = OnDivergence.FAIL,
    name: str = "tools",
) -> RecordedTools:
    """`tools` (functions, tools, tool sets, or None to replay) with a memory at a path or an address.

    Functions and tools given here have their own source as version, unless `versions` names one; those
    inside a tool set are known by their specs alone. The rest is as for `RecordedTools`.
    """
    things = [] if tools is None else _one_by_one(tools)
    return RecordedTools(
        None if tools is None else as_toolset(things),
        open_store(address, must_exist=chosen(Mode, mode, "mode") is Mode.REPLAY),
        mode,
        stateless=stateless,
        versions={**source_versions(things), **(versions or {})},
        scope=scope,
        on_divergence=on_divergence,
        name=name,
    )


def _one_by_one(tools: Any) -> list[Any]:
    is_one = isinstance(tools, (Tool, ToolSet)) or callable(tools) or not isinstance(tools, Iterable)
    return [tools] if is_one else list(tools)
