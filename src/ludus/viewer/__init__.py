"""The viewer: a local web page on a folder of runs (`ludus view`). It reads runs and never changes them.

workspace        which runs there are, their metrics and whether they are being written
episode_index    a DuckDB table of all episodes, filled from their Parquet files; filters, sorting, paging
episode_view     one episode as JSON: messages, turns, tokens, timings
findings         what needs a person
comparison       recipe differences, paired statistics, curves of several runs
labels           what people say about episodes, as data to train on
play             an environment stepped by hand, or by a checkpoint
export           self-contained HTML
http             routes
access, server   who may use them, and the life of the server
"""

from ludus.core.failures import MissingExtraError

try:
    import aiohttp as _aiohttp  # noqa: F401
except ImportError as error:  # pragma: no cover - depends on the installation
    raise MissingExtraError("aiohttp", "view", "the viewer") from error

from ludus.viewer.server import ViewerConfig, ViewerServer, serve_viewer

__all__ = ["ViewerConfig", "ViewerServer", "serve_viewer"]
