"""Servers: thin HTTP doors. `ToolServer` puts any tools behind HTTP/JSON; needs the extra `serve`."""

from ludus.core.failures import MissingExtraError

try:
    import aiohttp as _aiohttp  # noqa: F401
except ImportError as error:  # pragma: no cover - depends on the installation
    raise MissingExtraError("aiohttp", "serve", "a server of tools, environments or models") from error

from ludus.serve.app import serve_until_told
from ludus.serve.service import ServerConfig
from ludus.serve.tool_server import ToolServer

__all__ = ["ServerConfig", "ToolServer", "serve_until_told"]
