"""Record and replay: a memory for the results of tools, in a SQLite file or in Redis.

`recorded` wraps tools, `RecordedTools` is the tool set that it makes, `open_store` finds a store by its
address. A call is kept under its tool, the tool's version, the arguments and, where the tool has state, what
the episode has called before (`records`).
"""

from ludus.tools.recording.recorded_tools import RecordedTools, recorded
from ludus.tools.recording.records import (
    Label,
    Mode,
    OnDivergence,
    RecordingConfig,
    RecordingStats,
    Scope,
    label_of,
)
from ludus.tools.recording.stores import (
    RecordingStoreError,
    RedisStore,
    SQLiteStore,
    Store,
    open_store,
)

__all__ = [
    "Label",
    "Mode",
    "OnDivergence",
    "RecordedTools",
    "RecordingConfig",
    "RecordingStats",
    "RecordingStoreError",
    "RedisStore",
    "SQLiteStore",
    "Scope",
    "Store",
    "label_of",
    "open_store",
    "recorded",
]
