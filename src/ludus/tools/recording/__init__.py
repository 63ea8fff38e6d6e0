"""Record and replay: a memory for the results of tools, in a SQLite file or in Redis.

`recorded` wraps tools, `RecordedTools` is the tool set that it makes, `open_store` finds a store by its
address. A call is kept under its tool, the tool's version, the arguments and, where the tool has state, what
the episode has called before (`keys`); what is kept is in `records`.
"""

from ludus.tools.recording.keys import Label, label_of
from ludus.tools.recording.recorded_tools import RecordedTools, RecordingConfig, recorded
from ludus.tools.recording.records import Mode, OnDivergence, RecordingStats, Scope
from ludus.tools.recording.redis_store import RedisStore
from ludus.tools.recording.sqlite_store import SQLiteStore
from ludus.tools.recording.store import RecordingStoreError, Store, open_store

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
