"""The version of a tool: a digest of its schema and, where it is code of ours, of its source and settings.

What was learned, recorded or stored with one version of a tool need not hold for another. An edit of the
function, even of a comment, is a new version, and so is another content of a file that a setting names: a
corpus, a database. What the function calls is not looked at.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from ludus.core.failures import LudusError
from ludus.core.messages import ToolContext, ToolSet
from ludus.core.task import Task
from ludus.tools.recording import RecordedTools
from ludus.tools.recording.keys import settings_version, source_of, source_version, spec_version
from ludus.tools.toolset import CombinedTools, LocalTools

log = logging.getLogger(__name__)


async def tool_versions(tools: ToolSet) -> dict[str, str]:
    """The versions of a tool set by name; of tools elsewhere, what their schemas tell."""
    if isinstance(tools, LocalTools):
        return {one.name: spec_version(one.spec, source_version(one)) for one in tools.tools}
    if isinstance(tools, RecordedTools) and tools.inner is not None:
        return await tool_versions(tools.inner)
    if isinstance(tools, CombinedTools):
        return {n: v for one in tools.sets for n, v in (await tool_versions(one)).items()}
    try:
        specs = await tools.list(ToolContext("versions", Task()))
    except LudusError as error:
        log.warning("the versions of the tools of %s are not known: %s", type(tools).__name__, error)
        return {}
    return {spec.name: spec_version(spec) for spec in specs}


def code_version(code: Callable[..., Any] | type, settings: Mapping[str, Any] | None = None) -> str:
    """A digest of the source of a class or function, or else its name, and of the settings that it is given."""
    text = source_of(code) or f"{code.__module__}:{getattr(code, '__qualname__', '')}"
    return settings_version(text, settings or {})
