"""The version of a local tool: its own source, and the plain settings it was made with.

An edit of the function, even of a comment, is a new version, so a stale result is never replayed for new
code. What the function calls is not looked at; name a version yourself where that matters.
"""

from __future__ import annotations

import hashlib
import inspect
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

from ludus.core.failures import ConfigError
from ludus.core.messages import ToolSet
from ludus.tools.recording.keys import canonical
from ludus.tools.tool import FunctionTool, Tool, tool

_NOT_IN_THE_RESULT = frozenset(
    {"name", "description", "timeout", "max_concurrency", "process", "retries", "is_unbound"}
)


def source_versions(things: Iterable[Any]) -> dict[str, str]:
    """Versions by name of the functions and tools among `things`; tool sets are left to their specs."""
    local = [one for one in things if isinstance(one, Tool) or not isinstance(one, ToolSet)]
    made = [one if isinstance(one, Tool) else tool(one) for one in local]
    for one in made:
        if one.signature.env is not None:
            raise ConfigError(
                f"tool {one.name!r} acts on the episode's environment, which a replay would leave as it is; "
                "leave the tool out of the recording"
            )
    return {one.name: source_version(one) for one in made}


def source_version(one: Tool) -> str:
    """A digest of source and settings; of the settings alone where the source is not to be had."""
    code: Callable[..., Any] | type = one.function if isinstance(one, FunctionTool) else type(one)
    settings = {
        name: value
        for name, value in vars(one).items()
        if not name.startswith("_")
        and name not in _NOT_IN_THE_RESULT
        and (value is None or isinstance(value, (str, int, float)))
    }
    text = canonical([_source(code), settings])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _source(code: Callable[..., Any] | type) -> str:
    try:
        return textwrap.dedent(inspect.getsource(code))
    except (OSError, TypeError):  # typed at a prompt, or written in C
        return ""
