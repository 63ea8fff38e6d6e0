"""The viewer: a local web page on a folder of runs (`ludus view`). It reads runs and never changes them."""

from ludus.core.failures import MissingExtraError

try:
    import aiohttp as _aiohttp  # noqa: F401
except ImportError as error:  # pragma: no cover - depends on the installation
    raise MissingExtraError("aiohttp", "view", "the viewer") from error

from ludus.viewer.http import ViewerConfig, ViewerServer, serve_viewer

__all__ = ["ViewerConfig", "ViewerServer", "serve_viewer"]
