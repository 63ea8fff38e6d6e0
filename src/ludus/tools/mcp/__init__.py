"""The tools of MCP servers (Model Context Protocol): commands over stdio, addresses over streamable HTTP.

A recipe says `"mcp:uvx some-server"`, `"mcp:https://..."`, or a table `{ mcp = "..." }` (`MCPServerConfig`).
`toolset` is what episodes use, `connection` one running server and its list, `servers` its bytes, `guardian`
the parent of its process. Needs the extra `mcp`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from ludus.core.config import Config, Place
from ludus.core.failures import ConfigError, MissingExtraError, not_there

if TYPE_CHECKING:
    from ludus.tools.mcp.toolset import MCPTools

__all__ = ["MCPServerConfig", "is_mcp", "mcp_tools"]

SCHEME = "mcp:"
FILES = "{files}"
"""Placeholder in a command for the folder of `files`."""
_VARIABLE = re.compile(r"\$\{(\w+)\}")


class MCPServerConfig(Config):
    """An MCP server, and what of it an agent may use."""

    mcp: str
    """The command that starts it (stdio), such as "uvx mcp-server-time", or its address (streamable HTTP)."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables of the command; it inherits only PATH, HOME and the like. ${NAME} is one of the run's."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Headers of every request to the address; ${NAME} is a variable of the run, such as a token."""
    cwd: Place | None = None
    """The folder that the command runs in; this one when left out."""
    files: Place | None = None
    """A folder that every server process gets a fresh copy of, as its working directory and as {files} in the
    command; each episode then has a process of its own, unless per_episode is false."""
    allow: tuple[str, ...] = ("*",)
    """The tools on offer, by name; * stands for anything."""
    deny: tuple[str, ...] = ()
    """Tools that are not on offer, though allowed."""
    read_only: bool = False
    """Offer only tools that the server declares to change nothing (readOnlyHint): its word, not a guarantee."""
    prefix: str = Field(default="", pattern=r"^[A-Za-z0-9_-]{0,32}$")
    """Put before the names of its tools, where two servers have the same."""
    resources: bool = False
    """Also offer its resources, by the tools list_resources and read_resource."""
    prompts: bool = False
    """Also offer its prompts, by the tools list_prompts and get_prompt."""
    per_episode: bool | None = None
    """Whether each episode has a process or session of its own; left out, addresses do and commands do not."""
    servers: int = Field(default=16, ge=1)
    """With per_episode: processes or sessions at once; further episodes wait."""
    concurrency: int = Field(default=16, ge=1)
    """Calls that run at once, over all episodes."""
    timeout: float = Field(default=30.0, gt=0)
    """Seconds that a call may take."""
    start_timeout: float = Field(default=60.0, gt=0)
    """Seconds from the start of a server until it has listed its tools; uvx and npx may download first."""
    restarts: int = Field(default=3, ge=0)
    """How often in a row a server that does not start is tried again, each time after a longer pause."""
    max_tools: int = Field(default=128, ge=1)
    """Tools on offer; a server with more is refused until allow picks some."""
    max_chars: int = Field(default=20_000, ge=100)
    """Characters of a result; the middle of a longer one is left out."""
    max_message_bytes: int = Field(default=16_000_000, ge=10_000)
    """Bytes of one message of the server; a larger result is not read, and the model gets an error."""

    @field_validator("mcp")
    @classmethod
    def _can_be_read(cls, given: str) -> str:
        if not given.strip():
            raise ValueError('it is empty: write a command ("uvx mcp-server-time") or an address')
        if is_address(given):
            if not urlsplit(given).hostname:
                raise ValueError(f"{given!r} is no address: write https://host/path")
            return given.strip()
        try:
            shlex.split(given)
        except ValueError as error:
            raise ValueError(f"the command cannot be read ({error}): {given!r}") from None
        return given.strip()

    @property
    def is_http(self) -> bool:
        return is_address(self.mcp)

    @property
    def label(self) -> str:
        """Name of the server in messages; an address without its query, which may hold a key."""
        if self.is_http:
            parts = urlsplit(self.mcp)
            port = f":{parts.port}" if parts.port else ""
            return f"{parts.scheme}://{parts.hostname}{port}{parts.path}"
        return self.mcp

    @property
    def has_own_sessions(self) -> bool:
        """Whether each episode has a process or session of its own."""
        if self.per_episode is not None:
            return self.per_episode
        return self.is_http or self.files is not None

    def command(self, files: str) -> list[str]:
        """The command's words; `files` is where the copy of the files is."""
        return [word.replace(FILES, files) for word in shlex.split(self.mcp)]

    def variables(self, files: str) -> dict[str, str]:
        """The command's own variables."""
        return {
            name: expanded(text, f"env.{name}").replace(FILES, files) for name, text in self.env.items()
        }

    def http_headers(self) -> dict[str, str]:
        return {name: expanded(text, f"headers.{name}") for name, text in self.headers.items()}

    def check_program(self) -> None:
        """Refuse a command whose program is not there (`ConfigError`), as starting it would."""
        if self.is_http:
            return
        program, folder = shlex.split(self.mcp)[0], self.files or self.cwd or "."
        if FILES in program:
            return  # it is in a copy that does not exist yet
        if os.sep in program:
            found = shutil.which(str(Path(folder) / program))
        else:
            found = shutil.which(program, path=self.variables("").get("PATH"))
        if found is None:
            raise ConfigError(
                f"the MCP server {self.label!r} cannot be started: there is no program {program!r}. Install "
                "it, or name the command in full"
            )

    def permits(self, name: str) -> bool:
        """Whether a tool of this name may be called."""
        return any(fnmatchcase(name, one) for one in self.allow) and not any(
            fnmatchcase(name, one) for one in self.deny
        )

    @classmethod
    def of(cls, spec: str | Mapping[str, Any]) -> MCPServerConfig:
        """From what a recipe says: "mcp:...", or a table; `ConfigError` where it cannot be."""
        table = {"mcp": spec} if isinstance(spec, str) else dict(spec)
        if "tool" in table:
            table["mcp"] = table.pop("tool")
        if isinstance(table.get("mcp"), str):
            table["mcp"] = table["mcp"].removeprefix(SCHEME)
        made = cls.parse(table, f"the MCP server {str(table.get('mcp'))!r:.100}")
        made._check_kind()
        return made

    def _check_kind(self) -> None:
        """Refuse settings of commands on an address, and settings of addresses on a command."""
        wrong = ("env", "cwd", "files") if self.is_http else ("headers",)
        for name in wrong:
            if getattr(self, name):
                kind = "an address, which is started by others" if self.is_http else "a command"
                raise ConfigError(f"the MCP server {self.label!r} is {kind}: it takes no {name}")
        if self.files is not None and self.cwd is not None:
            raise ConfigError(
                f"the MCP server {self.label!r}: the copy of files is its cwd; give one of them"
            )
        for name in ("files", "cwd"):
            folder = getattr(self, name)
            if folder is not None and not Path(folder).is_dir():
                raise ConfigError(
                    f"the MCP server {self.label!r}, {name}: {not_there(folder, 'folder')}"
                )
        if FILES in self.mcp and self.files is None:
            raise ConfigError(
                f"the MCP server {self.label!r} names {FILES}: say which folder with files = ..."
            )


def is_mcp(spec: Any) -> bool:
    """Whether what a recipe says of a tool names an MCP server."""
    if isinstance(spec, Mapping):
        return "mcp" in spec or str(spec.get("tool")).startswith(SCHEME)
    return isinstance(spec, str) and spec.startswith(SCHEME)


def is_address(server: str) -> bool:
    return server.strip().lower().startswith(("http://", "https://"))


def expanded(text: str, where: str) -> str:
    """`text` with ${NAME} replaced by that environment variable: recipes need not hold secrets."""

    def value(match: re.Match[str]) -> str:
        found = os.environ.get(match[1])
        if found is None:
            raise ConfigError(
                f"{where}: there is no environment variable {match[1]}; set it, or write the value"
            )
        return found

    return _VARIABLE.sub(value, text)


def mcp_tools(spec: Any) -> MCPTools:
    """The tool set of a server that a recipe names; nothing is started yet."""
    config = spec if isinstance(spec, MCPServerConfig) else MCPServerConfig.of(spec)
    try:
        from ludus.tools.mcp.toolset import MCPTools
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("ludus"):
            raise
        raise MissingExtraError("mcp", "mcp", "using an MCP server's tools") from error
    return MCPTools(config)
