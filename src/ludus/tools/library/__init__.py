"""Tools that come with Ludus, and `build_toolset`: from what a recipe says about tools to one tool set.

A tool is named by a short name (`"python"`), by a reference (`"shop.py:search"`), by the address of a tool
server (`"http://host:port"`), by an MCP server (`"mcp:uvx mcp-server-time"`, `"mcp:https://..."`), by a table
whose key `tool` is one of these and whose other keys are options (`{tool = "sql", database = "shop.db"}`); in
Python it may be the thing itself. No tool is imported before it is asked for: `TOOLS` holds names only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from ludus.core.config import Config
from ludus.core.failures import ConfigError
from ludus.core.messages import ToolSet
from ludus.core.registry import Registry
from ludus.tools.calling import Encode
from ludus.tools.mcp import is_mcp, mcp_tools
from ludus.tools.tool import LocalTools, Tool
from ludus.tools.toolset import as_toolset

if TYPE_CHECKING:
    from ludus.sandbox import SandboxConfig
    from ludus.tools.library.sandbox import EpisodeSessions
    from ludus.tools.recording import RecordingConfig

__all__ = ["TOOLS", "Toolkit", "build_toolset", "tools_named"]

TOOLS = Registry(
    "tool",
    {
        "python": "ludus.tools.library.sandbox:PYTHON",
        "bash": "ludus.tools.library.sandbox:BASH",
        "files": "ludus.tools.library.files:FILES",
        "sql": "ludus.tools.library.sql:SQL",
        "calculator": "ludus.tools.library.calculator:calculator",
        "search": "ludus.tools.library.retrieval:SearchTool",
        "web_search": "ludus.tools.library.web:WebSearch",
        "visit": "ludus.tools.library.web:Visit",
    },
)

Spec = str | Mapping[str, Any] | Tool | ToolSet | Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Toolkit:
    """Tools that belong together and work in an episode's sandbox session."""

    options: type[Config]
    """The model of the table that a recipe may give."""
    build: Callable[[Any, EpisodeSessions], Sequence[Tool]]
    """Tools of checked options."""
    readable: Callable[[Any], tuple[str, ...]] = lambda options: ()
    """The files that the sandbox must be able to see."""


def build_toolset(
    specs: Spec | Sequence[Spec] | None,
    *,
    encode: Encode | None = None,
    sandbox: SandboxConfig | None = None,
    record: RecordingConfig | None = None,
) -> ToolSet:
    """One tool set. All sandbox tools of the list share one session per episode, made by `sandbox`.

    With `record`, results are remembered and replayed.
    """
    if specs is None:
        specs = []
    if isinstance(specs, str | Mapping) or not isinstance(specs, Sequence):
        specs = [specs]
    things: list[Any] = []
    kits: list[tuple[Toolkit, Config]] = []
    for spec in specs:
        found, options = _found(spec)
        if isinstance(found, Toolkit):
            kits.append((found, _kit_options(found, options, spec)))
        else:
            things.append(_with_options(found, options, _name(spec)) if options else found)
    if kits:
        things.append(_sandboxed(kits, sandbox, encode))
    if record is not None:
        from ludus.tools.recording import recorded

        return recorded(things, record.path, **record.options)
    return as_toolset(things, encode=encode)


def tools_named(specs: Sequence[Spec]) -> list[Tool | type[Tool]]:
    """The tools of this process among what a recipe or Python names."""
    found: list[Any] = []
    for spec in specs:
        if not is_mcp(spec) and not _name(spec).startswith(("http://", "https://")):
            thing = _found(spec)[0]
            found += thing.tools if isinstance(thing, LocalTools) else [thing]
    return [
        one
        for one in found
        if isinstance(one, Tool) or (isinstance(one, type) and issubclass(one, Tool))
    ]


def _found(spec: Any) -> tuple[Any, dict[str, Any]]:
    """The object that a spec names, and the options that it gives."""
    if is_mcp(spec):
        return mcp_tools(spec), {}
    if isinstance(spec, str):
        spec = {"tool": spec}
    if not isinstance(spec, Mapping):
        return spec, {}
    options = dict(spec)
    name = options.pop("tool", None)
    if not isinstance(name, str):
        raise ConfigError(f"a tool is a name, or a table whose key 'tool' names it: {spec!r:.200}")
    if name.startswith(("http://", "https://")):
        from ludus.tools.remote import RemoteTools

        return _with_options(RemoteTools, options, name, name), {}
    return TOOLS.load(name), options


def _kit_options(kit: Toolkit, options: dict[str, Any], spec: Any) -> Config:
    """The options as the kit takes them. The error for a bare name says where options go."""
    try:
        return kit.options.parse(options, f"the tool {_name(spec)!r}")
    except ConfigError as error:
        if isinstance(spec, Mapping):
            raise
        raise ConfigError(
            f'{error}\nA tool\'s options stand in a table, such as tools = [{{ tool = "{spec}", ... }}]: in a '
            "recipe, or in the file that `ludus serve tools --config` reads"
        ) from None


def _name(spec: Any) -> str:
    return str(spec.get("tool")) if isinstance(spec, Mapping) else str(spec)


def _with_options(found: Any, options: Mapping[str, Any], name: str, *arguments: Any) -> Any:
    """Call a class or a factory with the options; unknown ones are refused by name."""
    if isinstance(found, Tool) or not callable(found):
        raise ConfigError(f"the tool {name!r} takes no options ({', '.join(options)})")
    signature = inspect.signature(found)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for key in options:
        if key not in signature.parameters and not takes_any:
            near = get_close_matches(key, signature.parameters, n=1)
            known = ", ".join(signature.parameters) or "none"
            hint = f"did you mean {near[0]!r}?" if near else f"known options: {known}"
            raise ConfigError(f"the tool {name!r} has no option {key!r}; {hint}")
    try:
        signature.bind(*arguments, **options)
    except TypeError as error:
        raise ConfigError(f"the tool {name!r}: {error}") from error
    return found(*arguments, **options)


def _sandboxed(
    kits: Sequence[tuple[Toolkit, Config]],
    sandbox: SandboxConfig | None,
    encode: Encode | None,
) -> ToolSet:
    from ludus.sandbox import SandboxConfig
    from ludus.tools.library.sandbox import EpisodeSessions, SandboxTools

    config = sandbox or SandboxConfig()
    seen = [path for kit, options in kits for path in kit.readable(options)]
    readable = tuple(dict.fromkeys([*config.readable, *seen]))
    sessions = EpisodeSessions(config.model_copy(update={"readable": readable}))
    tools = [tool for kit, options in kits for tool in kit.build(options, sessions)]
    return SandboxTools(tools, sessions, encode=encode)
