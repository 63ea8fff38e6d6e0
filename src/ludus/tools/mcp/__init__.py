"""The tools of MCP servers (Model Context Protocol): commands over stdio, addresses over streamable HTTP.

`config` is what a recipe says, `toolset` what episodes use, `connection` one running server and its list,
`servers` its bytes, `guardian` the parent of its process. Needs the extra `mcp`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ludus.core.failures import MissingExtraError
from ludus.tools.mcp.config import MCPServerConfig, is_mcp

if TYPE_CHECKING:
    from ludus.tools.mcp.toolset import MCPTools

__all__ = ["MCPServerConfig", "is_mcp", "mcp_tools"]


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
